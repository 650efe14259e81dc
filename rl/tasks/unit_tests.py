"""Hidden tests of what a completion left in its sandbox, run in another one that the policy never touched.

    submission's files --> a fresh sandbox --test 1--> exit status, output --> compared here --> share of tests passed
                                 ^           --test 2-->
                           a test's own files

A fresh sandbox holds the declared files and nothing else, or, where the task has `prepare`, these in the state with
which the completion began: no process, no variable and no other file of the policy's comes with them. The tests of one
submission share it, in order, so a test may find what earlier ones left behind; one that ends the sandbox, or makes
room or paths unusable, costs itself alone, because the next gets a fresh one (`bench.py`).

What a test compares with never enters a sandbox: a program that is given its input can compute the answer or not, but
there is nothing to read it from. A test that is a script is weaker. Its text, expected values included, lies in the
memory of the process that imports the submission, and so does the word that says that it came to its end; code that
searches for them can forge the verdict. Use one where inputs and outputs cannot say what you mean, and read what the
policy learns.

| what happened                                                | result                                  |
|--------------------------------------------------------------|-----------------------------------------|
| wrong output, exit status, deadline, out of memory, disk full| the test is failed                      |
| no declared file was left                                    | 0, `empty`                              |
| the sandbox could not be made, died, or was lost             | all again, then no score, `infra`       |
| what was submitted cannot be where it was, or is in the way  | the test is failed                      |
| a test's own files go into no sandbox                        | no score, `data`                        |

Tests are a function of the submission, so running them again is safe. A submission that ended its sandbox from inside
every time, without using up its memory, would be an infra failure: nothing inside is meant to be able to.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from rollforward.rl.tasks.bench import Bench, BenchLostError, SpoiltError, UnfitError
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.reward_config import UnitTestReward
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rollout.types import FailureType
from rollforward.rollout.workspace import Submission, Workspace
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, KeptSubstrate
from rollforward.sandbox.types import ExecRequest, ExecResult, ExecStatus, SandboxSpec

_NOTHING: Final = Workspace()
_RUN_SCRIPT: Final = """\
import json, os, sys
def run():
    given = json.load(sys.stdin)
    verdict = os.dup(1)
    sys.path.insert(0, "/workspace")
    exec(compile(given["script"], "test", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os.write(verdict, given["word"].encode())
run()
"""
"""The word, which nobody can know before, is written where the script came to its end without an exception."""


class UnitTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hidden test: a command and what it must do, or a Python script that must come to its end."""

    argv: tuple[str, ...] = ()
    """Program and arguments, such as `[python3, solve.py]`; it runs in /workspace."""
    stdin: str = ""
    """What the command reads."""
    files: dict[str, str] = {}
    """Files that are put into the sandbox before it, by path."""
    stdout: str | None = None
    """What the command must write; null: anything."""
    compare: Literal["stripped", "exact"] = "stripped"
    """`stripped` leaves white space at the two ends of the output out of account."""
    exit_code: int = 0
    """Exit status that the command must have; negative: the signal that must end it."""
    any_exit: bool = False
    """Whether any exit status will do."""
    script: str | None = None
    """Python source in place of a command; modules in /workspace can be imported. Weaker, see above."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] | None = None
    """Seconds; null: the reward's."""

    def __post_init__(self) -> None:
        """Refuse what is neither a command nor a script, or both."""
        if bool(self.argv) == (self.script is not None):
            raise ValueError("a test has either `argv`, a command, or `script`, Python source")
        if self.script is not None and (self.stdin or self.stdout is not None or self.exit_code or self.any_exit):
            raise ValueError(
                "a script reads nothing and is judged by its end; leave stdin, stdout, exit_code and any_exit out"
            )
        if any("\0" in word for word in self.argv) or (self.argv and not self.argv[0]):
            raise ValueError("argv begins with a program, and no word of it holds a NUL")


class UnitTestJudge:
    """Runs the hidden tests of submissions. Any number of threads may ask at one time."""

    def __init__(
        self, reward: UnitTestReward, grader: Grader, *, owner: str, substrate: KeptSubstrate = "container"
    ) -> None:
        """Keep the rules.

        Args:
            reward: how passed tests become a score.
            grader: has the sandboxes.
            owner: begins every message, such as `task errands`.
            substrate: what isolates the sandboxes in which they run.
        """
        self._reward, self._grader, self._owner = reward, grader, owner
        self._substrate: KeptSubstrate = substrate

    def __call__(
        self,
        submission: Submission | None,
        tests: Sequence[UnitTest],
        *,
        declared: Sequence[str] = (),
        workspace: Workspace = _NOTHING,
    ) -> Score | Unscored:
        """Judge one submission.

        Args:
            submission: what was left; None where nothing can have been.
            tests: at least one.
            declared: paths that a submission can have.
            workspace: what the completion's sandbox began with: its image and `prepare` are the tests' too.
        """
        if submission is None or not submission.files:
            return Score(value=0.0, reason=ScoreReason.EMPTY)

        async def judge(client: SandboxClient, config: ContainerConfig) -> "list[_Verdict] | Unscored":
            limits = config.limits if self._reward.limits is None else self._reward.limits
            spec = SandboxSpec(substrate=self._substrate, image=workspace.image, limits=limits)
            lost = ""
            for _ in range(config.attempts):
                bench = Bench(client, spec, submission=submission, declared=declared, workspace=workspace)
                try:
                    await bench.open()
                    return [await self._run(bench, test) for test in tests]
                except BenchLostError as error:
                    lost = str(error)
                except UnfitError as error:
                    return Unscored(failure=FailureType.DATA, detail=f"{self._owner}: {error}")
                finally:
                    await bench.close()
            return Unscored(
                failure=FailureType.INFRA,
                detail=f"{self._owner}: the tests failed as infra {config.attempts} times: {lost}",
            )

        verdicts = self._grader.run(judge)
        return verdicts if isinstance(verdicts, Unscored) else self._score(verdicts)

    async def _run(self, bench: Bench, test: UnitTest) -> "_Verdict":
        word = secrets.token_hex(16)
        timeout_s = self._reward.timeout_s if test.timeout_s is None else test.timeout_s
        request = ExecRequest(argv=test.argv, stdin=test.stdin.encode(), wall_s=timeout_s)
        if test.script is not None:
            stdin = json.dumps({"script": test.script, "word": word}).encode()
            request = ExecRequest(argv=("python3", "-B", "-c", _RUN_SCRIPT), stdin=stdin, wall_s=timeout_s)
        try:
            result = await bench.run({path: text.encode() for path, text in test.files.items()}, request)
        except SpoiltError:
            return "failed"
        if result.status is ExecStatus.TIMEOUT:
            return "timeout"
        if result.status not in (ExecStatus.OK, ExecStatus.EXIT):
            return "failed"
        return "passed" if _is_as_expected(test, result, word) else "failed"

    def _score(self, verdicts: "Sequence[_Verdict]") -> Score:
        share = verdicts.count("passed") / len(verdicts)
        if share == 1.0:
            return Score(value=1.0, reason=ScoreReason.CORRECT)
        if share > 0.0:
            return Score(value=share if self._reward.partial_credit else 0.0, reason=ScoreReason.PARTIAL)
        return Score(value=0.0, reason=ScoreReason.TIMEOUT if "timeout" in verdicts else ScoreReason.WRONG)


_Verdict = Literal["passed", "failed", "timeout"]


def check_tests(value: object) -> tuple[UnitTest, ...]:
    """Tests as a file has them, checked: a list of objects with the fields of `UnitTest`.

    Raises:
        msgspec.ValidationError: it is none, is empty, or a test makes no sense.
    """
    tests = msgspec.convert(value, tuple[UnitTest, ...])
    if not tests:
        raise msgspec.ValidationError("there must be at least one test")
    return tests


def _is_as_expected(test: UnitTest, result: ExecResult, word: str) -> bool:
    if test.script is not None:
        return result.exit_code == 0 and word.encode() in result.stdout
    if not test.any_exit and result.exit_code != test.exit_code:
        return False
    if test.stdout is None:
        return True
    if result.stdout_bytes > len(result.stdout):
        return False  # something of it is missing, so it is longer than what is expected may be
    expected = test.stdout.encode()
    if test.compare == "stripped":
        return result.stdout.strip() == expected.strip()
    return result.stdout == expected
