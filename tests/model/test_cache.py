"""Cache layout and its bytes, reads and writes, and copies.

Not proven here: that decode on it equals prefill (parity/test_bit_contract.py); who owns slots and blocks (rollout/).
"""

import dataclasses

import msgspec
import pytest
import torch

from rollforward.model.cache import (
    CacheView,
    allocate_cache,
    block_tokens,
    cache_bytes,
    cache_planes,
    copy_sequence,
    index_key_format,
    kv_entry_format,
    window_slots,
)
from rollforward.model.config import preset
from rollforward.model.plan_model import cache_plan
from rollforward.model.segments import Segment, SegmentBatch
from tests.helpers.tiny import tiny_config


def test_planes_of_the_tiny_preset():
    # Layers: window, CSA 4, HCA 32, CSA 4; a block covers 32 tokens = 8 CSA entries + 1 HCA entry.
    planes = {plane.name: (plane.kind, plane.rows, plane.width) for plane in cache_planes(tiny_config())}
    expected = {}
    for layer in range(4):
        expected[f"layers.{layer}.window"] = ("state", 16, 80)
    for layer in (1, 3):
        expected |= {
            f"layers.{layer}.raw_kv": ("state", 8, 160),
            f"layers.{layer}.raw_score": ("state", 8, 160),
            f"layers.{layer}.entries": ("block", 8, 80),
            f"layers.{layer}.index_raw_kv": ("state", 8, 64),
            f"layers.{layer}.index_raw_score": ("state", 8, 64),
            f"layers.{layer}.index_entries": ("block", 8, 32),
        }
    expected |= {
        "layers.2.raw_kv": ("state", 32, 80),
        "layers.2.raw_score": ("state", 32, 80),
        "layers.2.entries": ("block", 1, 80),
    }
    assert planes == expected


def test_block_tokens_is_the_least_common_multiple():
    assert block_tokens(preset("flash")) == 128
    assert block_tokens(tiny_config()) == 32
    rates = msgspec.structs.replace(
        tiny_config().compress_rates, compressed_sparse_attention=6, heavily_compressed_attention=40
    )
    config = msgspec.structs.replace(tiny_config(), compress_rates=rates, compress_ratios=(0, 6, 40, 6, 0))
    assert block_tokens(config) == 120
    assert window_slots(config, 1) == 12
    assert window_slots(config, 2) == 40
    plain = msgspec.structs.replace(tiny_config(), compress_ratios=(0, 0, 0, 0, 0))
    assert block_tokens(plain) == 16


def test_rows_of_the_official_storage():
    """FlashMLA's page: 576 bytes of payload per entry, then 8 of scales; the indexer's 64 and 4."""
    entry, key = kv_entry_format(preset("flash")), index_key_format(preset("flash"))
    assert (entry.payload_bytes, entry.scale_bytes, entry.num_bytes, entry.alignment_bytes) == (576, 8, 584, 576)
    assert (key.payload_bytes, key.scale_bytes, key.num_bytes) == (64, 4, 68)
    pages = {
        plane.name.removeprefix("layers.2."): plane.rows * plane.packed.num_bytes
        for plane in cache_planes(preset("flash"))
        if plane.name.startswith("layers.2.")
    }
    assert pages == {
        "window": 128 * 584,
        "raw_kv": 32 * 1024,
        "raw_score": 32 * 1024,
        "entries": 32 * 584,
        "index_raw_kv": 8 * 1024,
        "index_raw_score": 8 * 1024,
        "index_entries": 32 * 68,
    }


def test_bytes_are_the_published_ones():
    flash = cache_bytes(preset("flash"), packed=True)
    assert flash.per_token == 21 * (584 + 68) / 4 + 20 * 584 / 128 == 3514.25
    assert flash.window == 43 * 128 * 584
    assert flash.state == 1024 * (21 * (64 + 16) + 20 * 512)
    # A page of 32 CSA entries is padded to 33 * 576, one of an HCA entry to 2 * 576, 32 index keys are 34 lines.
    assert flash.padded_block == 21 * (33 * 576 + 34 * 64) + 20 * 2 * 576
    assert flash.of_sequence(129) == flash.window + flash.state + 2 * flash.padded_block
    assert round(cache_bytes(preset("pro"), packed=True).per_token) == 5031


@pytest.mark.parametrize("name", ["flash", "pro", "mini", "tiny"])
@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_the_planes_are_those_that_plan_says(name: str, packed: bool):
    config = preset(name)
    planned, planes = cache_plan(config, packed=packed), cache_bytes(config, packed=packed)
    assert dataclasses.asdict(planes) == msgspec.structs.asdict(planned)
    assert planned.per_token == planes.per_token
    assert planned.per_token == cache_bytes(config, packed=packed, block_multiple=3).per_token
    tokens = 3 * planes.block_tokens
    assert [planned.of_sequence(n) for n in (0, 1, tokens, tokens + 1)] == [
        planes.of_sequence(n) for n in (0, 1, tokens, tokens + 1)
    ]


