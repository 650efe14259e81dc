"""What answers the policy's turns, as the engine sees it: records and a protocol.

    engine --durable turn that calls--> begin ... collect --Observation--> engine: OBSERVE in the log, the next turn
    engine --durable end of a completion--> end ... results --Ending--> replica: the completion with what it submits

Here: the contract. Not here: tools in a sandbox (tool_environment.py), completions that keep one (agent_sessions.py).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from rollforward.model.messages import ReasoningEffort
from rollforward.rollout.types import ArrayRecord, FailureType, Int32Array, Request, RequestId
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.config import KeptSubstrate, SandboxConfig, ToolConfig
from rollforward.sandbox.types import CallStatus

_Key = TypeVar("_Key", int, str)


class SandboxUse(msgspec.Struct, frozen=True, kw_only=True):
    """What completions of a task do with the sandbox that each of them keeps."""

    substrate: KeptSubstrate = "container"
    """What isolates it."""
    submission: tuple[str, ...] = ()
    """Files that are taken out at the end."""
    max_submission_bytes: int = 1 << 20
    """What they may have together; one that makes it more is left out."""
    max_tool_s: float | None = None
    """Seconds that all calls of a completion may take; None: any."""


class TaskTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one task, as its turns call them."""

    tools: tuple[ToolConfig, ...]
    """At least one."""
    effort: ReasoningEffort = "non-think"
    """Of the task's prompts; says where a turn's reasoning ends."""
    max_observation_tokens: int
    """Tokens that the answer to one turn may have; its requests say the same."""
    max_calls_per_turn: int = 16
    """Calls that one turn may have; of a turn with more none is made."""
    sandbox: SandboxUse | None = None
    """Where a completion keeps a sandbox from its first call to its last; None where every call is a process of its
    own."""


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to build the environment of its replica."""

    model_dir: str
    """Where the tokenizer lies."""
    tasks: dict[str, TaskTools]
    """By the task's name; at least one."""
    sandbox: SandboxConfig
    """Where the tools run."""
    agents: Any = None
    """An `AgentsAccess` (agents.py): who holds the sandboxes of completions, where a task's keep one. It crosses
    processes."""


