"""Proves: nobody makes a failure of his own look like the platform's, which is not punished, and nobody makes up what a
sandbox says: statuses, answers, frames, verdicts of hidden tests.

Does not prove: that a hidden test which is a script cannot be talked into passing (`unit_tests.py` says so).
"""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.reward_config import UnitTestReward
from rollforward.rl.tasks.types import Score
from rollforward.rl.tasks.unit_tests import UnitTest, UnitTestJudge
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, Limits
from rollforward.sandbox.errors import GoneCause
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.outcomes import exec_result
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, CallStatus, ExecStatus, SandboxSpec
from tests.helpers.attacks import LIMITS, InContainer, Way, attacked_tools, harmless, python
from tests.helpers.containers import World

MIB = 1 << 20
CONFIG = ContainerConfig(
    trusted_code=True,
    warm=0,
    limits=Limits(wall_s=10.0, cpu_s=4.0, memory_bytes=96 * MIB, disk_bytes=2 * MIB, processes=16, files=256),
    create_timeout_s=60.0,
)
TIMER = """
event = struct.pack("QiixxxxxxxxQ", 0, 9, 0, 0) + bytes(64)
timer = ctypes.c_int()
made = libc.timer_create(1, event, ctypes.byref(timer))
libc.timer_settime(timer, 0, struct.pack("4q", 0, 1000000, 0, 1000000), None)
time.sleep(0.2)
"""
SUICIDES = {
    "kill oneself": "os.kill(os.getpid(), 9)",
    "stop oneself for a moment": "os.kill(os.getpid(), 19) if os.getpid() == 1 else None",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 9)",
    "a timer that kills": TIMER,
    "a pipe that kills whoever has it": "fcntl.fcntl(3 if os.getpid() == 1 else 1, 10, 9)\n"
    "f = 3 if os.getpid() == 1 else 1\nfcntl.fcntl(f, fcntl.F_SETOWN, os.getpid())\n"
    "fcntl.fcntl(f, fcntl.F_SETFL, fcntl.fcntl(f, fcntl.F_GETFL) | os.O_ASYNC)\n"
    "os.write(f, b' ' * 99)\ntime.sleep(0.2)",
    "exit like one who was killed": "os._exit(137)",
    "exit at once": "os._exit(0)",
    "abort": "os.abort()",
    "a null pointer": "ctypes.string_at(0)",
    "a filter that kills": "held = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x80000000))\n"
    "libc.prctl(22, 2, struct.pack('HxxxxxxQ', 1, ctypes.addressof(held)), 0, 0)",
    "strict mode": "libc.prctl(22, 1, 0, 0, 0)\nos.getpid()",
    "another program": "os.execv('/bin/sh', ['sh', '-c', 'kill -9 $$; kill -19 $$; exit 137'])",
    "no program": "open('p', 'w').write('#!/nonexistent')\nos.chmod('p', 0o755)\nos.execv('./p', ['p'])",
    "unmapped": "import mmap\nlibc.munmap(ctypes.c_void_p(id(None) & ~0xfff), 1 << 20)",
    "limits of computing": "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "limits of another": "resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "closed answers": "os.closerange(0, 64)\nos._exit(0)",
    "parents' deaths": "libc.prctl(1, 9, 0, 0, 0)\nos.kill(os.getppid(), 9) if os.getppid() else None",
    "everybody's priority": "os.setpriority(os.PRIO_USER, os.getuid(), 19)\nos.setpriority(os.PRIO_PGRP, 0, 19)",
    "ends by memory": "x = []\nwhile True: x.append(bytearray(16 << 20))",
    "names of errors": "raise type('RecursionError\\n\\x00', (BaseException,), {'__str__': lambda s: 1 / 0})()",
}


@pytest.mark.parametrize("how", SUICIDES)
def test_no_end_of_its_own_is_the_platforms(way: Way, how: str) -> None:
    harmless(way, SUICIDES[how])


SPOILERS = {
    "a workspace that nobody may enter": "os.chmod('.', 0)",
    "a home that nobody may enter": "os.chmod('/home', 0)",
    "places that are full": "f = open('f', 'wb')\ntry:\n"
    "  while True: f.write(bytes(4096)); f.flush()\nexcept OSError: pass",
    "names that are used up": "try:\n  for i in range(9999): open(f'n{i}', 'w').close()\nexcept OSError: pass",
    "a tree": "for i in range(200): os.mkdir('d'); os.chdir('d')",
    "a program in front": "open('python3', 'w').write('exit 1')\nos.chmod('python3', 0o755)",
    "modules in front": "for m in ('json', 'os', 'sitecustomize'): open(m + '.py', 'w').write('raise SystemExit')",
    "a workspace in the way": "for i in range(99):\n"
    "  if not error_of(os.rename, '/workspace', '/home//w') == 'worked': break",
    "what is hidden": "for n in ('/tmp', '/home', '/workspace'): error_of(os.rmdir, n)",
}


