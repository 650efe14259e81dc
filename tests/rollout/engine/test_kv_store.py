"""Proves: one sequence's cache goes out and into any place with the same future; a saved state comes back bit for bit,
or is refused with the right reason, whatever happens to its files, the disk or the process; the directory keeps its
bound.

Not here: that a resumed request has the uninterrupted bits (test_kv_resume.py).
"""

import os
import resource
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.cache import allocate_cache, cache_bytes, cache_planes
from rollforward.model.config import CompressRates, ModelConfig
from rollforward.model.transformer import Model
from rollforward.rollout.engine import kv_store
from rollforward.rollout.engine.kv_file import WeightsId, decode_manifest, encode_manifest
from rollforward.rollout.engine.kv_store import KvRejection, KvState, KvStore, export_sequence, import_sequence
from rollforward.rollout.types import RequestId
from tests.helpers.bits import different_bits
from tests.helpers.cached import CachedSequences
from tests.helpers.tiny import random_params, random_tokens, tiny_config

CONFIG = tiny_config()
# One layer of each kind with a compressor, and rows of a few numbers: files small enough to attack everywhere.
SMALL: ModelConfig = msgspec.structs.replace(
    CONFIG,
    num_hidden_layers=2,
    compress_ratios=(2, 8, 0),
    compress_rates=CompressRates(compressed_sparse_attention=2, heavily_compressed_attention=8),
    sliding_window=2,
    head_dim=4,
    qk_rope_head_dim=2,
)
FIRST, SECOND = RequestId(3, 0, 1), RequestId(3, 0, 2)
TOKENS = tuple(range(100, 140))
WEIGHTS = WeightsId(4, "a")


