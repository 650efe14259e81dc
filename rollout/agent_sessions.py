"""The sandboxes of completions that keep one, from the first call to what is submitted.

    AgentTurn --in order, key t{turn}c{index}--> Session.call --> TurnAnswer
    AgentTurn of the last turn --> its calls, Session.collect, Session.close --> Ending

Everything here may be asked again, by the same process or a successor, with the same turn: a session answers from its
command log what ran, and an outcome that nobody knows fails the completion as infra. What a completion had used of its
time is read there too, so that a successor decides as the first would have.

Here: which session a completion has, its order and its bounds. Not here: threads (agents.py), tokens
(tool_environment.py), the log of commands (sandbox/session.py), who isolates (sandbox/container.py).
"""

import asyncio
import contextlib
import copy
import hashlib
import posixpath
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from rollforward.rollout.environment import CallTimes, Ending, SandboxCounts, SandboxUse, TaskTools, ToolOutcomes
from rollforward.rollout.types import FailureType, RequestId
from rollforward.rollout.workspace import BegunWith, Submission, Workspace
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.command_log import PREPARED_NAME, LogView, log_path, read_log
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.prepared import Preparation
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, CallResult, CallStatus, SandboxSpec

_HOME: Final = "/workspace"
_CLOSING_S: Final = 5.0
"""What giving back may take when the process ends; after it the leases do it."""
_KEPT_AT_ONCE: Final = 8
"""Sandboxes whose states are taken at one time."""
_FIRST_COMMANDS: Final = 2
"""A drill strikes at one of so many commands."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to hold sandboxes of a run. It crosses processes."""

    run_dir: str
    """Of the run: command logs lie there, and its path tells its sandboxes from those of other runs."""
    tasks: dict[str, TaskTools]
    """Tasks whose completions keep a sandbox, by name."""
    container: ContainerConfig
    """Limits and patience."""
    transports: tuple[Any, ...]
    """`Transport`s to the supervisors, in the same order everywhere."""
    sync: bool = True
    """Whether command logs survive a power cut."""


class AgentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked about one turn of one completion."""

    id: RequestId
    """The completion's request."""
    task: str
    """Its task."""
    seed: int
    """Of the request."""
    attempt: int
    """Of the request."""
    turn: int
    """Number of the turn, from 1."""
    position: int = 0
    """Furthest position in the command log that what the policy has seen rests on."""
    workspace: Workspace
    """What the sandbox begins with."""
    calls: tuple[Call, ...]
    """Checked calls, in order."""


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of a turn ended."""

    results: tuple[CallResult, ...]
    """One for each call; after one that is INFRA there is no other."""
    position: int
    """Position in the command log that they rest on."""
    failure: FailureType = FailureType.INFRA
    """Whose fault a result that is INFRA is: `infra` or `data`."""


@dataclass(eq=False)
class _Agent:
    """One completion with its session."""

    session: Session
    seconds: dict[tuple[int, int], float]
    """Of commands that ended, by turn and index."""
    saboteur: "_Saboteur | None"
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    counts: SandboxCounts = SandboxCounts(opened=1)  # noqa: RUF009 - frozen
    ending: Ending | None = None

    def count(self, **more: float | CallTimes | ToolOutcomes) -> None:
        """Count something up."""
        self.counts = self.counts + SandboxCounts(**more)  # type: ignore[arg-type]

    @property
    def failure(self) -> FailureType:
        """Whose fault it is where the session has failed."""
        return FailureType.DATA if self.session.is_data_fault else FailureType.INFRA

    def used_s(self, turn: int, index: int) -> float:
        """Time of the commands before one."""
        return sum(seconds for place, seconds in self.seconds.items() if place < (turn, index))


class AgentSessions:
    """Sandboxes of completions. One event loop."""

    def __init__(self, settings: AgentSettings, *, owner: str) -> None:
        """Keep what is needed; nothing is asked yet.

        Args:
            settings: of the run.
            owner: who holds the sandboxes, for people; a successor has the same name.
        """
        self._settings = settings
        transports = [copy.copy(transport) for transport in settings.transports]  # one serves one event loop
        self._client = SandboxClient(transports, settings.container, owner=owner)
        self._run = hashlib.blake2b(settings.run_dir.encode(), digest_size=4).hexdigest()
        self._agents: dict[RequestId, _Agent] = {}
        self._opening: dict[RequestId, asyncio.Lock] = {}
        self._asked: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._keeping: set[asyncio.Task[bool]] = set()

    async def resume(self, turn: AgentTurn) -> None:
        """Hold what an earlier process left of a completion, so that its lease does not run out."""
        with self._being_asked():
            if _newest(self._logs(turn)) is not None:
                await self._agent(turn)

    async def answer(self, turn: AgentTurn) -> TurnAnswer:
        """Run the calls of a turn in order, each once over all lives of the completion."""
        with self._being_asked():
            agent = await self._agent(turn)
            async with agent.lock:
                answer = await self._run_calls(agent, turn)
                if self._settings.container.snapshots == "turn":
                    # While the policy thinks; its next call waits for it.
                    keeping = asyncio.create_task(self._keep(agent))
                    self._keeping.add(keeping)
                    keeping.add_done_callback(self._keeping.discard)
                return answer

    async def finish(self, turn: AgentTurn) -> Ending:
        """Run the calls of the last turn if there are some, take what is submitted, and give the sandbox back.

        The sandbox ends behind the answer. A completion that never called anything needs none: what it submits lies in
        its workspace.
        """
        use = self._use(turn.task)
        was_used = turn.id in self._agents or turn.position > 0 or _newest(self._logs(turn)) is not None
        if not was_used and not turn.calls and not turn.workspace.prepare:
            untouched = _untouched(turn.workspace, use)
            if untouched is not None:
                return Ending(id=turn.id, submission=untouched)
        with self._being_asked():
            agent = await self._agent(turn)
            async with agent.lock:
                if agent.ending is None:
                    agent.ending = await self._end(agent, turn, use)
                    closing = asyncio.create_task(self._close(turn.id, agent))
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                return agent.ending

    async def keep(self, within_s: float) -> int:
        """Keep the states of all sandboxes that are held beside their command logs, unless `snapshots` is `never`.

        Args:
            within_s: seconds; what is not kept then is not kept.

        Returns:
            Completions whose log has all that was done.
        """
        if self._settings.container.snapshots == "never" or not self._agents:
            return 0
        room = asyncio.Semaphore(_KEPT_AT_ONCE)

        async def keep_one(agent: _Agent) -> bool:
            async with room:
                return await self._keep(agent)

        keeping = [asyncio.create_task(keep_one(agent)) for agent in self._agents.values() if agent.ending is None]
        if not keeping:
            return 0
        done, late = await asyncio.wait(keeping, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return sum(not task.cancelled() and task.exception() is None and task.result() for task in done)

    async def _keep(self, agent: _Agent) -> bool:
        async with agent.lock:  # not between two calls of a turn
            return await agent.session.snapshot(max_bytes=self._settings.container.max_snapshot_bytes)

    async def close(self) -> None:
        """Leave sandboxes to their leases and logs to a successor. Nothing may be asked afterwards; a command that runs
        goes on, and its result waits for who asks again."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSING_S)
        cut_off: list[asyncio.Task[Any]] = [*self._asked, *self._closing, *self._keeping]
        for task in cut_off:
            task.cancel()
        await asyncio.gather(*cut_off, return_exceptions=True)
        await asyncio.gather(*(agent.session.detach() for agent in self._agents.values()), return_exceptions=True)
        await self._client.close()

    @contextlib.contextmanager
    def _being_asked(self) -> Generator[None]:
        """While it is open, `close` cuts the task off."""
        task = asyncio.current_task()
        assert task is not None, "asked on the event loop"
        self._asked.add(task)
        try:
            yield
        finally:
            self._asked.discard(task)

    def _use(self, task: str) -> SandboxUse:
        use = self._settings.tasks[task].sandbox
        assert use is not None, "only completions of tasks that keep a sandbox are asked about"
        return use

    async def _end(self, agent: _Agent, turn: AgentTurn, use: SandboxUse) -> Ending:
        submission, failure, detail = None, None, ""
        if agent.saboteur is not None:
            agent.saboteur.ends()
        answer = await self._run_calls(agent, turn)
        if answer.results and answer.results[-1].status is CallStatus.INFRA:
            failure, detail = agent.failure, answer.results[-1].detail
        else:
            collected = await agent.session.collect(use.submission, max_bytes=use.max_submission_bytes)
            begun_with = self._begun_with(agent.session, turn)
            submission = Submission(files=collected.files, problem=collected.problem, begun_with=begun_with)
            if collected.failure:
                submission, failure, detail = None, agent.failure, collected.failure
            elif use.max_tool_s is not None and sum(agent.seconds.values()) >= use.max_tool_s:
                failure, detail = FailureType.TIMEOUT, f"its tools took {use.max_tool_s:g} s (max_tool_s)"
        session = agent.session
        agent.count(
            created=session.num_created,
            restored=session.num_restored,
            retried=session.num_asked_again,
            failed=int(failure is FailureType.INFRA),
            unknown=int(failure is FailureType.INFRA and detail.startswith("unknown outcome")),
            timeouts=int(failure is FailureType.TIMEOUT),
            injected=int(agent.saboteur is not None and agent.saboteur.has_struck),
        )
        return Ending(id=turn.id, submission=submission, failure=failure, detail=detail, counts=agent.counts)

    async def _run_calls(self, agent: _Agent, turn: AgentTurn) -> TurnAnswer:
        use = self._use(turn.task)
        results: list[CallResult] = []
        position = agent.session.position
        for index, call in enumerate(turn.calls):
            if use.max_tool_s is not None and agent.used_s(turn.turn, index) >= use.max_tool_s:
                text = f"the {use.max_tool_s:g} s that tools may take are used up; end with what you have"
                results.append(CallResult(status=CallStatus.ERROR, text=text))
                agent.count(outcomes=ToolOutcomes.of(call.tool, None))
                continue
            told = await agent.session.call(f"t{turn.turn}c{index}", call)
            results.append(told.result)
            position = told.position
            if not told.is_replayed:
                agent.count(outcomes=ToolOutcomes.of(call.tool, told.result.status))
            if told.result.status is CallStatus.INFRA:
                break
            seconds = agent.seconds[turn.turn, index] = told.result.seconds
            if told.is_replayed:
                agent.count(replayed=1)
            else:
                agent.count(calls=1, call_s=seconds, call_max_s=seconds, call_times=CallTimes.of(seconds))
        return TurnAnswer(results=tuple(results), position=position, failure=agent.failure)

    async def _agent(self, turn: AgentTurn) -> _Agent:
        """The completion's session; opened where this process has none."""
        async with self._opening.setdefault(turn.id, asyncio.Lock()):
            agent = self._agents.get(turn.id)
            if agent is None:
                agent = self._agents[turn.id] = await self._open(turn)
        return agent

    async def _open(self, turn: AgentTurn) -> _Agent:
        logs = self._logs(turn)
        found = _newest(logs)
        place = turn.attempt if found is None else found
        seconds: dict[tuple[int, int], float] = {}
        if found is not None:
            view = await asyncio.to_thread(read_log, logs[found])
            if found < turn.attempt and (view.damage or view.history.failure):
                place = turn.attempt  # begun again because that one failed: in a new sandbox
            else:
                seconds = _logged_seconds(view)
        tools, saboteur = self._settings.tasks[turn.task].tools, self._saboteur(turn.seed)
        spec = SandboxSpec(
            substrate=self._use(turn.task).substrate,
            image=turn.workspace.image,
            limits=self._settings.container.limits,
            tools=tools,
            labels={"run": self._settings.run_dir, "task": turn.task, "trajectory": str(turn.id)},
        )
        session = await Session.open(
            self._client,
            log_path=logs[place],
            sandbox_id=f"{self._run}-{logs[place].stem}",
            spec=spec,
            files=turn.workspace.files,
            begin=self._preparation(turn.workspace, spec, logs[place].parent),
            config=self._settings.container,
            sync=self._settings.sync,
            saboteur=saboteur,
            known_position=turn.position,
        )
        return _Agent(session, seconds, saboteur)

    def _preparation(self, workspace: Workspace, spec: SandboxSpec, directory: Path) -> Preparation | None:
        """What completions of the step that begin alike share."""
        if not workspace.prepare:
            return None
        return Preparation(
            self._client,
            directory / PREPARED_NAME,
            spec=msgspec.structs.replace(spec, labels={**spec.labels, "trajectory": "prepare"}),
            files=workspace.files,
            commands=workspace.prepare,
            config=self._settings.container,
            sync=self._settings.sync,
        )

    def _begun_with(self, session: Session, turn: AgentTurn) -> BegunWith | None:
        """The prepared state that a completion began with."""
        if session.begin is None:
            return None
        return BegunWith(directory=str(self._logs(turn)[0].parent / PREPARED_NAME), record=session.begin)

    def _logs(self, turn: AgentTurn) -> list[Path]:
        """Where the commands of each attempt up to this one are logged."""
        first = log_path(Path(self._settings.run_dir), str(turn.id))
        return [first, *(first.with_name(f"{first.stem}-a{attempt}.log") for attempt in range(1, turn.attempt + 1))]

    async def _close(self, identity: RequestId, agent: _Agent) -> None:
        await agent.session.close()
        if self._agents.get(identity) is agent:
            del self._agents[identity]
        self._opening.pop(identity, None)

    def _saboteur(self, seed: int) -> "_Saboteur | None":
        share = self._settings.container.inject_failures
        if share <= 0:
            return None
        digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=9, person=b"inject failures").digest()
        if int.from_bytes(digest[:8], "little") >= share * 2**64:
            return None
        return _Saboteur(digest[8] % _FIRST_COMMANDS)


