"""Small errands in a workspace of files, made here: find a formula and submit it. Two turns with tools at least.

    Submit twice the formula in the file 27.txt.   read_file(path="27.txt") -> 7*x+25   submit(answer="2*(7*x+25)")

The workspace has some files with other formulas too, and the question says nothing about what is in them. Hidden tests
put numbers for x into what was submitted (answer.txt), so any formula of the same value is right. Held-out errands are
told apart from those that are trained on by file, formula and what is asked: no such three are in both.
"""

import hashlib
import random
from typing import Any, Final

import msgspec

from rollforward.model.messages import Message, ToolCall
from rollforward.rl.errors import TaskError
from rollforward.rl.shuffle import derive_key
from rollforward.rl.tasks.config import ErrandsConfig
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.tools import load_toolset
from rollforward.rl.tasks.types import Example, Score, Split, Unscored, check_index, workspace_of
from rollforward.rl.tasks.unit_tests import UnitTest, UnitTestJudge
from rollforward.rollout.workspace import Submission, Workspace

_CANDIDATES_PER_EXAMPLE: Final = 32
_GUESS: Final = "x"
_EVALUATE: Final = 'x=$1; echo "$(( $(cat answer.txt) ))"'
"""The shell's arithmetic."""


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What is behind one example."""

    files: dict[str, str]
    """The workspace: a formula by file."""
    file: str
    """The one that is asked for."""
    is_twice: bool
    """Whether twice its formula is asked for."""
    inputs: tuple[int, ...]
    """Numbers that the hidden tests put in."""
    is_guessed: bool
    """Whether SFT shows a guess."""

    @property
    def answer(self) -> str:
        """A right answer."""
        formula = self.files[self.file]
        return f"2*({formula})" if self.is_twice else formula

    @property
    def identity(self) -> tuple[str, str]:
        """What tells it from others."""
        return self.file, self.answer

    def value(self, x: int) -> int:
        """What a right answer is for x."""
        factor, rest = self.files[self.file].split("*x")
        return (int(factor) * x + int(rest)) * (2 if self.is_twice else 1)


class ErrandsTask:
    """Implements `Task`. Immutable after it is built.

    Args:
        config: sizes and shares.
        grader: has the sandboxes of the hidden tests.

    Raises:
        TaskError: there are too few different errands.
        ToolError: a tool cannot be offered.
    """

    def __init__(self, config: ErrandsConfig, grader: Grader) -> None:
        """Choose the held-out errands."""
        self._config = config
        self._tools = load_toolset(config)
        self._judge = UnitTestJudge(config.reward, grader, owner=f"task {config.name}", substrate=config.kept_substrate)
        heldout: dict[tuple[str, str], int] = {}
        for candidate in range(config.heldout_size * _CANDIDATES_PER_EXAMPLE):
            heldout.setdefault(self._draw("heldout", candidate).identity, candidate)
            if len(heldout) == config.heldout_size:
                break
        self._heldout, self._heldout_candidates = frozenset(heldout), tuple(heldout.values())
        digest = hashlib.blake2b(msgspec.json.encode(config, order="deterministic"), digest_size=16)
        digest.update(self._tools.digest)
        self._fingerprint = digest.hexdigest()

    @property
    def name(self) -> str:
        """The task's name in the run."""
        return self._config.name

    @property
    def options(self) -> ErrandsConfig:
        """Its effort, budget and tools."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """Hex digest of the configuration, which the held-out errands follow from, and the tools."""
        return self._fingerprint

    def size(self, split: Split) -> int:
        """Number of examples of a split."""
        return self._config.train_size if split == "train" else self._config.heldout_size

    def errand(self, index: int, split: Split = "train") -> Errand:
        """What is behind the example at `index` of a split.

        Raises:
            IndexError: `index` is outside the split.
            TaskError: all candidates for a training example are held out.
        """
        check_index(self, index, split)
        if split == "heldout":
            return self._draw("heldout", self._heldout_candidates[index])
        for candidate in range(_CANDIDATES_PER_EXAMPLE):
            errand = self._draw("train", index + candidate * self._config.train_size)
            if errand.identity not in self._heldout:
                return errand
        raise TaskError(
            f"task {self.name}: {_CANDIDATES_PER_EXAMPLE} errands in a row are held out. Lower heldout_size, which is"
            f" {self._config.heldout_size}"
        )

    def example(self, index: int, split: Split = "train") -> Example:
        """The example at `index` of a split; raises as `errand`."""
        errand = self.errand(index, split)
        what = "twice the formula" if errand.is_twice else "the formula"
        return Example(
            task=self.name,
            split=split,
            index=index,
            messages=(Message(role="user", content=f"Submit {what} in the file {errand.file}."),),
            answer=errand.answer,
            effort=self._config.effort,
            tools=self._tools.listed,
            demonstration=_shown(errand),
            workspace=Workspace(
                files={path: text.encode() for path, text in errand.files.items()}, image=self._config.image
            ),
        )

    def tests(self, example: Example) -> tuple[UnitTest, ...]:
        """The hidden tests of an example."""
        errand = self.errand(example.index, example.split)
        return tuple(
            UnitTest(argv=("sh", "-c", _EVALUATE, "sh", str(x)), stdout=str(errand.value(x))) for x in errand.inputs
        )

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score | Unscored:
        """Judge what was submitted by the hidden tests; see `Task.score`."""
        workspace = workspace_of(example, self._config)
        return self._judge(submission, self.tests(example), declared=self._config.submission, workspace=workspace)

    def _draw(self, split: Split, candidate: int) -> Errand:
        source = random.Random(derive_key("errands", self._config.seed, split, candidate))
        names = [f"{number}.txt" for number in source.sample(range(10, 100), self._config.notes)]
        files = {name: f"{source.randint(2, 9)}*x{source.choice('+-')}{source.randint(10, 99)}" for name in names}
        return Errand(
            files=files,
            file=names[0],
            is_twice=source.random() < self._config.twice_share,
            inputs=tuple(source.sample(range(2, 100), self._config.tests)),
            is_guessed=source.random() < self._config.guess_share,
        )


def _shown(errand: Errand) -> tuple[Message, ...]:
    """The turns that SFT learns. The tools are not run."""
    if errand.is_guessed:
        return (_calls("submit", answer=_GUESS),)
    return (
        _calls("read_file", path=errand.file),
        Message(role="tool", content=errand.files[errand.file]),
        _calls("submit", answer=errand.answer),
    )


def _calls(tool: str, **arguments: Any) -> Message:
    call = ToolCall(name=tool, arguments=msgspec.json.encode(arguments).decode())
    return Message(role="assistant", content="", tool_calls=(call,))
