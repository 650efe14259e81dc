"""Layers as sandboxes see them: stacked, hidden by each other, shared, mounted as files or as directories.

Proves that all forms show the same, that a layer is stored once whoever stacks it, that nothing of a mount is left, and
that a snapshot is restored on its own layers alone. Where a form's program is missing (Debian: erofs-utils,
squashfs-tools) its test skips and says so.
"""

import asyncio
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import images as images_module
from rollforward.sandbox import layers_files
from rollforward.sandbox.client import SandboxClient, SocketTransport
from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.errors import LayerError, SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.homes import Home
from rollforward.sandbox.images import Images
from rollforward.sandbox.layers import LayerStore
from rollforward.sandbox.layers_files import FileKind, Mounting
from rollforward.sandbox.types import ExecRequest, SandboxSpec, Snapshot, SnapshotKind
from tests.helpers.archives import Layout, folder, link, member, tar
from tests.helpers.containers import World
from tests.helpers.sandboxes import wait_for
from tests.helpers.supervisors import mount_count
from tests.helpers.trajectories import CONFIG, supervised


@pytest.fixture(params=["directories", "erofs", "squashfs"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How layers are shown; directories too where the kernel cannot mount such a file."""
    kind: FileKind | None = None if request.param == "directories" else request.param
    if kind is not None:
        try:
            layers_files.find_program(kind)
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
        if layers_files._mounts(kind):  # pyright: ignore[reportPrivateUsage]
            kind = None
    shown = kind or "directories"
    monkeypatch.setattr(images_module, "probe", lambda: Mounting(kind, shown))
    return shown


def programs() -> list[tuple[str, bytes, int]]:
    """What a shell needs: name, bytes, mode."""
    found: dict[str, Path] = {}
    for path in (Path("/bin/sh"), Path("/bin/cat"), Path("/bin/ls"), Path("/bin/rm"), Path("/usr/bin/stat")):
        found[str(path)] = path
        for line in subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout.splitlines():
            found |= {word: Path(word) for word in line.split() if word.startswith("/")}
    return [(name[1:], path.read_bytes(), 0o755) for name, path in found.items()]


@pytest.fixture(scope="module")
def base() -> bytes:
    """The lowest layer: a shell, and files that others hide."""
    shell = [member(name, data, mode=mode) for name, data, mode in programs()]
    return tar(
        *shell,
        folder("data"),
        *(member(f"data/{name}", b"base", mode=0o644) for name in ("base", "replaced", "removed")),
        *(member(f"{name}/old", b"base") for name in ("opaque", "gone")),
        member("etc/version", b"base 1"),
    )


WORKSPACE = (
    member("data/replaced", b"workspace"),
    member("data/.wh.removed"),
    member("opaque/.wh..wh..opq"),
    member("opaque/new", b"workspace"),
    member(".wh.gone"),
    member("workspace/given", b"given"),
)
TOOLKIT = (member("usr/bin/hello", b"#!/bin/sh\necho hello\n", mode=0o755), link("data/link", "base"))


@pytest.fixture
def images(tmp_path: Path, base: bytes) -> dict[str, tuple[str, ...]]:
    """Two images that share two layers; the toolkit of the second is of another version."""
    layout = Layout(tmp_path / "layout")
    layout.image([base, tar(*WORKSPACE)])
    for number in (1, 2):
        (tmp_path / f"toolkit{number}.tar").write_bytes(tar(*TOOLKIT, member("etc/toolkit", b"%d" % number)))
    return {f"v{n}": (str(layout.path), str(tmp_path / f"toolkit{n}.tar")) for n in (1, 2)}


SCRIPT = "cat /data/base /data/replaced /data/link given /etc/version /etc/toolkit; hello; ls /data /opaque; ls /gone"


def test_every_form_shows_the_same(tmp_path: Path, images: dict[str, tuple[str, ...]], form: str) -> None:
    mounts = mount_count()
    with World([], images, layers=LayersConfig(dir=str(tmp_path / "store"))) as world:
        assert world.report.layers == form
        one, two = world.create(image="v1"), world.create(image="v2")
        said = [world.sh(container, SCRIPT) for container in (one, two)]
        begin = b"baseworkspacebasegivenbase 1"
        end = b"hello\n/data:\nbase\nlink\nreplaced\n\n/opaque:\nnew\n"
        assert [result.stdout for result in said] == [begin + b"%d" % n + end for n in (1, 2)]
        assert all(b"/gone" in result.stderr for result in said)
        assert world.sh(one, "rm given; echo own > /workspace/own; ls").stdout == b"own\n"
        assert world.sh(two, "ls").stdout == b"given\n"
        assert world.sh(one, "echo x > /data/base").exit_code != 0
        assert world.sh(one, "echo x > /data/new").exit_code != 0
        store = tmp_path / "store"
        assert len(list((store / "trees").iterdir())) == 4, "base and workspace are there once"
        files = list((store / "files").iterdir())
        assert len(files) == (0 if form == "directories" else 4)
    assert mount_count() == mounts
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(tmp_path) in line]


def test_two_processes_share_what_they_read(tmp_path: Path, images: dict[str, tuple[str, ...]]) -> None:
    place = LayersConfig(dir=str(tmp_path / "store"))
    one, two = Images(images, place), Images(images, place)
    assert [layer.directory for layer in one.layers("v1")] == [layer.directory for layer in two.layers("v1")]
    assert one.layers("v1")[:2] == one.layers("v2")[:2]
    assert one.layers("host") == []
    assert one.digest("v1") == two.digest("v1") != one.digest("v2")
    assert one.digest("host") == "host"
    with pytest.raises(SandboxUnavailableError, match="there are host, v1, v2"):
        one.layers("v3")


def test_a_snapshot_is_restored_on_its_own_layers_alone(tmp_path: Path, images: dict[str, tuple[str, ...]]) -> None:
    known = Images(images, LayersConfig(dir=str(tmp_path / "store")))
    taken = Snapshot(kind=SnapshotKind.FILES, image=known.digest("v1"), data=b"")
    known.check_snapshot(taken, SandboxSpec(image="v1"))
    with pytest.raises(SandboxFileError, match="its own image"):
        known.check_snapshot(taken, SandboxSpec(image="v2"))
    machine = Snapshot(kind=SnapshotKind.MACHINE, image=known.digest("v1"), data=b"")
    with pytest.raises(SandboxFileError, match="files alone"):
        known.check_snapshot(machine, SandboxSpec(image="v1"))


@pytest.mark.parametrize("name", ["proc", "dev"])
@pytest.mark.parametrize("odd", ["link", "file", "whiteout"])
def test_no_layer_leads_a_mount_astray(tmp_path: Path, name: str, odd: str) -> None:
    members = {"link": link(name, "/etc"), "file": member(name, b"x"), "whiteout": member(f".wh.{name}")}
    (tmp_path / "evil.tar").write_bytes(tar(members[odd]))
    with pytest.raises(
        LayerError, match=rf"sandbox\.container\.images\.evil: in layer [0-9a-f]+ /{name} is no directory"
    ):
        Images({"evil": (str(tmp_path / "evil.tar"),)}, LayersConfig(dir=str(tmp_path / "store")))


def test_an_image_of_too_many_layers_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image([tar(member(f"f{n}")) for n in range(65)])
    with pytest.raises(SandboxUnavailableError, match="has 65 layers"):
        Images({"high": (str(layout.path),)}, LayersConfig(dir=str(tmp_path / "store")))


def test_sixty_four_layers_are_stacked(tmp_path: Path, base: bytes) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image([base, *(tar(member("data/top", b"%d" % n), member(f"data/f{n}")) for n in range(63))])
    images = {"high": (str(layout.path),)}
    with World([], images, layers=LayersConfig(dir=str(tmp_path / "store"))) as world:
        assert world.sh(world.create(image="high"), "cat /data/top; ls /data").stdout.startswith(b"62base\nf0\n")


def test_the_probe_really_mounts() -> None:
    found = layers_files.probe()
    if found.kind is None:
        assert found.report.startswith("directories (erofs: ")
    else:
        assert found.report == f"{found.kind} files, mounted"
        assert os.geteuid() == 0


def test_a_supervisor_holds_its_layers_while_it_lives(tmp_path: Path, images: dict[str, tuple[str, ...]]) -> None:
    layers = LayersConfig(dir=str(tmp_path / "store"))
    settings = msgspec.structs.replace(CONFIG, warm=0, images=images, layers=layers)

    async def ask(home: Home) -> bytes:
        async with SandboxClient([SocketTransport(home.socket)], settings, owner="test") as client:
            sandbox = await client.create("stacked", SandboxSpec(image="v2"))
            await sandbox.upload({"more": b"more"})
            fork = await sandbox.fork("forked", max_bytes=1 << 20)
            said = await fork.exec(ExecRequest(argv=("sh", "-c", "cat /etc/toolkit given more")))
            return said.stdout

    with supervised(settings) as home:
        assert asyncio.run(ask(home)) == b"2givenmore"
        with LayerStore(layers) as store:
            assert store.collect(unused_s=0.0) == []
    with LayerStore(layers) as store:
        removed: set[str] = set()
        wait_for(lambda: len(removed.update(info.digest for info in store.collect(unused_s=0.0)) or removed) == 4)


def test_a_layer_that_cannot_be_used_is_said_by_whoever_starts_a_supervisor(tmp_path: Path) -> None:
    (tmp_path / "evil.tar").write_bytes(tar(member("../out")))
    layers = LayersConfig(dir=str(tmp_path / "store"))
    settings = msgspec.structs.replace(CONFIG, images={"evil": (str(tmp_path / "evil.tar"),)}, layers=layers)
    field = r"sandbox\.container\.images\.evil: layer .*evil\.tar: '\.\./out' leaves the layer"
    with pytest.raises(LayerError, match=field), supervised(settings):
        pytest.fail("it started")
