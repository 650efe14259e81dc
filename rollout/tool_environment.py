"""Answers turns with tools: what the policy wrote is read, called in a sandbox, and rendered as the next prompt.

    turn ids --read_turn--> calls --refuse_call--> sandbox --> results, in the order of the calls
                              |          |                       |
           a malformed call: its problem +----------> encode_observation --cut to the limit--> Observation

A call that is malformed, names no tool, does not fit its schema, raises or runs out of time is answered with a text:
the policy sees it and may try again. Only where the sandbox itself failed has the turn no answer. Texts hold no times
and no identities, so the same turn has the same answer for a tool that is a function of its arguments.

A turn with a good call of a final tool (`submit`) calls nothing for the engine: it is the completion's last, and its
calls run at the end. Calls of a task whose completions keep a sandbox are run by its agents.

Not here: the grammar of calls (model/dsml.py), rendering (model/encoding.py), isolation (sandbox/), sandboxes that are
kept (agents.py).
"""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from rollforward.model.dsml import AssistantTurn
from rollforward.model.encoding import ChatEncoding
from rollforward.rollout.agent_sessions import AgentTurn, TurnAnswer
from rollforward.rollout.agents import Agents, AgentsAccess
from rollforward.rollout.environment import (
    Ending,
    EnvironmentConfig,
    Observation,
    SandboxCounts,
    TaskTools,
    ToolOutcomes,
    failed_observation,
)
from rollforward.rollout.errors import EnvironmentConfigError, PausedError
from rollforward.rollout.types import FailureType, Int32Array, Request, RequestId
from rollforward.sandbox.arguments import refuse_call
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.toolset import load_tool
from rollforward.sandbox.types import Call, CallResult, CallStatus, ToolSpec

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
    """A turn that waits for the results of its calls."""

    request: Request
    texts: list[str | None]
    """Of each call what it is answered, where that is known; None where a result decides."""
    made: tuple[Call, ...]
    """Calls whose results decide."""
    results: Sequence[Future[CallResult] | Future[TurnAnswer]]


class _Turn(NamedTuple):
    """What a turn asks for."""

    said: AssistantTurn
    calls: tuple[Call, ...]
    refused: tuple[str | None, ...]
    """Of each call why it is not made, or None."""
    is_final: bool
    """Whether the completion ends with it by a call of its own."""

    @property
    def allowed(self) -> tuple[Call, ...]:
        return tuple(call for call, refused in zip(self.calls, self.refused, strict=True) if refused is None)


