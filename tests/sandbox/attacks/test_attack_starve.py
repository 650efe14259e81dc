"""Proves: what a sandbox may use up is bounded, whatever it is made of: processes, memory that lies in sockets, pages,
queues or files, places for files, signals, watches, output; and what is used up is given back.

Does not prove: that computing time is shared fairly, or that locks on files are counted (see the table of cases).
"""

import os
from pathlib import Path

import pytest

from rollforward.sandbox import cgroups
from rollforward.sandbox.config import Limits
from rollforward.sandbox.types import ExecRequest, ExecStatus
from tests.helpers.attacks import LIMITS, InContainer, Way, answer, harmless, on_host
from tests.helpers.containers import World
from tests.helpers.sandboxes import is_gone

MIB = 1 << 20
PLACES = {"function": ("/tmp",), "call": (".", "/tmp", "/home", "/dev/shm"), "command": (".", "/home", "/dev/shm")}


def quota(way: Way) -> int:
    return MIB if way.name == "function" else LIMITS.disk_bytes


def test_a_fork_bomb_ends_at_the_limit(way: Way) -> None:
    bomb = "n = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(30)\n    n += 1\n"
    bomb += "except OSError as e: answer = [n, e.errno]"
    count, reason = answer(way, bomb)
    assert count <= LIMITS.processes + 4
    assert reason == 11  # EAGAIN
    harmless(
        way,
        "import _thread\ntry:\n  while True: _thread.start_new_thread(time.sleep, (30,))\nexcept RuntimeError: pass",
    )


@pytest.mark.parametrize("script", [":(){ :|:& };:", "f() { f & f & }; f; wait", "while :; do sleep 9 & done"])
def test_a_bomb_of_a_shell_leaves_the_sandbox_well(command: InContainer, script: str) -> None:
    result = command.world.sh(command.container, script, wall_s=0.4)
    assert result.status in (ExecStatus.TIMEOUT, ExecStatus.EXIT, ExecStatus.OK)
    assert command.world.sh(command.container, "echo well").stdout == b"well\n"


@pytest.mark.parametrize(
    "bomb",
    [
        "x = []\nwhile True: x.append(bytearray(8 << 20))",
        "import mmap\nx = []\nwhile True:\n  x.append(mmap.mmap(-1, 8 << 20)); x[-1].write(bytes(8 << 20))",
        "for _ in range(12):\n  if os.fork() == 0:\n    x = bytearray(b'x' * (64 << 20)); time.sleep(1)\ntime.sleep(1)",
    ],
    ids=["private", "shared", "many processes"],
)
def test_memory_is_the_sandboxs_own(inside: InContainer, bomb: str) -> None:
    before = inside.container
    ended = inside.run(bomb)
    assert ended.status in ("oom", "ok", "exit", "killed"), ended
    assert answer(inside, "answer = 1") == 1
    assert inside.is_gvisor or inside.container is before  # there all of it ends together


def test_a_memory_bomb_of_a_function_is_its_own(function: Way) -> None:
    assert harmless(function, "x = []\nwhile True: x.append(bytearray(8 << 20))").status == "oom"


PUT = """
held = []
def put(s, *data):
    try: s.sendto(*data) if len(data) > 1 else s.send(*data)
    except OSError: pass
"""
SOCKETS = {
    "udp": """
s = socket.socket(2, 2)
s.setblocking(False)
for _ in range(700):
    r = socket.socket(2, 2); r.bind(('127.0.0.1', 0)); r.setsockopt(1, 8, 1 << 22); held.append(r)
    for _ in range(8): put(s, bytes(50000), r.getsockname())
""",
    "tcp": """
l = socket.create_server(('127.0.0.1', 0))
l.settimeout(1)
try:
    for _ in range(150):
        a = socket.create_connection(l.getsockname(), 1); held.append(a)
        b, _ = l.accept(); a.setblocking(False); held.append(b)
        for _ in range(80): put(a, bytes(1 << 16))
except OSError: pass
""",
    "unix": """
for _ in range(300):
    a, b = socket.socketpair(1, 2); a.setblocking(False); a.setsockopt(1, 7, 1 << 22); held += [a, b]
    for _ in range(100): put(a, bytes(32000))
""",
}
USED = """
lines = [l.split() for l in open('/proc/net/sockstat') if l.startswith(('TCP:', 'UDP:'))]
answer = 4096 * sum(int(words[-1]) for words in lines)
"""


