"""Runs a command that sees files mounted over directories.

    python -m rollforward.sandbox.layers_mount MOUNTS COMMAND...

MOUNTS is JSON, [kind, [[file, directory], ...]]. The mounts are in a namespace of the command's own and go with it,
however it ends; so nothing of them is ever left. Only root may do this.
"""

import json
import os
import sys

from rollforward.sandbox.inside import system
from rollforward.sandbox.programs import run_program

_MOUNT_S = 30.0
_FLAGS = system.MS_RDONLY | system.MS_NOSUID | system.MS_NODEV


def main() -> None:
    """Mount and become the command."""
    kind, mounts = json.loads(sys.argv[1])
    system.unshare(system.NEWNS)
    system.mount("", "/", flags=system.MS_REC | system.MS_PRIVATE)
    for file, directory in mounts:
        try:
            system.mount(file, directory, kind, _FLAGS)
        except OSError:
            # A kernel that cannot mount the file as it is mounts it by a loop device, which goes with the mount.
            command = ["mount", "-t", kind, "-o", "loop,ro,nosuid,nodev", file, directory]
            done = run_program("mount", command, within_s=_MOUNT_S)
            if done.code:
                sys.exit(f"mount: {done.said}")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
