"""Hidden tests of what a completion left in its sandbox, run in another one that the policy never touched.

    submission's files --> a fresh sandbox --test 1--> exit status, output --> compared here --> share of tests passed
                                 ^           --test 2-->
                           a test's own files

A fresh sandbox holds the declared files and nothing else: no process, no variable and no other file of the policy's
comes with them. The tests of one submission share it, in order, so a test may find what earlier ones left behind; one
that ends the sandbox, or makes room or paths unusable, costs itself alone, because the next gets a fresh one.

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
| the files do not go into a fresh sandbox                     | no score, `data`                        |

Tests are a function of the submission, so running them again is safe. A submission that ended its sandbox from inside
every time, without using up its memory, would be an infra failure: nothing inside is meant to be able to.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.reward_config import UnitTestReward
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rollout.types import FailureType
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.config import ContainerConfig, KeptSubstrate, Limits
from rollforward.sandbox.errors import (
    SandboxBusyError,
    SandboxConnectionError,
    SandboxFileError,
    SandboxGoneError,
    SandboxUnavailableError,
)
from rollforward.sandbox.types import ExecRequest, ExecResult, ExecStatus, SandboxSpec

_BLOCK_BYTES: Final = 4096
"""A file takes whole blocks."""
_LOST: Final = (SandboxBusyError, SandboxConnectionError, SandboxGoneError, SandboxUnavailableError)
_INFRA: Final = (ExecStatus.INFRA, ExecStatus.SANDBOX_DEAD, ExecStatus.KILLED)

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

    def __call__(self, submission: Submission | None, tests: Sequence[UnitTest], *, image: str) -> Score | Unscored:
        """Judge one submission.

        Args:
            submission: what was left; None where nothing can have been.
            tests: at least one.
            image: what the sandbox is made of.
        """
        if submission is None or not submission.files:
            return Score(value=0.0, reason=ScoreReason.EMPTY)
        files = submission.files
        verdicts = self._grader.run(lambda client, config: self._judge(client, config, files, tests, image))
        return verdicts if isinstance(verdicts, Unscored) else self._score(verdicts)

    async def _judge(
        self,
        client: SandboxClient,
        config: ContainerConfig,
        files: Mapping[str, bytes],
        tests: Sequence[UnitTest],
        image: str,
    ) -> "list[_Verdict] | Unscored":
        limits = _beside(files, config.limits if self._reward.limits is None else self._reward.limits)
        lost = ""
        for _ in range(config.attempts):
            bench = _Bench(client, SandboxSpec(substrate=self._substrate, image=image, limits=limits), files)
            try:
                return [await self._run(bench, test) for test in tests]
            except _LostError as error:
                lost = str(error)
            except SandboxFileError as error:
                detail = f"{self._owner}: files cannot be put into a fresh sandbox: {error}"
                return Unscored(failure=FailureType.DATA, detail=detail)
            finally:
                await bench.close()
        return Unscored(
            failure=FailureType.INFRA,
            detail=f"{self._owner}: the tests failed as infra {config.attempts} times: {lost}",
        )

    async def _run(self, bench: "_Bench", test: UnitTest) -> "_Verdict":
        word = secrets.token_hex(16)
        timeout_s = self._reward.timeout_s if test.timeout_s is None else test.timeout_s
        request = ExecRequest(argv=test.argv, stdin=test.stdin.encode(), wall_s=timeout_s)
        if test.script is not None:
            stdin = json.dumps({"script": test.script, "word": word}).encode()
            request = ExecRequest(argv=("python3", "-B", "-c", _RUN_SCRIPT), stdin=stdin, wall_s=timeout_s)
        result = await bench.run({path: text.encode() for path, text in test.files.items()}, request)
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


class _LostError(Exception):
    """The platform failed a test; all of them may be run again."""


class _Bench:
    """The sandbox that the tests of one submission run in, replaced when a test has made it unusable."""

    def __init__(self, client: SandboxClient, spec: SandboxSpec, files: Mapping[str, bytes]) -> None:
        self._client, self._spec, self._files = client, spec, files
        self._sandbox: Sandbox | None = None
        self._num_run = 0  # in this sandbox

    async def run(self, files: Mapping[str, bytes], request: ExecRequest) -> ExecResult:
        """Put files there and run a command.

        Raises:
            _LostError: the platform failed.
            SandboxFileError: the files do not go into a fresh sandbox.
        """
        while True:
            result = await self._attempt(files, request)
            if result is not None:
                return result

    async def close(self) -> None:
        """Let go of the sandbox; a lease ends what cannot be told so."""
        sandbox, self._sandbox, self._num_run = self._sandbox, None, 0
        if sandbox is not None:
            try:
                await sandbox.close()
            except _LOST:
                return

    async def _attempt(self, files: Mapping[str, bytes], request: ExecRequest) -> ExecResult | None:
        """None: a used sandbox did not take the test, which did not run; the next attempt has a fresh one."""
        was_used = self._num_run > 0
        try:
            if self._sandbox is None:
                self._sandbox = await self._client.create(f"tests-{secrets.token_hex(12)}", self._spec)
                await self._sandbox.upload(self._files)
            if files:
                await self._sandbox.upload(files)
            self._num_run += 1
            result = await self._sandbox.exec(request, key=f"t{self._num_run}c0")
        except SandboxFileError:
            if not was_used:
                raise
            await self.close()
            return None
        except SandboxGoneError as error:  # before the command reached it
            if not was_used:
                raise _LostError(str(error)) from error
            await self.close()
            return None
        except _LOST as error:
            raise _LostError(str(error)) from error
        if result.status in _INFRA:
            raise _LostError(result.detail or str(result.status))
        return result


def _beside(files: Mapping[str, bytes], limits: Limits) -> Limits:
    """Limits with room for a submission beside what they give, so that none is so large that a test does not fit.

    Rounded up to powers of two: sandboxes that are kept ready are of few kinds.
    """
    blocks = sum(-(-len(data) // _BLOCK_BYTES) for data in files.values())
    names = sum(path.count("/") + 1 for path in files)
    return msgspec.structs.replace(
        limits,
        disk_bytes=limits.disk_bytes + _BLOCK_BYTES * _power_of_two(blocks),
        files=limits.files + _power_of_two(names),
    )


def _power_of_two(least: int) -> int:
    return 1 << max((least - 1).bit_length(), 4)


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
