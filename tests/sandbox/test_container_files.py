"""Proves: files go in and out of a container only where the sandbox's own user may put them, through no link, however
quickly things are renamed; a snapshot gives a container with the same files, and a forged one gives none.

Does not prove: what a command can reach.
"""

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox.config import LayersConfig, Limits
from rollforward.sandbox.container import Container
from rollforward.sandbox.errors import SandboxFileError, SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.types import ExecRequest, ExecStatus
from tests.helpers.containers import World
from tests.helpers.sandboxes import tools_in, wait_for


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World([]) as world:
        yield world


@pytest.fixture
def container(world: World) -> Iterator[Container]:
    container = world.create()
    yield container
    world.do(container.kill())


def get(world: World, container: Container, *paths: str, most: int = 1 << 22) -> dict[str, bytes]:
    return world.do(container.download(paths, max_bytes=most))


def test_bytes_come_back_as_they_went(world: World, container: Container) -> None:
    data = os.urandom(2_500_000)
    files = {"a/b/c": data, "empty": b"", "/tmp//x": b"\0\xff", "ä/\udcff": b"name"}
    world.do(container.upload(files))
    assert get(world, container, *files, "absent", "empty/x", "/nowhere/x") == files
    assert world.sh(container, "stat -c '%U %a' a a/b/c /tmp//x").stdout == b"user 755\nuser 644\nuser 644\n"
    world.do(container.upload({"a/b/c": b"short"}))
    assert get(world, container, "a/b/c") == {"a/b/c": b"short"}
    assert get(world, container, "/workspace/a/./b//c", most=5) == {"/workspace/a/./b//c": b"short"}
    with pytest.raises(SandboxFileError, match="more than 4 bytes"):
        get(world, container, "a/b/c", most=4)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../x", "no path"),
        ("a/../../x", "no path"),
        ("", "no path"),
        ("/", "no path"),
        ("a/", "no path"),
        ("x" * 300, "too long"),
        ("/proc/self/environ", "leaves"),
        ("/dev/null", "leaves"),
        ("/usr/x", "leaves"),
        ("link", "link"),
        ("dir_link/x", "link"),
        ("magic", "link"),
        ("/etc/passwd", "ermission denied"),
        ("fifo", "no regular file|holds it"),
        ("dir", "irectory"),
        ("sock", "no regular file|No such device"),
        ("mine", "ermission denied"),
    ],
)
def test_paths_that_are_refused(world: World, container: Container, path: str, why: str) -> None:
    script = (
        "ln -s /etc/passwd link; ln -s /tmp dir_link; ln -s /proc/self/fd/0 magic; mkfifo fifo; mkdir dir; touch mine;"
        " chmod 0 mine; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
    )
    assert world.sh(container, script).status == ExecStatus.OK
    with pytest.raises(SandboxFileError, match=why):
        world.do(container.upload({path: b"pwned"}))
    if path == "/etc/passwd":
        assert b"user:" in get(world, container, path)[path]
    elif path not in ("x" * 300, "/usr/x"):
        with pytest.raises(SandboxFileError):
            get(world, container, path)
    assert world.sh(container, "cat /etc/passwd /tmp//x").stdout.count(b"pwned") == 0


async def there(container: Container, path: str) -> None:
    """Wait until there is a file."""
    while not await container.download([path], max_bytes=9):
        await asyncio.sleep(0.01)


def test_a_lease_and_a_full_disk_do_not_hold_the_agent(world: World, container: Container) -> None:
    holder = """
import fcntl, os, signal, time
open('leased', 'w').close()
file = open('leased')
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
open('started', 'w').close()
while not os.path.exists('stop'): time.sleep(0.01)
"""

    async def race() -> None:
        running = asyncio.create_task(container.exec(ExecRequest(argv=("python3", "-c", holder), wall_s=100.0)))
        await there(container, "started")
        with pytest.raises(SandboxFileError, match="holds it"):
            await container.upload({"leased": b"x"})
        await container.upload({"stop": b""})
        assert (await running).status == ExecStatus.OK

    world.do(race())
    with pytest.raises(SandboxFileError, match="no room"):
        world.do(container.upload({"big": bytes(9 << 20)}))
    world.sh(container, "rm big")
    world.do(container.upload({"small": b"x"}))


