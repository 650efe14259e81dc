"""What the system refuses a sandbox, as an error that says the way out."""

import contextlib
import errno
from collections.abc import Generator
from typing import Final

from rollforward.sandbox.errors import SandboxUnavailableError

_MAKE_ROOM: Final = "Make room: sandboxes are held in memory, and the disks of machines in the user's cache"
_LOOK: Final = "Look at the disk, and at what the system says (dmesg)"
_LET: Final = "Let this user have it (chmod, chown)"
_WAYS_OUT: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG), _MAKE_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _LET),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Have more files open at a time (ulimit -n), or fewer sandboxes"),
}


def way_out(error: OSError) -> str:
    """What to do where the system refuses that."""
    return _WAYS_OUT.get(error.errno or 0, _LOOK)


@contextlib.contextmanager
def refusals(what: str) -> Generator[None]:
    """What the system refuses until the end of it is told.

    Args:
        what: cannot be done then.

    Raises:
        SandboxUnavailableError: in place of OSError and MemoryError.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise SandboxUnavailableError(f"sandbox: {what}: {why}. {way_out(error)}") from None
    except MemoryError:
        raise SandboxUnavailableError(f"sandbox: {what}: out of memory. {_MAKE_ROOM}") from None
