"""A ledger of published tokens, kept by a process that nobody kills: the witness of `rollforward drill` and of tests.

    replica --Report of tokens that leave it--> unix socket --> Ledger --Count, asked with what is left--> the drill

A published token is one that left a replica: in a completion, or in a turn that was handed to an environment. Whoever
says how many were lost must not be the process that lost them, so replicas report to this one. A report that a
replica's death cuts in two is of tokens that did not leave; one that was sent is read, whatever becomes of its sender.

Here: what is reported, how it is counted, the process. Not here: who reports (rollout/publication.py).
"""

import contextlib
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from rollforward.rollout.errors import LedgerError
from rollforward.rollout.types import Float32Array, Int32Array

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 60.0


class Report(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="report"):
    """Sampled tokens of one request that leave a replica, in order."""

    scope: str
    """Names the run, in which request ids are unique."""
    life: str
    """Names the opening of a log by which they leave."""
    request: str
    """Rendered request id."""
    attempt: int
    """Number of the attempt that sampled them."""
    start: int
    """Which sampled token of the request the first is, from 0."""
    tokens: bytes
    """Their ids, int32."""
    logprobs: bytes | None
    """Their log-probs, float32, where a completion leaves; None where a turn does."""
    num_logged: int
    """Sampled tokens of the request that this life found in its log; it drew those from there on itself."""


class Held(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="held"):
    """What is left of one request, to be compared with what was published."""

    scope: str
    """The run."""
    request: str
    """Rendered request id."""
    tokens: bytes
    """All its sampled tokens, int32."""
    logprobs: bytes
    """Their log-probs, float32."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ask"):
    """Asks for the counts, against what was told with `Held` before on the same connection; that is forgotten then."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of what was published."""

    published: int
    """Distinct tokens (run, request, position) that left a replica."""
    lost: int
    """Of these, how many are absent from what is left, or other tokens or log-probs stand there."""
    duplicated: int
    """How often one was drawn again after it had left, or left twice in one life."""
    unequal: int
    """How often one left again as another token or with another log-prob."""
    attempts: int
    """Highest attempt of a request that was published; 0 where none was begun again."""


class _Published:
    """A token that left."""

    __slots__ = ("delivered", "life", "logprob", "token")

    def __init__(self, token: int, logprob: int | None, life: str) -> None:
        self.token, self.logprob, self.life = token, logprob, life
        self.delivered: set[bool] = set()


class Ledger:
    """Counts. One thread; the process below feeds it."""

    def __init__(self) -> None:
        """Nothing is published yet."""
        self._tokens: dict[tuple[str, str], dict[int, _Published]] = {}
        self._duplicated = self._unequal = self._attempts = 0

    def record(self, report: Report) -> None:
        """Take note of tokens that leave a replica."""
        entry = self._tokens.setdefault((report.scope, report.request), {})
        self._attempts = max(self._attempts, report.attempt)
        is_delivery = report.logprobs is not None
        bits = _bits(report.logprobs) if report.logprobs is not None else None
        for index, token in enumerate(np.frombuffer(report.tokens, np.int32).tolist()):
            position = report.start + index
            logprob = None if bits is None else bits[index]
            known = entry.get(position)
            if known is None:
                known = entry[position] = _Published(token, logprob, report.life)
            else:
                if known.token != token or (None not in (known.logprob, logprob) and known.logprob != logprob):
                    self._unequal += 1
                if known.life != report.life:
                    self._duplicated += position >= report.num_logged
                    known.life, known.delivered = report.life, set()
                elif is_delivery in known.delivered:
                    self._duplicated += 1
                if known.logprob is None:
                    known.logprob = logprob
            known.delivered.add(is_delivery)

    def count(self, left: Mapping[tuple[str, str], Held]) -> Counts:
        """Compare with what is left, by scope and request."""
        lost = 0
        for key, entry in self._tokens.items():
            held = left.get(key)
            tokens = [] if held is None else np.frombuffer(held.tokens, np.int32).tolist()
            bits = [] if held is None else _bits(held.logprobs)
            lost += sum(
                position >= len(tokens)
                or tokens[position] != known.token
                or known.logprob not in (None, bits[position])
                for position, known in entry.items()
            )
        return Counts(
            published=sum(map(len, self._tokens.values())),
            lost=lost,
            duplicated=self._duplicated,
            unequal=self._unequal,
            attempts=self._attempts,
        )


def _bits(logprobs: bytes) -> list[int]:
    return np.frombuffer(logprobs, np.uint32).tolist()