def _planes(num_cached: int, config: ModelConfig = SMALL, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    storage = allocate_cache(config, num_slots=2, num_blocks=8)
    for plane in storage.values():
        plane.normal_()
    return export_sequence(storage, 1, [5, 2, 7, 3, 1], num_cached, config)


def _save(
    store: KvStore, request: RequestId = FIRST, *, num_cached: int = 17, version: int = 4, seed: int = 0
) -> str | None:
    planes = _planes(num_cached, seed=seed)
    weights = WeightsId(version, "a")
    return store.save(request, 0, num_cached=num_cached, weights=weights, token_ids=TOKENS, planes=planes)


def _load(store: KvStore, name: str, request: RequestId = FIRST, **changes: Any) -> KvState | KvRejection:
    arguments: dict[str, Any] = {"weights": WEIGHTS, "token_ids": TOKENS, "max_cached": 39} | changes
    return store.load(name, request, arguments.pop("attempt", 0), **arguments)


def _open(directory: Path, **changes: Any) -> KvStore:
    arguments: dict[str, Any] = {"config": SMALL, "precision": "native"} | changes
    return KvStore(directory, arguments.pop("config"), arguments.pop("precision"), **{"max_bytes": 1 << 30} | arguments)


def _is_same(found: KvState | KvRejection, num_cached: int = 17, seed: int = 0) -> bool:
    expected = _planes(num_cached, seed=seed)
    return (
        isinstance(found, KvState)
        and found.num_cached == num_cached
        and found.planes.keys() == expected.keys()
        and not any(different_bits(found.planes[name], plane) for name, plane in expected.items())
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, random_params(CONFIG), precision="native")


@pytest.mark.parametrize("num_cached", [1, 7, 17, 32, 70])
def test_the_future_is_the_same_in_any_slot_and_blocks(model: Model, num_cached: int) -> None:
    """Unwritten rows hold NaN on both sides; the tokens after it cross ring ends, entries and a block's end."""
    token_T = random_tokens(CONFIG, (num_cached + 36,))
    source = CachedSequences(model, num_slots=2, max_tokens=120, seed=1)
    source.run(1, token_T[:num_cached], 11)
    planes = export_sequence(source.storage, *source.owner(1), num_cached, CONFIG)
    target = CachedSequences(model, num_slots=3, max_tokens=160, seed=2)
    target.run(0, random_tokens(CONFIG, (90,), seed=9), 13)
    target.restart(0)  # what is there is another sequence's
    before = {name: plane.clone() for name, plane in target.storage.items()}
    import_sequence(target.storage, *target.owner(0), planes)
    slot, blocks = target.owner(0)
    for name, plane in target.storage.items():
        others = [unit for unit in range(len(plane)) if unit not in (blocks if name.endswith("entries") else (slot,))]
        assert different_bits(plane[others], before[name][others]) == 0
    target.place(0, num_cached)
    ours = target.run(0, token_T[num_cached:], 9)
    assert different_bits(ours, source.run(1, token_T[num_cached:], 36)) == 0


def test_only_entries_that_exist_are_taken() -> None:
    """37 tokens: nine entries of ratio 4 and one of ratio 32, of blocks that hold eight and one."""
    planes = _planes(37, CONFIG)
    rows = {name: len(plane) for name, plane in planes.items()}
    assert rows["layers.1.entries"] == rows["layers.3.index_entries"] == 9
    assert rows["layers.2.entries"] == 1
    assert {rows[plane.name] - plane.rows for plane in cache_planes(CONFIG) if plane.kind == "state"} == {0}
    # At a block's end it is what a sequence takes by the cache's own account.
    assert sum(plane.nbytes for plane in _planes(64, CONFIG).values()) == cache_bytes(CONFIG, packed=False).of_sequence(
        64
    )
    assert _planes(3, CONFIG)["layers.1.entries"].shape == (0, CONFIG.head_dim)


def test_blocks_of_twice_as_many_tokens_hold_the_same_sequence() -> None:
    storage = allocate_cache(CONFIG, num_slots=1, num_blocks=4, block_multiple=2)
    planes = _planes(70, CONFIG)
    import_sequence(storage, 0, [3, 1], planes)
    back = export_sequence(storage, 0, [3, 1], 70, CONFIG)
    assert all(different_bits(back[name], plane) == 0 for name, plane in planes.items())


def test_a_state_comes_back_bit_for_bit_in_another_process_s_store(tmp_path: Path) -> None:
    planes = _planes(17)
    next(iter(planes.values()))[0, :3] = torch.tensor([-0.0, torch.nan, -torch.inf])
    store = _open(tmp_path)
    name = store.save(FIRST, 0, num_cached=17, weights=WEIGHTS, token_ids=TOKENS, planes=planes)
    assert name is not None
    found = _load(_open(tmp_path), name, max_cached=17)
    assert isinstance(found, KvState)
    assert all(different_bits(found.planes[key], plane) == 0 for key, plane in planes.items())
    assert (store.stats.saved, store.stats.saved_bytes) == (1, store.num_bytes)
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request": SECOND}, KvRejection.FOREIGN),
        ({"attempt": 1}, KvRejection.FOREIGN),
        ({"token_ids": (*TOKENS[:16], 99, *TOKENS[17:])}, KvRejection.FOREIGN),
        ({"weights": WeightsId(3, "a")}, KvRejection.OTHER_WEIGHTS),
        ({"weights": WeightsId(5, "a")}, KvRejection.OTHER_WEIGHTS),
        ({"weights": WeightsId(4, "b")}, KvRejection.OTHER_WEIGHTS),
        ({"max_cached": 16}, KvRejection.BEYOND_LOG),
        ({"max_cached": 0}, KvRejection.BEYOND_LOG),
    ],
)
def test_a_state_of_something_else_is_refused_and_goes(
    tmp_path: Path, changes: dict[str, Any], reason: KvRejection
) -> None:
    store = _open(tmp_path)
    name = _save(store)
    assert name is not None
    assert _load(store, name, **changes) == reason
    assert list(tmp_path.iterdir()) == []
    assert store.num_bytes == 0
    assert _load(store, name) == KvRejection.MISSING


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32"},
        {"config": msgspec.structs.replace(SMALL, index_topk=4)},
        {"config": msgspec.structs.replace(SMALL, sliding_window=3)},
        {"config": msgspec.structs.replace(SMALL, rms_norm_eps=1e-5)},
    ],
)
def test_another_model_layout_or_precision_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    name = _save(_open(tmp_path))
    assert name is not None
    assert _load(_open(tmp_path, **changes), name) == KvRejection.OTHER_LAYOUT


def test_tokens_after_the_cached_ones_do_not_matter(tmp_path: Path) -> None:
    name = _save(_open(tmp_path))
    assert name is not None
    assert _is_same(_load(_open(tmp_path), name, token_ids=(*TOKENS[:17], 5)))


@contextmanager
def _attacked(directory: Path, name: str) -> Generator[tuple[Path, Path]]:
    """Put the files back afterwards: a refused state is removed."""
    manifest = directory / name
    files = (manifest, manifest.with_suffix(".safetensors"))
    contents = [file.read_bytes() for file in files]
    yield files
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _attack_bits(directory: Path, bits_of: Callable[[int], range]) -> None:
    store = _open(directory)
    name = _save(store)
    assert name is not None
    for which in range(2):
        size = [*directory.glob("*.json"), *directory.glob("*.safetensors")][which].stat().st_size
        for bit in bits_of(size):
            with _attacked(directory, name) as files:
                _flip(files[which], bit)
                assert _load(store, name) == KvRejection.DAMAGED, (which, bit)
    assert _is_same(_load(store, name))


