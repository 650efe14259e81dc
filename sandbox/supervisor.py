"""The process that sandboxes belong to: `python -m rollforward.sandbox.supervisor NAME CONFIG READY_FD`.

    whoever starts it ── exits or is killed, which changes nothing
         guard          own session, subreaper; waits, and cleans up after a supervisor that was killed
           supervisor   home locked (homes.py), socket, pool (pool.py); ends itself when nobody needs it
             the substrates' processes, which die with the supervisor

It answers questions (wire.py) of any number of connections, each as soon as it is done. It ends when it has had no
sandbox that somebody holds and no connection for a while, or by SIGTERM. What is killed with it, or with both: the next
supervisor of this user on this machine cleans up.

A lease is looked after by a sweep that comes round all the time, never by a timer of its own: a renewal and an expiry
cannot race, and nothing is forgotten because a timer was.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rollforward.sandbox import wire
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.container import ContainerSubstrate
from rollforward.sandbox.errors import SandboxConnectionError, SandboxError, SandboxGoneError
from rollforward.sandbox.fullvm import FullVmSubstrate
from rollforward.sandbox.gvisor import GVisorSubstrate
from rollforward.sandbox.homes import Claim, Home, sweep_home, sweep_homes
from rollforward.sandbox.images import Images
from rollforward.sandbox.microvm import MicroVmSubstrate
from rollforward.sandbox.pool import Box, Pool
from rollforward.sandbox.results import failed
from rollforward.sandbox.substrate import Substrates
from rollforward.sandbox.tool_files import ToolFiles
from rollforward.sandbox.types import CallResult, CallStatus, ExecResult, ExecStatus, Snapshot, SnapshotKind
from rollforward.sandbox.wire import Operation

_SWEEP_S: Final = 1.0
"""Between two sweeps, or a tenth of a lease."""
_IDLE_S: Final = 10.0
"""Without a sandbox and a connection; or a lease, where that is shorter."""
_BACKLOG: Final = 1024
_MOST: Final = 65535
"""Containers that there can be at all; the pool bounds them."""
_FILES: Final = 1 << 18
"""Descriptors; each container needs a few."""
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_T = TypeVar("_T")


class Service:
    """One supervisor's event loop: connections, questions, the sweep."""

    def __init__(self, claim: Claim, config: ContainerConfig) -> None:
        """Begin with nothing started."""
        self._claim, self._config = claim, config
        self._home = claim.home
        self._tools = ToolFiles(self._home.tools)
        self._images = Images(config.images, config.layers)
        named = {"label": self._home.name, "max_sandboxes": _MOST}
        makers = {
            "container": ContainerSubstrate,
            "gvisor": partial(GVisorSubstrate, runsc=config.runsc),
            "microvm": MicroVmSubstrate,
            "fullvm": FullVmSubstrate,
        }
        self._substrate = Substrates({name: partial(make, self._images, **named) for name, make in makers.items()})
        self._pool = Pool(self._substrate, self._home.book, config)
        self._is_ending = asyncio.Event()
        self._connections: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._needed_s = time.monotonic()
        self._operations: dict[str, tuple[Any, Callable[[Any], Awaitable[Any]]]] = {
            Operation.CONFIGURE: (wire.Configure, self._configure),
            Operation.CREATE: (wire.Create, self._create),
            Operation.ADOPT: (wire.Adopt, self._adopt),
            Operation.RENEW: (wire.Renew, self._renew),
            Operation.LIST: (None, self._list),
            Operation.STATS: (None, self._stats),
            Operation.EXEC: (wire.Exec, self._exec),
            Operation.CALL: (wire.Invoke, self._call),
            Operation.UPLOAD: (wire.Upload, self._upload),
            Operation.DOWNLOAD: (wire.Download, self._download),
            Operation.SNAPSHOT: (wire.Snapshot, self._snapshot),
            Operation.PAUSE: (wire.Which, self._pause),
            Operation.RESUME: (wire.Which, self._resume),
            Operation.FORK: (wire.Fork, self._fork),
            Operation.CLOSE: (wire.Which, self._close),
        }

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until nobody needs it.

        Args:
            ready: called when questions are answered.

        Raises:
            SandboxUnavailableError: this machine cannot isolate what the settings want isolated.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_ending.set)
        try:
            self._report = await self._substrate.start()
            self._report.check(self._config.trusted_code)
            listener = _listen(self._home.socket)
            server = await asyncio.start_unix_server(self._connected, sock=listener, limit=wire.PART_BYTES)
            ready()
            await self._look_after()
            # From here on whoever comes finds nobody, starts a successor, and that waits for the lock.
            self._home.socket.unlink(missing_ok=True)
            server.close()
        finally:
            for connection in tuple(self._connections):
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._pool.shutdown()

    async def _look_after(self) -> None:
        """Sweep until the end."""
        looked_s = time.monotonic()
        while not self._is_ending.is_set():
            period_s = min(_SWEEP_S, self._config.lease_s / 10)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._is_ending.wait()
            now_s = time.monotonic()
            # While this process itself was stopped, no owner could be heard.
            late_s = now_s - looked_s - period_s
            looked_s = now_s
            self._pool.sweep(late_s if late_s > period_s else 0.0)
            if self._connections or not self._pool.is_idle:
                self._needed_s = now_s
            elif now_s - self._needed_s > min(_IDLE_S, self._config.lease_s):
                return

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        waiting: set[asyncio.Task[None]] = set()
        frames = wire.FrameWriter(writer)

        def begin(named: list[Any], payload: wire.Data) -> None:
            answering = asyncio.create_task(self._answer(frames, named, payload))
            waiting.add(answering)
            answering.add_done_callback(waiting.discard)

        try:
            while True:
                begin(*await wire.read_frame(reader, tuple[int, str, memoryview]))
        except (OSError, EOFError, SandboxConnectionError, asyncio.CancelledError):
            pass
        finally:
            # What it asked for and nobody waits for any more; a command that runs goes on, and keeps its result.
            for answering in waiting:
                answering.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            self._connections.discard(task)
            frames.close()

    async def _answer(self, frames: wire.FrameWriter, named: list[Any], payload: wire.Data) -> None:
        number, operation = named
        try:
            if operation not in self._operations:
                raise SandboxConnectionError(f"a sandbox supervisor has no operation {operation!r}; it is older")
            kind, serve = self._operations[operation]
            question = wire.decode(payload, kind)
            del payload  # it may be long, and whoever serves may take long
            answer = wire.answer(await serve(question))
        except Exception as error:  # noqa: BLE001, whatever it is, the client is told
            answer = wire.refusal(error)
        with contextlib.suppress(OSError):
            try:
                await frames.write(number, data=answer)
            except SandboxConnectionError as error:  # it is too long
                await frames.write(number, data=wire.refusal(error))

    async def _configure(self, question: wire.Configure) -> tuple[str, ...]:
        self._report.check(question.config.trusted_code)
        self._config = question.config
        self._pool.configure(question.config)
        return tuple(f"{lack.what}: {lack.consequence} ({lack.way_out})" for lack in self._report.missing)

    async def _create(self, question: wire.Create) -> wire.Placed:
        spec = self._tools.local(question.spec, question.sources)
        if question.snapshot is not None:
            self._images.check_snapshot(question.snapshot, spec)
        box = await self._pool.create(
            question.sandbox_id,
            spec,
            owner=question.owner,
            snapshot=question.snapshot,
            within_s=question.timeout_s,
        )
        return self._placed(box)

    async def _adopt(self, question: wire.Adopt) -> wire.Placed:
        return self._placed(self._pool.adopt(question.sandbox_id, question.owner))

    def _placed(self, box: Box) -> wire.Placed:
        stats = self._pool.stats()
        return wire.Placed(instance=box.record.instance, spec=box.spec, load=stats.held + stats.waiting)

    async def _renew(self, question: wire.Renew) -> list[str]:
        return self._pool.renew(question.held)

    async def _list(self, question: None) -> Any:
        return self._pool.list()

    async def _stats(self, question: None) -> Any:
        return self._pool.stats()

    async def _exec(self, question: wire.Exec) -> ExecResult:
        box = self._find(question.which)
        result = await self._finish(box, lambda: box.sandbox.exec(question.request(), key=question.key))
        if result.status == ExecStatus.SANDBOX_DEAD:
            raise await self._death(question.which, box)
        return result

    async def _call(self, question: wire.Invoke) -> CallResult:
        box = self._find(question.which)
        try:
            return await self._finish(box, lambda: box.sandbox.call(question.call(), key=question.key))
        except RecursionError:  # nested as deep as the client can just write; nothing has run
            return failed(CallStatus.ERROR, "the arguments are no JSON")

    async def _upload(self, question: wire.Upload) -> None:
        box = self._find(question.which)
        await self._finish(box, lambda: box.sandbox.upload(wire.decode_files(question.files)))

    async def _download(self, question: wire.Download) -> dict[bytes, bytes]:
        box, paths = self._find(question.which), wire.decode_paths(question.paths)
        found = await self._finish(box, lambda: box.sandbox.download(paths, max_bytes=question.max_bytes))
        return wire.encode_files(found)

    async def _snapshot(self, question: wire.Snapshot) -> Snapshot:
        return await self._taken(self._find(question.which), question.max_bytes, files_only=question.files_only)

    async def _taken(self, box: Box, max_bytes: int, *, files_only: bool = False) -> Snapshot:
        kind = SnapshotKind.FILES if files_only else box.sandbox.snapshot_kind
        if kind is SnapshotKind.FILES:
            box.gate.check_quiet()  # of a whole machine whatever runs is in it too
        take = box.sandbox.snapshot if kind is SnapshotKind.FILES else box.sandbox.save
        data = await self._finish(box, lambda: take(max_bytes=max_bytes))
        return Snapshot(kind=kind, image=self._images.digest(box.spec.image), data=data)

    async def _pause(self, question: wire.Which) -> None:
        await self._find(question).gate.pause()

    async def _resume(self, question: wire.Which) -> None:
        await self._find(question).gate.resume()

    async def _fork(self, question: wire.Fork) -> wire.Placed:
        box = self._find(question.which)
        snapshot = await self._taken(box, question.max_bytes)
        forked = await self._pool.create(
            question.sandbox_id, box.spec, owner=question.owner, snapshot=snapshot, within_s=question.timeout_s
        )
        return self._placed(forked)

    async def _close(self, question: wire.Which) -> None:
        self._pool.close(question.sandbox_id, question.instance)

    def _find(self, which: wire.Which) -> Box:
        return self._pool.find(which.sandbox_id, which.instance)

    async def _finish(self, box: Box, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Let it come to its end, whoever goes away meanwhile: a command keeps its result for who asks again."""
        task = asyncio.create_task(box.gate.ask(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _death(self, which: wire.Which, box: Box) -> SandboxGoneError:
        """Why a sandbox is gone, as soon as that is known."""
        await asyncio.wait([box.sandbox.died], timeout=_SWEEP_S)
        await asyncio.sleep(0)
        return self._pool.gone_error(which.sandbox_id, which.instance)


def main() -> None:
    """Leave whoever started this, and be guard and supervisor."""
    name, config, ready = sys.argv[1], msgspec.json.decode(sys.argv[2], type=ContainerConfig), int(sys.argv[3])
    home = Home.of(name)
    if os.fork():
        os._exit(0)  # whoever started it has no child that it would end or wait for
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        os.close(ready)
        _guard(child, home)
    else:
        _supervise(home, config, ready)


def _guard(child: int, home: Home) -> None:
    """Wait for the supervisor, and clean up after it."""
    _prctl(_PR_SET_NAME, b"sandbox-guard")
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    while os.wait()[0] != child:  # orphans of containers come here too
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody is left to be told, and this ends when it has cleaned up
    # Whom it has left is this process's child now; each dies, and whom that one leaves comes next.
    with contextlib.suppress(ChildProcessError):
        while True:
            for orphan in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
                os.kill(int(orphan), signal.SIGKILL)
            os.wait()
    sweep_home(home, is_dead=True)


def _supervise(home: Home, config: ContainerConfig, ready: int) -> None:
    """Be the supervisor of a home, unless there is one."""
    _prctl(_PR_SET_NAME, b"sandbox-super")
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        claim = Claim.take(home, make=True)
        if claim is None:
            _tell(ready, wire.TAKEN)
            return
        claim.clean()
        claim.note_groups()
        log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        sweep_homes(but=home.name)
        try:
            asyncio.run(Service(claim, config).run(lambda: _say_ready(ready)))
            home.crash_log.unlink(missing_ok=True)
        except SandboxError:
            raise
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            home.keep_log()
            raise
        finally:
            claim.remove()
    except Exception as error:
        _tell(ready, wire.refusal(error))
        raise


def _tell(starter: int, outcome: wire.Data) -> None:
    """Tell whoever started this, unless it was killed: others may wait for the supervisor too."""
    with contextlib.suppress(BrokenPipeError):
        os.write(starter, outcome)


def _say_ready(ready: int) -> None:
    _tell(ready, wire.READY)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, ready, inheritable=False)  # not closed: what it fails by later must not be told to another file
    os.close(null)


def _listen(path: Path) -> socket.socket:
    """A socket at the path, in place of a dead one."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with wire.short_path(path) as short:
        listener.bind(short)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
