"""Proves: calls reach nothing of the host, of each other, or of what outlives them.

Does not prove: that the kernel has no flaw.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.types import Call, CallStatus
from tests.helpers.sandboxes import LIMITS, answer, ask, descendants, run, tools_in, wait_for, zygote_beside, zygotes


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionSandbox]:
    with FunctionSandbox(LIMITS, tools_in(tmp_path_factory.mktemp("tools"))) as sandbox:
        yield sandbox


def test_no_file_of_the_host(sandbox: FunctionSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    paths = ["/etc/shadow", "/etc/passwd", "/etc/hostname", "/home", "/var", "/run", "/sys", "/proc", "/boot", "/opt"]
    code = f"answer = [p for p in {[*paths, str(tmp_path / 'secret'), str(Path(__file__))]} if os.path.lexists(p)]"
    assert answer(sandbox, code) == []
    assert answer(sandbox, "answer = sorted(os.listdir('/dev'))") == ["null", "urandom"]


def test_no_environment_descriptors_or_capabilities(
    sandbox: FunctionSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "canary")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with FunctionSandbox(LIMITS, tools_in(tmp_path)) as other:
            assert set(answer(other, "answer = dict(os.environ)")) <= {"PYTHONHASHSEED", "PWD", "LC_CTYPE"}
            code = "n = 0\nfor i in range(64):\n  try: os.fstat(i); n += 1\n  except OSError: pass\nanswer = n"
            assert answer(other, code) == 4  # three of /dev/null, one to answer with
    code = """
class H(ctypes.Structure): _fields_ = [("v", ctypes.c_uint32), ("p", ctypes.c_int)]
h, d, libc = H(0x20080522, 0), (ctypes.c_uint32 * 6)(), ctypes.CDLL(None)
libc.capget(ctypes.byref(h), d)
answer = [*d, libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), os.getuid(), os.getgid()]
"""
    no_new_privileges, filtered = 1, 2
    assert answer(sandbox, code) == [0, 0, 0, 0, 0, 0, no_new_privileges, filtered, 65534, 65534]


def test_nobody_on_the_host_either(sandbox: FunctionSandbox) -> None:
    assert ask(sandbox, "calculator", expression="1").status == CallStatus.OK
    for pid in zygotes(os.getpid()):
        status = Path(f"/proc/{pid}/status").read_text()
        uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
        assert set(uids) == {"65534" if os.geteuid() == 0 else str(os.geteuid())}


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK knows no network namespace
        "os.memfd_create('x')",
    ],
)
def test_no_sockets_and_no_memory_that_nobody_counts(sandbox: FunctionSandbox, code: str) -> None:
    assert run(sandbox, code).text == "PermissionError: [Errno 1] Operation not permitted"
    assert answer(sandbox, "a, b = socket.socketpair(); a.send(b'1'); answer = int(b.recv(1))") == 1


def test_no_network_even_from_the_warm_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\ntry:\n  socket.create_connection(('127.0.0.1', {port}), 2); seen = 'connected'\n"
        source += "except OSError as e: seen = type(e).__name__\ndef look() -> str:\n  'Doc.'\n  return seen\n"
        (tmp_path / "look.py").write_text(source)
        with FunctionSandbox(LIMITS, [ToolConfig(name="look", file=str(tmp_path / "look.py"))]) as sandbox:
            assert ask(sandbox, "look").text in ("ConnectionRefusedError", "OSError")


def test_no_namespaces_mounts_devices_or_traces(sandbox: FunctionSandbox) -> None:
    code = """
libc = ctypes.CDLL(None, use_errno=True)
def failed(*numbers):
    return libc.syscall(*[ctypes.c_long(n) for n in numbers]) == -1 and ctypes.get_errno() or 'worked'
clone, mount, mknod = (56, 165, 133) if os.uname().machine == 'x86_64' else (220, 40, 33)
flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
answer = [
    *[failed(clone, flag | 17, 0, 0, 0, 0) for flag in flags],
    *[libc.unshare(flag) and ctypes.get_errno() for flag in flags],
    failed(435, 0, 0),
    libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) and ctypes.get_errno(),
    libc.umount(b'/tmp') and ctypes.get_errno(),
    libc.ptrace(0, 0, 0, 0) and ctypes.get_errno(),
    libc.shmget(0, 4096, 0o600) and ctypes.get_errno(),
]
"""
    assert answer(sandbox, code) == [1] * 14 + [38, 1, 1, 1, 1]
    assert run(sandbox, "os.mknod('vda', 0o60600, 0xFE00)").text.startswith("PermissionError")
    assert answer(sandbox, "answer = [os.getpid(), os.getppid()]") == [1, 0]


def test_writes_go_to_a_tmp_of_fixed_size_only(sandbox: FunctionSandbox) -> None:
    code = """
answer = []
for folder in ('/', '/dev', '/usr', '/etc', sys.base_prefix, os.path.dirname(os.__file__)):
    try: open(folder + '/pwned', 'w'); answer.append(folder)
    except OSError: pass
"""
    assert answer(sandbox, code) == []
    assert run(sandbox, "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(1 << 18))").text.startswith(
        "OSError: [Errno 28]"
    )
    assert run(sandbox, "for i in range(9999): open(f'/tmp/{i}', 'wb')").text.startswith("OSError: [Errno 28]")
    assert run(sandbox, "for i in range(3000): os.mkdir('d'); os.chdir('d')").status == CallStatus.ERROR


def test_nothing_is_left_for_the_next_call(tmp_path: Path) -> None:
    others = zygotes(os.getpid())
    with FunctionSandbox(SandboxConfig(workers=1), tools_in(tmp_path)) as sandbox:
        mark = "state.append(1); open('mark', 'w'); os.umask(0); os.environ['MARK'] = '1'\n"
        daemon = "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n  os._exit(0)\n"
        start = time.monotonic()
        assert answer(sandbox, mark + daemon + "answer = 1") == 1
        assert time.monotonic() - start < 30
        look = "answer = [state, os.listdir('/tmp'), os.environ.get('MARK'), os.getpid()]"
        assert answer(sandbox, look) == [[], [], None, 1]
        zygote = zygote_beside(others)
        wait_for(lambda: descendants(zygote) == [])
        open_files = len(os.listdir(f"/proc/{zygote}/fd"))
        for _ in range(20):
            run(sandbox, "1 / 0")
        assert len(os.listdir(f"/proc/{zygote}/fd")) == open_files


def test_equal_calls_answer_equally_in_every_process(tmp_path: Path) -> None:
    with FunctionSandbox(LIMITS, tools_in(tmp_path)) as sandbox:
        calls = [Call(tool="run", arguments={"code": "answer = list({'a', 'b', 'c', 'd', 'e'})"})] * 8
        assert len({sandbox.submit(call).result().text for call in calls}) == 1