@pytest.mark.parametrize("name", ["mini", "tiny"])
def test_plan_says_what_storage_takes(name: str):
    """Slots and blocks of a real cache, as the CPU holds them."""
    config, planned = preset(name), cache_plan(preset(name), packed=False)
    storage = allocate_cache(config, num_slots=2, num_blocks=5)
    assert sum(plane.nbytes for plane in storage.values()) == 2 * planned.per_sequence + 5 * planned.padded_block


@pytest.mark.parametrize("multiple", [1, 2])
def test_bytes_as_stored_are_those_of_the_tensors(multiple: int):
    config = tiny_config()
    stored = cache_bytes(config, packed=False, block_multiple=multiple)
    storage = allocate_cache(config, num_slots=3, num_blocks=5, block_multiple=multiple)
    sizes = {"block": 0, "state": 0}
    for name, plane in storage.items():
        sizes["block" if name.endswith("entries") else "state"] += plane.nbytes
    assert sizes == {"state": 3 * stored.per_sequence, "block": 5 * stored.padded_block}
    assert stored.block_tokens == 32 * multiple


def test_storage_is_zeroed_and_has_a_unit_per_slot_or_block():
    storage = allocate_cache(tiny_config(), num_slots=3, num_blocks=5)
    assert storage["layers.0.window"].shape == (3, 16, 80)
    assert storage["layers.1.entries"].shape == (5, 8, 80)
    assert all(not plane.any() and plane.dtype == torch.float32 for plane in storage.values())


def test_ring_is_read_before_and_written_after():
    storage = {"x": torch.arange(2 * 4.0).view(2, 4, 1).clone()}
    batch = SegmentBatch([Segment(start=5, length=2, slot=1), Segment(start=0, length=6, slot=0)], window=4)
    view = CacheView(storage, batch)
    before = view.read_ring("x")
    assert before.flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]  # in the order of the batch's segments
    view.write_ring("x", torch.tensor([[105.0], [106], [200], [201], [202], [203], [204], [205]]).requires_grad_(True))
    assert storage["x"][1].flatten().tolist() == [4, 105, 106, 7]
    assert storage["x"][0].flatten().tolist() == [204, 205, 202, 203]
    assert before.flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert not storage["x"].requires_grad


def test_entries_go_to_their_sequences_blocks():
    storage = {"x": torch.zeros(6, 2, 1)}
    batch = SegmentBatch(
        [Segment(start=6, length=7, slot=0, blocks=(5, 2)), Segment(start=0, length=4, slot=1, blocks=(3,))], window=4
    )
    view = CacheView(storage, batch)
    assert view.entries_per_block("x") == 2
    index = batch.entry_index(4, overlap=True, entries_per_block=2)
    flat = view.write_entries("x", index, torch.tensor([[11.0], [12.0], [20.0]]))
    # Entries 1 and 2 of the first sequence: block 5 row 1, block 2 row 0; entry 0 of the second: block 3 row 0.
    assert storage["x"].flatten().tolist() == [0, 0, 0, 0, 12, 0, 20, 0, 0, 0, 0, 11]
    assert flat.shape == (12, 1)


def test_copy_takes_every_plane_and_leaves_the_rest():
    storage = {
        "a.window": torch.arange(4.0).view(4, 1, 1).clone(),
        "a.entries": torch.arange(8.0).view(8, 1, 1).clone(),
    }
    copy_sequence(storage, (1, (2, 7)), [(0, (3, 4, 5)), (3, (6, 1, 0))])
    assert storage["a.window"].flatten().tolist() == [1, 1, 2, 1]
    assert storage["a.entries"].flatten().tolist() == [0, 7, 2, 2, 7, 5, 2, 7]


def test_copy_of_a_real_layout_is_exact_and_independent():
    storage = allocate_cache(tiny_config(), num_slots=2, num_blocks=5)
    generator = torch.Generator().manual_seed(0)
    for plane in storage.values():
        plane.copy_(torch.randn(plane.shape, generator=generator))
    copy_sequence(storage, (0, (1, 2)), [(1, (4, 3))])
    for name, plane in storage.items():
        source, target = (plane[[1, 2]], plane[[4, 3]]) if name.endswith("entries") else (plane[0], plane[1])
        assert torch.equal(source, target), name
    storage["layers.0.window"][0] += 1
    assert not torch.equal(storage["layers.0.window"][0], storage["layers.0.window"][1])


def test_a_copy_to_nobody_changes_nothing():
    storage = {"a.window": torch.ones(2, 1, 1), "a.entries": torch.ones(3, 1, 1)}
    copy_sequence(storage, (0, (1,)), [])
    assert all(bool((plane == 1).all()) for plane in storage.values())


def test_a_slot_that_does_not_exist_is_no_silent_write():
    storage = {"x": torch.zeros(2, 4, 1)}
    view = CacheView(storage, SegmentBatch([Segment(start=0, length=1, slot=2)], window=4))
    with pytest.raises(IndexError):
        view.read_ring("x")
    with pytest.raises(IndexError):
        view.write_ring("x", torch.ones(1, 1))
