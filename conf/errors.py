"""What can be wrong with a configuration or a command line. Other folders' errors are in their own errors.py."""

import errno
import re
import sys
from collections.abc import Iterator

__all__ = ["ConfError", "ConfigError", "RunDirError", "SubmitError", "UsageError", "user_error"]


class ConfError(ValueError):
    """Base of this folder's errors: the user can put it right.

    The message says what, the value, the rule and the way out. The caller prints the message without a
    traceback and exits with code 2. Nothing has been allocated or written.
    """


class ConfigError(ConfError):
    """A key, value or group choice that the schema does not know. Correct the YAML file or the override it names."""


class UsageError(ConfError):
    """The command line itself is wrong: an unknown verb, option or recipe. `rollforward --help` lists what there is."""


class RunDirError(ConfError):
    """The run directory holds another run, is in use, is damaged, or cannot be written. Choose another run_dir, or put
    right what the message names."""


class SubmitError(ConfError):
    """A job that cannot be given to a cluster: no sources to build from, no answer at the address, no valid token.
    Nothing was started there."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, or its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


_FULL = (errno.EDQUOT, errno.EFBIG, errno.ENOSPC)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_DISK_ERRORS = (*_FORBIDDEN, *_FULL)
"""What a disk says that is full or may not be written: no bug of ours, and the user's to change."""
_IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENOTDIR)
"""What stands at a path is of another kind than what is to be there, a link that leads nowhere included."""


def user_error(error: BaseException) -> BaseException | None:
    """The error to tell without a traceback: a ValueError of some folder's errors.py or a disk that refuses, also when
    Ray wrapped it; None for anything else."""
    for candidate in _candidates(error):
        if isinstance(candidate, OSError) and candidate.errno in _DISK_ERRORS:
            return candidate
        if isinstance(candidate, ValueError) and _is_ours(candidate):
            return candidate
    return None


def world_error(error: BaseException) -> BaseException | None:
    """Any other error of some folder's errors.py, whose message says what happened and what to do: it is told without
    a traceback too, also when Ray wrapped it. None for a bug, whose traceback says more."""
    return next((candidate for candidate in _candidates(error) if _is_ours(candidate)), None)


def _candidates(error: BaseException) -> Iterator[BaseException]:
    """What Ray wrapped in an error, then the error itself."""
    if isinstance(cause := getattr(error, "cause", None), BaseException):
        yield cause
    if getattr(error, "actor_init_failed", False) and (raised := _last_raised(str(error))) is not None:
        yield raised
    yield error


def _last_raised(text: str) -> BaseException | None:
    """The error of ours that the last traceback of a text ends with. Of what an actor's constructor raised, Ray keeps
    nothing else."""
    found = re.match(r".*^(rollforward\.\w+\.errors)\.(\w+): (.*)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None or "\n  File " in found[3]:  # of a traceback after it
        return None
    kind = getattr(sys.modules.get(found[1]), found[2], None)
    return None if kind is None else kind.__new__(kind, found[3].strip())


def _is_ours(error: BaseException) -> bool:
    modules = [base.__module__.split(".") for base in type(error).__mro__]
    return any(parts[0] == "rollforward" and parts[-1] == "errors" for parts in modules)


def told(error: BaseException) -> str:
    """What is said of a `user_error`: its message, and what a disk's lacks, the way out."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error}. {way_out(error)}, then give the command again; a run that had begun: `rollforward resume RUN_DIR`"


def is_lasting(error: BaseException) -> bool:
    """Whether what a disk says stays so until somebody does something about it."""
    return _number(error) in (*_DISK_ERRORS, *_IN_THE_WAY)


def way_out(error: BaseException, *, room: str = "Make room there") -> str:
    """What to do about what a disk says, the beginning of a sentence.

    Args:
        error: says so with its number, whoever wrapped it: Python's `[Errno 28]` or Rust's `(os error 28)`.
        room: what to do where it is full, or a file larger than it may be.
    """
    number = _number(error)
    if number in _FULL:
        return room
    if number in _FORBIDDEN:
        return "Let this user write there, or name another place"
    if number in _IN_THE_WAY:
        return "Move away what stands there, or name another place"
    return "See what stands there and look at the device (dmesg), or move the run to another one"


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\[Errno (\d+)\]|\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1] or found[2])
