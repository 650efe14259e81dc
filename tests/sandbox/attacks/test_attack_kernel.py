"""Proves: code in a sandbox, whichever way it runs there, gets nothing from the kernel that could lead out: no
namespaces, mounts, devices, tracers, programs in the kernel, foreign address families or other tables of calls.

Does not prove: that the calls which it has are without flaws.
"""

import pytest

from tests.helpers.attacks import Way, answer, harmless, on_host

REFUSED = {"EPERM", "ENOSYS", "EACCES"}
# Numbers on x86_64 and aarch64, and arguments with which the call works for somebody who may make it, or fails on them
# with another error than a refusal.
CALLS = {
    "unshare users": ((272, 97), 0x1000_0000),
    "unshare mounts": ((272, 97), 0x2_0000),
    "unshare pids": ((272, 97), 0x2000_0000),
    "unshare network": ((272, 97), 0x4000_0000),
    "unshare cgroups": ((272, 97), 0x200_0000),
    "setns": ((308, 268), -1, 0),
    "ptrace": ((101, 117), 16, 2**30, 0, 0),
    "process_vm_readv": ((310, 270), 1, 0, 0, 0, 0, 0),
    "process_vm_writev": ((311, 271), 1, 0, 0, 0, 0, 0),
    "process_madvise": ((440, 440), -1, 0, 0, 0, 0),
    "kcmp": ((312, 272), 1, 1, 99, 0, 0),
    "pidfd_getfd": ((438, 438), -1, 0, 0),
    "bpf": ((321, 280), 99, 0, 0),
    "perf_event_open": ((298, 241), 0, 0, 0, 0, 0),
    "userfaultfd": ((323, 282), 0xFFFF),
    "io_uring_setup": ((425, 425), 0, 0),
    "io_uring_enter": ((426, 426), -1, 0, 0, 0, 0, 0),
    "io_uring_register": ((427, 427), -1, 0, 0, 0),
    "keyctl": ((250, 219), 0, -3, 1),
    "add_key": ((248, 217), b"user", b"attack", b"x", 1, -1),
    "request_key": ((249, 218), b"user", b"attack", 0, 0),
    "memfd_create": ((319, 279), b"attack", 0),
    "memfd_secret": ((447, 447), 1 << 20),
    "fanotify_init": ((300, 262), 1 << 30, 0),
    "inotify_init1": ((294, 26), 0),
    "open_by_handle_at": ((304, 265), -1, 0, 0),
    "shmget": ((29, 194), 0, 4096, 0o600),
    "semget": ((64, 190), 0, 1, 0o600),
    "msgget": ((68, 186), 0, 0o600),
    "mq_open": ((240, 180), b"attack", 0, 0, 0),
    "syslog": ((103, 116), 99, 0, 0),
    "clone with users": ((56, 220), 0x1000_0000 | 17, 0, 0, 0, 0),
    "clone with mounts": ((56, 220), 0x2_0000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
}
# Only root may make these anywhere; nothing is tried of them on the host, where the one who tests may be root.
OF_ROOT = {
    "mount": ((165, 40), b"none", b"/tmp", b"tmpfs", 0, 0),
    "umount2": ((166, 39), b"/tmp", 2),
    "pivot_root": ((155, 41), b".", b"."),
    "chroot": ((161, 51), b"."),
    "fsopen": ((430, 430), b"tmpfs", 0),
    "open_tree": ((428, 428), -100, b"/", 1),
    "move_mount": ((429, 429), -100, b"/", -100, b"/", 0),
    "mount_setattr": ((442, 442), -100, b"/", 0x8000, b"\0" * 32, 32),
    "init_module": ((175, 105), 0, 0, b""),
    "kexec_load": ((246, 104), 0, 0, 0, 0),
    "reboot": ((169, 142), 0xFEE1DEAD, 672274793, 0x89ABCDEF, 0),
    "swapon": ((167, 224), b"/tmp", 0),
    "acct": ((163, 89), b"/dev/null"),
    "sethostname": ((170, 161), b"pwned", 5),
    "setdomainname": ((171, 162), b"pwned", 5),
    "settimeofday": ((164, 170), b"\0" * 16, 0),
    "clock_settime": ((227, 112), 0, b"\0" * 16),
    "setuid": ((105, 146), 0),
    "setgid": ((106, 144), 0),
    "setgroups": ((116, 159), 1, b"\0" * 4),
    "mknod of a disk": ((259, 33), -100, b"disk", 0o60600, 0xFE00),
}


def test_calls_that_lead_out_are_refused(way: Way) -> None:
    found = answer(way, f"answer = {{name: call(*a) for name, a in {CALLS!r}.items()}}")
    assert {name: said for name, said in found.items() if said not in REFUSED} == {}


def test_the_host_would_not_refuse_them() -> None:
    # Each in a process of its own, which what it changes dies with.
    code = "import concurrent.futures\ndef one(a):\n  pid = os.fork()\n"
    code += "  if pid == 0:\n    libc.unshare(0x08000000)\n"  # segments, semaphores and queues would outlive it
    code += "    said = call(*a)\n    os.write(out, said.encode()); os._exit(0)\n"
    code += "  os.waitpid(pid, 0)\n  return os.read(back, 99).decode()\n"
    code += "back, out = os.pipe()\n"
    names = ("unshare users", "ptrace", "process_vm_readv", "pidfd_getfd", "io_uring_setup", "memfd_create")
    names += ("keyctl", "inotify_init1", "shmget", "semget", "msgget", "setns", "perf_event_open", "open_by_handle_at")
    found = on_host(code + f"answer = {{name: one(a) for name, a in { ({n: CALLS[n] for n in names})!r}.items()}}")
    assert {name: said for name, said in found.items() if said in REFUSED} == {}


def test_calls_of_root_are_refused(way: Way) -> None:
    found = answer(way, f"answer = {{name: call(*a) for name, a in {OF_ROOT!r}.items()}}")
    assert {name: said for name, said in found.items() if said not in REFUSED} == {}
    assert answer(way, "answer = [os.uname().nodename == 'pwned', os.getuid() == 0, os.getgid() == 0]") == [False] * 3


def test_every_address_family_that_no_namespace_shuts_in_is_refused(way: Way) -> None:
    families = [n for n in range(1, 46) if n not in (1, 2, 10)]
    code = f"answer = {{str(n): error_of(socket.socket, n, k) for n in {families} for k in (1, 2, 3)}}"
    assert set(answer(way, code).values()) == {"EPERM"}
    code = f"answer = {{str(n): error_of(socket.socketpair, n, 1) for n in {families}}}"
    assert set(answer(way, code).values()) == {"EPERM"}
    assert on_host("answer = [error_of(socket.socket, n, 3) for n in (16, 38)]")[0] == "worked"
    assert on_host("answer = error_of(socket.socketpair, 30, 1)") != "EPERM"


def test_sockets_that_speak_to_the_wire_are_refused(way: Way) -> None:
    found = answer(way, "answer = [error_of(socket.socket, f, socket.SOCK_RAW, p) for f in (2, 10) for p in (1, 255)]")
    assert set(found) <= {"EPERM", "EACCES"}


def test_the_other_tables_of_system_calls_are_closed(way: Way) -> None:
    # x32 numbers; and int 0x80, which reaches the table of 32 bits, where 20 is getpid and nothing is filtered by name.
    assert answer(way, "answer = call(0x40000000 | 39) if IS_X86 else 'EPERM'") in REFUSED
    code = """
import mmap
status = signal.SIGSYS
if IS_X86:
    pid = os.fork()
    if pid == 0:
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(bytes.fromhex("b814000000cd80c3"))
        where = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.CFUNCTYPE(ctypes.c_int)(where)()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
answer = status & 127
"""
    sigsys = 31
    assert answer(way, code) == (0 if way.is_gvisor else sigsys)  # whose kernel has one table, filtered like every call


def test_a_filter_of_ones_own_takes_nothing_back(way: Way) -> None:
    # One that allows everything, put on top.
    code = """
allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
held = ctypes.create_string_buffer(allow)
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(held))
put = libc.prctl(22, 2, program, 0, 0)
answer = [put, call((319, 279), b"x", 0), libc.prctl(22, 1, 0, 0, 0)]
"""
    assert answer(way, code) == [0, "EPERM", -1]


def test_nothing_types_into_a_terminal(way: Way) -> None:
    requests = [0x5412, 0x541C, 0x1_0000_5412, 0xFFFF_FFFF_0000_5412 - (1 << 64)]
    assert answer(way, f"answer = [call((16, 29), 0, r, b'x') for r in {requests}]") == ["EPERM"] * len(requests)
    assert on_host("answer = call((16, 29), os.open('/dev/null', 0), 0x5412, b'x')") == "ENOTTY"


def test_no_right_comes_back_by_a_program(way: Way) -> None:
    code = """
with open('/usr/bin/env', 'rb') as f: data = f.read()
with open('mine', 'wb') as f: f.write(data)
os.chmod('mine', 0o6755)
flags = [os.statvfs('.').f_flag & 2, os.statvfs('/usr').f_flag & 3]
answer = [libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), *flags]
"""
    no_new_privileges, filtered, nosuid, nosuid_and_read_only = 1, 2, 2, 3
    said = answer(way, code)
    assert said[:2] == [no_new_privileges, filtered]
    assert said[2:] == ([0, 0] if way.is_gvisor else [nosuid, nosuid_and_read_only])  # which shows no such flags


def test_a_crash_wakes_nobody_on_the_host(way: Way) -> None:
    # 1 is the size at which the kernel calls no program of core_pattern either; 0 would not do for that.
    assert answer(way, "answer = resource.getrlimit(resource.RLIMIT_CORE)") == [1, 1]
    code = "pid = os.fork()\nif pid == 0:\n  os.kill(os.getpid(), 11)\n  time.sleep(9)\n"
    code += "status = os.waitpid(pid, 0)[1]\nanswer = [status & 128, [n for n in os.listdir('.') if 'core' in n]]"
    assert answer(way, code) == [0, []]


@pytest.mark.parametrize("signal_to_all", ["os.kill(-1, 9)", "os.kill(1, 9)", "os.kill(1, 19)", "os.killpg(0, 9)"])
def test_who_kills_everybody_kills_what_is_his(way: Way, signal_to_all: str) -> None:
    harmless(way, f"try: {signal_to_all}\nexcept OSError: pass")
