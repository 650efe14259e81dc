"""Answers turns with tools: what the policy wrote is read, called in a sandbox, and rendered as the next prompt.

    turn ids --read_turn--> calls --sandbox.submit--> results, in the order of the calls
                              |                              |
                  a malformed call: its problem ----> encode_observation --cut to the limit--> Observation

A call that is malformed, names no tool, raises or runs out of time is answered with a text: the policy sees it and may
try again. Only where the sandbox itself failed has the turn no answer. Texts hold no times and no identities, so the
same turn has the same answer for a tool that is a function of its arguments.

Not here: the grammar of calls (model/dsml.py), rendering (model/encoding.py), isolation (sandbox/).
"""

import queue
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from rollforward.model.dsml import AssistantTurn
from rollforward.model.encoding import ChatEncoding
from rollforward.rollout.environment import EnvironmentConfig, Observation, TaskTools, failed_observation
from rollforward.rollout.errors import EnvironmentConfigError
from rollforward.rollout.types import Int32Array, Request, RequestId
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.types import Call, CallResult, CallStatus

_CUT = " ... (cut)"
_TOO_MANY = "error: too many calls in one turn; none of their results fits"


class CallRunner(Protocol):
    """What the environment asks of a sandbox."""

    def submit(self, call: Call) -> Future[CallResult]:
        """Start a call; the future never raises for what the call did."""
        ...

    def shutdown(self) -> None:
        """End every call and process; safe to call twice."""
        ...


class _Pending(NamedTuple):
    request: Request
    results: list[Future[CallResult]]


class ToolEnvironment:
    """Implements ``Environment``. One thread asks, any may ``wake`` it; the sandbox works in its own."""

    def __init__(
        self,
        encoding: ChatEncoding,
        tasks: Mapping[str, TaskTools],
        runners: Mapping[tuple[ToolConfig, ...], CallRunner],
    ) -> None:
        """Bind tasks to sandboxes.

        Args:
            encoding: of the model that is asked.
            tasks: tools and effort by task.
            runners: for each distinct set of tools the sandbox that holds it; ended by ``close``.

        Raises:
            EnvironmentConfigError: a task's ``max_observation_tokens`` leaves no room for an answer.
        """
        self._encoding = encoding
        self._tasks = dict(tasks)
        self._runners = dict(runners)
        self._pending: dict[RequestId, _Pending] = {}
        self._ready: list[Observation] = []
        self._finished: queue.SimpleQueue[RequestId | None] = queue.SimpleQueue()  # None wakes
        for name, task in tasks.items():
            needed = len(encoding.encode_observation([_TOO_MANY], task.effort))
            if task.max_observation_tokens < needed:
                raise EnvironmentConfigError(
                    f"task {name}: max_observation_tokens is {task.max_observation_tokens}; with this tokenizer the"
                    f" shortest answer to a turn has {needed}. Set max_observation_tokens={needed} or more"
                )

    def is_call(self, request: Request, turn_ids: Int32Array) -> bool:
        """Whether the turn calls tools, well-formed or not; see ``Environment``."""
        return self._read(request, turn_ids).is_call

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int) -> None:
        """Start the turn's calls; see ``Environment``. Calls of functions are safe to repeat after a restart."""
        said = self._read(request, turn_ids)
        if said.is_malformed_call:
            self._ready.append(self._observation(request, [f"error: {said.problem}"]))
            return
        runner = self._runners[self._task(request).tools]
        results = [runner.submit(Call(tool=call.name, arguments=call.decode_arguments())) for call in said.calls]
        self._pending[request.id] = _Pending(request, results)
        for result in results:
            result.add_done_callback(lambda _, identity=request.id: self._finished.put(identity))

    def collect(self, *, block: bool) -> list[Observation]:
        """Return the answers that are complete; see ``Environment``."""
        assert not block or self._pending or self._ready, "nothing is outstanding"
        while block and not self._ready:
            identity = self._finished.get()
            if identity is None:
                break
            self._assemble(identity)
        while not self._finished.empty():
            self._assemble(self._finished.get())
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Let ``collect`` return; see ``Environment``."""
        self._finished.put(None)

    def close(self) -> None:
        """End the sandboxes; see ``Environment``."""
        for runner in self._runners.values():
            runner.shutdown()

    def _task(self, request: Request) -> TaskTools:
        assert request.tools is not None, "the engine asks only for requests with tools"
        return self._tasks[request.tools.task]

    def _read(self, request: Request, turn_ids: Int32Array) -> AssistantTurn:
        return self._encoding.read_turn(turn_ids.tolist(), self._task(request).effort)

    def _assemble(self, identity: RequestId | None) -> None:
        """Complete a request's answer if that was its last result."""
        pending = None if identity is None else self._pending.get(identity)
        if identity is None or pending is None or not all(result.done() for result in pending.results):
            return
        del self._pending[identity]
        results = [result.result() for result in pending.results]
        failed = [result for result in results if result.status is CallStatus.INFRA]
        if failed:
            self._ready.append(failed_observation(identity, failed[0].detail))
        else:
            self._ready.append(self._observation(pending.request, [_told(result) for result in results]))

    def _observation(self, request: Request, texts: list[str]) -> Observation:
        assert request.tools is not None, "the engine asks only for requests with tools"
        limit = request.tools.max_observation_tokens
        token_ids = fit_observation(self._encoding, texts, self._task(request), limit)
        return Observation(id=request.id, token_ids=np.array(token_ids, dtype=np.int32))


def _told(result: CallResult) -> str:
    return result.text if result.status is CallStatus.OK else f"error: {result.text}"


def fit_observation(encoding: ChatEncoding, texts: list[str], task: TaskTools, max_tokens: int) -> list[int]:
    """Return the ids that answer a turn, the longest texts cut where all of them do not fit.

    Args:
        encoding: of the model.
        texts: one for each call.
        task: gives the effort.
        max_tokens: limit of the whole observation, the tokens around the texts included.
    """

    def encoded(max_chars: int) -> list[int]:
        cut = [text if len(text) <= max_chars else text[:max_chars] + _CUT for text in whole]
        return encoding.encode_observation(cut, task.effort)

    whole = [text.encode(errors="replace").decode() for text in texts]
    longest = max(map(len, whole))
    token_ids = encoded(longest)
    if len(token_ids) <= max_tokens:
        return token_ids
    low, high = -1, longest  # the texts cut to `high` characters do not fit, those cut to `low` do unless it is -1
    while high - low > 1:
        middle = (low + high) // 2
        if len(encoded(middle)) <= max_tokens:
            low = middle
        else:
            high = middle
    return encoded(low) if low >= 0 else encoding.encode_observation([_TOO_MANY], task.effort)


def build_environment(config: EnvironmentConfig) -> ToolEnvironment:
    """Start the sandboxes of a replica and return its environment.

    Raises:
        EnvironmentConfigError: see ``ToolEnvironment``.
        TokenizerError, EncodingError: the model directory has no usable tokenizer or names an unknown encoding.
        SandboxError: this machine cannot run the sandbox, or a tool cannot be loaded.
    """
    encoding = ChatEncoding.load(Path(config.model_dir))
    sets = dict.fromkeys(task.tools for task in config.tasks.values())
    with ExitStack() as started:  # one that fails to start leaves none behind
        runners = {tools: started.enter_context(FunctionSandbox(config.sandbox, tools)) for tools in sets}
        environment = ToolEnvironment(encoding, config.tasks, runners)
        started.pop_all()
    return environment
