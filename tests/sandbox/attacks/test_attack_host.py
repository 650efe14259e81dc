"""Proves: code in a sandbox finds nothing of the host: no file, variable, process, socket, device or control group; and
what stands between it and the host (the first process of its namespace, descriptors, /proc) it can neither read, change
nor stop.

Does not prove: that sandboxes share no cache or clock by which one could measure another.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.attacks import InContainer, Way, answer, harmless, on_host, python, status_of, victim
from tests.helpers.containers import World

PLACES = (
    "/",
    "/usr",
    "/usr/bin",
    "/etc",
    "/dev",
    "/bin",
    sys.base_prefix,
    os.path.dirname(os.__file__),
    "/root",
    "/var",
)


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[dict[str, object]]:
    """What listens on the host: TCP, an abstract name, a path."""
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract, named = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        abstract.bind(f"\0attack-{os.getpid()}")
        named.bind(str(tmp_path / "s"))
        for listener in (abstract, named):
            listener.listen()
        yield {"tcp": tcp.getsockname()[1], "abstract": f"\0attack-{os.getpid()}", "path": str(tmp_path / "s")}


def reaching(listeners: dict[str, object]) -> str:
    return f"""
def reach(family, where):
    try:
        with socket.socket(family) as s:
            s.settimeout(2)
            s.connect(where)
    except OSError as error:
        return type(error).__name__
    return 'connected'
places = ((2, ('127.0.0.1', {listeners["tcp"]})), (1, {listeners["abstract"]!r}), (1, {listeners["path"]!r}))
answer = [reach(*place) for place in places]
"""


def test_nothing_that_listens_on_the_host_is_reached(way: Way, listeners: dict[str, object]) -> None:
    assert on_host(reaching(listeners)) == ["connected"] * 3
    assert "connected" not in answer(way, reaching(listeners))


def test_no_name_is_asked_for_anywhere(way: Way) -> None:
    code = "try: socket.getaddrinfo('example.com', 80); answer = 'found'\nexcept OSError as e: answer = 'none'"
    assert answer(way, code) == "none"
    code = "answer = error_of(lambda: socket.socket(2, 2).sendto(b'x', ('9.9.9.9', 53)))"
    assert answer(way, code) in ("ENETUNREACH", "EHOSTUNREACH", "EPERM")


def test_no_secret_of_a_file_or_a_variable(way: Way, secret: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("canary")
    code = f"""
import glob
word = {secret[:9]!r} + {secret[9:]!r}
places = [{str(tmp_path / "key")!r}, {__file__!r}, '/etc/shadow', '/run/secrets', '/sys', '/boot']
seen = [p for p in places if os.path.lexists(p)]
for path in ['/etc/hostname', *glob.glob('/proc/[0-9]*/environ'), *glob.glob('/proc/[0-9]*/cmdline')]:
    try: data = open(path, 'rb').read()
    except OSError: continue
    if word.encode() in data: seen.append(path)
if word in os.environ: seen.append('environ')
answer = sorted(seen)
"""
    assert {"environ", str(tmp_path / "key")} <= set(on_host(code))
    assert answer(way, code) == []


def test_memory_of_the_process_holds_no_secret_of_the_host(way: Way, secret: str) -> None:
    # The process of a call is forked from one that bubblewrap started: its stack had the environment's place.
    code = f"""
import gc
word = {secret[:9]!r} + {secret[9:]!r}
answer = [k for k in os.environ if k == word] + [1 for o in gc.get_objects() if isinstance(o, dict) and word in o]
"""
    assert answer(way, code) == []


def test_nothing_outside_is_written(way: Way) -> None:
    code = f"""
answer = []
for place in {PLACES!r}:
    for name in ('pwned', '../pwned'):
        try: open(os.path.join(place, name), 'w'); answer.append(place)
        except OSError: pass