@pytest.mark.parametrize("kind", SOCKETS)
def test_what_lies_in_sockets_counts(command: InContainer, kind: str) -> None:
    """Most of it counts to nobody in version 1 of control groups unless they are told so."""
    ended = command.run(PUT + SOCKETS[kind] + USED)
    if ended.status == "ok":
        assert int(ended.text) <= LIMITS.memory_bytes, "sockets hold more than the sandbox may"
    else:
        assert ended.status == "oom", ended
    assert answer(command, "answer = 1") == 1


def test_netlink_whose_memory_nobody_counts_is_refused(way: Way) -> None:
    code = "s = socket.socket(16, 3, 0); s.setblocking(False)\nm = struct.pack('IHHII', 16, 0x7fff, 5, 1, 0)\nn = 0\n"
    code += "try:\n  while n < 300: s.send(m); n += 1\nexcept BlockingIOError: pass\nanswer = n"
    assert on_host(code) > 100
    assert way.run(code).status in ("error", "exit")


@pytest.mark.parametrize("how", ["named", "unlinked", "sparse", "allocated", "mapped"])
def test_places_for_files_have_one_size(way: Way, how: str) -> None:
    code = f"""
import mmap
held, total = [], 0
for place in {PLACES[way.name]!r}:
    try:
        for i in range(64):
            path = f"{{place}}/f{{i}}"
            f = os.open(path, os.O_RDWR | os.O_CREAT); held.append(f)
            if {how!r} == 'unlinked': os.unlink(path)
            if {how!r} == 'sparse': os.truncate(f, 1 << 17); os.pwrite(f, b'x', 1 << 16)
            if {how!r} == 'allocated': os.posix_fallocate(f, 0, 1 << 17)
            elif {how!r} == 'mapped':
                os.truncate(f, 1 << 12); mmap.mmap(f, 1 << 12).close(); os.pwrite(f, bytes(1 << 17), 0)
            elif {how!r} != 'sparse': os.write(f, bytes(1 << 17))
            total += os.fstat(f).st_blocks * 512 * {not way.is_gvisor}
    except OSError as error:
        assert error.errno in (errno.ENOSPC, errno.EMFILE), error
room = os.statvfs('.')
answer = max(total, (room.f_blocks - room.f_bfree) * room.f_frsize * {way.is_gvisor})
"""
    # gVisor says of a file that its holes are full.
    assert answer(way, code) <= quota(way)
    assert_emptied(way)


def assert_emptied(way: Way) -> None:
    if isinstance(way, InContainer):
        way.renew()
    assert answer(way, "open('again', 'wb').write(bytes(1 << 16))\nanswer = 1") == 1


@pytest.mark.parametrize(
    "make", ["open(n, 'w').close()", "os.mkdir(n)", "os.symlink('x' * 200, n)", "os.mkfifo(n)", "os.link('first', n)"]
)
def test_places_for_names_are_counted(way: Way, make: str) -> None:
    code = f"""
open('first', 'w').close()
made = 0
try:
    while made < 5000: n = f'n{{made}}'; {make}; made += 1
except OSError as error: answer = [made, error.errno]
"""
    if "os.link(" in make and isinstance(way, InContainer) and way.is_on_disk:
        code = code.replace("5000", "500")  # names of one file lie in its directory there, which has blocks to count
        code += "else: answer = [made, 28]"
    if "mkfifo" in make and way.is_gvisor:  # those are its kernel's, and memory of the sandbox
        assert way.run(code).status in ("ok", "oom")
        assert_emptied(way)
        return
    made, reason = answer(way, code)
    assert made <= 1024
    assert reason == 28  # ENOSPC
    assert_emptied(way)


def test_attributes_of_files_are_counted(way: Way) -> None:
    code = """
total, name = 0, 0
try:
    for i in range(200):
        with open(f'f{i}', 'w'): pass
        for j in range(64):
            os.setxattr(f'f{i}', f'user.{j}', bytes(1 << 15)); total += 1 << 15
except OSError as error: pass
answer = total
"""
    assert answer(way, code) <= 2 * LIMITS.disk_bytes
    assert_emptied(way)


def test_memory_that_outlives_processes_is_refused(way: Way) -> None:
    calls = {
        "shmget": ((29, 194), 7, 1 << 20, 0o1666),
        "msgget": ((68, 186), 7, 0o1666),
        "semget": ((64, 190), 7, 9, 0o1666),
    }
    calls |= {"memfd_create": ((319, 279), b"x", 0), "mq_open": ((240, 180), b"x", 0o102, 0o666, 0)}
    calls |= {"add_key": ((248, 217), b"user", b"x", bytes(99), 99, -3)}
    assert answer(way, f"answer = [call(*a) for a in {list(calls.values())!r}]") == ["EPERM"] * len(calls)