class _Saboteur:
    """Kills the sandbox of a completion at one of its commands; the rest of the way it is a loss like any other.

    One that ends by a call before its turn came is struck there: if those with few commands got away more often, what
    is left would say something about the policy.
    """

    def __init__(self, num_spared: int) -> None:
        self._num_spared = num_spared
        self.has_struck = False
        self._seen: set[str] = set()

    def ends(self) -> None:
        """Take note that the next command is one of the last turn's."""
        self._num_spared = min(self._num_spared, len(self._seen))

    async def __call__(self, key: str, sandbox: Sandbox) -> None:
        """See ``Saboteur``."""
        self._seen.add(key)
        if not self.has_struck and len(self._seen) > self._num_spared:
            self.has_struck = True
            await sandbox.close()


def _newest(logs: Sequence[Path]) -> int | None:
    """The last attempt that has a log, or one of which that cannot be told."""
    return max((attempt for attempt, path in enumerate(logs) if _may_exist(path)), default=None)


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # whoever opens it says what is wrong with the path, and the completion fails with that


def _logged_seconds(view: LogView) -> dict[tuple[int, int], float]:
    """Time of the commands that a log has results of."""
    seconds: dict[tuple[int, int], float] = {}
    for key, command in view.history.commands.items():
        if command.end is not None:
            turn, _, index = key.removeprefix("t").partition("c")
            with contextlib.suppress(ValueError):
                seconds[int(turn), int(index)] = command.end.seconds
    return seconds


def _untouched(workspace: Workspace, use: SandboxUse) -> Submission | None:
    """What a sandbox would hold in which nothing ran; None where only one can tell: its image may have something at a
    path, or what the workspace has there cannot be taken."""
    files = {_absolute(path): data for path, data in workspace.files.items()}
    found = {path: files.get(_absolute(path)) for path in use.submission}
    absent = [_absolute(path) for path, data in found.items() if data is None]
    taken = {path: data for path, data in found.items() if data is not None}
    may_be_there = any(not path.startswith(f"{_HOME}/") for path in absent)
    is_directory = any(name.startswith(f"{path}/") for path in absent for name in files)
    if may_be_there or is_directory or sum(map(len, taken.values())) > use.max_submission_bytes:
        return None
    return Submission(files=taken)


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join(_HOME, path))
