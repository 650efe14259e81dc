"""A process of the template that becomes an emulator: shut in as a container is, then a program of this machine.

Its request, in place of an agent's:

    {"program": [path, arguments], "uid", "keep": how many of the descriptors it is handed, "file_bytes"}

and the descriptors: those that it is handed, which become 3, 4, 5 and so on; one that becomes its standard error; then
files to write "0" into, which put the writer into its control groups. It sees what the image `host` shows, read-only,
and a /tmp of a few kilobytes; it is nobody, has no capability and gets none, and no environment. It is the first
process of its PID namespace: with it all ends. No file that it writes gets longer than `file_bytes`, which is more than
its machine needs: the attempt fails.
"""

import fcntl
import os
import resource
import signal
from typing import Any, Final

from rollforward.sandbox.inside import root, system

FIRST: Final = 3
"""The first descriptor that it is handed is this one, the next ones follow."""
_ERRORS: Final = 2
_DISK_BYTES: Final = 1 << 20
_FILES: Final = 64
_FAR: Final = 256


def main(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become it."""
    far = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FAR) for descriptor in descriptors]
    kept, (errors, *groups) = far[: request["keep"]], far[request["keep"] :]
    os.dup2(errors, _ERRORS)  # the template's own has no end, and is what all others have said
    for descriptor in groups:
        os.write(descriptor, b"0")
    for place, descriptor in enumerate(kept, FIRST):
        os.dup2(descriptor, place, inheritable=True)
    os.closerange(FIRST + len(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    root.build({"image": [root.HOST], "binds": request["binds"], "disk_bytes": _DISK_BYTES, "files": _FILES}, _nothing)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], request["file_bytes"]))
    system.become(root.USER, 0)
    os.execve(request["program"][0], request["program"], {})


def _nothing(_: int) -> None:
    """There is nothing to restore."""