class LedgerClient:
    """A connection to a ledger. One thread at a time."""

    def __init__(self, path: str | Path) -> None:
        """Connect.

        Raises:
            LedgerError: no ledger listens there.
        """
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise self._gone(error) from error

    def report(self, report: Report) -> None:
        """Tell the ledger what is about to leave; returned from, it is on record even if this process dies.

        Raises:
            LedgerError: the ledger is gone.
        """
        self._send(report)

    def counts(self, left: list[Held]) -> Counts:
        """Ask for the counts against what is left, after everything that was reported by anybody until now.

        Raises:
            LedgerError: the ledger is gone.
        """
        for held in left:
            self._send(held)
        self._send(Ask())
        try:
            with self._socket.dup().makefile("rb") as stream:
                (size,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                return msgspec.msgpack.decode(stream.read(size), type=Counts)
        except (OSError, struct.error, msgspec.MsgspecError) as error:
            raise self._gone(error) from error

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _send(self, message: Report | Held | Ask) -> None:
        try:
            self._socket.sendall(_framed(message))
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> LedgerError:
        return LedgerError(
            f"no ledger of published tokens answers at {self._path} ({error}); rollout.ledger is set by `rollforward"
            " drill`, whose process keeps it. Leave rollout.ledger out of other runs"
        )


class LedgerProcess:
    """Starts a ledger in a process of its own, which ends with this object or with this process. A context manager."""

    def __init__(self) -> None:
        """Start it and wait until it listens."""
        self._directory = tempfile.TemporaryDirectory(prefix="rollforward-")  # short: the kernel takes 107 characters
        self.path = Path(self._directory.name) / "ledger"
        program = "import sys; from rollforward.rollout.ledger import serve; serve(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interruption of the drill from the keyboard is not the ledger's
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise LedgerError("the ledger's process did not start; see what it said on standard error")

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        self.close()

    def close(self) -> None:
        """End the process and remove its socket."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._directory.cleanup()


def serve(path: str) -> None:
    """Keep a ledger at a socket until standard input ends. What `LedgerProcess` starts."""
    ledger = Ledger()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, selectors.DefaultSelector() as selector:
        listening.bind(path)
        listening.listen(128)
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ, None)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        asking: list[_Connection] = []
        while True:
            # Who asks is answered when nothing is left to read: what dead replicas had sent comes first.
            events = selector.select(0 if asking else None)
            if not events:
                for connection in asking:
                    connection.answer(ledger)
                asking.clear()
            for key, _ in events:
                if key.fileobj is sys.stdin:
                    return
                if key.data is None:
                    channel, _ = listening.accept()
                    selector.register(channel, selectors.EVENT_READ, _Connection(channel))
                    continue
                connection: _Connection = key.data
                if not connection.read(ledger):
                    selector.unregister(key.fileobj)
                    connection.channel.close()
                elif connection.is_asking and connection not in asking:
                    asking.append(connection)


class _Connection:
    """One peer of the ledger: bytes that are no whole message yet, and what it has said is left."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.is_asking = False
        self._data = bytearray()
        self._left: dict[tuple[str, str], Held] = {}
        self._decoder = msgspec.msgpack.Decoder(Report | Held | Ask)

    def read(self, ledger: Ledger) -> bool:
        """Take what has come; False at its end, where half a message is dropped."""
        with contextlib.suppress(ConnectionError):
            if data := self.channel.recv(_CHUNK_BYTES):
                self._data += data
                self._take(ledger)
                return True
        return False

    def answer(self, ledger: Ledger) -> None:
        """Send the counts."""
        counts, self._left, self.is_asking = ledger.count(self._left), {}, False
        with contextlib.suppress(OSError):
            self.channel.sendall(_framed(counts))

    def _take(self, ledger: Ledger) -> None:
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if len(self._data) - start - _LENGTH.size < size:
                break
            start += _LENGTH.size
            match self._decoder.decode(bytes(self._data[start : start + size])):
                case Report() as report:
                    ledger.record(report)
                case Held() as held:
                    self._left[held.scope, held.request] = held
                case Ask():
                    self.is_asking = True
            start += size
        del self._data[:start]


def _framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def held(scope: str, request: str, tokens: Int32Array, logprobs: Float32Array) -> Held:
    """Return what is left of a request, from its arrays."""
    return Held(scope=scope, request=request, tokens=tokens.tobytes(), logprobs=logprobs.tobytes())
