"""The first process of a container that gVisor isolates: lays its files out, starts `runsc`, and answers for the files.

It is forked from the template as an agent is, and stays outside of gVisor's kernel:

    control socket --> standard input of `runsc` --> the agent inside (`gvisor_agent.py`): commands and calls
    files socket   --> this process: {"id", "op", ...} as an agent is asked for files, answered in the same way

Its request is an agent's with "runsc" (path and options), "python" (path) and "shows" (directories that this has its
libraries from), and the descriptors: both sockets, a file for what `runsc` says, then an agent's others. All that
`runsc` starts is in the PID namespace whose first process this is: with one of them all end.

    bundle/       what `runsc` is told (OCI), and where it keeps its state
    base/         the root that it shows: the agent's /usr, Python and programs
      sandbox/    the sandbox's root, with a /proc and a /dev of gVisor's
      shared/     its /dev/shm

Files are looked after out here, with this kernel's openat2 and attributes of files, neither of which every gVisor has.
"""

import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from typing import Any, Final

from rollforward.sandbox.inside import files, frames, hearing, root, snapshots, system

_BASE, _BUNDLE = f"{root.PLACE}/base", f"{root.PLACE}/bundle"
_PROGRAMS: Final = "/program"
_START: Final = f"import sys; sys.path.insert(0, '{_PROGRAMS}'); from {__package__}.gvisor_agent import main; main()"
SANDBOX: Final = "/sandbox"
"""Where the agent sees the sandbox's root until it enters it."""
SHARED: Final = "/shared"
"""Likewise what becomes its /dev/shm."""
_LINKS: Final = ("bin", "lib", "lib64", "lib32", "libx32", "sbin")
_ID: Final = "sandbox"
_FAR: Final = 64
_STATE_BYTES: Final = 4 << 20
_CAPABILITIES: Final = ("SYS_ADMIN", "SYS_CHROOT", "SETUID", "SETGID", "KILL", "DAC_OVERRIDE", "CHOWN", "FOWNER")
_RIGHTS: Final = system.CAP_SETUID | system.CAP_SETGID | system.CAP_DAC_OVERRIDE | system.CAP_CHOWN | system.CAP_FOWNER


def main(request: dict[str, Any], descriptors: list[int]) -> None:
    """Start the container, and answer for its files until it ends or the host closes the socket."""
    control, host, errors, *others = [fcntl.fcntl(it, fcntl.F_DUPFD_CLOEXEC, _FAR) for it in descriptors]
    snapshot = others.pop(0) if request["has_snapshot"] else -1
    for descriptor in others:
        os.write(descriptor, b"0")
        os.close(descriptor)
    try:
        upper = root.lay(request, lambda upper: restore(upper, snapshot))
    except files.FileError as error:
        hearing.receive(control)  # what is not read when this ends would be told as a broken connection
        system.write_all(control, frames.pack({"id": 0, "kind": "snapshot", "error": str(error)}))
        return
    _lay_base(request["shows"])
    _write_bundle(request)
    command = [*request["runsc"], "--root", f"{_BUNDLE}/state", "run", "--bundle", _BUNDLE, _ID]
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((control, errors, errors))]
    reset = [signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.pidfd_open(os.posix_spawn(command[0], command, {}, file_actions=actions, setsigdef=reset))
    for descriptor in (control, errors):
        os.close(descriptor)
    os.chroot(root.ROOT)
    os.chdir("/")
    system.keep_capabilities(_RIGHTS if os.getuid() == 0 else 0)
    system.set_dumpable(False)
    _serve(host, child, upper)


def restore(upper: int, snapshot: int) -> None:
    """Unpack the snapshot that the sandbox begins with, if it begins with one.

    Raises:
        FileError: it is none.
    """
    if snapshot >= 0:
        with open(snapshot, "rb") as file:
            snapshots.restore(upper, file)


def _lay_base(shows: list[str]) -> None:
    """Make what `runsc` shows, in a file system of this namespace's own."""
    flags = system.MS_NOSUID | system.MS_NODEV
    system.mount("tmpfs", root.PLACE, "tmpfs", flags, f"mode=755,size={_STATE_BYTES}")
    for name in ("dev", "etc", "proc", "tmp", SANDBOX[1:], SHARED[1:]):
        os.makedirs(f"{_BASE}/{name}")
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{_BASE}/{name}")
    for path in [*shows, os.path.dirname(__file__)]:
        os.makedirs(_BASE + path, exist_ok=True)
        system.bind(path, _BASE + path)
    for name in ("proc", "dev"):  # gVisor shows its own there; to whoever looks after files it is another file system
        system.mount("tmpfs", f"{root.ROOT}/{name}", "tmpfs", flags | system.MS_RDONLY, "size=4k,mode=755")
    system.mount("proc", "/proc", "proc", flags | system.MS_NOEXEC)


def _write_bundle(request: dict[str, Any]) -> None:
    os.makedirs(f"{_BUNDLE}/state")
    python = [request["python"], "-P", "-s", "-S", "-B", "-c", _START]
    rights = [f"CAP_{name}" for name in _CAPABILITIES]
    process = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": python,
        "env": ["PYTHONHASHSEED=0"],
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted"), rights),
        "noNewPrivileges": True,
    }
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": SANDBOX, "type": "bind", "source": root.ROOT, "options": ["rbind", "rw"]},
        {"destination": f"{SANDBOX}/proc", "type": "proc", "source": "proc"},
        {"destination": SHARED, "type": "bind", "source": root.SHARED, "options": ["rbind", "rw"]},
    ]
    spec = {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": _BASE, "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
    with open(f"{_BUNDLE}/config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)


def _serve(host: int, child: int, upper: int) -> None:
    """Answer questions about files until `runsc` has ended."""
    poller = select.poll()
    for descriptor in (host, child):
        poller.register(descriptor, select.POLLIN)
    while child not in [descriptor for descriptor, _ in poller.poll()]:
        request, blobs = hearing.receive(host)
        head: frames.Head = {}
        try:
            if request["op"] == "verify":
                head = {"fault": files.changed_file(upper)}
            for part, data in _parts(request, blobs, upper):
                system.write_all(host, frames.pack({"id": request["id"], **part, "more": True}, data))
        except files.FileError as error:
            head = {"file_error": str(error)}
        except OSError as error:
            head = {"file_error": str(error.strerror)}
        system.write_all(host, frames.pack({"id": request["id"], **head}))


def _parts(request: frames.Head, blobs: list[bytes], upper: int) -> Iterator[tuple[frames.Head, bytes]]:
    """What comes before the answer; a file that is uploaded is written by the way."""
    match request["op"]:
        case "upload":
            files.upload(request, blobs[0])
        case "download":
            yield from files.download(request)
        case "snapshot":
            yield from (({}, data) for data in snapshots.take(upper, request["max_bytes"]))
        case _:
            return
