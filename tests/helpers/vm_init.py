"""The first process of a guest: load what programs need, wait for a command, then get at the disks and obey.

    boot -> imports -> "ready" -> [the host saves this state once and starts every guest from it] -> a byte -> disks

The drivers of the disks are loaded after that byte on the serial port, so a guest that starts from the saved state has
seen nothing of the disks, as after a power cut. The disk named "program" holds a tar: modules, and

    command.json  {"filesystems": {"home": "/log", ...}, "module": ..., "arguments": {...}}

The module's `run(arguments, say)` does the rest.
"""

import ctypes
import importlib
import json
import os
import sys
import tarfile
import termios
import traceback
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FINIT_MODULE = 313
_PROGRAM = "/program"


def _mount(source: str, target: str, kind: str) -> None:
    os.makedirs(target, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), None):
        raise OSError(ctypes.get_errno(), f"mount {source} at {target} as {kind}")


def _load_drivers() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for path in sorted(Path("/drivers").iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        if libc.syscall(ctypes.c_long(_FINIT_MODULE), descriptor, b"", 0):
            raise OSError(ctypes.get_errno(), f"load driver {path.name}")
        os.close(descriptor)


def _disks() -> dict[str, str]:
    """Device by the name that the host gave it."""
    found: dict[str, str] = {}
    for block in Path("/sys/block").iterdir():
        serial = block / "serial"
        if serial.exists():
            found[serial.read_text(encoding="utf-8").strip()] = f"/dev/{block.name}"
    return found


def _obey(say: Callable[[str], None]) -> None:
    _load_drivers()
    disks = _disks()
    with tarfile.open(disks["program"]) as archive:
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # not in every 3.11
        archive.extractall(_PROGRAM)
    sys.path.insert(0, _PROGRAM)
    command: dict[str, Any] = json.loads(Path(_PROGRAM, "command.json").read_text(encoding="utf-8"))
    for name, target in command["filesystems"].items():
        _mount(disks[name], target, "ext4")
    importlib.import_module(command["module"]).run(command["arguments"], say)


def _main() -> None:
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    _mount("devtmpfs", "/dev", "devtmpfs")
    manifest = json.loads(Path("/manifest.json").read_text(encoding="utf-8"))
    sys.path[:] = manifest["path"]
    os.environ.update(manifest["environment"])
    for name in manifest["modules"]:
        importlib.import_module(name)
    port = os.open("/dev/ttyS0", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(port, termios.TCSANOW)

    def say(line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(port, data) :]

    say("ready")
    os.read(port, 1)
    try:
        _obey(say)
    except BaseException:  # noqa: BLE001 - the host tells it
        say(json.dumps({"error": traceback.format_exc()}))
    say("end")
    while True:
        os.read(port, 1)


if __name__ == "__main__":
    _main()
