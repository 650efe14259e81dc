"""Files that a trajectory leaves, out of its sandbox and out of its log.

A path at which nothing is is left out. What cannot be taken costs its own path alone, by the doing of what ran there:
the rest is what a reward needs, and a policy that leaves a directory where a file is asked for is told apart from one
that leaves nothing. What is wrong with a path is said by `inside/files.py`.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from rollforward.sandbox.client import Sandbox
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import GetRecord, path_text
from rollforward.sandbox.errors import SandboxFileError
from rollforward.sandbox.tenancy import Tenancy
from rollforward.sandbox.types import Collected
from rollforward.sandbox.unbroken import in_thread

_SANDBOX: Final = re.compile(r"^sandbox [0-9a-z-]+: ")


async def take(
    tenancy: Tenancy, sandbox: Sandbox, paths: Sequence[str], max_bytes: int
) -> tuple[dict[str, bytes], str]:
    """The files at these paths that can be taken, in this order as long as they have no more bytes together, and why
    the others cannot.

    Raises:
        SandboxGoneError: the sandbox is gone; nothing has been taken.
    """
    files: dict[str, bytes] = {}
    problems: list[str] = []
    left = max_bytes
    for path in dict.fromkeys(paths):
        try:
            found = await tenancy.patiently(partial(sandbox.download, [path], max_bytes=max_bytes))
        except SandboxFileError as error:
            # Without the sandbox's name, which is another one in each.
            problems.append(_SANDBOX.sub("", str(error)) or f"{path[:200]!r} cannot be taken")
            continue
        size = sum(map(len, found.values()))
        if size > left:
            problems.append(f"{path[:200]!r} makes it more than {max_bytes} bytes")
            continue
        files |= found
        left -= size
    return files, "; ".join(problems)


async def read_taken(log: CommandLog, record: GetRecord, position: int, *, is_replayed: bool) -> Collected:
    """What the log says was taken."""
    files = await in_thread(lambda: {path_text(path): log.blobs.get(stored) for path, stored in record.files})
    return Collected(files=files, problem=record.problem, failure="", position=position, is_replayed=is_replayed)
