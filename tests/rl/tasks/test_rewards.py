"""Proves: what answers are worth under each kind of reward; that a user's function ends at its deadline, survives its
own death, never turns the platform's failure into a 0, and is refused at the start where it cannot be called.

Does not prove that math-verify is right. Deadlines here are fractions of a second and nothing measures them.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollforward.rl.errors import RewardError
from rollforward.rl.tasks.reward_config import ExactReward, MathReward, PythonReward
from rollforward.rl.tasks.rewards import Judge, build_judge
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rollout.types import FailureType

USER_FILE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from beside import DOUBLE

class Odd(Exception):
    def __str__(self):
        raise ValueError("no words")

def loop():
    while True:
        pass

def die_once():
    mark = Path(__file__).with_name("died")
    if not mark.exists():
        mark.write_text("")
        os._exit(0)
    return 0.5

def leave_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(__file__).with_name("child").write_text(str(child.pid))
    loop()

def flood():
    print("x" * 3_000_000)
    return 1.0

def raises(error):
    raise error

ACTIONS = {
    "loop": loop, "sleep": lambda: time.sleep(600), "crash": lambda: os._exit(7), "die_once": die_once,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "child": leave_a_child, "flood": flood,
    "key": lambda: {}["a"], "network": lambda: raises(ConnectionRefusedError("no judge")),
    "memory": lambda: raises(MemoryError()), "exit": lambda: sys.exit(0), "odd": lambda: raises(Odd()),
    "above": lambda: 1.5, "below": lambda: -0.25, "nan": lambda: float("nan"), "inf": lambda: float("inf"),
    "none": lambda: None, "text": lambda: "0.5", "huge": lambda: "9" * 3_000_000, "list": lambda: [1.0],
    "true": lambda: True, "false": lambda: False, "zero": lambda: 0, "half": lambda: DOUBLE / 4, "one": lambda: 1,
    "stdin": lambda: float(len(sys.stdin.read())), "pid": lambda: os.getpid() / 2**40,
}

def score(question: str, answer: str | None, text: str) -> float:
    if text in ACTIONS:
        return ACTIONS[text]()
    return float(text == f"{question}/{answer}")
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(USER_FILE)
    (tmp_path / "beside.py").write_text("DOUBLE = 2.0\n")
    return path


def judge_of(path: Path, **changes: Any) -> Judge:
    fields: dict[str, Any] = {"file": str(path), "timeout_s": 30.0}
    return build_judge(PythonReward(**(fields | changes)), max_answer_chars=8, owner="task mine")


def ask(judge: Judge, text: str) -> Score | Unscored:
    return judge("q", "a", text)


@pytest.mark.parametrize(
    ("text", "ignore_case", "value", "reason"),
    [
        ("New  York", False, 1.0, ScoreReason.CORRECT),
        ("<think>Paris?</think>\n<answer> New York </answer>", False, 1.0, ScoreReason.CORRECT),
        ("new york", False, 0.0, ScoreReason.WRONG),
        ("new york", True, 1.0, ScoreReason.CORRECT),
        ("New York.", False, 0.0, ScoreReason.WRONG),
        ("", False, 0.0, ScoreReason.EMPTY),
        ("<think>", False, 0.0, ScoreReason.UNCLOSED_THINKING),
        ("New York City, N.Y.", False, 0.0, ScoreReason.TOO_LONG),
    ],
)
def test_exact(text: str, ignore_case: bool, value: float, reason: ScoreReason) -> None:
    judge = build_judge(ExactReward(ignore_case=ignore_case), max_answer_chars=16, owner="task mine")
    assert judge("Where?", " New York", text) == Score(value=value, reason=reason)


def test_values_of_a_function_are_scores(reward_file: Path) -> None:
    judge = judge_of(reward_file)
    values = {"q/a": 1.0, "q/b": 0.0, "true": 1.0, "false": 0.0, "zero": 0.0, "half": 0.5, "one": 1.0, "stdin": 0.0}
    assert {text: ask(judge, text) for text in values} == {
        text: Score(value=value, reason={1.0: "correct", 0.5: "partial", 0.0: "wrong"}[value])  # type: ignore[arg-type]
        for text, value in values.items()
    }
    assert judge("q", None, "q/None") == Score(value=1.0, reason=ScoreReason.CORRECT)
    for text in ("", "\0", "\ud800", "<think>", "é" * 2_000_000):  # any text, as it is: no reading, no limit
        assert ask(judge, text) == Score(value=0.0, reason=ScoreReason.WRONG)


def test_one_process_serves_all_calls_until_it_dies(reward_file: Path) -> None:
    judge = judge_of(reward_file)
    first, again = ask(judge, "pid"), ask(judge, "pid")
    assert first == again
    ask(judge, "crash")
    assert ask(judge, "pid") != first


def test_what_a_function_prints_is_no_answer(reward_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge = judge_of(reward_file)
    assert ask(judge, "flood") == Score(value=1.0, reason=ScoreReason.CORRECT)
    assert ask(judge, "half") == Score(value=0.5, reason=ScoreReason.PARTIAL)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "failure", "detail"),
    [
        ("key", FailureType.DATA, r"score\(\) in .*my_reward\.py raised KeyError: 'a' \(my_reward\.py, line \d+\)"),
        ("exit", FailureType.DATA, "raised SystemExit"),
        ("odd", FailureType.DATA, r"raised Odd \(my_reward"),
        ("network", FailureType.INFRA, "raised ConnectionRefusedError: no judge"),
        ("memory", FailureType.INFRA, "raised MemoryError"),
        ("crash", FailureType.INFRA, "the process ended with exit status 7"),
        ("killed", FailureType.INFRA, "the process was ended by SIGKILL"),
    ],
)
def test_what_fails_has_a_type_and_no_score(reward_file: Path, text: str, failure: FailureType, detail: str) -> None:
    judge = judge_of(reward_file)
    result = ask(judge, text)
    assert isinstance(result, Unscored)
    assert result.failure is failure
    assert re.search(detail, result.detail), result.detail
    assert ask(judge, "q/a") == Score(value=1.0, reason=ScoreReason.CORRECT)
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_process_that_dies_once_is_asked_again(reward_file: Path) -> None:
    assert ask(judge_of(reward_file), "die_once") == Score(value=0.5, reason=ScoreReason.PARTIAL)


def test_a_deadline_ends_a_loop_with_a_0_and_a_wait_without_score(reward_file: Path) -> None:
    judge = judge_of(reward_file, timeout_s=2.0)
    assert ask(judge, "loop") == Score(value=0.0, reason=ScoreReason.TIMEOUT)
    assert Score(value=0.0, reason=ScoreReason.TIMEOUT).failure is FailureType.TIMEOUT
    waited = ask(judge, "sleep")
    assert isinstance(waited, Unscored)
    assert waited.failure is FailureType.INFRA
    assert "no value within 2 s, of which it computed only 0.0 s" in waited.detail
    assert ask(judge, "q/a") == Score(value=1.0, reason=ScoreReason.CORRECT)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int, within_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not is_alive(pid)


def test_a_deadline_ends_what_the_function_has_started(reward_file: Path) -> None:
    ask(judge_of(reward_file, timeout_s=4.0), "child")
    assert ends(int(reward_file.with_name("child").read_text()))


def test_a_process_ends_with_its_judge(reward_file: Path) -> None:
    judge = judge_of(reward_file)
    result = ask(judge, "pid")
    assert isinstance(result, Score)
    pid = round(result.value * 2**40)
    assert is_alive(pid)
    del judge
    assert ends(pid)


RUN_AND_HANG = """
import sys
from rollforward.rl.tasks.reward_config import PythonReward
from rollforward.rl.tasks.rewards import build_judge
judge = build_judge(PythonReward(file=sys.argv[1], timeout_s=3.0), max_answer_chars=9, owner="t")
print(round(judge("q", "a", "pid").value * 2**40), flush=True)
judge("q", "a", sys.argv[2])
sys.stdin.read()
"""


@pytest.mark.parametrize("text", ["one", "loop"])
def test_no_process_outlives_a_killed_owner(reward_file: Path, text: str) -> None:
    """Idle, its socket closes; in a loop, the kernel's timer ends it 5 s after the deadline."""
    command = [sys.executable, "-c", RUN_AND_HANG, str(reward_file), text]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    time.sleep(0.3)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert ends(pid)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("above", "1.5"),
        ("below", "-0.25"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("none", "None"),
        ("text", "'0.5'"),
        ("list", r"\[1\.0\]"),
        ("huge", "'9{79}"),
    ],
)
def test_a_value_that_is_no_reward_stops_the_run(reward_file: Path, text: str, shown: str) -> None:
    judge = judge_of(reward_file)
    with pytest.raises(RewardError, match=rf"returned {shown}; a reward is a finite number from 0 to 1\. Correct") as e:
        ask(judge, text)
    assert len(str(e.value)) < 500
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert ask(judge, "q/a") == Score(value=1.0, reason=ScoreReason.CORRECT)


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        (None, "score", r"there is no such Python file\. Correct reward\.file"),
        ("def scores(q, a, t): ...", "score", "it has no function 'score'; it has scores. Set function to one of them"),
        ("score = 3", "score", "it has no function 'score'; it has none"),
        ("def score(text): ...", "score", r"score\(text\) cannot be called with question, answer and text\. Define it"),
        ("async def score(q, a, t): ...", "score", r"score\(\) is async; .* Write it with def"),
        ("def score(:", "score", r"raised SyntaxError: invalid syntax \(r\.py, line 1\)\. Correct the file"),
        ("import nowhere", "score", r"raised ModuleNotFoundError: No module named 'nowhere' \(r\.py, line 1\)"),
        ("import sys; sys.exit(3)", "score", "importing it raised SystemExit: 3"),
        ("import os; os._exit(3)", "score", "importing it failed: the process ended with exit status 3"),
        ("import time; time.sleep(600)", "score", r"not imported within 1\.5 s\. .*raise reward\.start_timeout_s"),
    ],
)
def test_what_cannot_be_called_is_refused_at_the_start(
    tmp_path: Path, text: str | None, function: str, message: str
) -> None:
    path = tmp_path / "r.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RewardError, match=message) as caught:
        judge_of(path, function=function, start_timeout_s=1.5 if text and "sleep" in text else 60.0)
    assert str(caught.value).startswith(f"task mine: reward file {path}: ")