for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sys/net/ipv4/ip_forward',
             '/proc/sys/user/max_user_namespaces', '/proc/sysrq-trigger', '/proc/self/oom_score_adj', '/dev/kmsg',
             '/proc/sys/fs/binfmt_misc/register', '/proc/self/setgroups', '/proc/1/oom_score_adj', '/dev/mem',
             '/proc/self/uid_map'):
    try:
        if os.stat(path).st_rdev == os.makedev(1, 3): continue  # masked by /dev/null, which takes everything
        with open(path, 'w') as file: file.write('0')
        answer.append(path)
    except OSError: pass
for change in (lambda: os.chmod('/dev/null', 0o600), lambda: os.unlink('/dev/null'),
               lambda: os.rename('/dev/null', '/dev/x'),
               lambda: os.mknod('disk', 0o60600, 0xFE00), lambda: os.chmod('/usr', 0o777),
               lambda: os.utime('/usr/bin/env'),
               lambda: os.link('/usr/bin/env', 'env'), lambda: os.symlink('x', '/etc/x'),
               lambda: os.rename('/etc', '/e')):
    try: change(); answer.append('changed')
    except OSError: pass
"""
    assert answer(way, code) == []
    assert not Path("/pwned").exists()


def test_files_of_the_kernel_that_tell_of_the_host_are_masked(inside: InContainer) -> None:
    names = ("kcore", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "keys", "key-users", "slabinfo", "timer_list")
    names += ("sysrq-trigger", "kallsyms", "vmallocinfo", "sched_debug", "latency_stats")
    code = f"""
answer = []
for name in {names!r}:
    try:
        with open('/proc/' + name, 'rb') as file:
            if file.read(1): answer.append(name)
    except OSError: pass
answer += [n for n in ('sys', 'run/docker.sock', 'dev/kvm', 'dev/mem', 'dev/vda', 'dev/fuse', 'dev/ptmx', 'dev/pts') if
           os.path.lexists('/' + n) and (n != 'sys' or os.listdir('/sys'))]
"""
    assert answer(inside, code) == []
    assert "kallsyms" in on_host(code)


def test_no_function_sees_a_process_or_a_mount(function: Way) -> None:
    assert answer(function, "answer = [os.path.exists('/proc'), os.path.exists('/sys'), os.listdir('/dev')]") == [
        False,
        False,
        ["urandom", "null"],
    ]


def test_processes_of_the_host_are_neither_seen_nor_killed(way: Way) -> None:
    target = victim()
    try:
        code = f"""
seen = [n for n in (os.listdir('/proc') if os.path.exists('/proc') else []) if n.isdigit()]
tried = []
for pid in range(2, {4000 if way.is_slow else 40000}):
    if pid not in (os.getpid(), {2 * way.is_gvisor}):  # the process around a command can be killed there, by that alone
        for what in (lambda: os.kill(pid, 9), lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9)):
            try: what(); tried.append(pid)
            except OSError: pass
answer = [len(seen) <= 3, [error_of(os.kill, {target.pid}, 9)]]
"""
        assert answer(way, code) == [True, ["ESRCH"]]
        assert target.poll() is None
        subreaper = on_host(f"answer = [len(os.listdir('/proc')) > 3, error_of(os.kill, {target.pid}, 9)]")
        assert subreaper == [True, "worked"]
    finally:
        target.kill()
        target.wait()


def test_no_control_group_is_reached(way: Way) -> None:
    code = """
import glob
answer = glob.glob('/sys/fs/cgroup/*') + [p for p in ('/cgroup', '/dev/cgroup') if os.path.exists(p)]
mounts = open('/proc/self/mountinfo').read() if os.path.exists('/proc/self') else ''
answer += [line for line in mounts.splitlines() if 'cgroup' in line.partition(' - ')[2]]
answer += [call((165, 40), b'x', b'.', b'cgroup2', 0, 0), call((272, 97), 0x2000000)]
"""
    assert answer(way, code) == ["EPERM", "EPERM"]


def test_only_the_streams_are_inherited(way: Way, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = """
answer = []
for n in range(1024):
    try: os.fstat(n); answer.append(n)
    except OSError: pass