class ToolEnvironment:
    """Implements ``Environment``. One thread asks, any may ``wake`` it; the sandboxes work in their own."""

    def __init__(
        self,
        encoding: ChatEncoding,
        tasks: Mapping[str, TaskTools],
        runners: Mapping[tuple[ToolConfig, ...], CallRunner],
        agents: Agents | None = None,
    ) -> None:
        """Bind tasks to sandboxes.

        Args:
            encoding: of the model that is asked.
            tasks: tools and effort by task.
            runners: for each distinct set of tools of tasks that keep no sandbox the sandbox that holds it; ended by
                ``close``.
            agents: who runs calls of tasks that keep one; let go by ``close``.

        Raises:
            EnvironmentConfigError: a task's ``max_observation_tokens`` leaves no room for an answer.
            ToolError: a tool cannot be offered.
        """
        self._encoding = encoding
        self._tasks = dict(tasks)
        self._runners = dict(runners)
        self._agents = agents
        self._specs = {name: {tool.name: load_tool(tool) for tool in task.tools} for name, task in tasks.items()}
        self._pending: dict[RequestId, _Pending] = {}
        self._ready: list[Observation] = []
        self._endings: dict[RequestId, Future[Ending]] = {}
        self._counts = SandboxCounts()
        self._finished: queue.SimpleQueue[RequestId | None] = queue.SimpleQueue()  # None wakes
        for name, task in tasks.items():
            needed = len(encoding.encode_observation([_TOO_MANY], task.effort))
            if task.max_observation_tokens < needed:
                raise EnvironmentConfigError(
                    f"task {name}: max_observation_tokens is {task.max_observation_tokens}; with this tokenizer the"
                    f" shortest answer to a turn has {needed}. Set max_observation_tokens={needed} or more"
                )

    def is_call(self, request: Request, turn_ids: Int32Array) -> bool:
        """Whether the turn calls tools, well-formed or not, and is not the last by a call of its own; see
        ``Environment``."""
        turn = self._read(request, turn_ids)
        return turn.said.is_call and not turn.is_final

    def resume(self, request: Request, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Hold what is left of a sandbox; see ``Environment``."""
        if self._task(request).sandbox is not None:
            self._agents_of(request).resume(_agent_turn(request, (turn, attempt, position), ()))

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Start the turn's calls; see ``Environment``. Calls of functions are safe to repeat after a restart, those in
        a sandbox that is kept run once."""
        asked = self._read(request, turn_ids)
        if asked.said.is_malformed_call:
            self._ready.append(self._observation(request, [f"error: {asked.said.problem}"]))
            return
        most = self._task(request).max_calls_per_turn
        if len(asked.calls) > most:
            self._count_refused(request, asked.calls)
            text = f"error: the turn has {len(asked.calls)} calls and at most {most} may be; none was made"
            self._ready.append(self._observation(request, [text]))
            return
        results: Sequence[Future[CallResult] | Future[TurnAnswer]]
        if not asked.allowed:
            results = ()
        elif self._task(request).sandbox is not None:
            results = (self._agents_of(request).answer(_agent_turn(request, (turn, attempt, position), asked.allowed)),)
        else:
            runner = self._runners[self._task(request).tools]
            results = [runner.submit(call) for call in asked.allowed]
        refused = [call for call, why in zip(asked.calls, asked.refused, strict=True) if why is not None]
        self._count_refused(request, refused)
        texts = [None if why is None else f"error: {why}" for why in asked.refused]
        self._pending[request.id] = _Pending(request, texts, asked.allowed, results)
        for result in results:
            result.add_done_callback(lambda _, identity=request.id: self._finished.put(identity))
        if not results:
            self._finished.put(request.id)

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

    def end(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Start to end a completion; see ``Environment``."""
        if self._task(request).sandbox is None:
            return
        is_whole = bool(turn_ids.size) and turn_ids[-1] == self._encoding.tokenizer.eos_id
        asked = self._read(request, turn_ids) if is_whole else None
        calls = asked.allowed if asked is not None and asked.is_final else ()
        self._endings[request.id] = self._agents_of(request).finish(
            _agent_turn(request, (turn, attempt, position), calls)
        )

    def results(self, identities: Sequence[RequestId]) -> dict[RequestId, Ending]:
        """Wait for ends; see ``Environment``."""
        waited = {identity: self._endings.pop(identity) for identity in identities if identity in self._endings}
        try:
            endings = {identity: ending.result() for identity, ending in waited.items()}
        except CancelledError:
            raise PausedError(
                "the environment was closed while completions ended; whoever comes next finds them the same"
            ) from None
        self._counts = sum((ending.counts for ending in endings.values()), self._counts)
        return endings

    def counts(self) -> SandboxCounts:
        """Return what was done; see ``Environment``."""
        return self._counts

    def keep(self, within_s: float) -> Future[int]:
        """Keep the states of completions' sandboxes; see ``Environment``."""
        if self._agents is not None:
            return self._agents.keep(within_s)
        nothing: Future[int] = Future()
        nothing.set_result(0)
        return nothing

    def close(self) -> None:
        """End the sandboxes of calls, let go of those of completions; see ``Environment``."""
        for runner in self._runners.values():
            runner.shutdown()
        if self._agents is not None:
            self._agents.close()

    def _task(self, request: Request) -> TaskTools:
        assert request.tools is not None, "the engine asks only for requests with tools"
        return self._tasks[request.tools.task]

    def _specs_of(self, request: Request) -> Mapping[str, ToolSpec]:
        assert request.tools is not None, "the engine asks only for requests with tools"
        return self._specs[request.tools.task]

    def _agents_of(self, request: Request) -> Agents:
        assert self._agents is not None, f"{request.id} keeps a sandbox, so there are agents"
        return self._agents

    def _read(self, request: Request, turn_ids: Int32Array) -> _Turn:
        task, specs = self._task(request), self._specs_of(request)
        said = self._encoding.read_turn(turn_ids.tolist(), task.effort)
        calls = tuple(Call(tool=call.name, arguments=call.decode_arguments()) for call in said.calls)
        refused = tuple(refuse_call(call, specs) for call in calls)
        is_good = 0 < len(calls) <= task.max_calls_per_turn and not any(refused)
        return _Turn(said, calls, refused, is_good and any(specs[call.tool].is_final for call in calls))

    def _assemble(self, identity: RequestId | None) -> None:
        """Complete a request's answer if that was its last result."""
        pending = None if identity is None else self._pending.get(identity)
        if identity is None or pending is None or not all(result.done() for result in pending.results):
            return
        del self._pending[identity]
        results: list[CallResult] = []
        position, failure = 0, FailureType.INFRA
        for done, call in zip(pending.results, pending.made, strict=False):  # agents have one for all calls
            result = done.result()
            if isinstance(result, TurnAnswer):
                results += result.results
                position, failure = result.position, result.failure
            else:
                results.append(result)
                self._counts += SandboxCounts(outcomes=ToolOutcomes.of(call.tool, result.status))
        failed = [result for result in results if result.status is CallStatus.INFRA]
        if failed:
            self._ready.append(failed_observation(identity, failed[0].detail, failure))
            return
        told = iter(results)
        texts = [_told(next(told)) if text is None else text for text in pending.texts]
        self._ready.append(self._observation(pending.request, texts, position))

    def _count_refused(self, request: Request, calls: Sequence[Call]) -> None:
        specs = self._specs_of(request)
        for call in calls:
            is_known = call.tool in specs
            outcome = ToolOutcomes.of(call.tool, None) if is_known else ToolOutcomes(calls={"unknown": 1})
            self._counts += SandboxCounts(outcomes=outcome)

    def _observation(self, request: Request, texts: list[str], position: int = 0) -> Observation:
        assert request.tools is not None, "the engine asks only for requests with tools"
        limit = request.tools.max_observation_tokens
        token_ids = fit_observation(self._encoding, texts, self._task(request), limit)
        return Observation(id=request.id, token_ids=np.array(token_ids, dtype=np.int32), command_position=position)


def _agent_turn(request: Request, place: tuple[int, int, int], calls: tuple[Call, ...]) -> AgentTurn:
    """The turn for agents; `place` is turn, attempt and position of ``Environment.begin``."""
    turn, attempt, position = place
    assert request.tools is not None, "the engine asks only for requests with tools"
    assert request.workspace is not None, f"{request.id} keeps a sandbox, so its request says what is in it"
    return AgentTurn(
        id=request.id,
        task=request.tools.task,
        seed=request.seed,
        attempt=attempt,
        turn=turn,
        position=position,
        workspace=request.workspace,
        calls=calls,
    )


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


def build_environment(config: EnvironmentConfig, *, owner: str = "replica") -> ToolEnvironment:
    """Start the sandboxes of a replica and return its environment.

    Args:
        config: what it needs.
        owner: name of the replica; sandboxes that completions keep are held in it.

    Raises:
        EnvironmentConfigError: see ``ToolEnvironment``.
        TokenizerError, EncodingError: the model directory has no usable tokenizer or names an unknown encoding.
        SandboxError: this machine cannot run the sandbox, or a tool cannot be loaded.
    """
    encoding = ChatEncoding.load(Path(config.model_dir))
    sets = dict.fromkeys(task.tools for task in config.tasks.values() if task.sandbox is None)
    access: AgentsAccess | None = config.agents
    with ExitStack() as started:  # one that fails to start leaves none behind
        runners = {tools: started.enter_context(FunctionSandbox(config.sandbox, tools)) for tools in sets}
        agents = None if access is None else access.connect(owner)
        if agents is not None:
            started.callback(agents.close)
        environment = ToolEnvironment(encoding, config.tasks, runners, agents)
        started.pop_all()
    return environment