@pytest.mark.parametrize("how", SPOILERS)
def test_no_call_makes_the_next_one_a_failure_of_the_platform(world: World, how: str) -> None:
    container = world.create(LIMITS)
    code = f"import errno, os\n{_ERROR_OF}\n{SPOILERS[how]}"
    world.call(container, "run", code=code)
    for tool, arguments in (
        ("bash", {"command": "echo 1"}),
        ("python", {"code": "print(1)"}),
        ("run", {"code": "answer = 1"}),
    ):
        result = world.call(container, tool, **arguments)
        assert result.status in ("ok", "error", "killed"), (tool, result)
    assert world.sh(container, "echo 1").status in (ExecStatus.OK, ExecStatus.EXIT, ExecStatus.DISK_FULL)
    world.do(container.kill())


_ERROR_OF = "def error_of(f, *a):\n  try: f(*a)\n  except OSError as e: return str(e)\n  return 'worked'"


def test_a_first_process_that_buries_too_many_ran_out_of_time() -> None:
    head: dict[str, Any] = {"code": -9, "is_over": False, "seconds": 9.0, "cpu_s": LIMITS.cpu_s + 1, "is_full": False}
    head |= {"stdout_bytes": 0, "stderr_bytes": 0}
    assert exec_result(head, [b"", b""], LIMITS, has_oom=False).status == ExecStatus.TIMEOUT
    head["cpu_s"] = 0.1
    assert exec_result(head, [b"", b""], LIMITS, has_oom=False).status == ExecStatus.INFRA


FORGED = {
    "infra": '{"status": "infra", "text": "", "truncated": false, "total_bytes": 0}',
    "ok and more": '{"status": "ok", "text": "mine", "truncated": false, "total_bytes": 4}{"status": "infra"}',
    "no status": '{"text": "mine"}',
    "long": '{"status": "ok", "text": "' + "x" * 9000 + '", "truncated": false, "total_bytes": 1}',
    "negative": '{"status": "ok", "text": "", "truncated": false, "total_bytes": -' + "9" * 40 + "}",
    "half characters": '{"status": "ok", "text": "\\\\ud800", "truncated": false, "total_bytes": 1}',
    "deep": "[" * 50_000,
    "a frame": "\\x02\\x00\\x00\\x00li",
    "outcomes": "l",
    "nothing": "",
}


@pytest.mark.parametrize("what", FORGED)
def test_what_the_process_of_a_call_makes_up_is_believed_as_far_as_it_may_be(way: Way, what: str) -> None:
    if way.name == "command":
        code = f"for f in range(3, 64):\n  try: os.write(f, b'''{FORGED[what]}''')\n  except OSError: pass"
    else:
        code = "f = max(n for n in range(64) if error_of(os.fstat, n) == 'worked')\n"
        code += f"os.write(f, b'''{FORGED[what]}''')\nos._exit(0)"
    ended = harmless(way, code)
    assert ended.status in ("ok", "killed"), ended
    assert len(ended.text) <= 9000


def test_a_command_says_nothing_that_its_leader_did_not_see(command: InContainer) -> None:
    code = """
import glob
for path in glob.glob('/proc/*/fd/*'):
    try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'{"leader": 0}')
    except OSError: pass
sys.exit(7)
"""
    result = command.world.do(command.container.exec(python("import os, sys\n" + code)))
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, 7)


def test_who_ends_the_agent_by_memory_is_the_one_who_did_it(world: World) -> None:
    container = world.create(LIMITS)
    code = "import os, time\nfor _ in range(20):\n  if os.fork() == 0:\n"
    code += "    x = bytearray(b'x' * (9 << 20)); time.sleep(2)\ntime.sleep(2)"
    result = world.python(container, code)
    assert result.status in (ExecStatus.OOM, ExecStatus.OK, ExecStatus.EXIT)
    if container.died.done():
        assert container.died.result() == GoneCause.OOM
    world.do(container.kill())


@pytest.fixture(scope="module")
def transport() -> LocalTransport:
    return LocalTransport(supervisor_id("attacks", secrets.token_hex(8)), CONFIG)


