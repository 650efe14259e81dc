"""What answers the policy's turns, as the engine sees it: records and a protocol.

    engine --durable turn that calls--> begin ... collect --Observation--> engine: OBSERVE in the log, the next turn

Here: the contract. Not here: tools in a sandbox (tool_environment.py).
"""

from typing import Protocol

import msgspec
import numpy as np

from rollforward.model.messages import ReasoningEffort
from rollforward.rollout.types import ArrayRecord, FailureType, Int32Array, Request, RequestId
from rollforward.sandbox.config import SandboxConfig, ToolConfig


class TaskTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one task, as its turns call them."""

    tools: tuple[ToolConfig, ...]
    """At least one."""
    effort: ReasoningEffort = "non-think"
    """Of the task's prompts; says where a turn's reasoning ends."""
    max_observation_tokens: int
    """Tokens that the answer to one turn may have; its requests say the same."""


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to build the environment of its replica."""

    model_dir: str
    """Where the tokenizer lies."""
    tasks: dict[str, TaskTools]
    """By the task's name; at least one."""
    sandbox: SandboxConfig
    """Where the tools run."""


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
    """Set where the platform could not answer; the request then ends as aborted with it. What a tool says about its
    own failure is an answer."""
    detail: str = ""
    """What failed, for a person."""
    command_position: int = 0
    """Position in the sandbox's command log that the answer reflects; 0 where there is none."""


def failed_observation(identity: RequestId, detail: str) -> Observation:
    """Return the observation of a platform that could not answer: an infra failure."""
    return Observation(id=identity, token_ids=np.zeros(0, np.int32), failure=FailureType.INFRA, detail=detail)


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

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int) -> None:
        """Start to answer a turn that ``is_call``; ``collect`` brings the answer.

        A call leaves the replica, so it is a publication (P1): the engine asks only when the turn's end of sequence is
        durable in its log.

        Args:
            request, turn_ids: as in ``is_call``.
            turn: number of the turn, from 1. After a restart the same turn may be asked again with the same tokens.
        """
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

    def close(self) -> None:
        """End what is still running; nothing may be asked afterwards. Safe to call twice."""
        ...
