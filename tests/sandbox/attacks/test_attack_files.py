"""Proves: a file that the host takes out of a container, or puts into one, is what its path says, whatever stands
there, is renamed meanwhile or is called; and snapshots hold nothing but what a container may hold, in both directions.

Function calls have no files that anybody takes out.
"""

import asyncio
import io
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from rollforward.sandbox.container import Container
from rollforward.sandbox.errors import SandboxFileError
from rollforward.sandbox.types import ExecStatus
from tests.helpers.attacks import LIMITS, everywhere, on_host, python, status_of
from tests.helpers.containers import World

MIB = 1 << 20
# What stands at the path, and whether the host may get bytes of it.
POISON = {
    "a link": "os.symlink('/etc/passwd', 'p')",
    "a link that leads nowhere": "os.symlink('nowhere', 'p')",
    "a link to itself": "os.symlink('p', 'p')",
    "a link of the kernel's": "os.symlink('/proc/self/environ', 'p')",
    "a pipe": "os.mkfifo('p')",
    "a pipe with a reader": "os.mkfifo('p')\nos.open('p', os.O_RDWR)\nif os.fork(): time.sleep(0)",
    "a socket": "import socket\nsocket.socket(1).bind('p')",
    "a directory": "os.mkdir('p')",
    "a file that its owner may not read": "open('p', 'w').write('x')\nos.chmod('p', 0)",
    "more than there may be": "f = open('p', 'w')\nf.truncate(1 << 21)",
    "a link above": "os.mkdir('d')\nopen('d/q', 'w').write('x')\nos.symlink('d', 'l')",
}
NAMES = {
    b"new\nline": True,
    b"\xff\xfe": True,
    b"\x1b]0;owned\x07": True,
    b"-rf": True,
    b" ": True,
    b"a" * 255: True,
    b"..x": True,
    b"d/" * 200 + b"f": True,
    b"/home//x": True,
    b"a" * 256: False,
    b"\0": False,
    b"..": False,
    b"": False,
    b"x/": False,
    b"d/../../etc/passwd": False,
    b"a" * (1 << 17): False,
}


@pytest.fixture(scope="module")
def shared(world: World) -> Iterator[Container]:
    container = world.create(LIMITS)
    yield container
    world.do(container.kill())


@pytest.fixture
def container(world: World, shared: Container) -> Container:
    world.sh(shared, "chmod -R u+rwX /workspace; find /workspace /home /tmp -mindepth 1 -delete")
    return shared


def put(world: World, container: Container, code: str) -> None:
    result = world.python(container, f"import os, time\n{code}")
    assert result.status == ExecStatus.OK, result


@everywhere
@pytest.mark.parametrize("what", POISON)
def test_what_is_no_plain_file_is_not_taken_out(world: World, container: Container, what: str) -> None:
    put(world, container, POISON[what])
    path = "l/q" if what == "a link above" else "p"
    for taken in (path, f"/workspace/{path}", f"./{path}"):
        if world.name == "gvisor" and what.startswith(("a pipe", "a socket")):  # its kernel alone knows of those
            assert world.do(container.download([taken], max_bytes=MIB)) == {}
            continue
        with pytest.raises(SandboxFileError):
            world.do(container.download([taken], max_bytes=MIB))
    assert world.sh(container, "echo well").stdout == b"well\n"


def test_this_machines_programs_are_not_reached(world: World, container: Container) -> None:
    for asked in (container.download(["/usr/bin/env"], max_bytes=MIB), container.upload({"/usr/bin/env": b"x"})):
        with pytest.raises(SandboxFileError):
            world.do(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [w for w in POISON if w not in ("more than there may be",)])
def test_what_is_no_plain_file_is_not_written_through(world: World, container: Container, what: str) -> None:
    put(world, container, POISON[what])
    path = "l/q" if what == "a link above" else "p"
    with pytest.raises(SandboxFileError):
        world.do(container.upload({path: b"pwned"}))
    assert b"pwned" not in world.sh(container, "cat /etc/passwd nowhere d/q 2>/dev/null").stdout


@everywhere
@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/environ", "/proc/1/mem", "/dev/shm/x", "/proc/x"])
def test_other_file_systems_are_not_reached(world: World, container: Container, path: str) -> None:
    world.sh(container, "echo x > /dev/shm/x")
    with pytest.raises(SandboxFileError):
        world.do(container.download([path], max_bytes=MIB))
    with pytest.raises(SandboxFileError):
        world.do(container.upload({path: b"x"}))
    with pytest.raises(SandboxFileError):
        world.do(container.upload({"/etc/passwd": b"root::0:0::/:/bin/sh\n"}))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:16])