def _attack_lengths(directory: Path, lengths_of: Callable[[int], Iterable[int]]) -> None:
    store = _open(directory)
    name = _save(store)
    assert name is not None
    for which in range(2):
        size = [*directory.glob("*.json"), *directory.glob("*.safetensors")][which].stat().st_size
        for length in lengths_of(size):
            with _attacked(directory, name) as files:
                os.truncate(files[which], length)
                assert _load(store, name) == KvRejection.DAMAGED, (which, length)
    assert _is_same(_load(store, name))


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    _attack_bits(tmp_path, lambda size: range(size % 7, 8 * size, 73))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    _attack_bits(tmp_path, lambda size: range(8 * size))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_truncation_is_refused(tmp_path: Path) -> None:
    _attack_lengths(tmp_path, lambda size: range(size))


def test_a_truncated_and_a_longer_file_are_refused(tmp_path: Path) -> None:
    _attack_lengths(tmp_path, lambda size: (*range(size % 3, size, 11), size - 1, size + 1))


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    """Two requests with equal lengths, versions and tokens: only who they are, and the planes, differ."""
    names = [_save(_open(tmp_path), request, seed=seed) for request, seed in ((FIRST, 0), (SECOND, 1))]
    for suffixes, reason in (
        ((".safetensors",), KvRejection.DAMAGED),
        ((".json",), KvRejection.FOREIGN),
        ((".json", ".safetensors"), KvRejection.FOREIGN),
    ):
        for name, request in zip(names, (FIRST, SECOND), strict=True):
            directory = tmp_path / f"{len(suffixes)}{suffixes[0]}{request}"
            directory.mkdir()
            for source, target in (names, names[::-1]):
                assert source is not None
                assert target is not None
                for suffix in (".json", ".safetensors"):
                    taken = target if suffix in suffixes else source
                    content = (tmp_path / taken).with_suffix(suffix).read_bytes()
                    (directory / source).with_suffix(suffix).write_bytes(content)
            assert name is not None
            assert _load(_open(directory), name, request) == reason


