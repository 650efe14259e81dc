"""The filter of system calls for code that nobody trusts, as a program for seccomp(2).

Numbers are of <linux/seccomp.h>, <linux/filter.h>, and the tables of x86_64 and aarch64.
"""

import ctypes
import os
import platform
from typing import Final

Step = tuple[int, int, int, int]
"""Code, jump if true, jump if false, k."""

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _EPERM, _ENOSYS, _ENOTSUP = 0x7FFF_0000, 0x8000_0000, 0x0005_0001, 0x0005_0026, 0x0005_005F
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CLONE_ANY_NAMESPACE = 0x7E02_0000

_ARCHITECTURES: Final = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
_CLONE, _CLONE3, _PRLIMIT64, _SOCKET, _SETRLIMIT, _IOCTL = (56, 220), 435, (302, 261), (41, 198), (160, 164), (16, 29)
_SOCKETPAIR, _LGETXATTR = (53, 199), (192, 9)
_FAMILIES: Final = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: those that a network namespace shuts in and whose memory counts to who holds it, which
that of AF_NETLINK does not."""
_OF_ONESELF: Final = (
    *(((141, 140), 1), ((251, 30), 1)),  # setpriority, ioprio_set
    *(
        ((142, 118), 0),
        ((144, 119), 0),
        ((203, 122), 0),
        ((314, 274), 0),
    ),  # sched_setparam, _scheduler, _affinity, attr
)
"""System calls that take a process, and as which argument: nobody but oneself (0)."""
_OF_USERS: Final = {(141, 140): 2, (251, 30): 3}
"""Those of them that also take a user, as the first argument says by this number: oneself then is all processes of the
user, the one around a command too, which goes on to the next command."""
_IOCTLS: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into somebody's terminal."""
# System calls that a process without capabilities could use to leave something behind, to hold memory that no limit
# counts, to reach much of the kernel or another process of the same user: numbers on x86_64 and aarch64.
_DENIED: Final = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "inotify_init": (253, -1),  # instances count to the host's user too, who has few
    "inotify_init1": (294, 26),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "memfd_secret": (447, 447),
}


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter)))


class Filter:
    """A filter that is ready to be installed."""

    def __init__(self, *, sockets: bool, own_limits: bool, link_attributes: bool = True) -> None:
        """See `steps`."""
        table = steps(sockets=sockets, own_limits=own_limits, link_attributes=link_attributes)
        self._program = _Program(len(table), (_Filter * len(table))(*table))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def install(self) -> None:
        """Hold this thread and all that it starts to the filter, for good. It needs no new privileges, or a right."""
        if self._libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(self._program), 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"installing seccomp: {os.strerror(number)}")


def steps(*, sockets: bool, own_limits: bool, link_attributes: bool = True) -> list[Step]:
    """The filter.

    Args:
        sockets: whether there may be sockets of the families that a network namespace shuts in; others never.
        own_limits: whether a process may change its own limits. Where the process must not look as if the machine had
            killed it, it may not: a limit of computing time kills as the machine does. Another's never.
        link_attributes: whether the kernel can be asked for attributes of a link; else the answer is that there is no
            such thing.

    Raises:
        OSError: this architecture has no table of system calls here.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine}; there are {', '.join(_ARCHITECTURES)}")
    column, architecture = _ARCHITECTURES[machine]
    denied = [numbers[column] for numbers in _DENIED.values() if numbers[column] >= 0]
    if not own_limits:
        denied.append(_SETRLIMIT[column])
    return [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, 0x4000_0000),  # x32, the same calls under other numbers
        (_RETURN, 0, 0, _EPERM),
        (_JUMP_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory; glibc goes on with clone
        (_RETURN, 0, 0, _ENOSYS),
        *(step for number in denied for step in ((_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM))),
        *([] if link_attributes else _when(_LGETXATTR[column], [(_RETURN, 0, 0, _ENOTSUP)])),
        *_when(_SOCKET[column], _one_of(0, _FAMILIES if sockets else ())),
        *_when(_SOCKETPAIR[column], _one_of(0, _FAMILIES[:1])),
        *(step for numbers, who in _OF_ONESELF for step in _when(numbers[column], _of_oneself(numbers, who))),
        *_when(_IOCTL[column], _none_of(1, _IOCTLS)),
        *_when(_PRLIMIT64[column], _asks_only(or_own=own_limits)),
        *_when(
            _CLONE[column],
            [(_LOAD, 0, 0, _AT_ARGUMENTS), (_JUMP_ANY_BIT, 0, 1, _CLONE_ANY_NAMESPACE), (_RETURN, 0, 0, _EPERM)],
        ),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _when(number: int, body: list[Step]) -> list[Step]:
    """The body for this system call alone; what gets through it is allowed."""
    return [(_JUMP_EQUAL, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, _ALLOW)]


def _of_oneself(numbers: tuple[int, int], who: int) -> list[Step]:
    """The process that the argument `who` names is the caller, and no user is named."""
    return [*(_none_of(0, (_OF_USERS[numbers],)) if numbers in _OF_USERS else ()), *_one_of(who, (0,))]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Step]:
    checks = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument), *checks, (_RETURN, 0, 0, _EPERM)]


def _none_of(argument: int, values: tuple[int, ...]) -> list[Step]:
    checks = [step for value in values for step in ((_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _EPERM))]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument), *checks]


def _asks_only(*, or_own: bool) -> list[Step]:
    """prlimit64: both halves of its third argument, the new limit, are 0; or its first, the process, is 0."""
    asks = [
        (_LOAD, 0, 0, _AT_ARGUMENTS + 16),
        (_JUMP_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _AT_ARGUMENTS + 20),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _EPERM),
    ]
    if not or_own:
        return asks
    return [(_LOAD, 0, 0, _AT_ARGUMENTS), (_JUMP_EQUAL, len(asks), 0, 0), *asks]
