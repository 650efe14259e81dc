"""Proves: commands and calls of a container hold no right, see nothing of the host or of other containers, and cannot
reach the agent beside which they run; what control groups a machine has is found and used.

Does not prove: that the kernel has no flaw.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf.errors import user_error
from rollforward.sandbox import cgroups, host
from rollforward.sandbox.container import Container, ContainerSubstrate
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.images import Images
from rollforward.sandbox.types import ExecRequest, ExecStatus
from tests.helpers.containers import World
from tests.helpers.sandboxes import descendants, tools_in
from tests.helpers.supervisors import command

LOOK = "import ctypes, json, os, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tools_in(tmp_path_factory.mktemp("tools"))) as world:
        yield world


@pytest.fixture(scope="module")
def container(world: World) -> Container:
    return world.create()


def both(world: World, container: Container, code: str) -> list[Any]:
    """The JSON value `answer` of code, as a command and as a call."""
    result = world.python(container, f"{LOOK}{code}\nprint(json.dumps(answer))")
    assert result.status == ExecStatus.OK, result.stderr
    return [json.loads(result.stdout), json.loads(world.call(container, "run", code=LOOK + code).text)]


def test_no_right_and_no_way_to_one(world: World, container: Container) -> None:
    code = """
status = dict(line.rstrip('\\n').split(':\\t', 1) for line in open('/proc/self/status'))
answer = [status[k].split()[0] for k in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Uid', 'Gid')]
answer.append(status['Groups'].strip() in ('', '1000', '65534'))
"""
    none = "0" * 16
    assert both(world, container, code) == [[none, none, none, none, "1", "2", "1000", "1000", True]] * 2


def test_users_of_containers_are_nobody_on_the_host_and_differ(world: World, container: Container) -> None:
    other = world.create()
    users: list[set[str]] = []
    for one in (container, other):
        running = world.loop.create_task(_sleep(one))
        users.append({world.do(_user(one))})
        running.cancel()
    if os.geteuid() == 0:
        assert all(int(uid) > 1_000_000 for found in users for uid in found)
        assert not users[0] & users[1]
    else:
        assert users == [{str(os.geteuid())}] * 2


async def _sleep(container: Container) -> None:
    await container.exec(ExecRequest(argv=("sleep", "5"), wall_s=5.0))


async def _user(container: Container) -> str:
    """The one user of all its processes, once it sleeps: one that is being made has another for a moment."""
    while True:
        pids = descendants(container.pid)
        users = {uid for pid in pids for uid in _uids(pid)}
        if len(users) == 1 and any(command(pid) == "sleep 5" for pid in pids):
            return users.pop()
        await asyncio.sleep(0.01)


def _uids(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return set()
    return set(next(line for line in lines if line.startswith("Uid:")).split()[1:])


def test_no_file_environment_or_descriptor_of_the_host(world: World, container: Container, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    paths = ["/etc/shadow", "/sys", "/boot", "/opt", "/srv", "/box", "/program", "/images", str(tmp_path), __file__]
    code = f"answer = [p for p in {paths} if os.path.lexists(p)]"
    assert both(world, container, code) == [[], []]
    code = "answer = [sorted(os.listdir('/dev')), sorted(set(os.environ) - {'LC_CTYPE'})]"
    devices = sorted(["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"])
    command, call = both(world, container, code)
    assert command == [devices, ["HOME", "LANG", "PATH", "TERM", "USER"]]
    assert call[0] == devices
    assert set(call[1]) <= {"PYTHONHASHSEED", "PWD"}
    code = """
answer = []
for n in range(1024):
    try: answer.append(os.readlink(f'/proc/self/fd/{n}').split(':')[0])
    except OSError: pass
"""
    command, call = both(world, container, code)
    assert command == ["/dev/null", "pipe", "pipe"]
    assert call == ["/dev/null", "/dev/null", "/dev/null", "socket"]


def test_proc_shows_its_own_processes_and_nothing_of_the_host(world: World, container: Container) -> None:
    code = """
def read(path):
    try: return len(open(path, 'rb').read(100))
    except OSError as e: return type(e).__name__
answer = [sorted(int(p) for p in os.listdir('/proc') if p.isdecimal()) in ([1], [1, 2])]
names = 'kcore kmsg kpagecount kpageflags kpagecgroup keys key-users kallsyms timer_list sysrq-trigger vmallocinfo'
answer.append([n for n in (names + ' slabinfo').split() if read('/proc/' + n) not in (0, 'FileNotFoundError')])
def write(path):
    try: open(path, 'w').write('1'); return 'written'
    except OSError as e: return type(e).__name__
paths = ['sys/kernel/core_pattern', 'sys/kernel/hostname', 'sys/net/ipv4/ip_forward', 'self/oom_score_adj']
answer.append([p for p in paths if write('/proc/' + p) == 'written'])
"""
    assert both(world, container, code) == [[True, [], []]] * 2
    look = "for f in environ mem maps fd root cwd stack auxv; do ls /proc/1/$f/ >/dev/null 2>&1 && echo $f;"
    assert world.sh(container, look + " cat /proc/1/$f 2>/dev/null | head -c 10; done").stdout == b""


def test_only_its_own_loopback(world: World, container: Container) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
def reach(address):
    try: socket.create_connection(address, 2); return 'connected'
    except OSError as e: return type(e).__name__
listening = socket.create_server(('127.0.0.1', 0))
answer = [reach(('127.0.0.1', {port})), reach(('1.1.1.1', 80)), reach(listening.getsockname())]
answer += [[l.split(":")[0].strip() for l in open("/proc/net/dev").readlines()[2:]]]
"""
        for found in both(world, container, code):
            assert found[0] == "ConnectionRefusedError"
            assert found[1] == "OSError"
            assert found[2:] == ["connected", ["lo"]]
    code = """
answer = []
for family in range(0, 47):
    try: socket.socket(family, socket.SOCK_DGRAM).close(); answer.append(family)
    except PermissionError: pass
    except OSError: pass
"""
    assert [set(found) - {1, 2, 10} for found in both(world, container, code)] == [set(), set()]


def test_what_the_kernel_refuses(world: World, container: Container) -> None:
    code = """
def failed(*numbers):
    return libc.syscall(*[ctypes.c_long(n) for n in numbers]) == -1 and ctypes.get_errno() or 'worked'
x86 = os.uname().machine == 'x86_64'
clone, setns, memfd, shmget = (56, 308, 319, 29) if x86 else (220, 268, 279, 194)
flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
answer = [
    *[failed(clone, flag | 17, 0, 0, 0, 0) for flag in flags],
    *[libc.unshare(flag) and ctypes.get_errno() for flag in flags],
    failed(435, 0, 0),
    failed(425, 1, 0), failed(memfd, 0, 0), failed(shmget, 0, 4096, 0o600), failed(438, 0, 0, 0),
    libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) and ctypes.get_errno(),
    libc.umount2(b'/proc', 2) and ctypes.get_errno(),
    libc.ptrace(16, 1, 0, 0) and ctypes.get_errno(),
    libc.chroot(b'/tmp') and ctypes.get_errno(),
    libc.sethostname(b'x', 1) and ctypes.get_errno(),
    failed(302 if x86 else 261, 1, 0, ctypes.addressof(ctypes.create_string_buffer(16)), 0),
]
"""
    assert both(world, container, code) == [[1] * 14 + [38] + [1] * 10] * 2
    assert world.sh(container, "mknod d b 254 0 || mknod c c 1 1 || echo none").stdout == b"none\n"
    code = "answer = [l.split()[1] for l in open('/proc/self/mounts') if 'nosuid' not in l.split()[3].split(',')]"
    assert both(world, container, code) == [[], []]


# ---- The machine


def test_a_machine_without_control_groups_is_said_to_be_so() -> None:
    none = cgroups.find("", "")
    assert none.parents() == []
    report = host.probe(none)
    assert {missing.what for missing in report.missing} >= {
        "no control group for memory",
        "no control group for processes",
    }
    report.check(trusted_code=True)
    with pytest.raises(SandboxUnavailableError, match="trusted_code=true") as refused:
        report.check(trusted_code=False)
    assert user_error(refused.value) is refused.value  # told in a line


def test_without_control_groups_limits_are_by_process(world: World) -> None:
    with World(list(world.tools), hierarchies=cgroups.find("", "")) as other:
        container = other.create()
        assert container.cgroup == ()
        hog = other.python(container, "x = bytearray(1 << 30)")
        assert (hog.status, b"MemoryError" in hog.stderr) == (ExecStatus.EXIT, True)
        bomb = "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(60)\n"
        assert other.python(container, bomb + "except OSError as e: print(e.errno)").stdout == b"11\n"
        other.do(container.kill())


def _tree(folder: Path, *, v1: tuple[str, ...] = (), v2: str | None = None) -> tuple[str, str]:
    """Text of mountinfo and of /proc/self/cgroup for directories that look like hierarchies."""
    mounts, own = "1 0 0:1 / / rw - ext4 /dev/x rw\n", ""
    for name in v1:
        (folder / name / "own").mkdir(parents=True)
        mounts += f"2 1 0:2 / {folder / name} rw,nosuid shared:9 - cgroup cgroup rw,{name}\n"
        own += f"3:{name}:/own\n"
    if v2 is not None:
        (folder / "two" / "own").mkdir(parents=True)
        (folder / "two" / "own" / "cgroup.controllers").write_text(v2)
        (folder / "two" / "own" / "cgroup.subtree_control").write_text("")
        mounts += f"3 1 0:3 / {folder / 'two'} rw - cgroup2 cgroup2 rw\n"
        own += "0::/own\n"
    return mounts, own


def test_hierarchies_of_both_versions_are_found(tmp_path: Path) -> None:
    one = cgroups.find(*_tree(tmp_path / "a", v1=("memory", "pids")))
    assert (one.memory, one.unified) == (tmp_path / "a/memory/own", None)
    two = cgroups.find(*_tree(tmp_path / "b", v2="cpu memory pids"))
    assert two.memory == two.pids == two.unified == tmp_path / "b/two/own"
    assert (tmp_path / "b/two/own/cgroup.subtree_control").read_text() == "+memory +pids"
    hybrid = cgroups.find(*_tree(tmp_path / "c", v1=("memory", "pids"), v2="hugetlb"))
    assert (hybrid.memory, hybrid.unified) == (tmp_path / "c/memory/own", tmp_path / "c/two/own")
    mounts, own = _tree(tmp_path / "d", v1=("memory",))
    shown = cgroups.find(mounts.replace("0:2 /", "0:2 /docker/x"), own.replace("/own", "/docker/x/own"))
    assert shown.memory == tmp_path / "d/memory/own"


def test_groups_of_a_label_are_swept_and_others_stay(world: World) -> None:
    found = cgroups.find()
    if not found.parents():
        pytest.skip("this machine has no control group that can be written")
    mine = cgroups.Group(found, f"t{os.getpid()}", "a", 64 << 20, 8)
    other = cgroups.Group(found, f"t{os.getpid()}-b", "a", 64 << 20, 8)
    assert cgroups.sweep(found, f"t{os.getpid()}") == 0
    assert [path for path in mine.paths if path.exists()] == []
    assert all(path.exists() for path in other.paths)
    assert other.remove()
    with pytest.raises(ValueError, match="label"):
        ContainerSubstrate(Images({}), label="a/../b", max_sandboxes=1)
