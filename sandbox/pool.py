"""The sandboxes of one supervisor: who has which, who waits for room, what is ready, what has run out of its lease.

    asked for --room--> making --> held --closed, expired, died--> ending --nothing left--> (record removed)
                \\--one is warm, still as new--^                      | not within its time
                                                                   stuck, tried again at each sweep

Room is given first come, first served; a place is free again when nothing of its sandbox is left. A sandbox that is
gone is remembered by why. Not here: bytes and sockets (`supervisor.py`), what isolates (`substrate.py`).
"""

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from rollforward.sandbox import wire
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxBusyError,
    SandboxError,
    SandboxGoneError,
    SandboxIdentityError,
    SandboxUnavailableError,
)
from rollforward.sandbox.gate import Gate
from rollforward.sandbox.graves import Graves, was_closed
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.leases import Deadline, LeaseBook, LeaseRecord, started_ticks
from rollforward.sandbox.room import Room
from rollforward.sandbox.substrate import Substrate
from rollforward.sandbox.types import CREATE_BOUNDS_S, PoolStats, SandboxInfo, SandboxSpec, Snapshot, SnapshotKind

_MAKERS: Final = 8
"""Sandboxes that are made at one time."""
_ENDERS: Final = 16
"""Sandboxes that are taken down at one time."""
_REFILL_S: Final = 0.05
"""Before a warm sandbox is made: whoever has just been given one asks it something first."""
_SHUTDOWN_S: Final = 20.0
"""For taking everything down at the end."""


@dataclass(eq=False)
class Box:
    """A sandbox that exists."""

    record: LeaseRecord
    spec: SandboxSpec
    sandbox: Instance
    made_s: float
    deadline: Deadline | None = None
    """None while it is warm."""
    has_room: bool = False
    is_ending: bool = False
    gate: Gate = field(init=False)
    """What it is asked passes there."""

    def __post_init__(self) -> None:
        self.gate = Gate(self.sandbox)


@dataclass(eq=False)
class _Making:
    """A sandbox that was asked for."""

    spec: SandboxSpec
    task: "asyncio.Task[Box] | None" = None
    num_waiting: int = 0
    has_room: bool = False
    is_unwanted: bool = False
    """It was closed before it was made."""