def test_a_racing_renamer_never_sees_a_file_follow_its_link(world: World, container: Container) -> None:
    """The parent of the file is a directory and a link to another in turn, as fast as they can be exchanged."""
    renamer = """
import ctypes, os
os.makedirs('real/d'); os.makedirs('/tmp//trap/d'); os.symlink('../tmp//trap', 'link')
libc = ctypes.CDLL(None)
open('/home//started', 'w').close()
while not os.path.exists('/home//stop'):
    for _ in range(1000): libc.renameat2(-100, b'real', -100, b'link', 2)
"""

    async def race() -> tuple[set[str], int]:
        running = asyncio.create_task(container.exec(ExecRequest(argv=("python3", "-c", renamer), wall_s=200.0)))
        await there(container, "/home//started")
        written, refused = set[str](), 0
        for number in range(20_000):
            if number >= 400 and written and refused:
                break
            name = f"real/d/f{number % 400}"
            try:
                await container.upload({name: b"x"})
                written.add(name)
            except SandboxFileError:
                refused += 1
        await container.upload({"/home//stop": b""})
        assert (await running).status == ExecStatus.OK
        return written, refused

    written, refused = world.do(race())
    assert written
    assert refused > 0
    assert world.sh(container, "find /tmp//trap -type f | wc -l").stdout == b"0\n"
    assert world.sh(container, "find /workspace -type f | wc -l").stdout == b"%d\n" % len(written)


def test_questions_of_a_gone_container(world: World) -> None:
    container = world.create()
    world.do(container.kill())
    with pytest.raises(SandboxGoneError):
        world.do(container.upload({"a": b""}))
    with pytest.raises(SandboxGoneError):
        world.do(container.snapshot(max_bytes=1))
    with pytest.raises(SandboxGoneError):
        world.do(container.is_fresh())


@pytest.mark.parametrize("attribute", ["user.mine", "user.overlay.opaque"])
def test_an_attribute_that_somebody_set_is_a_change(world: World, container: Container, attribute: str) -> None:
    assert world.do(container.is_fresh())
    assert world.python(container, f"import os; os.setxattr('/home', {attribute!r}, b'y')").status == ExecStatus.OK
    assert not world.do(container.is_fresh())


# ---- Snapshots


def test_a_snapshot_gives_the_same_files(world: World, container: Container) -> None:
    script = """
mkdir -p a/b /tmp//t; echo one > a/b/f; ln -s ../nowhere a/link; chmod 700 a; chmod 755 a/b/f; touch -d 2001-02-03 a/b
printf x > "$(printf 'bad\\377name')"; mkfifo p; ln a/b/f hard; head -c 100000 /dev/urandom > big; chmod 0 a/b
"""
    assert world.sh(container, script).status == ExecStatus.OK
    taken = world.do(container.snapshot(max_bytes=1 << 22))
    other = world.create(snapshot=taken)
    assert world.do(other.snapshot(max_bytes=1 << 22)) == taken
    look = "find . /tmp -printf '%p %y %m %U %l\\n' | sort; cat hard; md5sum big; chmod 700 a/b; date -r a/b +%Y"
    want = world.sh(container, look.replace("find .", "rm p; find .")).stdout
    assert world.sh(other, look).stdout == want
    assert b"2001" in want
    with pytest.raises(SandboxFileError, match="more than 1000 bytes"):
        world.do(container.snapshot(max_bytes=1000))


def test_deep_trees_are_taken_given_and_removed(world: World) -> None:
    limits = Limits(files=16384, disk_bytes=64 << 20, memory_bytes=128 << 20)
    dig = "import os\nfor i in range({}): os.mkdir('d' * 9); os.chdir('d' * 9)\nopen('leaf', 'w').write('deep')"
    walk = "import os\nfor i in range(600): os.chdir('d' * 9)\nprint(open('leaf').read())"
    container = world.create(limits)
    assert world.python(container, dig.format(600)).status == ExecStatus.OK
    other = world.create(limits, snapshot=world.do(container.snapshot(max_bytes=1 << 26)))
    assert world.python(other, walk).stdout == b"deep\n"
    assert world.python(other, dig.format(3000).replace("'d'", "'e'")).status == ExecStatus.OK
    with pytest.raises(SandboxFileError, match="more than"):
        world.do(other.snapshot(max_bytes=1 << 16))
    world.do(other.kill())
    assert [path for path in other.cgroup if path.exists()] == []


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


