"""Linux as the programs inside use it: forking into namespaces, mounts, capabilities, files that no link leads astray.

Numbers are those of <linux/sched.h>, <linux/prctl.h>, <linux/capability.h>, <linux/mount.h> and <linux/openat2.h>; the
numbers of system calls without a name here are the same on x86_64 and aarch64.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from typing import Final

NEWNS: Final = 0x0002_0000
NEWUTS: Final = 0x0400_0000
NEWIPC: Final = 0x0800_0000
NEWUSER: Final = 0x1000_0000
NEWPID: Final = 0x2000_0000
NEWNET: Final = 0x4000_0000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

CAP_CHOWN: Final = 1 << 0
CAP_DAC_OVERRIDE: Final = 1 << 1
CAP_FOWNER: Final = 1 << 3
CAP_KILL: Final = 1 << 5
CAP_SETGID: Final = 1 << 6
CAP_SETUID: Final = 1 << 7
CAP_SYS_ADMIN: Final = 1 << 21

RESOLVE_INSIDE: Final = 0x01 | 0x02 | 0x04 | 0x08
"""Of openat2: no other mount, no magic link, no link at all, and nothing above the directory that it starts from."""

_CLONE_PIDFD = 0x1000
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OPENAT2 = 437
_MAX_BUSY = 100
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 4, 8, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL, _CAPABILITY_VERSION_3 = 4, 0x2008_0522
_PR_SET_CHILD_SUBREAPER = 36
_MNT_DETACH = 2

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock through the call: a fork must not let go of it.
_LOCKED: Final = ctypes.PyDLL(None, use_errno=True)
_LOCKED.syscall.restype = ctypes.c_long
_LIBC.syscall.restype = ctypes.c_long


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def check(result: int, what: str) -> int:
    """The result of a call of libc.

    Raises:
        OSError: it is negative; `what` stands before the reason.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork(namespaces: int, *, has_pidfd: bool = True) -> tuple[int, int]:
    """Like os.fork, with the child in new namespaces, as one system call.

    Args:
        namespaces: NEWNS and its like, added; with NEWPID the child is PID 1.
        has_pidfd: whether a pidfd is asked for, which not every kernel has.

    Returns:
        The child's pid and a pidfd of it, or -1; (0, -1) in the child.

    Raises:
        OSError: there is no room, or no right to do so.

    Invariants: only for processes of one thread. No handler of os.register_at_fork is skipped.
    """
    pidfd = ctypes.c_int(-1)
    flags = namespaces | (_CLONE_PIDFD if has_pidfd else 0) | signal.SIGCHLD
    _LOCKED.PyOS_BeforeFork()
    number = ctypes.c_long(_CLONE[platform.machine()])
    zero = ctypes.c_long(0)
    pid = int(_LOCKED.syscall(number, ctypes.c_long(flags), zero, ctypes.byref(pidfd), zero, zero))
    if pid == 0:
        _LOCKED.PyOS_AfterFork_Child()
        return 0, -1
    reason = ctypes.get_errno()
    _LOCKED.PyOS_AfterFork_Parent()
    ctypes.set_errno(reason)
    return check(pid, "making a process with namespaces"), pidfd.value


def unshare(namespaces: int) -> None:
    """Leave for new namespaces; NEWPID is for children only."""
    check(_LIBC.unshare(namespaces), "making namespaces")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2); an empty kind or option is none."""
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)
    check(result, f"mounting {target}")


def unmount(target: str) -> None:
    """Let go of what is mounted there, once nobody uses it."""
    check(_LIBC.umount2(target.encode(), _MNT_DETACH), f"letting go of {target}")


def bind(source: str, target: str) -> None:
    """Show a file, or a directory with all that is mounted below it, at another place too."""
    mount(source, target, flags=MS_BIND | MS_REC)


def pivot(root: str) -> None:
    """Make a mount the root and let go of the old one with all that was mounted there."""
    os.chdir(root)
    check(_LIBC.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b"."), "changing the root")
    check(_LIBC.umount2(b".", _MNT_DETACH), "letting go of the old root")
    os.chdir("/")


def keep_capabilities(mask: int) -> None:
    """Give up every capability that is not in the mask, for good where there are no new privileges."""
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    data[0].effective = data[0].permitted = mask & 0xFFFF_FFFF
    data[1].effective = data[1].permitted = mask >> 32
    cleared = _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if cleared == 0 or ctypes.get_errno() != errno.EINVAL:  # else this kernel has no such capabilities
        check(cleared, "clearing ambient capabilities")
    check(_LIBC.capset(ctypes.byref(header), data), "giving up capabilities")


def become(uid: int, capabilities: int) -> None:
    """Be this user and group and no other, with these capabilities."""
    if os.getuid() != uid:
        check(_LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keeping capabilities")
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    keep_capabilities(capabilities)


def die_with_parent() -> None:
    """Be killed when the thread ends that made this process. A change of users undoes it."""
    check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "dying with the parent")


def adopt_orphans() -> None:
    """Be the parent of what is left of descendants that end before theirs."""
    check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopting orphans")


def look_in(path: bytes) -> None:
    """Have programs that `os.posix_spawnp` starts by name alone be looked for in these directories, as of a PATH."""
    check(_LIBC.setenv(b"PATH", path, 1), "saying where programs are")


def no_new_privileges() -> None:
    """No program that this process or what it starts executes has more rights than it, for good."""
    check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")


def set_dumpable(is_dumpable: bool) -> None:
    """Whether processes of the same user may look into this one (/proc/PID/mem, ptrace)."""
    check(_LIBC.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0), "setting who may look in")


def set_file_user(uid: int) -> None:
    """The user and group of this thread's accesses to files; another than 0 has none of root's rights over them."""
    _LIBC.setfsgid(uid)
    _LIBC.setfsuid(uid)


def open_inside(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below a directory that passes no link, no mount and nothing above.

    Raises:
        OSError: ELOOP, EXDEV where it would; and what open(2) raises.
    """
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_INSIDE)
    buffer = ctypes.create_string_buffer(how, len(how))
    name = os.fsencode(path)
    number = ctypes.c_long(_OPENAT2)
    busy = 0
    while True:
        result = _LIBC.syscall(number, ctypes.c_long(directory), name, buffer, ctypes.c_size_t(len(how)))
        if result >= 0:
            return int(result)
        error = ctypes.get_errno()
        busy += error == 11  # EAGAIN: something was renamed meanwhile; or somebody has a lease on it, and keeps it
        if error not in (4, 11) or busy > _MAX_BUSY:
            raise OSError(error, os.strerror(error))


def sync_file_system(descriptor: int) -> None:
    """Have all that was written to the file system of an open file on its device."""
    check(_LIBC.syncfs(descriptor), "writing to the device")


def oom_kills(events: int) -> int:
    """Processes that the kernel has killed in a control group for memory.

    Args:
        events: a descriptor of its memory.events, or in version 1 memory.oom_control.
    """
    _, _, rest = os.pread(events, 1 << 12, 0).partition(b"\noom_kill ")
    return int(rest.partition(b"\n")[0] or 0)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to the end."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: there are fewer.
    """
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
