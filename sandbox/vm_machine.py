"""One virtual machine, seen from the host: its emulator's launch, its three sockets, its waking, whole-machine
snapshots.

    agent     commands, calls and files, as of a container (`agent_link.py`)
    keeper    the guest's first process (`vm_keeper.py`): wakes a machine, or makes one that goes on another one
    monitor   the emulator (`vm_monitor.py`)
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import signal
import socket
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from typing import Any, Final, Self

import msgspec

from rollforward.sandbox import cgroups
from rollforward.sandbox.agent_link import GO_ON, AgentLink
from rollforward.sandbox.container import SPARE_PROCESSES
from rollforward.sandbox.errors import SandboxFileError, SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.files import last_line
from rollforward.sandbox.images import host_directories
from rollforward.sandbox.inside import frames
from rollforward.sandbox.inside.files import PART_BYTES
from rollforward.sandbox.instance import Instance, gone_error
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.toolset import tool_source
from rollforward.sandbox.types import ExecRequest, SandboxSpec, SnapshotKind
from rollforward.sandbox.unbroken import in_thread, to_its_end
from rollforward.sandbox.vm import MIB, Given, Layout, guest_bytes
from rollforward.sandbox.vm_cache import CACHE
from rollforward.sandbox.vm_keeper import Keeper, newness
from rollforward.sandbox.vm_monitor import Monitor, MonitorLostError
from rollforward.sandbox.vm_state import Saved, Whole, close_all, memory_file, packed
from rollforward.sandbox.warm_template import WarmTemplate

SYSTEM: Final = "system"
"""Serial of the disk that every machine has."""
_COPIES: Final = 3
"""Of each page of a guest, which all count as its emulator's: in the file that its memory begins with, even where that
is empty (whoever touches it first pays for all who share it), as the guest has changed it, and as it is saved."""
_EMULATOR_BYTES: Final = 192 * MIB
_EMULATOR_THREADS: Final = 96
"""It has up to 64 that read and write disks."""
_SETUP_TIMEOUT_S: Final = 60.0
_BOOT_S: Final = {"kvm": 20.0, "tcg": 180.0}
_ERROR_BYTES: Final = 1 << 14
"""An emulator can say so much, and is not heard after that."""
_SAID_CHARS: Final = 2000
_END_S: Final = 1.0
"""The end of a process is heard of within this time of the end of what it had open."""
_WARNING: Final = "warning:"
_WANTS: Final = tuple(
    os.strerror(number).lower()
    for number in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
)
"""How an emulator says that the host has no more of something."""
_ID_BITS: Final = 48
_REHEARSAL: Final = (("true",), ("sh", "-c", ":"), ("python3", "-c", ""))
_LAST: Final = ExecRequest(argv=("sh", "-c", "while :; do :; done"), wall_s=0.2)
"""What a machine is made to do last. With it ends the process around it: the sandbox's first command or call has one of
which no other has been the parent, as in a container, and its process ids are the same everywhere."""
_SETTLE_S: Final = 30.0
_QUIET_S: Final = 120.0
"""An agent comes to the end of a message within this time."""
_LOOK_S: Final = 0.005
_PACE: Final = {"kvm": 2, "tcg": 60}
"""How many times as long as on the host things take in the guest."""


class BootError(SandboxUnavailableError):
    """A machine has not booted, by its accelerator as far as can be told: with another one it may."""


class Wires:
    """Three socket pairs of a machine. The emulator's ends are closed at the end of a `with`."""

    def __init__(self) -> None:
        """Make them."""
        with contextlib.ExitStack() as stack:
            pairs: list[tuple[socket.socket, socket.socket]] = []
            for _ in range(3):
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    stack.callback(end.close)
            stack.pop_all()
        (self.agent, self.agent_end), (self.keeper, self.keeper_end), (self.monitor, self.monitor_end) = pairs

    def sockets(self) -> list[tuple[str, int]]:
        """Name and the emulator's end of each, the ports first, in the order of their numbers."""
        ends = {"agent": self.agent_end, "keeper": self.keeper_end, "monitor": self.monitor_end}
        return [(name, end.fileno()) for name, end in ends.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for end in (self.agent_end, self.keeper_end, self.monitor_end):
            end.close()
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Close all ends that are not closed yet."""
        for end in (self.agent, self.keeper, self.monitor, self.agent_end, self.keeper_end, self.monitor_end):
            end.close()


class Machine(Instance):
    """One virtual machine. Made by a substrate's `create`."""

    snapshot_kind = SnapshotKind.MACHINE

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        layout: Layout,
        make_group: Callable[[int, int], cgroups.Group],
        forget: Any,
    ) -> None:
        """Nothing runs yet.

        Args:
            sandbox_id: see `Instance`.
            spec: likewise.
            layout: which machine.
            make_group: makes its control group, of so many bytes and processes.
            forget: see `Instance`.
        """
        host_bytes = _COPIES * guest_bytes(spec) + _EMULATOR_BYTES
        super().__init__(sandbox_id, spec, functools.partial(make_group, host_bytes, _EMULATOR_THREADS), forget)
        self.layout = layout
        self.uid = -1
        self._told_ooms = 0
        self._keeper: Keeper | None = None
        self._monitor: Monitor | None = None
        self._standing = asyncio.Lock()
        """Who has it stand still, or go on, is alone with that."""
        self._errors = -1

    @abstractmethod
    async def take(self, monitor: Monitor, stream: int, max_bytes: int) -> list[bytes]:
        """Write the stopped machine, memory included, into a file; what was written to its disk, in parts.

        Raises:
            SandboxFileError: it has more bytes.
            SandboxUnavailableError: it cannot be taken.
        """
        raise NotImplementedError

    async def launch(self, template: WarmTemplate, command: Sequence[str], given: Given) -> None:
        """Start its emulator.

        Args:
            template: makes it.
            command: path and arguments.
            given: what it is handed; closed by whoever opened it.

        Raises:
            SandboxUnavailableError: it cannot be made.
        """
        groups = self._group.open_procs()
        handed = {"program": list(command), "keep": len(given.descriptors), "binds": host_directories()}
        handed["file_bytes"] = self.layout.max_file_bytes()
        try:
            self._errors = os.memfd_create("errors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._errors, _ERROR_BYTES)
            fcntl.fcntl(self._errors, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            descriptors = [*given.descriptors, self._errors, *groups]
            await self._receive(template.make({**handed, "uid": self.uid}, descriptors))
        finally:
            close_all(groups)

    def said(self, template: WarmTemplate) -> str:
        """What its emulator has said, or else what its template has said last."""
        return self._words() or template.said()

    def _words(self) -> str:
        data = os.pread(self._errors, _ERROR_BYTES, 0) if self._errors >= 0 else b""
        return data.strip(b"\0").decode("utf-8", "replace").strip()[-_SAID_CHARS:]

    @contextlib.contextmanager
    def telling(self, template: WarmTemplate) -> Generator[None]:
        """Where its emulator fails, what that has said is told too."""
        try:
            yield
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(f"{error}: {self.said(template)}") from None

    async def booted(self, keeper: Keeper, template: WarmTemplate, console: int) -> None:
        """Wait until a machine that boots waits to be woken.

        Args:
            keeper: its first process.
            template: what its emulator was made by.
            console: file that the guest's words are in, where it fails.

        Raises:
            BootError: it has not come to that, by its accelerator as far as can be told.
            SandboxUnavailableError: it has not, for another reason.
        """
        try:
            head = await keeper.heard(_BOOT_S[self.layout.accelerator])
            if head.get("kind") != "":
                raise SandboxUnavailableError("sandbox: a machine did not boot")
        except SandboxUnavailableError as error:
            kind = BootError if await self._has_not_booted(template) else SandboxUnavailableError
            said = last_line(console) or self.said(template)
            raise kind(f"{error} ({self.layout.accelerator}): {said}") from None

    def is_its_accelerators(self, said: str) -> bool:
        """Whether an emulator says that its accelerator cannot do something, and not for want of something else."""
        said = said.lower()
        return self.layout.accelerator in said and not any(want in said for want in _WANTS)

    async def _has_not_booted(self, template: WarmTemplate) -> bool:
        """Whether that is its accelerator's doing: its emulator runs on, or says so, or has ended without a word and
        nobody killed it."""
        await asyncio.wait([self.died], timeout=_END_S)
        await asyncio.wait([template.died], timeout=_END_S)  # with which it dies
        if self._is_closing or template.died.done() or self._oom_kills():
            return False
        said = "\n".join(line for line in self._words().splitlines() if _WARNING not in line)
        return not self.died.done() or not said or self.is_its_accelerators(said)

    async def wake(self, wires: Wires, template: WarmTemplate, codes: list[bytes], snapshot: bytes) -> None:
        """Make a machine that waits this sandbox's.

        Args:
            wires: its sockets; taken over.
            template: for what its emulator has said, where it fails.
            codes: of the tools.
            snapshot: files to begin with.
        """
        self._keeper, self._monitor = Keeper(wires.keeper), self._monitor or Monitor(wires.monitor)
        limits = {**msgspec.to_builtins(self.spec.limits), "is_group_limited": True}
        told = {"limits": {**limits, "pace": _PACE[self.layout.accelerator]}, "tools": list(self._tools)}
        try:
            with self.telling(template):
                for message in self._waking(snapshot):
                    await self._keeper.tell(message)
            await self._greet(wires.agent, [(told, codes)], _SETUP_TIMEOUT_S)
        except (SandboxGoneError, TimeoutError, OSError):
            raise SandboxUnavailableError(f"sandbox: a machine did not come up: {self.said(template)}") from None

    async def rejoin(self, wires: Wires, template: WarmTemplate) -> None:
        """Take over a machine that goes on where it was saved; arguments as of `wake`."""
        self._keeper, self._monitor = Keeper(wires.keeper), self._monitor or Monitor(wires.monitor)
        # Its agent still answers questions that its ancestor was asked: they are other ones than these.
        first = 1 + secrets.randbits(_ID_BITS)
        self._link = await AgentLink.open(wires.agent, self._signal, max_bytes=self.max_message_bytes, first=first)
        self._link.hello.cancel()  # it has said that long ago
        self._link.tell(GO_ON)  # it was saved while it was quiet
        try:
            self._told_ooms = self._ooms = await self._keeper.renew()
        except SandboxUnavailableError as error:
            raise SandboxUnavailableError(
                f"sandbox: a saved machine did not go on: {error}: {self.said(template)}"
            ) from None

    async def rehearse(self) -> None:
        """Have it do once what sandboxes do first, and be as new again: agent and programs lie in its memory then.

        Raises:
            SandboxUnavailableError: it is not as new afterwards.
        """
        for request in (*(ExecRequest(argv=argv) for argv in _REHEARSAL), _LAST):
            await self.exec(request)
        try:
            async with asyncio.timeout(_SETTLE_S):
                while not await self.is_fresh():  # a process around a command is still ending
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise SandboxUnavailableError("sandbox: a machine was not as new after a rehearsal") from None

    async def save(self, *, max_bytes: int) -> bytes:
        """The whole machine: memory, processors, disk. It stands still meanwhile, and goes on. What it says or hears
        just then comes to the end of a message first: who goes on from it begins with another one. Not while it is
        paused: its agent must answer.

        Raises:
            SandboxFileError: it has more bytes.
            SandboxGoneError: it is gone.
            SandboxUnavailableError: the emulator cannot.
        """
        async with self._while_it_lives("a machine cannot be saved"):
            nothing = memoryview(b"")
            whole = Whole(runs=[], memory=nothing, devices=nothing, disk=nothing)
            saved = Saved(machine=self.layout.key(), spec=spec_key(self.spec), whole=whole)
            stream = memory_file(0)
            try:
                async with self._standing, self.quiet():
                    assert self._monitor is not None
                    try:
                        await self._monitor.ask("stop")
                        disk = await self.take(self._monitor, stream, max_bytes)
                    finally:
                        await to_its_end(self._go_on())
                size = self.layout.memory_bytes
                return await in_thread(lambda: packed(saved, stream, disk, size, max_bytes))
            finally:
                os.close(stream)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncGenerator[None]:
        """Neither side of it is in the middle of a message, until the end of it; an agent that does not come to that in
        time is lost.
        """
        link = self._asked()
        within = asyncio.get_running_loop().call_later(_QUIET_S, self._signal)
        try:
            async with link.quiet():
                within.cancel()
                yield
        finally:
            within.cancel()

    async def pause(self) -> None:
        """See `Instance`; its clock stands still too."""
        async with self._while_it_lives("a machine cannot be paused"), self._standing:
            self._asked()
            assert self._monitor is not None
            self._signal(signal.SIGCONT)  # one that is paused already answers nothing
            await self._monitor.ask("stop")
            # It would wait for the next timer of a clock that stands still now: a moment, again and again.
            self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """See `Instance`."""
        async with self._standing:
            await to_its_end(self._go_on())

    async def _go_on(self) -> None:
        """Have it run, at the time that it is. One that does not is given up: it would stand still for good, or be at
        another time."""
        if self._monitor is None or self._keeper is None or self.died.done():
            return
        self._signal(signal.SIGCONT)
        try:
            await self._monitor.ask("cont")
            await self._keeper.renew()
        except SandboxUnavailableError:
            self._signal()  # which the next question finds out

    @contextlib.asynccontextmanager
    async def _while_it_lives(self, what: str) -> AsyncGenerator[None]:
        """Where it ends meanwhile, or its emulator does not answer, it is gone, and nothing else.

        Args:
            what: cannot be done, where the system refuses something.

        Raises:
            SandboxGoneError: it is.
            SandboxUnavailableError: the system, or the emulator, has refused something.
        """
        try:
            with refusals(what):
                yield
        except SandboxUnavailableError as error:
            if isinstance(error, MonitorLostError) or self._is_closing or self._is_dead:
                raise gone_error(self.id, await self._lose()) from None
            raise

    def _let_go(self) -> None:
        """See `Instance`."""
        for end in (self._keeper, self._monitor):
            if end is not None:
                end.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def _waking(self, snapshot: bytes) -> Iterator[bytes]:
        limits = self.spec.limits
        parts = [snapshot[start : start + PART_BYTES] for start in range(0, len(snapshot), PART_BYTES)]
        layers = [disk.serial for disk in reversed(self.layout.disks) if disk.serial != SYSTEM]
        wake = {
            "image": layers or [SYSTEM],
            "disk_bytes": limits.disk_bytes,
            "files": limits.files,
            "memory_bytes": limits.memory_bytes + limits.disk_bytes,
            "processes": limits.processes + SPARE_PROCESSES,
            "snapshot_parts": len(parts),
        }
        yield frames.pack({"op": "wake", **newness(), **wake})
        for part in parts:
            yield frames.pack({}, part)

    def _oom_kills(self) -> int:
        """Those that the guest's kernel tells of, and its emulator's own."""
        last = self._link.last_words if self._link is not None else ""
        if last.isdecimal() and len(last) < 10:
            self._told_ooms = max(self._told_ooms, int(last))
        return self._told_ooms + super()._oom_kills()

    def _hear_ooms(self, head: frames.Head) -> None:
        if type(count := head.get("ooms")) is int:
            self._told_ooms = max(self._told_ooms, count)


def saved_whole(saved: bytes, spec: SandboxSpec, layouts: Sequence[Layout]) -> tuple[Layout, Whole]:
    """What `Machine.save` gave, of a snapshot that may go on as a sandbox of one of these layouts; with that one.

    Raises:
        SandboxFileError: it is none, or one of another machine or spec.
    """
    try:
        found = msgspec.msgpack.decode(saved, type=Saved)
    except msgspec.MsgspecError as error:
        raise SandboxFileError(f"sandbox: the snapshot is none of a machine: {error}") from None
    if found.spec != spec_key(spec):
        raise SandboxFileError("sandbox: the snapshot's machine has other limits or tools. Ask for the same spec")
    layout = next((layout for layout in layouts if layout.key() == found.machine), None)
    if layout is None:
        raise SandboxFileError(
            "sandbox: the snapshot goes on only in the machine that it was taken of, and QEMU, its accelerator, kernel"
            f" or system disk are others here. Have the same QEMU, and the same files in {CACHE}"
        )
    return layout, found.whole


def spec_key(spec: SandboxSpec) -> str:
    """Stands for what an agent is told of a spec: of a tool its text, wherever its file lies."""
    tools = [(msgspec.structs.replace(tool, file=None), tool_source(tool)) for tool in spec.tools]
    return hashlib.blake2b(msgspec.json.encode((spec.limits, tools)), digest_size=16).hexdigest()