@pytest.mark.parametrize(
    "forged",
    [
        b"nonsense" * 100,
        tar_of(member("../x")),
        tar_of(member("/etc/x")),
        tar_of(member("a/../../x")),
        tar_of(member("a", tarfile.CHRTYPE, devmajor=1, devminor=3)),
        tar_of(member("a", tarfile.BLKTYPE)),
        tar_of(member("a", tarfile.FIFOTYPE)),
        tar_of(member("a"), member("b", tarfile.LNKTYPE, linkname="a")),
        tar_of(member("tmp/l", tarfile.SYMTYPE, linkname="/"), member("tmp/l/x", data=b"x")),
        tar_of(member("a", data=b"x"), member("a", data=b"y")),
        tar_of(member("a", data=b"x"), member("a/b", data=b"y")),
        tar_of(member("big", data=bytes(9 << 20))),
        tar_of(member("cut", data=bytes(100_000)))[:50_000],
        tar_of(*(member(f"f{i}") for i in range(2000))),
    ],
)
def test_a_forged_snapshot_gives_no_container(world: World, forged: bytes) -> None:
    with pytest.raises(SandboxFileError, match="snapshot"):
        world.create(snapshot=forged)
    assert world.sh(world.create(), "echo well").stdout == b"well\n"


def test_bits_that_give_rights_are_lost(world: World) -> None:
    container = world.create(snapshot=tar_of(member("workspace/s", data=b"#!/bin/sh\n", mode=0o6755, uid=0)))
    assert world.sh(container, "stat -c '%U %a' s").stdout == b"user 755\n"


# ---- Images


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """A program without libraries (bash is not: it is copied with what it loads), in layers that hide each other."""
    folder = tmp_path_factory.mktemp("layers")
    low, high = folder / "low", folder / "high"
    for layer in (low, high):
        (layer / "bin").mkdir(parents=True)
        (layer / "data").mkdir()
    for path in ("/bin/sh", "/bin/cat", "/bin/ls", "/bin/rm"):
        _copy_program(Path(path), low)
    (low / "data" / "both").write_text("low")
    (low / "data" / "low").write_text("low")
    (high / "data" / "both").write_text("high")
    (low / "workspace").mkdir()
    (low / "workspace" / "given").write_text("given")
    (low / "etc").mkdir()
    (low / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    return {"small": (str(low), str(high))}


def _copy_program(program: Path, layer: Path) -> None:
    (layer / "bin" / program.name).write_bytes(program.read_bytes())
    (layer / "bin" / program.name).chmod(0o755)
    for line in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.splitlines():
        for word in line.split():
            if word.startswith("/"):
                target = layer / word[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(word).read_bytes())
                target.chmod(0o755)


def test_an_image_of_layers_without_python(layers: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    with World(tools_in(tmp_path), layers, layers=LayersConfig(dir=str(tmp_path / "store"))) as world:
        container = world.create(image="small")
        assert world.sh(container, "cat /data/both /data/low given").stdout == b"highlowgiven"
        assert b"data" in world.sh(container, "ls /").stdout
        wait_for(lambda: world.do(container.is_fresh()))  # the kernel notes that /workspace is in the image too
        assert world.do(container.exec(ExecRequest(argv=("python3",)))).exit_code == 127
        assert world.call(container, "calculator", expression="6 * 7").text == "42"
        shell = "answer = subprocess.run('cat given', shell=True, capture_output=True, text=True).stdout"
        assert world.call(container, "run", code=shell).text == "given"
        assert world.sh(container, "rm -f given; echo new > other; ls").stdout == b"other\n"
        assert Path(layers["small"][0], "workspace", "given").exists()
        other = world.create(image="small", snapshot=world.do(container.snapshot(max_bytes=1 << 20)))
        assert world.sh(other, "ls").stdout == b"other\n"
        assert world.sh(world.create(image="small"), "ls").stdout == b"given\n"
        assert world.sh(container, "echo x > /data/both; echo x > /data/new").status == ExecStatus.EXIT
        with pytest.raises(SandboxUnavailableError, match="there are host, small"):
            world.create(image="large")


@pytest.mark.parametrize("images", [{"host": ("/usr",)}, {"A": ("/usr",)}, {"a": ()}, {"a": ("/no/such/place",)}])
def test_images_that_cannot_be(images: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"sandbox\.container\.images"):
        World([], images)