"""
        found = answer(way, code)
        assert found[:3] == [0, 1, 2]
        assert len(found) == (3 if way.name == "command" else 4)  # the last to answer with


def test_the_first_process_of_a_command_is_out_of_reach(command: InContainer) -> None:
    code = """
import glob
answer = []
for name in ('mem', 'environ', 'maps', 'io', 'stack', 'syscall', 'auxv', 'pagemap'):
    try: open('/proc/1/' + name, 'rb').read(1); answer.append(name)
    except OSError: pass
for name in ('root', 'cwd', 'exe', 'ns/user', 'ns/pid', 'ns/mnt'):
    try: os.readlink('/proc/1/' + name); answer.append(name)
    except OSError: pass
for name in ('fd', 'map_files', 'fdinfo'):
    try: os.listdir('/proc/1/' + name); answer.append(name)
    except OSError: pass
for f in range(32):
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try: os.open(f'/proc/1/fd/{f}', mode); answer.append(f)
        except OSError: pass
changes = (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
           lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
           lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
           lambda: os.sched_setaffinity(1, {0}), lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
answer += [n for n, change in enumerate(changes) if error_of(change) == 'worked']
answer += [call((251, 30), 1, 1, 3 << 13), call((314, 274), 1, bytes([48]) + bytes(47), 0)]
answer += [call((101, 117), 16, 1, 0, 0)]
for number in range(1, 65):
    if number not in (18,):
        try: os.kill(1, number)
        except OSError: pass
"""
    assert answer(command, code) == ["EPERM", "EPERM", "EPERM"]
    assert harmless(command, "for s in range(1, 65):\n  try: os.kill(1, s)\n  except OSError: pass").status == "ok"
    assert on_host("answer = error_of(os.sched_setaffinity, os.getppid(), os.sched_getaffinity(0))") == "worked"


def test_a_program_that_a_tool_starts_cannot_answer_for_it(world: World, call: InContainer) -> None:
    tries = "; ".join(f"echo forged > /proc/1/fd/{n}; echo forged >&{n}" for n in range(3, 10))
    result = world.call(call.container, "bash", command=f"({tries}) 2> /dev/null; kill -9 1; kill -9 -1; echo mine")
    assert result.status == "ok"
    assert "forged" not in result.text


def test_sandboxes_do_not_see_each_other(world: World, command: InContainer) -> None:
    other = world.create()
    world.do(other.upload({"/home//theirs": b"canary"}))
    world.do(command.container.upload({"/home//mine": b"canary"}))
    server = (
        "import socket; s = socket.socket(1); s.bind('\\0sibling'); s.listen(); t = socket.create_server(('', 4242))"
    )
    waiting = world.loop.create_task(other.exec(python(f"{server}; import time; time.sleep(20)", wall_s=1.5)))
    assert answer(command, "answer = os.listdir('/home')") == ["mine"]
    code = "to = ((1, '\\0sibling'), (2, ('127.0.0.1', 4242)))\n"
    code += "answer = [error_of(socket.socket(f).connect, where) for f, where in to]"
    assert answer(command, code) == ["ECONNREFUSED", "ECONNREFUSED"]
    assert answer(command, "answer = {error_of(os.kill, n, 9) for n in range(3, 200)}\nanswer = [*answer]") == ["ESRCH"]
    assert world.do(status_of(waiting)) == "timeout"
    world.do(other.kill())


def test_commands_of_one_sandbox_share_files_and_no_processes(world: World, command: InContainer) -> None:
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1)"
    waiting = world.loop.create_task(command.container.exec(python(code, wall_s=10.0)))
    while answer(command, "answer = os.path.exists('pid')") is False:
        pass
    assert answer(command, "answer = sorted(n for n in os.listdir('/proc') if n.isdigit())") == ["1", "2"]
    harmless(command, "os.kill(-1, 9)")
    assert world.do(status_of(waiting)) == "ok"