def test_names_are_bytes_and_no_paths(world: World, container: Container, name: bytes) -> None:
    path = name.decode("utf-8", "surrogateescape")
    if NAMES[name]:
        world.do(container.upload({path: b"here"}))
        assert world.do(container.download([path], max_bytes=9)) == {path: b"here"}
        read = f"import os\nassert open(os.path.join(b'/workspace', {name!r}), 'rb').read() == b'here'"
        assert world.python(container, read).status == ExecStatus.OK
    else:
        with pytest.raises(SandboxFileError):
            world.do(container.upload({path: b"x"}))
        with pytest.raises(SandboxFileError):
            world.do(container.download([path], max_bytes=9))


@pytest.mark.parametrize("path", ["\ud800", "d/\udbff/x", "\udfff" * 9])
def test_half_characters_are_refused_and_end_nobody(world: World, container: Container, path: str) -> None:
    for asked in (container.upload({path: b"x"}), container.download([path], max_bytes=9)):
        with pytest.raises(SandboxFileError):
            world.do(asked)  # type: ignore[arg-type]
    assert world.sh(container, "echo well").stdout == b"well\n"


def wait_for_start(world: World, container: Container) -> None:
    while not world.do(container.download(["started"], max_bytes=9)):
        pass


def stop(world: World, container: Container, running: "asyncio.Task[Any]") -> None:
    """End a command that looks for the file `stop`."""
    world.do(container.upload({"stop": b""}))
    assert world.do(status_of(running)) == "ok"


RENAMER = """
import ctypes, os
open('/home//outside', 'w').write('secret'); os.makedirs('/home//d'); open('/home//d/f', 'w').write('secret')
os.mkdir('d'); open('d/f', 'w').write('plain'); os.symlink('/home//d', 'fake')
exchange = ctypes.CDLL(None).renameat2
open('started', 'w').close()
while not os.path.exists('stop'):
    for _ in range(1000): assert exchange(-100, b'd', -100, b'fake', 2) == 0
"""
NAIVE = """
import time
seen, end_s = set(), time.monotonic() + 100
while len(seen) < 2 and time.monotonic() < end_s: seen.add(open('d/f').read())
print(sorted(seen))
"""


def test_a_renamer_beside_it_leads_nobody_astray(world: World, container: Container) -> None:
    running = world.loop.create_task(container.exec(python(RENAMER, wall_s=200.0)))
    wait_for_start(world, container)
    # Who opens the path as it is written is led astray.
    assert world.python(container, NAIVE, wall_s=150.0).stdout == b"['plain', 'secret']\n"
    seen = set[Any]()
    for number in range(20_000):
        if number >= 100 and len(seen) >= 2:
            break
        try:
            seen.update(world.do(container.download(["d/f"], max_bytes=99)).values())
            world.do(container.upload({"d/g": b"mine"}))
        except SandboxFileError:
            seen.add("refused")
    assert seen == {b"plain", "refused"}
    stop(world, container, running)
    assert world.do(container.download(["/home//d/g"], max_bytes=9)) == {}


LEASE = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
open('held', 'w').write('x')
f = os.open('held', os.O_RDWR)
fcntl.fcntl(f, 1024, 1)
open('started', 'w').close()
while not os.path.exists('stop'): time.sleep(0.01)
"""


def test_a_lease_does_not_stop_the_agent(world: World, container: Container) -> None:
    """It would for as long as the kernel lets a lease be broken slowly, 45 seconds."""
    running = world.loop.create_task(container.exec(python(LEASE, wall_s=200.0)))
    wait_for_start(world, container)
    for asked in (container.download(["held"], max_bytes=9), container.upload({"held": b"y"})):
        with pytest.raises(SandboxFileError, match="something else holds it"):
            world.do(asked)  # type: ignore[arg-type]
    stop(world, container, running)
    assert world.do(container.download(["held"], max_bytes=9)) == {"held": b"x"}


def test_a_file_that_grows_and_shrinks_meanwhile_ends(world: World, container: Container) -> None:
    code = "import os\nf = open('p', 'wb')\nopen('started', 'w').close()\nwhile not os.path.exists('stop'):\n"
    code += "  f.truncate(0); f.seek(0); f.write(bytes(1 << 21)); f.flush()"
    running = world.loop.create_task(container.exec(python(code, wall_s=200.0)))
    wait_for_start(world, container)
    for _ in range(20):
        assert len(world.do(container.download(["p"], max_bytes=4 * MIB))["p"]) <= 4 * MIB
        try:
            world.do(container.snapshot(max_bytes=8 * MIB))
        except SandboxFileError:
            continue
    stop(world, container, running)


@everywhere
def test_a_snapshot_holds_names_and_no_tricks(world: World, container: Container) -> None:
    code = """