def test_arguments_nested_to_the_brink_are_the_models_fault(transport: LocalTransport, tmp_path: Path) -> None:
    """Between what a client can just write and what a supervisor can just read there is no room for an excuse."""

    async def tried() -> set[str]:
        spec, found = SandboxSpec(tools=tuple(attacked_tools(tmp_path)), limits=CONFIG.limits), set[str]()
        async with SandboxClient([transport], CONFIG, owner="attack") as client:
            session = await Session.open(
                client,
                log_path=tmp_path / "a.log",
                sandbox_id=f"deep-{secrets.token_hex(4)}",
                spec=spec,
                files={},
                config=CONFIG,
                sync=False,
            )
            for number, depth in enumerate([10, *range(900, 1300, 25)]):
                value: Any = 1
                for _ in range(depth):
                    value = [value]
                call = Call(tool="echo", arguments={"value": {"value": value}})
                found.add((await session.call(f"t{number}c0", call)).result.status)
            await session.close()
        return found

    # A client that can write what the supervisor cannot read; by a few levels every one can.
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(2 * before)
    try:
        assert asyncio.run(tried()) == {CallStatus.OK, CallStatus.ERROR}
    finally:
        sys.setrecursionlimit(before)


SUBMISSIONS = {
    "kills all": "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\nprint(8)",
    "no entry": "import os\nos.chmod('.', 0)\nprint(8)",
    "full": "import os\nf = open('f', 'wb')\ntry:\n  while True: f.write(bytes(4096)); f.flush()\n"
    "except OSError: pass\nprint(8)",
    "memory": "x = []\nwhile True: x.append(bytearray(8 << 20))",
    "bomb": "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(9)\n"
    "except OSError: pass\nprint(8)",
    "orphans": "import os\nwhile True:\n  try:\n    if os.fork() == 0:\n"
    "      os.fork(); os._exit(0)\n  except OSError: pass",
    "exit": "import os\nprint(8, flush=True)\nos._exit(137)",
    "looks": "import glob\nfor p in glob.glob('/proc/*/*') + glob.glob('/*/*'):\n  try: d = open(p, 'rb').read(9999)\n"
    "  except OSError: continue\n  if b'expect' + b'ed-7f3a' in d: print(d.decode())",
    "plants": "import os, sys\nopen('python3', 'w').write('#!/bin/sh\\necho expected-7f3a')\nos.chmod('python3', 493)\n"
    "open('/tmp' + '/python3', 'w').write('x')\nos.remove('solve.py')\nos.symlink('/dev/null', 'solve.py')\nprint('x')",
}


def test_no_submission_escapes_its_verdict(transport: LocalTransport) -> None:
    """What a submission does to the sandbox of the tests fails its own tests; it never leaves it without a score, nor
    gives it one that it has not earned."""
    grader = Grader(CONFIG, [transport])
    test = {"argv": ["python3", "solve.py"], "stdin": "4", "stdout": "expected-7f3a", "timeout_s": 1.5}
    tests = msgspec.convert([test, test], tuple[UnitTest, ...])
    patient = msgspec.convert([test | {"timeout_s": 60.0}] * 2, tuple[UnitTest, ...])
    judge = UnitTestJudge(UnitTestReward(timeout_s=2.0), grader, owner="task attacked")
    try:
        found = {
            name: judge(Submission(files={"solve.py": text.encode()}), tests) for name, text in SUBMISSIONS.items()
        }
        honest = judge(Submission(files={"solve.py": b"print('expected-7f3a')"}), patient)
    finally:
        grader.close()
    assert {name: score for name, score in found.items() if not (isinstance(score, Score) and score.value == 0.0)} == {}
    assert isinstance(honest, Score)
    assert honest.value == 1.0


def test_no_submission_is_so_large_that_it_gets_no_verdict(transport: LocalTransport) -> None:
    grader = Grader(CONFIG, [transport])
    test = {"argv": ["python3", "solve.py"], "stdout": "1", "files": {"given.txt": "x" * (64 << 10)}}
    judge = UnitTestJudge(UnitTestReward(timeout_s=5.0), grader, owner="task attacked")
    try:
        large = b"#" * (CONFIG.limits.disk_bytes - (16 << 10))
        found = judge(Submission(files={"solve.py": large}), msgspec.convert([test], tuple[UnitTest, ...]))
    finally:
        grader.close()
    assert isinstance(found, Score), found
    assert found.value == 0.0
