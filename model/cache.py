"""Key-value cache: what a sequence keeps between forwards, and how a forward reads and writes it.

Two kinds of storage, as in the report's serving section. **State** planes have a fixed size per sequence and belong to
a
slot: the ring of the sliding window and the rings of raw key-values that still wait for their entry (CSA overlap and
tail, HCA tail). **Block** planes hold compressed entries; a block covers lcm(m, m') tokens, so that every layer's
entries of those tokens live in the same block number. Block 0 is never written: its zeros stand for absent entries.

A ring holds position p in row p mod size, and every row read is checked against the positions that exist, so a slot
needs no clearing when a new sequence takes it.

Here: layouts, and reads and writes on storage that is handed in. Not here: who owns which slot or block (rollout/).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.segments import EntryIndex, SegmentBatch


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One tensor of the cache."""

    name: str
    """``layers.N.<what>``: window, raw_kv, raw_score, entries, and index_* for the indexer's own compressor."""
    kind: Literal["state", "block"]
    """``state``: one unit per slot. ``block``: one unit per block."""
    rows: int
    """Rows of one unit: ring size, or entries per block."""
    width: int
    """Elements of a row, float32 on the CPU."""


def block_tokens(config: ModelConfig) -> int:
    """Return the tokens that one cache block covers: the least common multiple of the compression ratios in use."""
    ratios = [ratio for ratio in config.compress_ratios if ratio > 0]
    return math.lcm(*ratios) if ratios else config.sliding_window


def window_slots(config: ModelConfig, layer: int) -> int:
    """Return L, the raw tokens that one entry of the layer reads: 2m for CSA, m for HCA."""
    return config.compress_ratios[layer] * (2 if config.layer_kind(layer) == "csa" else 1)


def cache_planes(config: ModelConfig) -> tuple[Plane, ...]:
    """List every plane of the trunk's cache in a fixed order."""
    planes = []
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        planes.append(Plane(name=prefix + "window", kind="state", rows=config.sliding_window, width=config.head_dim))
        kind = config.layer_kind(layer)
        if kind == "window":
            continue
        widths = {"": config.head_dim, "index_": config.index_head_dim}
        for role, entry_width in widths.items():
            if role == "index_" and kind != "csa":
                continue
            raw_width = entry_width * (2 if kind == "csa" else 1)
            slots = window_slots(config, layer)
            entries = block_tokens(config) // config.compress_ratios[layer]
            planes += [
                Plane(name=f"{prefix}{role}raw_kv", kind="state", rows=slots, width=raw_width),
                Plane(name=f"{prefix}{role}raw_score", kind="state", rows=slots, width=raw_width),
                Plane(name=f"{prefix}{role}entries", kind="block", rows=entries, width=entry_width),
            ]
    return tuple(planes)


def allocate_cache(config: ModelConfig, *, num_slots: int, num_blocks: int) -> dict[str, Tensor]:
    """Allocate zeroed storage for every plane: [slots or blocks, rows, width] float32.

    Args:
        config: the model.
        num_slots: sequences that may be in flight, >= 1.
        num_blocks: blocks including the reserved block 0, >= 1.
    """
    units = {"state": num_slots, "block": num_blocks}
    return {plane.name: torch.zeros(units[plane.kind], plane.rows, plane.width) for plane in cache_planes(config)}


class CacheView:
    """The storage as one layer's forward sees it, for the segments of one batch."""

    def __init__(self, storage: dict[str, Tensor], batch: SegmentBatch) -> None:
        """Bind storage (from ``allocate_cache``) to a batch whose segments have slots and blocks."""
        self._storage = storage
        self._batch = batch
        self._rings: dict[int, tuple[Tensor, Tensor]] = {}

    def entries_per_block(self, name: str) -> int:
        """Return how many entries of plane ``name`` one block holds."""
        return self._storage[name].shape[1]

    def read_ring(self, name: str) -> Tensor:
        """Return the ring rows of the batch's segments, [B * size, width], before this forward's tokens."""
        return self._storage[name][self._batch.slot_B].flatten(0, 1)

    def write_ring(self, name: str, values_TX: Tensor) -> None:
        """Store the last rows of every segment, position p in row p mod size. Mutates the storage."""
        plane = self._storage[name]
        size = plane.shape[1]
        if size not in self._rings:
            self._rings[size] = self._batch.ring_rows(size)
        token, row = self._rings[size]
        plane.view(-1, plane.shape[2])[row] = values_TX.detach()[token]

    def write_entries(self, name: str, index: EntryIndex, entries_Ee: Tensor) -> Tensor:
        """Store new entries in their blocks and return all rows of the plane, [blocks * rows, width]. Mutates
        storage."""
        plane = self._storage[name]
        flat = plane.view(-1, plane.shape[2])
        flat[self._batch.entry_rows(index, plane.shape[1])] = entries_Ee.detach()
        return flat


def copy_sequence(
    storage: dict[str, Tensor], source: tuple[int, tuple[int, ...]], targets: list[tuple[int, tuple[int, ...]]]
) -> None:
    """Copy one sequence's cache to others: members of a group share the prefill of their prompt. Mutates storage.

    Args:
        storage: from ``allocate_cache``.
        source: slot and blocks that hold the sequence.
        targets: slots and blocks of the copies; each has at least as many blocks as are in use.
    """
    source_slot, source_blocks = source
    target_slots = [slot for slot, _ in targets]
    count = min([len(source_blocks), *(len(blocks) for _, blocks in targets)])
    target_blocks = [block for _, blocks in targets for block in blocks[:count]]
    for name, plane in storage.items():
        if name.endswith("entries"):
            plane[target_blocks] = plane[list(source_blocks[:count])].repeat(len(targets), 1, 1)
        else:
            plane[target_slots] = plane[source_slot].clone()