for n in (b'new\\nline', b'\\xff', b'a' * 255, b'-rf', b'././@LongLink'[4:], b'@PaxHeader'): open(n, 'wb').write(n)
os.symlink(b'/etc/\\xff' + b'x' * 3000, 'link'); os.mkfifo('pipe'); os.chmod('link', 0) if False else None
open('suid', 'w'); os.chmod('suid', 0o6755); os.mkdir('closed'); open('closed/in', 'w'); os.chmod('closed', 0)
for n, t in enumerate((-1, -2**40, 2**33, 2**62)): open(f't{n}', 'w'); os.utime(f't{n}', (t, t))
for n in ('user.overlay.opaque', 'user.overlay.redirect', 'user.overlay.metacopy', 'user.x'):
    try: os.setxattr('/workspace', n, b'y')
    except OSError: pass
for t in ((0o20666, os.makedev(1, 3)), (0o20000, 0), (0o60666, os.makedev(8, 0))):
    try: os.mknod('device', *t); raise SystemExit('made a device')
    except PermissionError: pass
os.remove('/etc/passwd') if os.access('/etc', os.W_OK) else None
"""
    put(world, container, code)
    taken = world.do(container.snapshot(max_bytes=4 * MIB))
    with tarfile.open(fileobj=io.BytesIO(taken)) as tar:
        members = tar.getmembers()
    assert {member.type for member in members} <= {tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE}
    assert [m.name for m in members if m.mode & 0o6000 or m.name.startswith("/") or ".." in m.name.split("/")] == []
    assert [m.pax_headers for m in members if any("overlay" in key for key in m.pax_headers)] == []
    again = world.create(LIMITS, snapshot=taken)
    look = "chmod u+rx closed; ls -A | LC_ALL=C sort | md5sum; ls closed; readlink link | md5sum"
    assert world.sh(again, look).stdout == world.sh(container, f"rm pipe; {look}").stdout
    world.do(again.kill())


def test_a_snapshot_larger_than_allowed_ends_there(world: World, container: Container) -> None:
    put(world, container, "for i in range(200): f = open(f's{i}', 'w'); f.truncate(1 << 22)")
    with pytest.raises(SandboxFileError, match="more than"):
        world.do(container.snapshot(max_bytes=2 * MIB))
    assert world.sh(container, "echo well").stdout == b"well\n"


def tar_of(*members: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            info = tarfile.TarInfo("x")
            for field, value in member.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(bytes(info.size)) if info.size else None)
    return out.getvalue()


LINK = {"name": "workspace/l", "type": tarfile.SYMTYPE, "linkname": "/etc"}
HOSTILE = {
    "above": tar_of({"name": "../x"}),
    "absolute": tar_of({"name": "/etc/x"}),
    "inner dots": tar_of({"name": "workspace/../etc/x", "size": 1}),
    "through a link": tar_of(LINK, {"name": "workspace/l/x", "size": 1}),
    "over a link": tar_of(LINK, {"name": "workspace/l", "size": 1}),
    "a second name": tar_of({"name": "workspace/h", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
    "a disk": tar_of({"name": "workspace/d", "type": tarfile.BLKTYPE, "devmajor": 8}),
    "a device": tar_of({"name": "workspace/d", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 1}),
    "a pipe": tar_of({"name": "workspace/f", "type": tarfile.FIFOTYPE}),
    "too much": tar_of({"name": "workspace/big", "size": 9 * MIB}),
    "too many": tar_of(*({"name": f"workspace/n{i}"} for i in range(900))),
    "cut": tar_of({"name": "workspace/f", "size": 9999})[:2000],
    "headers without end": tarfile.TarInfo("h").tobuf().replace(b"0" + bytes(100), b"x" + bytes(100), 1) * 2000,
    "garbage": bytes(range(256)) * 40,
}


def _endless() -> bytes:
    header = tarfile.TarInfo("h")
    header.type = tarfile.XHDTYPE
    return header.tobuf() * 3000


@everywhere
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_snapshot_is_refused(world: World, what: str) -> None:
    data = _endless() if what == "headers without end" else HOSTILE[what]
    with pytest.raises(SandboxFileError):
        world.create(LIMITS, snapshot=data)


def test_a_plain_extraction_would_have_obeyed_it() -> None:
    code = """
import io, tarfile, tempfile
place = tempfile.mkdtemp()
os.mkdir(place + '/in'); os.symlink(place + '/out', place + '/in/l'); os.mkdir(place + '/out')
tar = io.BytesIO()
with tarfile.open(fileobj=tar, mode='w') as t: t.addfile(tarfile.TarInfo('l/x')); t.addfile(tarfile.TarInfo('../y'))
tar.seek(0)
with tarfile.open(fileobj=tar) as t: t.extractall(place + '/in')
answer = [os.path.exists(place + p) for p in ('/out/x', '/y')]
"""
    assert on_host(code) == [True, True]