class Pool:
    """See the module. One event loop; between two of its awaits nothing changes."""

    def __init__(self, substrate: Substrate, book: LeaseBook, config: ContainerConfig) -> None:
        """Begin with no sandbox.

        Args:
            substrate: makes them; it is started.
            book: where records go.
            config: bounds; `configure` changes them.
        """
        self._substrate, self._book, self._config = substrate, book, config
        self._room = Room(config.max_sandboxes)
        self._makers = asyncio.Semaphore(_MAKERS)
        self._enders = asyncio.Semaphore(_ENDERS)
        self._held: dict[str, Box] = {}
        self._making: dict[str, _Making] = {}
        self._warm: list[Box] = []
        self._wanted: list[SandboxSpec] = []
        self._refilling: asyncio.Task[None] | None = None
        self._ending: set[Box] = set()
        self._stuck: set[Box] = set()
        self._gone = Graves()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts = Counter[str]()  # by field of PoolStats
        self._create_s = [0] * (len(CREATE_BOUNDS_S) + 1)
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody has or wants a sandbox."""
        return not self._held and not self._making

    def configure(self, config: ContainerConfig) -> None:
        """Take over bounds. Leases are not shortened."""
        self._config = config
        self._room.resize(config.max_sandboxes)

    async def create(
        self, sandbox_id: str, spec: SandboxSpec, *, owner: str, snapshot: Snapshot | None, within_s: float
    ) -> Box:
        """Return the sandbox of that identity, made if there is none.

        Whoever is cancelled gives up its place in the queue, if nobody else waits for the same.

        Raises:
            SandboxBusyError: no room within that time.
            SandboxIdentityError: the identity is none, or is that of something else.
            SandboxError: see `Substrate.create`.
        """
        wire.check_identity(sandbox_id)
        making = self._making.get(sandbox_id)
        if making is None:
            if (box := self._held.get(sandbox_id)) is not None:
                _check_same(sandbox_id, box.spec, spec)
                self._take_over(box, owner)
                return box
            if self._is_closed:
                raise SandboxUnavailableError("the sandbox supervisor is ending; ask again, and another one starts")
            making = _Making(spec)
            task = making.task = asyncio.create_task(self._make(making, sandbox_id, owner, snapshot, within_s))
            self._making[sandbox_id] = making
            task.add_done_callback(lambda _: self._forget(sandbox_id, making))
        _check_same(sandbox_id, making.spec, spec)
        assert making.task is not None
        making.num_waiting += 1
        try:
            return await asyncio.shield(making.task)
        except asyncio.CancelledError:
            if making.is_unwanted and making.task.cancelled():
                raise was_closed(sandbox_id) from None
            raise
        finally:
            making.num_waiting -= 1
            if making.num_waiting == 0:
                self._give_up(sandbox_id, making)

    def adopt(self, sandbox_id: str, owner: str) -> Box:
        """Give the sandbox to another owner.

        Raises:
            SandboxGoneError: there is none.
        """
        box = self._held.get(sandbox_id)
        if box is None:
            raise self.gone_error(sandbox_id, "")
        self._take_over(box, owner)
        self._counts["adopted"] += 1
        return box

    def find(self, sandbox_id: str, instance: str) -> Box:
        """Return a sandbox that is asked something, which is a sign of life of its owner.

        Raises:
            SandboxGoneError: this incarnation is gone.
        """
        box = self._held.get(sandbox_id)
        if box is None or box.record.instance != instance:
            raise self.gone_error(sandbox_id, instance)
        self._renew(box)
        return box

    def renew(self, held: Mapping[str, str]) -> list[str]:
        """Take signs of life for incarnations by identity; return which are gone."""
        gone: list[str] = []
        for sandbox_id, instance in held.items():
            box = self._held.get(sandbox_id)
            if box is not None and box.record.instance == instance:
                self._renew(box)
            else:
                gone.append(sandbox_id)
        return gone

    def close(self, sandbox_id: str, instance: str) -> None:
        """End a sandbox; without an instance whichever has the identity, made or still waited for. One that is gone is
        no error."""
        making = self._making.get(sandbox_id)
        if making is not None and instance == "":
            making.is_unwanted = True
            self._give_up(sandbox_id, making)
        box = self._held.get(sandbox_id)
        if box is not None and instance in ("", box.record.instance):
            self._counts["closed"] += 1
            self._end(box, GoneCause.CLOSED)

    def list(self) -> Sequence[SandboxInfo]:
        """Return what somebody holds."""
        now_s = time.monotonic()
        return [
            SandboxInfo(
                sandbox_id=sandbox_id,
                instance=box.record.instance,
                owner=box.record.owner,
                spec=box.spec,
                platform=box.sandbox.platform,
                age_s=now_s - box.made_s,
                lease_s=0.0 if box.deadline is None else box.deadline.left_s,
            )
            for sandbox_id, box in self._held.items()
        ]

    def stats(self) -> PoolStats:
        """Return the counters."""
        return PoolStats(
            held=len(self._held),
            warm=len(self._warm),
            waiting=self._room.num_waiting,
            ending=len(self._ending),
            stuck=len(self._stuck),
            create_s=tuple(self._create_s),
            **self._counts,
        )

    def sweep(self, deaf_s: float) -> None:
        """End what has run out of its lease, try again what would not end, and keep ready what shall be.

        Args:
            deaf_s: for so long this process stood still and heard nobody.
        """
        for box in tuple(self._held.values()):
            if box.deadline is not None and deaf_s > 0.0:
                box.deadline.put_off(deaf_s)
            if box.deadline is not None and box.deadline.left_s <= 0.0:
                self._counts["expired"] += 1
                self._end(box, GoneCause.EXPIRED)
        for box in tuple(self._stuck):
            self._stuck.discard(box)
            self._take_down(box)
        self._refill()

    async def shutdown(self) -> None:
        """End everything, in bounded time."""
        self._is_closed = True
        for making in tuple(self._making.values()):
            if making.task is not None and not making.has_room:
                making.task.cancel()
        for box in tuple(self._held.values()):
            self._end(box, GoneCause.CLOSED)
        for box in tuple(self._warm):
            self._warm.remove(box)
            self._take_down(box)
        await self._substrate.close()  # by which what is being made, or waits for its substrate to start, fails at once
        end_s = time.monotonic() + _SHUTDOWN_S
        while self._tasks and time.monotonic() < end_s:
            await asyncio.wait(tuple(self._tasks), timeout=end_s - time.monotonic())

    async def _make(
        self, making: _Making, sandbox_id: str, owner: str, snapshot: Snapshot | None, within_s: float
    ) -> Box:
        start_s = time.monotonic()
        try:
            await self._room.take(within_s)
        except TimeoutError:
            self._counts["busy"] += 1
            raise SandboxBusyError(
                f"no room for sandbox {sandbox_id} within {within_s:g} s: {self._room.taken} are there, as"
                " sandbox.container.max_sandboxes allows, and none ended. Raise it or sandbox.container.actors, or wait"
                " longer (create_timeout_s)"
            ) from None
        making.has_room = True
        record = LeaseRecord(
            instance=secrets.token_hex(8),
            sandbox_id=sandbox_id,
            owner=owner,
            labels=making.spec.labels,
            made_unix_s=time.time(),
        )
        box = None
        try:
            box = await self._take_warm(record, making.spec) if snapshot is None else None
            if box is None:
                box = await self._new(record, making.spec, snapshot)
            else:
                self._counts["warm_hits"] += 1
            if box.sandbox.died.done() or self._is_closed:
                self._take_down(box)
                raise SandboxUnavailableError(f"sandbox {sandbox_id} died as soon as it was made")
        except BaseException:
            self._counts["failed"] += 1
            self._leave_room(record.instance if box is None else box.record.instance)
            raise
        box.has_room, box.deadline = True, Deadline(self._config.lease_s)
        self._held[sandbox_id] = box
        self._gone.forget(sandbox_id)
        self._counts["created"] += 1
        self._create_s[bisect_left(CREATE_BOUNDS_S, time.monotonic() - start_s)] += 1
        self._want(making.spec)
        if making.is_unwanted:
            self.close(sandbox_id, record.instance)
            raise was_closed(sandbox_id)
        return box

    async def _new(self, record: LeaseRecord, spec: SandboxSpec, snapshot: Snapshot | None) -> Box:
        """Make one, with a record before it is there and a better one after."""
        async with self._makers:
            self._book.write(record)
            try:
                sandbox = await self._substrate.create(record.instance, spec, **_beginning(snapshot))
            except BaseException:
                left = self._substrate.left(record.instance)
                if left is None:
                    self._book.remove(record.instance)
                else:
                    self._take_down(Box(record=record, spec=spec, sandbox=left, made_s=time.monotonic()))
                raise
        box = Box(record=record, spec=spec, sandbox=sandbox, made_s=time.monotonic())
        sandbox.died.add_done_callback(lambda died: self._died(box, died))
        try:
            self._rewrite(box, record)
        except SandboxUnavailableError:
            self._take_down(box)
            raise
        return box

    def _rewrite(self, box: Box, record: LeaseRecord) -> None:
        pid = box.sandbox.pid
        record = msgspec.structs.replace(
            record,
            instance=box.record.instance,
            pid=pid,
            started_ticks=started_ticks(pid),
            cgroups=tuple(str(path) for path in box.sandbox.cgroup),
        )
        self._book.write(record)
        box.record = record

    async def _take_warm(self, record: LeaseRecord, spec: SandboxSpec) -> Box | None:
        """Return a warm sandbox that is proved to be as new, under its new name."""
        while (box := next((box for box in self._warm if _is_same(box.spec, spec)), None)) is not None:
            self._warm.remove(box)
            try:
                if await box.sandbox.is_fresh() and not box.sandbox.died.done():
                    self._rewrite(box, record)
                    box.spec, box.made_s = spec, time.monotonic()
                    return box
            except (SandboxError, OSError):
                pass
            self._counts["unfresh"] += 1
            self._take_down(box)
        return None

    def _want(self, spec: SandboxSpec) -> None:
        """Keep sandboxes of that kind ready, and those of the kinds before it as long as there is room for both."""
        self._wanted = [spec, *(known for known in self._wanted if not _is_same(known, spec))][: self._config.warm]
        self._refill()

    def _refill(self) -> None:
        if self._is_closed or (self._refilling is not None and not self._refilling.done()):
            return
        wanted = self._wanted[: self._config.warm]
        share = [wanted[n % len(wanted)] for n in range(self._config.warm)] if wanted else []
        for box in tuple(self._warm):
            found = next((spec for spec in share if _is_same(spec, box.spec)), None)
            if found is None:
                self._warm.remove(box)
                self._take_down(box)
            else:
                share.remove(found)
        if share:
            self._refilling = self._start(self._make_warm(share))

    async def _make_warm(self, specs: Sequence[SandboxSpec]) -> None:
        """Make what is missing, one by one, behind those who wait."""
        for spec in specs:
            await asyncio.sleep(_REFILL_S)
            if self._is_closed or self._making:
                return
            record = LeaseRecord(
                instance=secrets.token_hex(8), sandbox_id="", owner="", labels={}, made_unix_s=time.time()
            )
            try:
                box = await self._new(record, msgspec.structs.replace(spec, labels={}), None)
            except (SandboxError, OSError):
                self._counts["failed"] += 1
                return
            if self._is_closed or box.sandbox.died.done():
                self._take_down(box)
                return
            self._warm.append(box)

    def _take_over(self, box: Box, owner: str) -> None:
        box.record = msgspec.structs.replace(box.record, owner=owner)
        self._renew(box)

    def _renew(self, box: Box) -> None:
        if box.deadline is not None:
            box.deadline.renew(self._config.lease_s)

    def _died(self, box: Box, died: "asyncio.Future[GoneCause]") -> None:
        """One ended by itself or was killed by somebody else."""
        if box.is_ending or died.cancelled():
            return
        cause = GoneCause.LOST if died.exception() is not None else died.result()
        if box in self._warm:
            self._warm.remove(box)
            self._counts["unfresh"] += 1
            self._take_down(box)
        elif self._held.get(box.record.sandbox_id) is box:
            if cause == GoneCause.OOM:
                self._counts["oom"] += 1
            else:
                self._counts["lost"] += 1
            self._end(box, cause)

    def _end(self, box: Box, cause: GoneCause) -> None:
        """Nobody has it any more from here on."""
        sandbox_id = box.record.sandbox_id
        del self._held[sandbox_id]
        self._gone.bury(sandbox_id, box.record.instance, cause)
        self._take_down(box)

    def _take_down(self, box: Box) -> None:
        box.is_ending = True
        self._ending.add(box)
        self._start(self._end_sandbox(box))

    async def _end_sandbox(self, box: Box) -> None:
        try:
            async with self._enders:
                await box.sandbox.kill()
        finally:
            self._ending.discard(box)
        if not box.sandbox.is_gone:
            self._stuck.add(box)  # a process of it waits in the kernel for something, killed as it is
            return
        self._book.remove(box.record.instance)
        if box.has_room:
            box.has_room = False
            self._room.give()

    def _leave_room(self, instance: str) -> None:
        """Give the place of a sandbox that nobody gets back, when nothing of it is left."""
        left = (box for box in (*self._ending, *self._stuck) if box.record.instance == instance)
        if (box := next(left, None)) is None:
            self._room.give()
        else:
            box.has_room = True

    def gone_error(self, sandbox_id: str, instance: str) -> SandboxGoneError:
        """Say why a sandbox is not there, as far as that is remembered."""
        return self._gone.error(sandbox_id, instance)

    def _give_up(self, sandbox_id: str, making: _Making) -> None:
        """Stop waiting for room for it. One that has room is made to its end."""
        if making.task is not None and not making.task.done() and not making.has_room:
            self._forget(sandbox_id, making)  # whoever asks from here on asks anew
            making.task.cancel()

    def _forget(self, sandbox_id: str, making: _Making) -> None:
        if self._making.get(sandbox_id) is making:
            del self._making[sandbox_id]

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _beginning(snapshot: Snapshot | None) -> dict[str, Any]:
    """What a substrate is told of the snapshot that a sandbox begins with."""
    if snapshot is None:
        return {"snapshot": None}
    return {"saved" if snapshot.kind is SnapshotKind.MACHINE else "snapshot": snapshot.data}


def _is_same(one: SandboxSpec, other: SandboxSpec) -> bool:
    """Whether two are as good as each other; labels are for people."""
    return msgspec.structs.replace(one, labels={}) == msgspec.structs.replace(other, labels={})


def _check_same(sandbox_id: str, there: SandboxSpec, asked: SandboxSpec) -> None:
    if not _is_same(there, asked):
        raise SandboxIdentityError(
            f"sandbox {sandbox_id} is made of something else than what is asked for under this identity. Choose another"
            " identity, or close that sandbox first"
        )
