"""How the answers of a dataset are judged: exact text, mathematical equality, a pattern, or a user's Python function.

Hidden tests of what was left in a sandbox are in `unit_tests.py`.

Everything that takes time or is not ours runs in a process of its own (`reward_process.py`), so that a score is the
same from every thread and a deadline holds whatever the code does. What a failure of that process means:

| what happened                                         | result                           |
|-------------------------------------------------------|----------------------------------|
| the function raised                                   | no score, `data`                 |
| it raised OSError (connections too) or MemoryError    | no score, `infra`                |
| the process died, and a second one on the same text   | no score, `infra`                |
| deadline, and it computed a tenth of the time or more | 0, counted as `timeout`, trained |
| deadline, and it waited                               | no score, `infra`                |
| it returned something that is not 0 to 1              | RewardError: the run stops       |

A deadline that finds the function computing is the text's doing, such as `9**9**9`; if it had no score, a policy could
hide bad answers behind it. One that finds it waiting is another machine's doing, or this one's for want of a core.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollforward.rl.errors import RewardError
from rollforward.rl.tasks.answers import read_answer
from rollforward.rl.tasks.reward_config import AnswerReward, ExactReward, MathReward, PatternReward, PythonReward
from rollforward.rl.tasks.reward_process import Deadline, Died, Raised, Result, RewardProcess, Value
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rollout.types import FailureType

Judge = Callable[[str, str | None, str], Score | Unscored]
"""(question, right answer, what the model said in its last turn, after `<think>` where it reasons) -> its worth."""

_MATH_FILE: Final = Path(__file__).with_name("math_answers.py")
_PATTERN_FILE: Final = Path(__file__).with_name("pattern_answers.py")
_START_TIMEOUT_S: Final = 120.0
_COMPUTING_SHARE: Final = 0.1  # a busy machine may leave a process no more; an honest call needs far less


def build_judge(reward: AnswerReward, *, max_answer_chars: int, owner: str) -> Judge:
    """The verifier that `reward` describes, its process started.

    Args:
        reward: which.
        max_answer_chars: a longer answer scores 0 unread; a Python reward reads any.
        owner: begins every error message, such as `task sums`.

    Raises:
        RewardError: the user's file or function is absent, or cannot be called as it must be.
    """
    match reward:
        case ExactReward():
            return ExactJudge(reward, max_answer_chars)
        case MathReward():
            return ProcessJudge(
                _MATH_FILE, "equality", timeout_s=reward.timeout_s, max_answer_chars=max_answer_chars, owner=owner
            )
        case PatternReward():
            return ProcessJudge(
                _PATTERN_FILE,
                "matches",
                timeout_s=reward.timeout_s,
                max_answer_chars=max_answer_chars,
                owner=owner,
                pattern=reward.pattern,
            )
        case PythonReward():
            return PythonJudge(reward, owner)


class ExactJudge:
    """Compares texts."""

    def __init__(self, reward: ExactReward, max_answer_chars: int) -> None:
        """Keep the rules."""
        self._ignore_case = reward.ignore_case
        self._max_answer_chars = max_answer_chars

    def __call__(self, question: str, answer: str | None, text: str) -> Score:
        """Judge one answer."""
        given, failure = read_answer(text, self._max_answer_chars)
        if failure is not None:
            return Score(value=0.0, reason=failure)
        return _score(float(self._normalised(given) == self._normalised(answer or "")))

    def _normalised(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


class ProcessJudge:
    """Asks a function of ours in a process of its own: math-verify's time limits are signals, which only a main thread
    has, and there are texts with which a regular expression is never done."""

    def __init__(
        self,
        file: Path,
        function: str,
        *,
        timeout_s: float,
        max_answer_chars: int,
        owner: str,
        pattern: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            file, function: called with the question, what is right, and the answer.
            timeout_s: seconds that a call may take.
            max_answer_chars, owner: see `build_judge`.
            pattern: what is right, whatever the question; None: its right answer.
        """
        self._max_answer_chars, self._owner, self._pattern = max_answer_chars, owner, pattern
        self._process = RewardProcess(
            file, function, timeout_s=timeout_s, start_timeout_s=_START_TIMEOUT_S, owner=owner
        )

    def __call__(self, question: str, answer: str | None, text: str) -> Score | Unscored:
        """Judge one answer."""
        given, failure = read_answer(text, self._max_answer_chars)
        if failure is not None:
            return Score(value=0.0, reason=failure)
        result = self._process.call(question, answer if self._pattern is None else self._pattern, given)
        return _score(result.value) if isinstance(result, Value) else _without_value(result, self._owner)


class PythonJudge:
    """Calls a user's function in a process of its own."""

    def __init__(self, reward: PythonReward, owner: str) -> None:
        """Start the process, which imports the file.

        Raises:
            RewardError: no such file or function, or another signature.
        """
        self._owner = owner
        self._call = f"{reward.function}() in {reward.file}"
        self._process = RewardProcess(
            Path(reward.file),
            reward.function,
            timeout_s=reward.timeout_s,
            start_timeout_s=reward.start_timeout_s,
            owner=owner,
        )

    def __call__(self, question: str, answer: str | None, text: str) -> Score | Unscored:
        """Judge one answer.

        Raises:
            RewardError: the function returned what is no score.
        """
        result = self._process.call(question, answer, text)
        if not isinstance(result, Value):
            return _without_value(result, f"{self._owner}: {self._call}")
        if result.value is None or not 0.0 <= result.value <= 1.0:  # false for NaN too
            raise RewardError(
                f"{self._owner}: {self._call} returned {result.shown}; a reward is a finite number from 0 to 1. Correct"
                " the function (scale or clip its value) and go on"
            )
        return _score(result.value)


def _score(value: float | None) -> Score:
    if value is None or value <= 0.0:
        return Score(value=0.0, reason=ScoreReason.WRONG if value is not None else ScoreReason.UNREADABLE)
    return Score(value=value, reason=ScoreReason.CORRECT if value >= 1.0 else ScoreReason.PARTIAL)


def _without_value(result: Result, who: str) -> Score | Unscored:
    """What a call is worth that gave no value; the table above."""
    match result:
        case Deadline(timeout_s=timeout_s, cpu_s=cpu_s) if cpu_s >= _COMPUTING_SHARE * timeout_s:
            return Score(value=0.0, reason=ScoreReason.TIMEOUT)
        case Deadline(timeout_s=timeout_s, cpu_s=cpu_s):
            detail = f"no value within {timeout_s:g} s, of which it computed only {cpu_s:.1f} s"
            return Unscored(failure=FailureType.INFRA, detail=f"{who}: {detail}")
        case Raised(is_infra=is_infra, detail=detail):
            failure = FailureType.INFRA if is_infra else FailureType.DATA
            return Unscored(failure=failure, detail=f"{who} raised {detail}")
        case Died(detail=detail):
            return Unscored(failure=FailureType.INFRA, detail=f"{who}: {detail}")
        case Value():
            raise AssertionError("a value has a score")
