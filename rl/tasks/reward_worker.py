"""The other side of `reward_process.py`: imports one function from one file and calls it for every request.

Run as a script in a process of its own, so it needs nothing of this project but this file. Requests and results are
JSON behind four bytes of length, on a socket that only this file knows; what the function prints goes to standard
error. The process ends when the socket closes, and the kernel ends it some seconds after a deadline even where nobody
is left to do so.
"""

import hashlib
import importlib.util
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

_LENGTH_BYTES: Final = 4
_GRACE_S: Final = 5.0
"""After its deadline a process that nobody has ended has this long to live."""
_MAX_DETAIL_CHARS: Final = 400
_MAX_SHOWN_CHARS: Final = 80


class Call(msgspec.Struct, frozen=True):
    """One request."""

    question: str
    """First argument of the function."""
    answer: str | None
    """Second argument."""
    text: str
    """Third argument."""
    timeout_s: float
    """Seconds that the call has."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The function is imported and can be called."""

    digest: str
    """Of the bytes of its file."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The function cannot be called."""

    detail: str
    """Why, and the way out."""


class Value(msgspec.Struct, frozen=True, tag=True):
    """What the function returned."""

    value: float | None
    """As a number; None where it is none or not finite, for which JSON has null."""
    shown: str
    """As a person reads it, cut short."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised."""

    detail: str
    """Exception and line."""
    is_infra: bool
    """Whether it was the machine's or the network's doing: OSError or MemoryError."""


Reply = Ready | Refused | Value | Raised
"""All that this process says."""


def send(channel: socket.socket, record: msgspec.Struct) -> None:
    """Write one record. A text that is no UTF-8 loses the characters that are not."""
    payload = msgspec.json.encode(record)
    channel.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)


def receive(channel: socket.socket) -> bytes | None:
    """Read one record's JSON, waiting once; None where the other side has closed.

    Raises:
        TimeoutError: the socket's own time limit, which the caller sets, is over.
    """
    header = _exactly(channel, _LENGTH_BYTES)
    return None if header is None else _exactly(channel, int.from_bytes(header, "little"))


def clean(text: str) -> str:
    """The text with `?` for every half of a character, which UTF-8 cannot write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size > 0:
        part = channel.recv(min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _import(path: Path) -> ModuleType:
    """The file as a module; modules beside it can be imported, after all installed ones."""
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018, any name that ends with .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str) -> Callable[[str, str | None, str], Any] | Refused:
    function = getattr(module, name, None)
    if not callable(function):
        have = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        return Refused(f"it has no function {name!r}; it has {', '.join(have) or 'none'}. Set function to one of them")
    if inspect.iscoroutinefunction(function):
        return Refused(f"{name}() is async; a reward is called and waited for. Write it with def")
    try:
        signature = inspect.signature(function)
        signature.bind("question", "answer", "text")
    except TypeError:
        return Refused(
            f"{name}{signature} cannot be called with question, answer and text. Define it as"  # pyright: ignore[reportPossiblyUnboundVariable]
            f" {name}(question: str, answer: str | None, text: str) -> float"
        )
    except ValueError:
        pass  # written in C, without a signature
    return function


def _raised(error: BaseException) -> Raised:
    # Of a file that is no Python only our own frames and those of the import are left; the error names its line itself.
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    frames = [one for one in frames if one.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001, its __str__ is the user's
        text = type(error).__name__
    return Raised(clean(text[:_MAX_DETAIL_CHARS]) + place, isinstance(error, OSError | MemoryError))


def _call(function: Callable[[str, str | None, str], Any], call: Call) -> Value | Raised:
    """Call the function; whatever it raises is an answer, SystemExit too."""
    try:
        returned = function(call.question, call.answer, call.text)
        is_number = hasattr(returned, "__float__")
        value = float(returned) if is_number else None
        shown = repr(returned)[:_MAX_SHOWN_CHARS]
    except BaseException as error:  # noqa: BLE001, the code is the user's
        return _raised(error)
    return Value(value, clean(shown))


def _load(path: Path, name: str) -> tuple[Callable[[str, str | None, str], Any] | None, Ready | Refused]:
    try:
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        found = _find(_import(path), name)
    except BaseException as error:  # noqa: BLE001, the code is the user's
        return None, Refused(f"importing it raised {_raised(error).detail}. Correct the file")
    return (None, found) if isinstance(found, Refused) else (found, Ready(digest))


def main(descriptor: int, path: Path, name: str) -> int:
    """Serve until the socket closes. Returns the process's exit status."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    function, reply = _load(path, name)
    send(channel, reply)
    while function is not None:
        payload = receive(channel)
        if payload is None:
            break
        call = msgspec.json.decode(payload, type=Call)
        signal.setitimer(signal.ITIMER_REAL, call.timeout_s + _GRACE_S)
        result = _call(function, call)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(channel, result)
    return 0


if __name__ == "__main__":
    _status = main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(_status)  # not through the user's exit handlers and threads, which may never end
