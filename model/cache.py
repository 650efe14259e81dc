"""Key-value cache: what a sequence keeps between forwards, and how a forward reads and writes it.

Two kinds of storage, as in the report's serving section. **State** planes have a fixed size per sequence and belong to
a
slot: the ring of the sliding window and the rings of raw key-values that still wait for their entry (CSA overlap and
tail, HCA tail). **Block** planes hold compressed entries; a block covers lcm(m, m') tokens, so that every layer's
entries of those tokens live in the same block number. Block 0 is never written: its zeros stand for absent entries.

The CPU keeps rows as float32. Where caches are packed (FlashMLA's layout), a row is a ``RowFormat``: 448 E4M3 bytes, 64
BF16 rotary dimensions and 8 bytes of scales for a window row or entry (584 B), packed E2M1 and its scales for an index
key (68 B), float32 for raw key-values. ``cache_bytes`` adds either up.

A ring holds position p in row p mod size, and every row read is checked against the positions that exist, so a slot
needs no clearing when a new sequence takes it.

Here: layouts, and reads and writes on storage that is handed in. Not here: who owns which slot or block (rollout/).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollforward.kernels.quant.formats import KV_GROUP, MXFP4_GROUP
from rollforward.model.config import ModelConfig
from rollforward.model.segments import EntryIndex, SegmentBatch

_SCALE_ALIGNMENT = 8
"""Scale bytes of an entry are padded to this."""

_CACHE_LINE = 64

_FP32_BYTES = 4

_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How a row is stored where the cache is packed. A page (the rows of one unit) has all payloads, then all
    scales."""

    name: Literal["kv_entry", "index_key", "fp32"]
    """``kv_entry``: E4M3, rotary dimensions BF16. ``index_key``: E2M1. ``fp32``: float32."""
    payload_bytes: int
    """Elements of a row."""
    scale_bytes: int
    """Scales of a row, their padding included."""
    alignment_bytes: int
    """A page of a block plane is padded to a multiple of this."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.payload_bytes + self.scale_bytes


def kv_entry_format(config: ModelConfig) -> RowFormat:
    """Return the format of a window row or compressed entry; 584 bytes with 448 + 64 dimensions."""
    payload = config.nope_head_dim + _BF16_BYTES * config.qk_rope_head_dim
    num_scales = math.ceil(config.nope_head_dim / KV_GROUP)
    scale_bytes = math.ceil(num_scales / _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
    return RowFormat(name="kv_entry", payload_bytes=payload, scale_bytes=scale_bytes, alignment_bytes=payload)


def index_key_format(config: ModelConfig) -> RowFormat:
    """Return the format of an index key; 68 bytes with 128 dimensions."""
    width = config.index_head_dim
    return RowFormat(
        name="index_key", payload_bytes=width // 2, scale_bytes=width // MXFP4_GROUP, alignment_bytes=_CACHE_LINE
    )


def fp32_format(width: int) -> RowFormat:
    """Return the format of a row of raw key-values or scores, and of every row on the CPU."""
    return RowFormat(name="fp32", payload_bytes=_FP32_BYTES * width, scale_bytes=0, alignment_bytes=1)


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
    packed: RowFormat
    """A row where the cache is packed."""

    @property
    def stored(self) -> RowFormat:
        """A row on the CPU."""
        return fp32_format(self.width)


@dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """What a sequence takes, MTP not counted.

    Example: cache_bytes(preset("flash"), packed=True).per_token == 3514.25
    """

    window: int
    """Sliding windows of a sequence."""
    state: int
    """Its raw key-values and scores that wait for their entry."""
    block: int
    """Entries of one block."""
    padded_block: int
    """The same with each plane's page padded."""
    block_tokens: int
    """Tokens that a block covers."""

    @property
    def per_token(self) -> float:
        """Growth with every token of a long sequence, padding not counted."""
        return self.block / self.block_tokens

    @property
    def per_sequence(self) -> int:
        """What every sequence takes, however short."""
        return self.window + self.state

    def of_sequence(self, num_tokens: int) -> int:
        """Return what a sequence of so many tokens occupies, padding included."""
        return self.per_sequence + math.ceil(num_tokens / self.block_tokens) * self.padded_block


