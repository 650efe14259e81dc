"""Layers and their store: what a layer is told apart by, what sources may hold, who shares it, and kills while it is
made.

Proves that the same content has the same digest however it comes, that hostile archives write nothing outside of their
tree and are refused by name, that a SIGKILL at any point leaves a store that is used as before, and that what somebody
holds is not removed. Layers in sandboxes are in test_layers_stacked.py.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox import layers_archive, layers_tree
from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.errors import LayerError, SandboxUnavailableError
from rollforward.sandbox.layers import Layer, LayerStore
from rollforward.sandbox.layers_files import find_program
from rollforward.sandbox.layers_tree import OPAQUE, tree_digest
from tests.helpers.archives import Layout, folder, link, member, tar, zstd

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(LayersConfig(dir=str(tmp_path / "store"), max_bytes=4 * MIB, max_files=2000))


def saved(tmp_path: Path, data: bytes, name: str = "layer.tar") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def one(store: LayerStore, source: str) -> Layer:
    (layer,) = store.layers(source)
    return layer


HONEST = (
    folder("./"),
    folder("bin/"),
    member("bin/tool", b"#!/bin/sh\n", mode=0o755),
    member("data/deep/file", b"x" * 5000),
    link("bin/link", "/data/deep/file"),
    link("data/same", "data/deep/file", is_hard=True),
    member("empty"),
    member("caf\u00e9/" + "n" * 200, b"long"),
)


def test_the_same_content_is_the_same_layer_however_it_comes(store: LayerStore, tmp_path: Path) -> None:
    plain = tar(*HONEST)
    made = one(store, saved(tmp_path, plain))
    others = [
        saved(tmp_path, gzip.compress(plain), "a"),
        saved(tmp_path, zstd(plain), "b"),
        saved(tmp_path, tar(*HONEST, form=tarfile.GNU_FORMAT), "c"),
        saved(tmp_path, tar(*reversed(HONEST[:5]), *HONEST[5:]), "d"),  # another order, of what has an order
    ]
    subprocess.run(["cp", "-a", made.directory, tmp_path / "copy"], check=True)
    os.utime(tmp_path / "copy" / "empty", (0, 0))
    (tmp_path / "copy" / "unlinked").write_bytes((tmp_path / "copy" / "data" / "same").read_bytes())
    (tmp_path / "copy" / "unlinked").replace(tmp_path / "copy" / "data" / "same")
    layout = Layout(tmp_path / "layout")
    layout.image([plain])
    for source in (*others, str(tmp_path / "copy"), str(layout.path), f"layer:{made.digest}"):
        assert one(store, source) == made, source
    assert len(list((store.directory / "trees").iterdir())) == 1
    assert (made.directory / "data" / "same").stat().st_nlink == 1
    assert os.readlink(made.directory / "bin" / "link") == "/data/deep/file"
    assert (made.directory / "bin" / "tool").stat().st_mtime == 1_700_000_000


def changed(**fields: Any) -> list[tuple[tarfile.TarInfo, bytes]]:
    """A small layer with something else about its one file."""
    info, data = member("d/f", fields.pop("data", b"one"), **{"mode": 0o644, **fields})
    return [folder("d", 0o755), (info, data)]


def test_the_digest_counts_what_can_be_told_apart_and_nothing_else(store: LayerStore, tmp_path: Path) -> None:
    def digest(*members: Any) -> str:
        return one(store, saved(tmp_path, tar(*members), hashlib.sha256(repr(members).encode()).hexdigest())).digest

    first = digest(*changed())
    assert digest(*changed(mtime=5, uid=7, gname="x")) == first
    assert digest(*changed(mode=0o4755)) == digest(*changed(mode=0o755))
    others = [
        changed(data=b"two"),
        changed(data=b""),
        changed(mode=0o755),
        [folder("d", 0o700), *changed()[1:]],
        [*changed(), member("d/g")],
        [*changed(), folder("e")],
        [folder("d"), link("d/f", "one")],
        [folder("d"), member("d/.wh.f")],
        [*changed(), member("d/.wh..wh..opq")],
        [folder("d"), folder("d/f")],
    ]
    digests = [first, *(digest(*members) for members in others)]
    assert len(set(digests)) == len(digests)


def test_the_form_of_a_digest_is_this(store: LayerStore, tmp_path: Path) -> None:
    """Written down by hand: a store of one version is read by the next."""

    def fields(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    content = hashlib.blake2b(b"one", digest_size=32).digest()
    form = b"rollforward layer 1" + fields(b"d", b"d", b"755", b"") + fields(b"f", b"d/f", b"644", content)
    expected = hashlib.blake2b(form, digest_size=32).hexdigest()
    assert one(store, saved(tmp_path, tar(*changed()))).digest == expected


def test_whiteouts_and_opaque_directories(store: LayerStore, tmp_path: Path) -> None:
    tree = one(
        store,
        saved(
            tmp_path,
            tar(
                member("gone/.wh.name"),
                member(".wh.top"),
                folder("whole"),
                member("whole/.wh..wh..opq"),
                member("whole/kept", b"kept"),
                member("both/.wh.x"),
                member("both/x", b"there"),  # hides only what lies below
                member("dir/.wh.sub"),
                folder("dir/sub"),
                member("late/x", b"there"),
                member("late/.wh.x"),
                member(".wh..wh.plnk", b"aufs"),
            ),
        ),
    ).directory
    for name in ("gone/name", "top"):
        status = (tree / name).lstat()
        assert stat.S_ISCHR(status.st_mode)
        assert status.st_rdev == 0
    assert os.getxattr(tree / "whole", OPAQUE) == b"y"
    assert os.getxattr(tree / "dir" / "sub", OPAQUE) == b"y"
    assert (tree / "whole" / "kept").read_bytes() == b"kept"
    assert [(tree / name / "x").read_bytes() for name in ("both", "late")] == [b"there"] * 2
    assert sorted(os.listdir(tree)) == ["both", "dir", "gone", "late", "top", "whole"]


DEVICE = {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}
HOSTILE: dict[str, tuple[Sequence[tuple[tarfile.TarInfo, bytes]], str]] = {
    "absolute": ([member("/etc/passwd", b"x")], "leaves the layer"),
    "up": ([member("../out", b"x")], "leaves the layer"),
    "up inside": ([member("a/../../out", b"x")], "leaves the layer"),
    "through a link": ([link("a", "/etc"), member("a/passwd", b"x")], "no directory of the layer"),
    "through a link up": ([link("a", "../../.."), member("a/out", b"x")], "no directory of the layer"),
    "through a link inside": ([folder("d"), link("a", "d"), member("a/x", b"x")], "no directory of the layer"),
    "directory over a link out": (
        [link("a", "/"), folder("a"), link("a/b", "/"), member("a/b/c", b"x")],
        "no directory",
    ),
    "through a file": ([member("a", b"x"), member("a/b", b"x")], "no directory of the layer"),
    "hard link out": ([link("a", "../../secret", is_hard=True)], "leaves the layer"),
    "hard link absolute": ([link("a", "/etc/passwd", is_hard=True)], "leaves the layer"),
    "hard link through a link": ([link("d", "/etc"), link("a", "d/passwd", is_hard=True)], "cannot be had"),
    "hard link to a link": ([link("l", "/etc/passwd"), link("a", "l", is_hard=True)], "cannot be had"),
    "hard link to a directory": ([folder("d"), link("a", "d", is_hard=True)], "no regular file"),
    "hard link to nothing": ([link("a", "b", is_hard=True)], "cannot be had"),
    "whiteout up": ([member("a/.wh...", b"")], "hides no name"),
    "whiteout of nothing": ([member(".wh.", b"")], "hides no name"),
    "whiteout through a link": ([link("a", "/etc"), member("a/.wh.passwd")], "no directory of the layer"),
    "opaque through a link": ([link("a", "/etc"), member("a/.wh..wh..opq")], ""),
    "opaque root": ([member(".wh..wh..opq")], "hides all"),
    "device": ([member("null", **DEVICE)], "no directory, regular file or link"),
    "block device": ([member("sda", type=tarfile.BLKTYPE, devmajor=8)], "no directory, regular file or link"),
    "pipe": ([member("pipe", type=tarfile.FIFOTYPE)], "no directory, regular file or link"),
    "unknown": ([member("odd", type=b"Q")], "no directory, regular file or link"),
    "too deep": ([member("d/" * 2001 + "x", b"x")], "longer than"),
    "long name": ([member("n" * 256, b"x")], "longer than"),
    "not too long a name": ([member("n" * 255, b"x")], ""),
    "NUL": ([member("a", pax_headers={"path": "a\0b"})], "leaves the layer"),
    "link to nothing": ([member("a", type=tarfile.SYMTYPE, pax_headers={"linkpath": ""})], "link to no path"),
    "long link": ([link("a", "x" * 5000)], "too long"),
    "negative size": ([member("a", pax_headers={"size": "-1"})], "no whole tar archive"),
    "huge size": ([member("a", pax_headers={"size": "9" * 30})], "no whole tar archive"),
    "a word as size": ([member("a", pax_headers={"size": "many"})], "no whole tar archive"),
    "many bytes": ([member(f"f{n}", b"x" * MIB) for n in range(5)], "max_bytes"),
    "many files": ([member(f"f{n}") for n in range(2001)], "max_files"),
    "many directories": (
        [folder("/".join(["d"] * n)) for n in range(1, 700)] + [folder(f"e{n}") for n in range(1400)],
        "max_files",
    ),
    "deep by itself": ([member("/".join(["d"] * 1990) + f"/{n}/x") for n in range(20)], "max_files"),
    "many bytes of nothing": ([member(f".wh..wh.{n}", b"x" * MIB) for n in range(5)], "max_bytes"),
    "many names of one": (
        [member("f", b"x" * MIB), *(link(f"g{n}", "f", is_hard=True) for n in range(5))],
        "max_bytes",
    ),
    "replaced directory": ([folder("d"), member("d", b"x")], "a directory and something else"),
    "root as a file": ([member(".", b"x")], "its root is no directory"),
    "sparse": ([member("a", pax_headers={"GNU.sparse.size": "1"})], "sparse"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("packed", [False, True])
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(
    store: LayerStore, tmp_path: Path, what: str, packed: bool
) -> None:
    members, said = HOSTILE[what]
    data = tar(*members)
    source = saved(tmp_path, gzip.compress(data, 1) if packed else data)
    canary = tmp_path / "store" / "canary"
    passwd = Path("/etc/passwd").stat()
    if said:
        with pytest.raises(LayerError, match=said) as refused:
            one(store, source)
        assert source in str(refused.value)
        assert not list((store.directory / "trees").iterdir())
    else:
        layer = one(store, source)
        assert tree_digest(layer.directory)[0] == layer.digest
    assert not list((store.directory / "making").iterdir())
    assert not canary.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"layer.tar", "store"}
    after = Path("/etc/passwd").stat()
    assert (after.st_mtime_ns, after.st_size, after.st_nlink) == (passwd.st_mtime_ns, passwd.st_size, passwd.st_nlink)


def test_long_headers_and_bombs_are_refused_before_they_are_held(
    store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    read = layers_archive.Hashed.read

    def watched(self: Any, size: int, /) -> bytes:
        most.append(size)
        return read(self, size)

    monkeypatch.setattr(layers_archive.Hashed, "read", watched)
    for kind in (b"x", b"g", b"L", b"K"):
        info = tarfile.TarInfo("h")
        info.type, info.size = kind, 1 << 40
        with pytest.raises(LayerError, match="header of 1099511627776 bytes"):
            one(store, saved(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + bytes(2048)))
    zeros = io.BytesIO()
    with gzip.GzipFile(fileobj=zeros, mode="wb", mtime=0) as file:
        info = tarfile.TarInfo("bomb")
        info.size = 1 << 30
        file.write(info.tobuf())
        for _ in range(64):
            file.write(bytes(MIB))
    behind = tar(member("a")) + bytes(64 * MIB)
    for bomb in (zeros.getvalue(), gzip.compress(behind, 1), zstd(behind)):
        with pytest.raises(LayerError, match="max_bytes"):
            one(store, saved(tmp_path, bomb))
    assert max(most) <= MIB + 512
    assert not list((store.directory / "making").iterdir())


def header(data: bytes, kind: bytes = b"x") -> bytes:
    """An extended header before a member."""
    info = tarfile.TarInfo("h")
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    """Of an extended header."""
    said = f" {key}={value}\n".encode()
    size = len(said) + 1
    while len(str(size)) + len(said) != size:
        size += 1
    return str(size).encode() + said


def test_headers_without_members_end_as_files_would(store: LayerStore, tmp_path: Path) -> None:
    for kind in (b"x", b"g", b"L", b"K"):
        bomb = header(record("comment", "c"), kind) * 2001 + tar(member("a"))
        with pytest.raises(LayerError, match="more than 2000 files"):
            one(store, saved(tmp_path, bomb))
    within = header(record("comment", "c")) * 1999 + tar(member("a"))
    assert (one(store, saved(tmp_path, within)).directory / "a").is_file()


def test_records_are_read_once_and_only_those_of_use_are_held(store: LayerStore, tmp_path: Path) -> None:
    """Global ones, other at each member, would be held to the end and looked through at every member."""
    most = b"6 k=v\n" * (MIB // 6)
    with pytest.raises(LayerError, match="extended header of more than 256 records"):
        one(store, saved(tmp_path, header(most) + tar(member("a"))))
    held: list[int] = []
    extend = layers_archive._extend

    def watched(info: tarfile.TarInfo, records: dict[str, str]) -> None:
        held.append(len(records))
        extend(info, records)

    bomb = b"".join(
        header(b"".join(record(f"k{n}.{i}", "v" * 300) for i in range(200)), b"g") + tar(member(f"f{n}", b"x"))[:1024]
        for n in range(50)
    )
    path = saved(tmp_path, bomb + bytes(1024))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_archive, "_extend", watched)
        tree = one(store, path).directory
    assert len(list(tree.iterdir())) == 50
    assert max(held) == 0


def test_records_of_use_count_in_their_order_and_malformed_ones_do_not(store: LayerStore, tmp_path: Path) -> None:
    shared = header(record("path", "shared") + record("mtime", "5.5"), b"g")
    own = header(record("path", "first") + record("comment", "x" * 5000) + record("path", "own"))
    tree = one(store, saved(tmp_path, shared + own + tar(member("a"))[:512] + tar(member("b")))).directory
    assert sorted(path.name for path in tree.iterdir()) == ["own", "shared"]
    assert (tree / "own").stat().st_mtime == 5
    for bad in (
        b"0 a=b\n",
        b"6 a=b",
        b"6 a=bb\n",
        b"9 a=b\n",
        b" a=b\n",
        b"-6 a=b\n",
        b"5 ab\n",
        b"1" * 70,
        b"99999999999 a=b\n",
    ):
        with pytest.raises(LayerError, match=r"malformed|no whole"):
            one(store, saved(tmp_path, header(bad) + tar(member("a"))))
    for key in ("size", "mtime"):
        with pytest.raises(LayerError, match=f"a {key} of 100 characters"):
            one(store, saved(tmp_path, header(record(key, "1" * 100)) + tar(member("a"))))


def test_setuid_and_what_its_owner_could_not_read(store: LayerStore, tmp_path: Path) -> None:
    tree = one(
        store,
        saved(
            tmp_path, tar(member("s", b"x", mode=0o6755), folder("d", 0o1777), folder("n", 0), member("n/f", mode=0))
        ),
    ).directory
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in tree.rglob("*")}
    assert modes == {"s": 0o755, "d": 0o1777, "n": 0o700, "f": 0o400}


def test_an_archive_cut_anywhere_is_refused_or_whole(store: LayerStore, tmp_path: Path) -> None:
    data = tar(member("a", b"x" * 700), folder("d"))
    whole = one(store, saved(tmp_path, data)).digest
    end = data.rstrip(b"\0")
    for size in [*range(0, len(end), 97), len(end) // 512 * 512]:
        with pytest.raises(LayerError):
            one(store, saved(tmp_path, data[:size]))
    packed = gzip.compress(data)
    for size in range(1, len(packed), 7):
        with pytest.raises(LayerError):
            one(store, saved(tmp_path, packed[:size]))
    for number in range(60):
        place = number * len(packed) // 60
        flipped = bytearray(packed)
        flipped[place] ^= 0x10
        with contextlib.suppress(LayerError):  # or it is a bit of a header that says nothing
            assert one(store, saved(tmp_path, bytes(flipped))).digest == whole


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("absent", "is not there"),
        ("layer:abc", "no digest"),
        (f"layer:{'0' * 64}", "not in the store"),
        ("file#name", "no OCI layout"),
    ],
)
def test_sources_that_are_none(store: LayerStore, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "file").write_bytes(tar(member("a")))
    name = source if source.startswith("layer:") else str(tmp_path / source)
    with pytest.raises(LayerError, match=said):
        store.layers(name)


@pytest.mark.parametrize("odd", ["pipe", "device", "socket"])
def test_a_directory_with_what_no_layer_has(store: LayerStore, tmp_path: Path, odd: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    kinds = {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}
    try:
        os.mknod(source / odd, kinds[odd] | 0o600, os.makedev(1, 3) if odd == "device" else 0)
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(LayerError, match=f"'{odd}' is no directory"):
        store.layers(str(source))


def test_a_source_is_read_again_only_when_it_changed(
    store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("one")
    first = one(store, str(source))

    def refuse(*_: object) -> None:
        pytest.fail("it was read again")

    with monkeypatch.context() as patch:
        patch.setattr(layers_tree, "read_parts", refuse)
        assert one(store, str(source)) == first
        assert one(LayerStore(LayersConfig(dir=str(store.directory))), str(source)) == first
    (source / "d" / "f").write_text("two")
    second = one(store, str(source))
    assert second.digest != first.digest
    assert (first.directory / "d" / "f").read_text() == "one"


def test_images_of_an_oci_layout(store: LayerStore, tmp_path: Path) -> None:
    low, high = tar(member("a", b"low")), tar(member(".wh.a"), member("b", b"high"))
    layout = Layout(tmp_path / "layout")
    layout.image([low, high], name="one")
    layout.image([low], name="two", compress=False)
    layout.image([tar(member("foreign"))], machine="s390x")
    source = str(layout.path)
    both = store.layers(f"{source}#one")
    assert [sorted(os.listdir(layer.directory)) for layer in both] == [["a"], ["a", "b"]]
    assert store.layers(f"{source}#two") == both[:1]
    with pytest.raises(LayerError, match="2 images for this machine"):
        store.layers(source)
    with pytest.raises(LayerError, match="0 images named 'three'"):
        store.layers(f"{source}#three")
    nested = layout.json({"manifests": layout.manifests[1:2]}, "application/vnd.oci.image.index.v1+json")
    layout.write([nested])
    assert store.layers(source) == both[:1]
    layout.write([layout.json({"manifests": [nested]}, "application/vnd.oci.image.index.v1+json")])
    assert store.layers(source) == both[:1]


def damage_blob(layout: Layout) -> None:
    path = layout.path / "blobs" / "sha256" / blob_of(layout).removeprefix("sha256:")
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)


def blob_of(layout: Layout) -> str:
    manifest = layout.path / "blobs" / "sha256" / layout.manifests[0]["digest"].removeprefix("sha256:")
    return json.loads(manifest.read_bytes())["layers"][0]["digest"]


def swap_blob(layout: Layout) -> None:
    path = layout.path / "blobs" / "sha256" / blob_of(layout).removeprefix("sha256:")
    path.write_bytes(tar(member("evil", b"x")))


def with_digest(digest: str) -> Callable[[Layout], None]:
    return lambda layout: layout.write([{**layout.manifests[0], "digest": digest}])


def loop(layout: Layout) -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    entry = layout.manifests[0]
    for _ in range(8):
        entry = layout.json({"manifests": [entry]}, kind)
    layout.write([entry])


def pipe_blob(layout: Layout) -> None:
    path = layout.path / "blobs" / "sha256" / blob_of(layout).removeprefix("sha256:")
    path.unlink()
    os.mkfifo(path)


def another_manifest(layout: Layout) -> None:
    """Of the same length, and as good as the first."""
    path = layout.path / "blobs" / "sha256" / layout.manifests[0]["digest"].removeprefix("sha256:")
    path.write_bytes(path.read_bytes().replace(b"octet-stream", b"octet-strean"))


def another_layer(layout: Layout) -> None:
    """As the manifest says, and not as the configuration does."""
    layout.manifests.clear()
    blob, config = layout.blob(tar(member("evil"))), layout.json({"rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}, "")
    layout.write([layout.json({"config": config, "layers": [blob]}, "")])


def fewer_layers(layout: Layout) -> None:
    blob, config = layout.blob(tar(member("evil"))), layout.json({"rootfs": {"diff_ids": []}}, "")
    layout.write([layout.json({"config": config, "layers": [blob]}, "")])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (another_manifest, "it is damaged"),
        (another_layer, "and the image says"),
        (fewer_layers, "1 layers and its configuration 0"),
        (damage_blob, "damaged"),
        (swap_blob, "it is damaged"),
        (with_digest("sha256:../../../../etc/passwd"), "is no digest"),
        (with_digest("md5:" + "0" * 32), "is no digest"),
        (with_digest("sha256:" + "0" * 64), "cannot be read"),
        (loop, "lead to each other"),
        (pipe_blob, "no regular file"),
        (lambda layout: (layout.path / "index.json").write_text("[" * 100_000), "is not what a layout has"),
        (lambda layout: (layout.path / "index.json").write_text("{}"), "is not what a layout has"),
        (lambda layout: (layout.path / "index.json").unlink(), "cannot be read"),
        (lambda layout: layout.write([{**layout.manifests[0], "size": 7}]), "it is damaged"),
    ],
)
def test_a_layout_that_is_damaged_or_lies(
    store: LayerStore, tmp_path: Path, harm: Callable[[Layout], Any], said: str
) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image([tar(member("a", b"x" * 9000))])
    harm(layout)
    with pytest.raises(LayerError, match=said):
        store.layers(str(layout.path))
    assert not list((store.directory / "trees").iterdir())
    assert not list((store.directory / "making").iterdir())


_HARMS = (
    "mkdir",
    "open",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "symlink",
    "mknod",
    "utime",
    "fchmod",
    "write",
    "close",
)


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Does the work in a process that is killed before the n-th of its calls that change something; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = number
        for name in _HARMS:
            real = getattr(os, name)

            def counting(*arguments: Any, real: Any = real, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            setattr(os, name, counting)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_point_leaves_a_store_that_is_used_as_before(tmp_path: Path) -> None:
    source = saved(tmp_path, tar(folder("d"), member("d/f", b"x" * 3000), link("l", "d/f"), member("d/.wh.g")))
    with LayerStore(LayersConfig(dir=str(tmp_path / "whole"))) as whole:
        digest = one(whole, source).digest
    number, points = 0, 0
    while True:
        place = LayersConfig(dir=str(tmp_path / f"store{number}"))
        was_killed = killed_at(number, lambda place=place: LayerStore(place).layers(source))
        with LayerStore(place) as store:
            for path in (store.directory / "trees").iterdir() if (store.directory / "trees").exists() else ():
                assert tree_digest(path)[0] == path.name == digest
            assert {info.digest for info in store.infos()} <= {digest}
            layer = one(store, source)
            assert layer.digest == digest
            assert (layer.directory / "d" / "f").read_bytes() == b"x" * 3000
            assert not list((store.directory / "making").iterdir())
        points += was_killed
        if not was_killed:
            break
        number += 1
    assert points > 30


def test_a_kill_at_any_point_of_collecting_leaves_whole_layers_or_none(tmp_path: Path) -> None:
    source = saved(tmp_path, tar(folder("d"), member("d/f", b"x")))
    place, number = LayersConfig(dir=str(tmp_path / "store")), 0
    while True:
        with LayerStore(place) as store:
            layer = one(store, source)
            store.layer_file(layer)
        was_killed = killed_at(number, lambda: LayerStore(place).collect(unused_s=0.0))
        with LayerStore(place) as store:
            again = one(store, source)
            assert tree_digest(again.directory)[0] == again.digest == layer.digest
            assert not list((store.directory / "making").iterdir())
        number += 1
        if not was_killed:
            break
    assert number > 5


def test_what_somebody_holds_is_not_removed_and_what_nobody_used_is(tmp_path: Path) -> None:
    place = LayersConfig(dir=str(tmp_path / "store"))
    first, second = (saved(tmp_path, tar(member(name)), name) for name in ("a", "b"))
    holder, other = LayerStore(place), LayerStore(place)
    kept, gone = one(holder, first), one(other, second)
    file = other.layer_file(gone)
    assert [info.is_held for info in other.infos()] == [True, True]
    assert other.collect(unused_s=0.0) == []
    other.close()
    assert other.collect(unused_s=3600.0) == []
    assert [info.digest for info in other.collect(unused_s=0.0)] == [gone.digest]
    assert (kept.directory.exists(), gone.directory.exists(), file.exists()) == (True, False, False)
    assert [info.source for info in other.infos()] == [first]
    with pytest.raises(LayerError, match="not in the store"):
        other.layers(f"layer:{gone.digest}")
    assert one(other, second) == gone
    holder.close()


def test_many_who_want_the_same_get_one(tmp_path: Path) -> None:
    source = saved(tmp_path, tar(*(member(f"f{n}", os.urandom(2000)) for n in range(300))))
    place = LayersConfig(dir=str(tmp_path / "store"))
    pids: list[int] = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                layer = one(LayerStore(place), source)
                status = 0 if tree_digest(layer.directory)[0] == layer.digest else 2
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 6
    store = LayerStore(place)
    assert len(store.infos()) == 1
    assert not list((store.directory / "making").iterdir())


def test_a_store_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailableError, match=r"sandbox\.container\.layers\.dir"):
        LayerStore(LayersConfig(dir=str(tmp_path / "file" / "store"))).layers(saved(tmp_path, tar(member("a"))))


def test_an_image_file_has_the_tree_in_it_with_root_as_owner(store: LayerStore, tmp_path: Path) -> None:
    members = (folder("d", 0o700), member("d/f", b"x" * 9000, uid=1234), link("l", "d/f"), member(".wh.gone"))
    layer = one(store, saved(tmp_path, tar(*members)))
    file = store.layer_file(layer)
    made = file.stat()
    assert store.layer_file(layer) == file
    assert os.path.samestat(file.stat(), made), "it is not made again"
    assert not file.stat().st_mode & 0o222

    def asked(command: str) -> str:
        debugfs = Path(find_program("ext4")).with_name("debugfs")
        return subprocess.run([debugfs, "-R", command, file], capture_output=True, text=True, check=True).stdout

    assert "Mode:  0700" in asked("stat /d")
    assert "User:     0   Group:     0" in asked("stat /d/f")
    assert asked("cat /d/f") == "x" * 9000
    assert "character special" in asked("stat /gone")
