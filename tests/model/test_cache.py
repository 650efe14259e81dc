"""Cache layout, reads and writes, and copies.

Not proven here: that decode on it equals prefill (parity/test_bit_contract.py); who owns slots and blocks (rollout/).
"""

import msgspec
import pytest
import torch

from rollforward.model.cache import CacheView, allocate_cache, block_tokens, cache_planes, copy_sequence, window_slots
from rollforward.model.config import preset
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
