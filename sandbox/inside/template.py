"""The program that containers are forked from: one warm Python inside bubblewrap, for `container.py`.

Standard input is a SOCK_SEQPACKET socket to the host; a message is JSON with descriptors beside it:

    host -> here    {"image": [directories, the highest first], "binds", "uid", "disk_bytes", "files", "has_snapshot"};
                    the container's end of its control socket, the snapshot's file if it has one, then files to write
                    "0" into, which put the writer into its cgroups;
                    or what `emulator.py` or `gvisor.py` says
    here -> host    {"error": text or ""}, and where there is none a pidfd of the container's first process

Answers come in the order of the questions. This process holds CAP_SYS_ADMIN in its user namespace (as the host's root
also CAP_SETUID and CAP_SETGID, to give a container its users). It looks at nothing that a container says: a container
is forked, told its users, and left alone (`agent.py`).
"""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox.inside import agent, emulator, gvisor, root, system

_HOST: Final = 0
_NAMESPACES: Final = system.NEWUSER | system.NEWPID | system.NEWNS | system.NEWNET | system.NEWIPC | system.NEWUTS
_MAX_MESSAGE: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 64
"""A full VM of the most disks has three sockets, 28 files, and its control groups."""
PRELOADED: Final = (
    *("ast", "base64", "bisect", "codecs", "collections", "contextlib", "copy", "ctypes", "datetime", "errno", "fcntl"),
    *("fnmatch", "functools", "glob", "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "pathlib"),
    *("posixpath", "random", "re", "resource", "select", "selectors", "shlex", "shutil", "signal", "socket", "stat"),
    *("string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "traceback", "typing"),
    *("unicodedata", "warnings", "zlib", "encodings.latin_1", "encodings.ascii"),
)
"""What tools may import while they run, when this machine's Python may be out of their sight; what a tool's file
imports at its top is there too. The less memory this process has, the faster it is forked."""


def main() -> None:
    """Make containers until the host closes the socket."""
    setup = json.loads(sys.argv[1])
    _drop(setup["uid"])
    root.prepare(setup["binds"])
    for name in PRELOADED:
        importlib.import_module(name)
    host = socket.socket(fileno=_HOST)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    gc.collect()
    gc.freeze()  # a collection in a container would touch, and so copy, every page
    gc.disable()
    host.sendall(b'{"error": ""}')
    while True:
        message, descriptors, _, _ = socket.recv_fds(host, _MAX_MESSAGE, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        try:
            _, pidfd = make(request, descriptors, is_many=setup["is_many"])
        except OSError as error:
            host.sendall(json.dumps({"error": str(error)}).encode())
        else:
            socket.send_fds(host, [b'{"error": ""}'], [pidfd])
            os.close(pidfd)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _drop(uid: int) -> None:
    """Become nobody, with what it takes to make containers."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    rights = system.CAP_SYS_ADMIN
    if os.getuid() == 0:
        rights |= system.CAP_SETUID | system.CAP_SETGID
    system.become(uid, rights)
    system.die_with_parent()
    system.set_dumpable(True)  # its children's users are written by way of /proc, which is then its own
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)


def make(request: dict[str, Any], descriptors: list[int], *, is_many: bool) -> tuple[int, int]:
    """Fork a container, or an emulator.

    Args:
        request: see the module.
        descriptors: likewise.
        is_many: whether this process may give it users of its own.

    Returns:
        Its pid here, and a pidfd.

    Raises:
        OSError: it cannot be.
    """
    ready, go = os.pipe()
    pid, pidfd = system.fork(_NAMESPACES)
    if pid == 0:
        status = 1
        try:
            os.close(go)
            if os.read(ready, 1):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _program_of(request).main(request, descriptors)
                status = 0
        except Exception:  # noqa: BLE001, for whoever reads what the template has said
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    try:
        os.close(ready)
        _map_users(pid, request["uid"], is_many)
        os.write(go, b"+")
    except OSError:
        os.close(pidfd)
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(go)
    return pid, pidfd


def _program_of(request: dict[str, Any]) -> Any:
    """The module that becomes what is asked for."""
    if "program" in request:
        return emulator
    return gvisor if "runsc" in request else agent


def _map_users(pid: int, uid: int, is_many: bool) -> None:
    """Give the container its users: root, who is this process's, and the one whose commands it runs, or him alone."""
    own = os.getuid()
    proc = Path(root.PROC) / str(pid)
    if is_many:
        text = f"0 {own} 1\n{root.USER} {uid} 1\n"
    else:
        text = f"{root.USER} {own} 1\n"
        (proc / "setgroups").write_text("deny")
    (proc / "uid_map").write_text(text)
    (proc / "gid_map").write_text(text)