class Observation(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """The answer to one turn of one request.

    Example: Observation(id=RequestId(0, 0, 0), token_ids=np.array([5, 9], np.int32)).
    """

    id: RequestId
    """The request."""
    token_ids: Int32Array
    """[T] int32. What enters the sequence between the turn's end of sequence and the next turn's first token: at least
    one token and at most `tools.max_observation_tokens`; empty where it failed."""
    failure: FailureType | None = None
    """Set where there is no answer: `infra`, the platform could not, or `data`, what the sandbox begins with fits into
    none. The request then ends as aborted with it. What a tool says about its own failure is an answer."""
    detail: str = ""
    """What failed, for a person."""
    command_position: int = 0
    """Position in the sandbox's command log that the answer reflects; 0 where there is none."""


def failed_observation(identity: RequestId, detail: str, failure: FailureType = FailureType.INFRA) -> Observation:
    """Return the observation of what could not be answered, by the platform's fault if nothing else is said."""
    return Observation(id=identity, token_ids=np.zeros(0, np.int32), failure=failure, detail=detail)


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long calls took, in classes of 4 % each way, so that those of many processes add up."""

    classes: dict[int, int] = {}
    """Calls by class; class n is around 2**(n / 8) microseconds."""

    @classmethod
    def of(cls, seconds: float) -> "CallTimes":
        """One call; less than a microsecond counts as one."""
        return cls(classes={round(8 * math.log2(max(1e6 * seconds, 1.0))): 1})

    def __add__(self, other: "CallTimes") -> "CallTimes":
        """Both together."""
        return CallTimes(classes=_sums(self.classes, other.classes))

    @property
    def count(self) -> int:
        """Calls."""
        return sum(self.classes.values())

    @property
    def median_s(self) -> float:
        """Seconds within which half of them came to their end, at 4 % each way; 0 where there are none."""
        ordered = sorted(self.classes.items())
        sums = itertools.accumulate(number for _, number in ordered)
        half = next((n for (n, _), so_far in zip(ordered, sums, strict=True) if 2 * so_far >= self.count), None)
        return 0.0 if half is None else 1e-6 * 2 ** (half / 8)


class ToolOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of tools ended, wherever they ran; under `tools/` in the metrics."""

    calls: dict[str, int] = {}
    """Calls by `TOOL/OUTCOME`, an outcome being a `CallStatus`, or `refused`: it was not made, because the tool takes
    no such arguments, the turn had too many calls, or the time of the completion's tools was used up. `unknown` are
    calls of tools that there are not: their names are the policy's, and as many as it likes."""

    @classmethod
    def of(cls, tool: str, status: CallStatus | None) -> "ToolOutcomes":
        """One call of a tool that there is; None: it was refused."""
        return cls(calls={f"{tool}/{'refused' if status is None else status.value}": 1})

    def __add__(self, other: "ToolOutcomes") -> "ToolOutcomes":
        """Both together."""
        return ToolOutcomes(calls=_sums(self.calls, other.calls))


def _sums(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted(one.keys() | other.keys())}


class SandboxCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What completions did with their sandboxes, counted at their ends; under `sandbox/` in the metrics."""

    opened: int = 0
    """Completions that used one."""
    created: int = 0
    """Sandboxes that were made for them."""
    retried: int = 0
    """Questions about sandboxes that were asked again because nobody had answered."""
    calls: int = 0
    """Calls that ran."""
    replayed: int = 0
    """Calls that the command log answered."""
    call_s: float = 0.0
    """Seconds that calls took, summed."""
    call_max_s: float = 0.0
    """The longest of them."""
    call_times: CallTimes = CallTimes()
    """Of all of them; `call_p50_s` in the metrics."""
    unknown: int = 0
    """Completions that failed because nobody knows whether a command of theirs ran."""
    failed: int = 0
    """Completions that failed because the platform did, the unknown ones among them."""
    timeouts: int = 0
    """Completions that used up the time of their tools."""
    injected: int = 0
    """Sandboxes that were killed for a drill."""
    restored: int = 0
    """Sandboxes that took the place of a lost one, with all that had been done in it."""
    outcomes: ToolOutcomes = ToolOutcomes()
    """How calls ended: those that ran in this life, and those that were refused. Of tasks that keep no sandbox too,
    whose calls are counted when they are answered."""

    def __add__(self, other: "SandboxCounts") -> "SandboxCounts":
        """Both together: sums, of `call_max_s` the larger."""
        return SandboxCounts(
            **{
                name: max(value, getattr(other, name)) if name == "call_max_s" else value + getattr(other, name)
                for name, value in msgspec.structs.asdict(self).items()
            }
        )


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What is left when a completion that kept a sandbox has ended."""

    id: RequestId
    """Its request."""
    submission: Submission | None = None
    """What it leaves; None where the platform or its data failed."""
    failure: FailureType | None = None
    """`infra` where the platform failed, `data` where what the sandbox begins with fits into none, `timeout` where the
    time of its tools was used up."""
    detail: str = ""
    """What failed, for a person."""
    counts: SandboxCounts = SandboxCounts()
    """What it did, as far as this life of it goes."""


class Environment(Protocol):
    """Answers turns. Used by one engine from one thread, but for ``wake``; a request has at most one answer
    outstanding."""

    def is_call(self, request: Request, turn_ids: Int32Array) -> bool:
        """Return whether a finished turn asks for an answer. Starts nothing; the same for the same tokens.

        Args:
            request: has ``tools``.
            turn_ids: [T] int32. The turn's tokens, its end of sequence included.
        """
        ...

    def resume(self, request: Request, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Take note that a request with ``tools`` goes on which an earlier life began, so that what it left is held.
        Returns at once.

        Args:
            request, turn, attempt, position: as in ``begin``.
        """
        ...

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Start to answer a turn that ``is_call``; ``collect`` brings the answer.

        A call leaves the replica, so it is a publication (P1): the engine asks only when the turn's end of sequence is
        durable in its log.

        Args:
            request, turn_ids: as in ``is_call``.
            turn: number of the turn, from 1. After a restart the same turn may be asked again with the same tokens.
            attempt: of the request; grows where it was begun again because an earlier one failed or was damaged.
            position: in the sandbox's command log, the furthest of this attempt's observations: a log that ends before
                it has lost what they rest on, and the platform has failed the request.
        """
        ...

    def end(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Take note that a request with ``tools`` has ended, however; returns at once. What its last turn calls though
        it is no call for the engine runs now, what it submits is taken, its sandbox is given back.

        It is a publication like ``begin``. Asked again in another life, it gives the same ``results``.

        Args:
            request, turn, attempt, position: as in ``begin``.
            turn_ids: of the last turn, with or without an end of sequence.
        """
        ...

    def results(self, identities: Sequence[RequestId]) -> dict[RequestId, Ending]:
        """Wait for the ends of these requests; those that kept no sandbox have none. Each is told once.

        Raises:
            PausedError: the environment was closed meanwhile; a successor finds the same.
        """
        ...

    def counts(self) -> SandboxCounts:
        """Return what completions did whose ``results`` were told, and how calls that keep no sandbox ended. From any
        thread."""
        ...

    def collect(self, *, block: bool) -> list[Observation]:
        """Return the answers that came since the last call, in any order, each once.

        Args:
            block: wait until there is at least one, or until ``wake``. Only while an answer is outstanding.
        """
        ...

    def wake(self) -> None:
        """Let the ``collect`` that waits, or else the next one, return at once, with no answer if there is none. From
        any thread: an engine that is paused does not wait for a slow tool.
        """
        ...

    def keep(self, within_s: float) -> Future[int]:
        """Start to keep the states of sandboxes where a successor finds them though they are lost, as far as the run's
        settings say so and the time allows. From any thread, while nothing else is asked.

        Args:
            within_s: seconds; what is not kept then is not kept.

        Returns:
            How many are.
        """
        ...

    def close(self) -> None:
        """End what is still running, or leave it to a successor; nothing may be asked afterwards. Safe to call
        twice."""
        ...