def test_the_hosts_watches_and_signals_are_not_used_up(way: Way) -> None:
    assert answer(way, "answer = [call((294, 26), 0), call((300, 262), 0, 0)]") == ["EPERM", "EPERM"]
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
n = 0
while n < 5000 and libc.sigqueue(os.getpid(), 40, 0) == 0: n += 1
answer = n
"""
    assert answer(way, code) <= 1024
    timers = "t = ctypes.c_int()\nn = 0\nwhile n < 5000 and libc.timer_create(1, None, ctypes.byref(t)) == 0: n += 1\n"
    timers += "answer = n"
    assert way.is_gvisor or answer(way, timers) <= 1024  # whose timers are its own
    assert on_host("answer = call((294, 26), 0)") == "worked"
    assert on_host(code) > 1024


def test_descriptors_pipes_and_polls_are_bounded(way: Way) -> None:
    code = """
import select
n = 0
try:
    while True: os.pipe(); n += 2
except OSError as error: answer = [n, error.errno]
"""
    count, reason = answer(way, code)
    assert count <= 1024
    assert reason == 24  # EMFILE
    assert answer(way, "answer = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]") == 0


def test_limits_are_not_raised(way: Way) -> None:
    names = ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NICE", "RTPRIO")
    code = f"""
answer = []
for name in {names!r}:
    which = getattr(resource, 'RLIMIT_' + name)
    soft, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        try: resource.setrlimit(which, (hard + 1, hard + 1)); answer.append(name)
        except (OSError, ValueError): pass
        try: resource.prlimit(0, which, (hard + 1, hard + 1)); answer.append(name)
        except (OSError, ValueError): pass
nice = {() if way.is_gvisor else (-20, -1)}
answer += [n for n in nice if error_of(os.setpriority, 0, 0, n) == 'worked' and os.getpriority(0, 0) < 0]
answer += ['rt'] if error_of(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)) == 'worked' else []
"""
    assert answer(way, code) == []


def test_the_workload_is_killed_before_what_guards_it(inside: InContainer) -> None:
    code = "answer = [open('/proc/self/oom_score_adj').read().strip(), error_of(open, '/proc/self/oom_score_adj', 'w')]"
    assert answer(inside, code) == ["1000", "EROFS"]
    assert Path(f"/proc/{inside.container.pid}/oom_score_adj").read_text().strip() != "1000"
    # Without a read-only /proc it would be taken back by whoever likes.
    code = "for n in '500', '400': open('/proc/self/oom_score_adj', 'w').write(n)\nanswer = 1"
    assert on_host(code) == 1


def test_a_flood_of_output_is_bounded_and_read(command: InContainer) -> None:
    result = command.world.sh(command.container, "yes | head -c 30000000; yes x | head -c 30000000 >&2")
    assert result.status == ExecStatus.OK
    assert (result.stdout_bytes, result.stderr_bytes) == (30_000_000, 30_000_000)
    assert len(result.stdout) <= LIMITS.output_bytes
    assert command.world.sh(command.container, "yes", wall_s=0.3).status == ExecStatus.TIMEOUT


def test_a_tree_without_end_is_cleared_away(world: World) -> None:
    container = world.create(Limits(memory_bytes=128 * MIB, disk_bytes=32 * MIB, files=8192))
    code = "import os\nfor i in range(3000):\n  os.mkdir('d'); os.chdir('d')\nopen('end', 'w')"
    assert world.python(container, code).status == ExecStatus.OK
    groups, pid = container.cgroup, container.pid
    world.do(container.kill())
    assert is_gone(pid)
    assert [path for path in groups if path.exists()] == []


def test_a_hundred_megabytes_of_arguments_are_no_harm(world: World, call: InContainer) -> None:
    container = world.create()
    for argv in (("true", "x" * (100 * MIB)), ("true", *(["x" * 1000] * 5000)), ("true", "x" * (1 << 17))):
        result = world.do(container.exec(ExecRequest(argv=argv)))
        assert (result.status, result.exit_code) == (ExecStatus.EXIT, 126)
    assert world.sh(container, "echo well").stdout == b"well\n"
    assert world.call(call.container, "run", code="#" * (2 * MIB)).status == "error"
    assert answer(call, "answer = 1") == 1
    world.do(container.kill())


def test_nothing_of_all_that_is_left_in_control_groups(world: World) -> None:
    container = world.create()
    (memory,) = [path for path in container.cgroup if path.parent == cgroups.find().memory]
    assert container.cgroup
    world.do(container.kill())
    assert not memory.exists()
    assert os.path.exists(memory.parent)