def block_tokens(config: ModelConfig, *, multiple: int = 1) -> int:
    """Return the tokens that one cache block covers: the least common multiple of the compression ratios in use, or so
    many times it."""
    ratios = [ratio for ratio in config.compress_ratios if ratio > 0]
    return multiple * (math.lcm(*ratios) if ratios else config.sliding_window)


def window_slots(config: ModelConfig, layer: int) -> int:
    """Return L, the raw tokens that one entry of the layer reads: 2m for CSA, m for HCA."""
    return config.compress_ratios[layer] * (2 if config.layer_kind(layer) == "csa" else 1)


def cache_planes(config: ModelConfig, *, block_multiple: int = 1) -> tuple[Plane, ...]:
    """List every plane of the trunk's cache in a fixed order; see ``block_tokens`` for ``block_multiple``."""
    planes: list[Plane] = []
    entry = kv_entry_format(config)
    formats = {"": entry, "index_": index_key_format(config)}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        window = Plane(
            name=prefix + "window", kind="state", rows=config.sliding_window, width=config.head_dim, packed=entry
        )
        planes.append(window)
        kind = config.layer_kind(layer)
        if kind == "window":
            continue
        widths = {"": config.head_dim, "index_": config.index_head_dim}
        for role, entry_width in widths.items():
            if role == "index_" and kind != "csa":
                continue
            raw_width = entry_width * (2 if kind == "csa" else 1)
            slots = window_slots(config, layer)
            entries = block_tokens(config, multiple=block_multiple) // config.compress_ratios[layer]
            name = prefix + role
            planes += [
                Plane(name=f"{name}{raw}", kind="state", rows=slots, width=raw_width, packed=fp32_format(raw_width))
                for raw in ("raw_kv", "raw_score")
            ]
            planes.append(
                Plane(name=name + "entries", kind="block", rows=entries, width=entry_width, packed=formats[role])
            )
    return tuple(planes)


def cache_bytes(config: ModelConfig, *, packed: bool, block_multiple: int = 1) -> CacheBytes:
    """Add up the planes of a model.

    Args:
        config: the model.
        packed: in the packed formats, else as the CPU stores them.
        block_multiple: see ``block_tokens``.
    """
    window = state = block = padded = 0
    for plane in cache_planes(config, block_multiple=block_multiple):
        row = plane.packed if packed else plane.stored
        num_bytes = plane.rows * row.num_bytes
        if plane.kind == "block":
            block += num_bytes
            padded += math.ceil(num_bytes / row.alignment_bytes) * row.alignment_bytes
        elif plane.name.endswith("window"):
            window += num_bytes
        else:
            state += num_bytes
    tokens = block_tokens(config, multiple=block_multiple)
    return CacheBytes(window=window, state=state, block=block, padded_block=padded, block_tokens=tokens)


def allocate_cache(
    config: ModelConfig,
    *,
    num_slots: int,
    num_blocks: int,
    block_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Allocate zeroed storage for every plane: [slots or blocks, rows, width] float32.

    Args:
        config: the model.
        num_slots: sequences that may be in flight, >= 1.
        num_blocks: blocks including the reserved block 0, >= 1.
        block_multiple: see ``block_tokens``.
        device: that of the weights.
    """
    units = {"state": num_slots, "block": num_blocks}
    planes = cache_planes(config, block_multiple=block_multiple)
    return {plane.name: torch.zeros(units[plane.kind], plane.rows, plane.width, device=device) for plane in planes}


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
        source: slot, and the blocks that are to be copied: all of a sequence, or those that its copies do not share.
        targets: slots and blocks of the copies; the first blocks of each are written.
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
