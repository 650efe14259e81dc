"""The client of sandboxes: one async API over whatever carries the questions, a socket or a Ray actor.

    client = SandboxClient([SocketTransport(path)], ContainerConfig(), owner="engine-0")
    sandbox = await client.create("3f9a2c71-s12-p3-m0-a0", SandboxSpec())
    result = await sandbox.exec(ExecRequest(argv=("sh", "-c", "echo hello")), key="t0c0")

What is safe to ask again when no answer came (`SandboxConnectionError`):

| question           | safe to repeat                                                                               |
|--------------------|----------------------------------------------------------------------------------------------|
| create             | yes: an identity names one sandbox; the same identity and spec give what there is            |
| exec, call         | with the same `key`: it runs once in a sandbox, which keeps its result; without one never    |
| upload             | yes: the same bytes                                                                          |
| download, snapshot | yes: they change nothing                                                                     |
| fork               | yes, as create; a repeated one may begin with a later state                                  |
| pause, resume      | yes                                                                                          |
| adopt, renew, list | yes                                                                                          |
| close              | yes                                                                                          |

The client does that itself, `config.attempts` times; what it raises then may be asked again by its caller. A sandbox
belongs to its supervisor and is held by a lease; the client renews those that it has in the background, three times a
lease. Not here: what isolates (`container.py`), who owns (`supervisor.py`), what survives a preemption (`session.py`).
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from rollforward.sandbox import wire
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxConnectionError,
    SandboxError,
    SandboxGoneError,
    SandboxUnavailableError,
)
from rollforward.sandbox.toolset import tool_source
from rollforward.sandbox.transport import SocketTransport, Transport
from rollforward.sandbox.types import (
    Call,
    CallResult,
    CallStatus,
    ExecRequest,
    ExecResult,
    PoolStats,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
)
from rollforward.sandbox.wire import Operation, Which

_GRACE_S: Final = 100.0
"""An answer may come so much later than what it is about may last; then nobody answers. Longer than what it takes to
find that a supervisor hangs and to replace it (launch.py)."""
_PAUSE_S: Final = 0.1
"""Before something is asked again; four times as long each time, and never the same for two who ask."""
_RENEWALS: Final = 3
"""In the time of a lease."""

__all__ = ["Sandbox", "SandboxClient", "SocketTransport", "Transport"]

_Infos = list[SandboxInfo]  # `SandboxClient.list` hides the name

_T = TypeVar("_T")


class _Route:
    """A supervisor as this client sees it: how busy it was last, and whether it may get new sandboxes.

    States of the breaker: whole --break_after failures in a row--> broken --break_s--> on trial: one success makes it
    whole, one failure breaks it again.
    """

    def __init__(self, transport: Transport, config: ContainerConfig) -> None:
        self.transport = transport
        self._config = config
        self._failures = 0
        self._broken_until_s = 0.0
        self._told_load = self._placing = 0

    @property
    def load(self) -> int:
        return self._told_load + self._placing

    def is_broken(self) -> bool:
        return time.monotonic() < self._broken_until_s

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self._config.break_after:
            self._broken_until_s = time.monotonic() + self._config.break_s

    def worked(self) -> None:
        self._failures, self._broken_until_s = 0, 0.0

    async def ask(
        self, operation: Operation, question: object, kind: type[_T], *, within_s: float = _GRACE_S, repeat: bool = True
    ) -> _T:
        """Ask, and ask again what is safe to repeat."""
        payload = wire.encode(question)
        lost = SandboxConnectionError(f"{operation} was not asked")
        for attempt in range(self._config.attempts if repeat else 1):
            if attempt:
                await _pause(attempt)
            try:
                async with asyncio.timeout(within_s):
                    answer = await self.transport.ask(operation, payload)
                return wire.result(answer, kind)
            except TimeoutError:
                lost = SandboxConnectionError(f"the sandbox supervisor did not answer {operation} in {within_s:g} s")
            except SandboxConnectionError as error:
                lost = error
        raise lost

    async def place(self, question: wire.Create) -> wire.Placed:
        """Ask for a sandbox, once."""
        self._placing += 1
        try:
            within_s = question.timeout_s + _GRACE_S
            placed = await self.ask(Operation.CREATE, question, wire.Placed, within_s=within_s, repeat=False)
        except (SandboxConnectionError, SandboxUnavailableError):
            self.failed()
            raise
        finally:
            self._placing -= 1
        self.worked()
        self._told_load = placed.load
        return placed


class SandboxClient:
    """Makes, finds and keeps sandboxes, on one supervisor or several. One event loop.

    New sandboxes go to the less busy of two supervisors that the identity names; one that failed `break_after` times in
    a row gets none for `break_s`.
    """

    def __init__(self, transports: Sequence[Transport], config: ContainerConfig, *, owner: str) -> None:
        """Keep whom to ask. Nothing is asked yet.

        Args:
            transports: one for each supervisor, in an order that is the same for all clients of the run.
            config: patience and bounds.
            owner: who holds the sandboxes, for people and for `list`; a successor has the same name.
        """
        if not transports:
            raise SandboxUnavailableError(
                "a sandbox client needs at least one supervisor; sandbox.container.actors says how many"
            )
        self._config, self._owner = config, owner
        self._routes = [_Route(transport, config) for transport in transports]
        self._held: dict[str, tuple[_Route, str]] = {}
        self._renewing: dict[_Route, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._sources: dict[object, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot: Snapshot | None = None) -> "Sandbox":
        """Make a sandbox, or return the one that there is under this identity. Whoever cancels it closes the sandbox.

        Args:
            sandbox_id: its identity, `[a-z0-9-]{1,64}`.
            spec: what it is made of.
            snapshot: what `Sandbox.snapshot` of another one of the same image has returned, to begin with: a restore,
                or one branch of many.

        Raises:
            SandboxBusyError: there was no room for it within `create_timeout_s`.
            SandboxUnavailableError: no supervisor can make it.
            SandboxConnectionError: none could be reached.
            SandboxIdentityError: the identity is none, or names a sandbox of another spec.
            SandboxFileError: the snapshot is of another image or kind, or does not fit.
            ToolError: a tool's file cannot be read.
        """
        wire.check_identity(sandbox_id)
        question = wire.Create(
            sandbox_id=sandbox_id,
            owner=self._owner,
            spec=spec,
            sources={tool.name: self._source(tool) for tool in spec.tools},
            snapshot=snapshot,
            timeout_s=self._config.create_timeout_s,
        )
        held = self._held.get(sandbox_id)
        lost: SandboxError = SandboxUnavailableError(f"sandbox {sandbox_id} was not asked for")
        for attempt in range(self._config.attempts):
            if attempt:
                await _pause(attempt)
            for route in [held[0]] if held is not None else self._candidates(sandbox_id):
                try:
                    return self._hold(route, sandbox_id, await route.place(question))
                except (SandboxConnectionError, SandboxUnavailableError) as error:
                    lost = error
                except asyncio.CancelledError:
                    if held is None:
                        self._later(route.ask(Operation.CLOSE, Which(sandbox_id=sandbox_id, instance=""), type(None)))
                    raise
        raise lost

    async def adopt(self, sandbox_id: str, *, instance: str = "") -> "Sandbox":
        """Take over a sandbox whose owner is gone, or find one again.

        Args:
            sandbox_id: its identity.
            instance: the incarnation that is meant, where that is known: two supervisors know an identity where the
                first one made it too late for who asked. Where no supervisor has it, whichever has the identity.

        Raises:
            SandboxGoneError: there is none; all supervisors said so.
            SandboxConnectionError: one could not be asked, and no other has it.
            SandboxIdentityError: the identity is none.
        """
        wire.check_identity(sandbox_id)
        held = self._held.get(sandbox_id)
        routes = [held[0]] if held is not None and instance in ("", held[1]) else self._routes
        question = wire.Adopt(sandbox_id=sandbox_id, owner=self._owner)
        asked = [asyncio.create_task(route.ask(Operation.ADOPT, question, wire.Placed)) for route in routes]
        try:
            answers = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            for task in asked:
                task.cancel()
        placed = [
            (route, found) for route, found in zip(routes, answers, strict=True) if isinstance(found, wire.Placed)
        ]
        for route, found in placed:
            if instance in ("", found.instance):
                return self._hold(route, sandbox_id, found)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        # Somebody who was not asked may have it; and who knows why it is gone knows more than who never heard of it.
        error = min(errors, key=lambda error: (isinstance(error, SandboxGoneError), _is_unknown(error)), default=None)
        if placed and (error is None or isinstance(error, SandboxGoneError)):
            return self._hold(placed[0][0], sandbox_id, placed[0][1])
        assert error is not None, "each has answered or failed"
        raise error

    async def renew(self, sandbox_ids: Sequence[str]) -> None:
        """Give a sign of life for these now. Those that are not there are let go of; the next question finds out.

        Raises:
            SandboxConnectionError: a supervisor could not be reached.
        """
        by_route: dict[_Route, dict[str, str]] = {}
        for sandbox_id in sandbox_ids:
            if (held := self._held.get(sandbox_id)) is not None:
                by_route.setdefault(held[0], {})[sandbox_id] = held[1]
        asked = [
            route.ask(Operation.RENEW, wire.Renew(held=instances), list[str]) for route, instances in by_route.items()
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for (route, instances), gone in zip(by_route.items(), answers, strict=True):
            if not isinstance(gone, BaseException):
                for sandbox_id in gone:
                    self._let_go(sandbox_id, instances.get(sandbox_id, ""), route)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def list(self) -> _Infos:
        """Returns all sandboxes of all supervisors, whoever holds them."""
        answers = await self._ask_all(lambda route: route.ask(Operation.LIST, None, _Infos))
        return [info for infos in answers for info in infos]

    async def stats(self) -> PoolStats:
        """Returns the counters of all supervisors, added up."""
        return sum(await self._ask_all(lambda route: route.ask(Operation.STATS, None, PoolStats)), PoolStats())

    async def close(self) -> None:
        """Stop giving signs of life and let go of the connections: sandboxes are left to their leases."""
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        for task in [*self._background, *self._renewing.values()]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._renewing.clear()
        self._held.clear()
        await asyncio.gather(*(route.transport.close() for route in self._routes), return_exceptions=True)

    def _candidates(self, sandbox_id: str) -> Sequence[_Route]:
        """Supervisors in the order in which they are asked for a sandbox; the same identity names the same two first,
        so that a client that starts anew finds what it has asked for."""
        numbered = sorted(
            range(len(self._routes)),
            key=lambda n: hashlib.blake2b(f"{n} {sandbox_id}".encode(), digest_size=8).digest(),
        )
        order = [self._routes[n] for n in numbered]
        first_two = sorted(order[:2], key=lambda route: route.load)
        return sorted([*first_two, *order[2:]], key=_Route.is_broken)

    def _source(self, tool: Any) -> str:
        # Read once: a tool does not change in the middle of a run.
        if tool not in self._sources:
            self._sources[tool] = tool_source(tool)
        return self._sources[tool]

    def _hold(self, route: _Route, sandbox_id: str, placed: wire.Placed) -> "Sandbox":
        self._held[sandbox_id] = route, placed.instance
        if route not in self._renewing:
            self._renewing[route] = asyncio.create_task(self._keep_renewing(route))
        which = Which(sandbox_id=sandbox_id, instance=placed.instance)
        return Sandbox(route, which, placed.spec, self._let_go, self._fork)

    async def _fork(self, route: _Route, which: Which, sandbox_id: str, max_bytes: int) -> "Sandbox":
        wire.check_identity(sandbox_id)
        question = wire.Fork(
            which=which,
            sandbox_id=sandbox_id,
            owner=self._owner,
            max_bytes=max_bytes,
            timeout_s=self._config.create_timeout_s,
        )
        within_s = question.timeout_s + _GRACE_S
        try:
            placed = await route.ask(Operation.FORK, question, wire.Placed, within_s=within_s)
        except asyncio.CancelledError:
            self._later(route.ask(Operation.CLOSE, Which(sandbox_id=sandbox_id, instance=""), type(None)))
            raise
        return self._hold(route, sandbox_id, placed)

    def _let_go(self, sandbox_id: str, instance: str, route: _Route) -> None:
        if self._held.get(sandbox_id) == (route, instance):
            del self._held[sandbox_id]

    async def _keep_renewing(self, route: _Route) -> None:
        """Give signs of life to one supervisor: one that does not answer must not keep the others from hearing."""
        while True:
            await asyncio.sleep(self._config.lease_s / _RENEWALS)
            with contextlib.suppress(SandboxError):  # the next question about a sandbox says what is wrong
                await self.renew([sandbox_id for sandbox_id, (holder, _) in self._held.items() if holder is route])

    async def _ask_all(self, ask: Callable[[_Route], Awaitable[_T]]) -> Sequence[_T]:
        return await asyncio.gather(*(ask(route) for route in self._routes))

    def _later(self, question: Any) -> None:
        task = asyncio.create_task(question)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for it


class Sandbox:
    """One incarnation of a sandbox, as whoever holds it sees it. Got from `SandboxClient.create` and `adopt`.

    Every method but `close` raises SandboxGoneError when it is gone, and SandboxConnectionError when nobody could be
    asked.
    """

    def __init__(
        self,
        route: _Route,
        which: Which,
        spec: SandboxSpec,
        let_go: Callable[[str, str, _Route], None],
        fork: Callable[[_Route, Which, str, int], Awaitable["Sandbox"]],
    ) -> None:
        """Use `SandboxClient.create` or `adopt`."""
        self._route, self._which, self._let_go, self._fork = route, which, let_go, fork
        self.spec = spec

    @property
    def id(self) -> str:
        """Its identity."""
        return self._which.sandbox_id

    @property
    def instance(self) -> str:
        """Names this incarnation, 16 hexadecimal digits: another one under the same identity has none of its files."""
        return self._which.instance

    async def exec(self, request: ExecRequest, *, key: str | None = None) -> ExecResult:
        """Run a command; its result says how it ended.

        Args:
            request: what to run.
            key: names the command within the sandbox: asked again it does not run again. None: it may not be repeated.

        Raises:
            SandboxGoneError: it was gone before the command reached it, which did not run. A sandbox that ends while
                the command runs gives a result (OOM, KILLED, INFRA).
            SandboxConnectionError: the outcome is unknown. With a key it can be asked for again.
        """
        question = wire.Exec.of(self._which, request, key)
        wall_s = self.spec.limits.wall_s if request.wall_s is None else request.wall_s
        return await self._ask(Operation.EXEC, question, ExecResult, wall_s + _GRACE_S, repeat=key is not None)

    async def call(self, call: Call, *, key: str | None = None) -> CallResult:
        """Call a tool of the spec; its result says how it ended. See `exec` for `key` and errors."""
        try:
            question = wire.Invoke.of(self._which, call, key)
        except (TypeError, ValueError, RecursionError):
            text = "the arguments are no JSON"
            return CallResult(status=CallStatus.ERROR, text=text, total_bytes=len(text))
        wall_s = max((tool.timeout_s for tool in self.spec.tools if tool.name == call.tool), default=0.0)
        return await self._ask(Operation.CALL, question, CallResult, wall_s + _GRACE_S, repeat=key is not None)

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files, with the directories that they need. Paths are absolute or relative to /workspace.

        Raises:
            SandboxFileError: a path leaves the sandbox or passes a link, or there is no room.
        """
        question = wire.Upload(which=self._which, files=wire.encode_files(files))
        await self._ask(Operation.UPLOAD, question, type(None))

    async def download(self, paths: Sequence[str], *, max_bytes: int) -> dict[str, bytes]:
        """Read regular files; those that do not exist are left out.

        Raises:
            SandboxFileError: one is no regular file or passes a link, or together they have more than `max_bytes`.
        """
        question = wire.Download(which=self._which, paths=wire.encode_paths(paths), max_bytes=max_bytes)
        return wire.decode_files(await self._ask(Operation.DOWNLOAD, question, dict[bytes, bytes]))

    async def snapshot(self, *, max_bytes: int, files_only: bool = False) -> Snapshot:
        """Take its state, from which others can begin; of a container its files and no process, of a machine all that
        runs in it too. It lives on.

        Args:
            max_bytes: that it may have.
            files_only: take of a machine what is taken of a container. Sandboxes with other limits and tools can begin
                with that, and it is far smaller.

        Raises:
            SandboxFileError: it would have more than `max_bytes`.
            SandboxBusyError: a command runs, and files are taken.
        """
        question = wire.Snapshot(which=self._which, max_bytes=max_bytes, files_only=files_only)
        return await self._ask(Operation.SNAPSHOT, question, Snapshot)

    async def fork(self, sandbox_id: str, *, max_bytes: int) -> "Sandbox":
        """Make a sandbox that begins as this one is now, at the same supervisor; see `snapshot` and
        `SandboxClient.create`. Both live on and know nothing of each other.

        Raises:
            SandboxFileError: its state has more than `max_bytes`.
            SandboxBusyError: a command runs, or there is no room.
            SandboxIdentityError: the identity is none, or names a sandbox of another spec.
        """
        return await self._fork(self._route, self._which, sandbox_id, max_bytes)

    async def pause(self) -> None:
        """Have nothing of it run until it is asked something; what it holds stays, and so does its lease.

        Raises:
            SandboxBusyError: a command runs.
            SandboxUnavailableError: its machine cannot.
        """
        await self._ask(Operation.PAUSE, self._which, type(None))

    async def resume(self) -> None:
        """Have it go on; whatever it is asked does that too."""
        await self._ask(Operation.RESUME, self._which, type(None))

    async def close(self) -> None:
        """End it. Returns when that is certain to happen; nothing runs in it for long after. Idempotent.

        Raises:
            SandboxConnectionError: nobody could be told; its lease ends it.
        """
        self._let_go(self._which.sandbox_id, self._which.instance, self._route)
        await self._ask(Operation.CLOSE, self._which, type(None))

    async def _ask(
        self, operation: Operation, question: object, kind: type[_T], within_s: float = _GRACE_S, *, repeat: bool = True
    ) -> _T:
        try:
            return await self._route.ask(operation, question, kind, within_s=within_s, repeat=repeat)
        except SandboxGoneError:
            self._let_go(self._which.sandbox_id, self._which.instance, self._route)
            raise


def _is_unknown(error: BaseException) -> bool:
    return isinstance(error, SandboxGoneError) and error.cause == GoneCause.LOST


async def _pause(attempt: int) -> None:
    await asyncio.sleep(_PAUSE_S * 4 ** (attempt - 1) * random.uniform(0.5, 1.5))