def test_a_file_that_changes_in_a_run_is_noticed_when_it_is_imported_again(reward_file: Path) -> None:
    judge = judge_of(reward_file)
    reward_file.write_text(USER_FILE + "\n")
    assert ask(judge, "q/a") == Score(value=1.0, reason=ScoreReason.CORRECT)
    with pytest.raises(RewardError, match=r"it has changed since the run began.*start a new run"):
        ask(judge, "crash")


def test_threads_get_their_own_results(reward_file: Path) -> None:
    judge = judge_of(reward_file)
    texts = [f"q/{index}" for index in range(60)]
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda index: judge("q", str(index), texts[index]), range(60)))
        wrong = list(pool.map(lambda index: judge("q", str(index + 1), texts[index]), range(60)))
    assert {one.value for one in right if isinstance(one, Score)} == {1.0}
    assert {one.value for one in wrong if isinstance(one, Score)} == {0.0}


class _Interrupted(BaseException):
    pass


def test_an_interrupted_call_leaves_no_late_reply(reward_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollforward.rl.tasks import reward_worker

    judge = judge_of(reward_file)

    def interrupted(channel: Any) -> bytes | None:
        raise _Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(reward_worker, "receive", interrupted)
        with pytest.raises(_Interrupted):
            ask(judge, "half")
    assert ask(judge, "q/a") == Score(value=1.0, reason=ScoreReason.CORRECT)


@pytest.fixture(scope="module")
def math() -> Judge:
    return build_judge(MathReward(timeout_s=30.0), max_answer_chars=200, owner="task mine")


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("1/2", "0.5", 1.0),
        ("1/2", r"\frac{2}{4}", 1.0),
        (r"\frac{1}{2}", r"So it is $\frac{2}{4}$.", 1.0),
        (r"\frac{1}{2}", "2", 0.0),
        (r"We get \boxed{7}.", "3 + 4 = 7", 1.0),
        ("1024", "2^{10}", 1.0),
        ("2", "2^{10}", 0.0),
        ("1000", "1,000", 1.0),
        ("-7", "7", 0.0),
        ("x^2+1", r"\boxed{1+x^2}", 1.0),
        ("8", "<think>maybe 9</think> The answer is 8.", 1.0),
        ("8", "<think>8", 0.0),
        ("Monday", "Monday", 1.0),
        ("8", "no idea at all", 0.0),
        ("8", "\0\ud800{{}", 0.0),
        ("8", "8" * 300, 0.0),
    ],
)
def test_mathematical_equality(math: Judge, answer: str, text: str, value: float) -> None:
    result = math("How many?", answer, text)
    assert isinstance(result, Score), result
    assert result.value == value


def test_a_right_answer_that_is_no_mathematics_is_the_datas_failure(math: Judge) -> None:
    result = math("How many?", r"\boxed{}", "8")
    assert isinstance(result, Unscored)
    assert result.failure is FailureType.DATA
    assert "cannot be read as mathematics" in result.detail


def test_mathematics_in_threads_and_without_end() -> None:
    judge = build_judge(MathReward(timeout_s=3.0), max_answer_chars=200, owner="task mine")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: judge("", f"{n}/3", rf"\boxed{{\frac{{{2 * n}}}{{6}}}}"), range(1, 21)))
    assert results == [Score(value=1.0, reason=ScoreReason.CORRECT)] * 20
    assert judge("", "8", r"\boxed{9^{9^{9^{9}}}}").failure is FailureType.TIMEOUT
    assert judge("", "8", "8.0") == Score(value=1.0, reason=ScoreReason.CORRECT)