def test_what_is_not_a_saved_state_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = _open(tmp_path)
    name = _save(store)
    assert name is not None
    outside = tmp_path.parent / "outside.json"
    outside.write_bytes((tmp_path / name).read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    for wrong in (
        "",
        "..",
        "../outside.json",
        str(outside),
        "a\0.json",
        name.replace("json", "safetensors"),
        "notes.txt",
    ):
        assert _load(store, wrong) == KvRejection.MISSING
    assert outside.exists()
    assert _is_same(_load(_open(tmp_path), name))
    assert (tmp_path / "notes.txt").exists()


def test_missing_files_and_folders_in_their_place_are_refused(tmp_path: Path) -> None:
    for index, suffix in enumerate((".json", ".safetensors")):
        for is_folder in (False, True):
            directory = tmp_path / f"{index}{is_folder}"
            store = _open(directory)
            name = _save(store)
            assert name is not None
            path = (directory / name).with_suffix(suffix)
            path.unlink()
            if is_folder:
                path.mkdir()
            assert _load(store, name) == KvRejection.MISSING
            assert _load(_open(directory), name) == KvRejection.MISSING
            assert _is_same(_load(store, _save(store) or ""))  # and the directory still takes others


def test_a_manifest_that_vouches_for_planes_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Not damage but a writer with a fault: every checksum holds."""
    store = _open(tmp_path)
    for changes in ({"num_cached": 9}, {"num_cached": 24}, {"plane_crc": {}}, {"format": 3}):
        name = _save(store)
        assert name is not None
        manifest = decode_manifest((tmp_path / name).read_bytes())
        assert manifest is not None
        changed = msgspec.structs.replace(manifest, **changes)
        if "num_cached" in changes:
            changed = msgspec.structs.replace(changed, tokens=kv_store.tokens_digest(TOKENS[: changed.num_cached]))
        (tmp_path / name).write_bytes(encode_manifest(changed))
        assert _load(store, name) == KvRejection.DAMAGED


@pytest.mark.parametrize("limit_bytes", [0, 100, 1000, 2000])
def test_a_full_disk_costs_the_state_and_nothing_else(tmp_path: Path, limit_bytes: int) -> None:
    """The limit on a file's size stands for a full disk: a real write fails."""
    store = _open(tmp_path)
    name = _save(store)
    assert name is not None
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        assert _save(store, num_cached=33) is None
        assert _save(store, SECOND, num_cached=33) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert store.stats.refused_disk == 2
    assert {path.name for path in tmp_path.iterdir()} == before
    assert _is_same(_load(store, name))
    assert _save(store, SECOND, num_cached=33) is not None


_CALLS = ("open", "write", "fsync", "replace", "close", "unlink")


def _kill_at(number: int) -> None:
    """SIGKILL this process at a system call of the store, a write half way through."""
    left = [number]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapped

    for name in _CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def _save_and_die(directory: Path, number: int) -> bool:
    """Replace FIRST's state in a child that is killed at its system call of this number; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            store = _open(directory)
            _kill_at(number)
            _save(store, num_cached=33, seed=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_at_every_system_call_of_a_save_the_old_or_the_new_state_is_there(tmp_path: Path) -> None:
    number, outcomes = 0, set()
    while True:
        directory = tmp_path / str(number)
        old = _save(_open(directory))
        assert old is not None
        was_killed = _save_and_die(directory, number)
        _open(directory)
        found = {path.name for path in directory.iterdir()}
        stems = {name.rsplit(".", 1)[0] for name in found}
        assert found == {stem + suffix for stem in stems for suffix in (".json", ".safetensors")}, "whole pairs alone"
        is_old = old in found
        assert is_old or len(stems) == 1
        new = next((stem + ".json" for stem in stems if stem + ".json" != old), None)
        if is_old:
            assert _is_same(_load(_open(directory), old))
        if new is not None:
            assert _is_same(_load(_open(directory), new), num_cached=33, seed=1)
        outcomes.add((is_old, new is not None))
        if not was_killed:
            break
        number += 1
    assert number > 10
    assert outcomes == {(True, False), (True, True), (False, True)}


def test_a_fresh_opening_removes_what_no_manifest_followed_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    name = _save(_open(tmp_path))
    assert name is not None
    other = "s1-p0-m0.a0.00000000"
    for leftover in (
        f"{other}.safetensors",
        f"{other}.json.tmp",
        f"{name}.tmp",
        "eval0-p1-m2.a12.89abcdef.safetensors.tmp",
    ):
        (tmp_path / leftover).write_bytes(b"x")
    for foreign in ("model.safetensors", "config.json", "x.tmp"):
        (tmp_path / foreign).write_bytes(b"x")
    _open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [name, name.replace(".json", ".safetensors"), "model.safetensors", "config.json", "x.tmp"]
    )


def test_a_second_save_replaces_the_first_and_others_stay(tmp_path: Path) -> None:
    store = _open(tmp_path)
    old, other = _save(store), _save(store, SECOND, seed=1)
    new = _save(store, num_cached=20, seed=2)
    assert len(list(tmp_path.iterdir())) == 4
    assert old is not None
    assert new is not None
    assert other is not None
    assert _load(store, old) == KvRejection.MISSING
    assert _is_same(_load(store, new), 20, 2)
    assert _is_same(_load(store, other, SECOND), 17, 1)


def test_states_go_when_their_request_is_closed_and_when_newer_weights_are_in_use(tmp_path: Path) -> None:
    store = _open(tmp_path)
    _save(store)
    _save(store, SECOND, version=5)
    damaged = tmp_path / (_save(store, RequestId(3, 1, 0), version=5) or "")
    damaged.write_bytes(b"")
    store = _open(tmp_path)
    store.discard(RequestId(3, 0, 3))
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    store.discard_older(4)
    # A damaged manifest names no version: its request may ask for it until the next weights.
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {str(FIRST), str(SECOND), "s3-p1-m0"}
    store.discard_older(5)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {str(SECOND)}
    store.discard(SECOND)
    assert list(tmp_path.iterdir()) == []


def test_the_budget_goes_to_the_longest(tmp_path: Path) -> None:
    """Room for two states of 16 tokens and a bit."""
    num_bytes = 0
    for index, length in enumerate((16, 16, 8)):
        store = _open(tmp_path / str(index))
        _save(store, num_cached=length)
        num_bytes += store.num_bytes if index < 2 else 8
    requests = [RequestId(0, 0, member) for member in range(5)]
    store = _open(tmp_path / "kept", max_bytes=num_bytes)
    assert _save(store, requests[0], num_cached=8) is not None
    assert _save(store, requests[1], num_cached=16) is not None
    assert _save(store, requests[2], num_cached=8) is None, "as long as the shortest: nobody gives way"
    assert _save(store, requests[3], num_cached=16) is not None
    assert _save(store, requests[4], num_cached=32, version=9) is not None
    kept = {path.name.split(".")[0] for path in (tmp_path / "kept").glob("*.json")}
    assert kept in ({str(requests[1]), str(requests[4])}, {str(requests[3]), str(requests[4])}, {str(requests[4])})
    assert store.num_bytes <= num_bytes
    assert (store.stats.refused_budget, store.stats.evicted) == (1, 4 - len(kept))
    assert _save(_open(tmp_path / "none", max_bytes=10)) is None
    assert list((tmp_path / "none").iterdir()) == []


def test_a_directory_that_cannot_be_made_holds_nothing_and_refuses_what_is_saved(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    store = _open(tmp_path / "kv")
    assert _save(store) is None
    assert (store.stats.refused_disk, store.num_bytes) == (1, 0)
    assert (tmp_path / "kv").read_text() == "a file"
