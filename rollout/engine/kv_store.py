"""Saved key-values: what a preempted sequence had in the cache, on disk, so that its resumption need not prefill.

    wal/engine-0.kv/   s3-p0-m1.a0.1f0c2a9b.safetensors   planes of one sequence: state whole, entries that exist
                       s3-p0-m1.a0.1f0c2a9b.json          manifest, written last: without it the planes do not count

The log is the truth, this is an accelerator: a state that is missing, damaged, of other weights, of another layout or
of other tokens is refused with a reason, and the sequence is prefilled from the log to the same bits. Nothing found in
the directory raises.

Here: one sequence's state out of and into cache storage (pure); the directory. Not here: bytes and checksums
(kv_file.py), which sequences are worth saving (preempt.py), when a state is used (resume.py).
"""

import re
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rollforward.model.cache import block_tokens, cache_planes
from rollforward.model.config import ModelConfig
from rollforward.model.train_config import Precision
from rollforward.rollout.engine.kv_file import (
    WeightsId,
    decode_manifest,
    decode_planes,
    encode_manifest,
    encode_state,
    fingerprint_of,
    layout_of,
    tokens_digest,
)
from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_files import TEMPORARY_SUFFIX, read_regular, replace_file

_PLANES_SUFFIX = ".safetensors"
_MANIFEST_SUFFIX = ".json"
_UNKNOWN_VERSION = -1
_OUR_NAME = re.compile(r"(?P<stem>[\w-]+\.a\d+\.[0-9a-f]{8})(?P<suffix>(\.safetensors|\.json)(\.tmp)?)")


class KvRejection(StrEnum):
    """Why a saved state is not used."""

    MISSING = "missing"
    """A file that the log or the manifest names is not there or cannot be read."""
    DAMAGED = "damaged"
    """A checksum or a length does not hold, or the file is none of ours."""
    FOREIGN = "foreign"
    """It is of another request, another attempt or other tokens."""
    OTHER_WEIGHTS = "other_weights"
    """It was computed with other weights than those in use."""
    OTHER_LAYOUT = "other_layout"
    """The model, the layout of the cache, the precision or the version of the arithmetic is another one."""
    BEYOND_LOG = "beyond_log"
    """It covers more than the log: tokens, or routes where the request records them."""


class KvState(NamedTuple):
    """One sequence's share of the cache."""

    num_cached: int
    """Tokens whose key-values it holds, from the first on."""
    planes: Mapping[str, Tensor]
    """Plane -> [rows, width] of a state plane, [entries, width] of a block plane."""


class KvStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a store wrote since it was opened; the source of `resume/kv_saved` and what stands beside it."""

    saved: int = 0
    """States that were written."""
    saved_bytes: int = 0
    """Bytes of their planes."""
    refused_budget: int = 0
    """States that were not written because longer ones fill the budget."""
    refused_disk: int = 0
    """States that the disk did not take."""
    evicted: int = 0
    """States that gave way to longer ones."""


class _Kept(NamedTuple):
    request: str
    policy_version: int
    num_cached: int
    num_bytes: int


def export_sequence(
    storage: Mapping[str, Tensor], slot: int, blocks: SequenceOf[int], num_cached: int, config: ModelConfig
) -> dict[str, Tensor]:
    """Copy one sequence's state out of cache storage.

    Args:
        storage: from ``allocate_cache``.
        slot: the sequence's. blocks: the sequence's in order; they cover ``num_cached`` tokens.
        num_cached: tokens in the cache, >= 1.
        config: the model.

    Returns:
        Plane -> its rows in memory of their own: [rows, width] of a state plane, [entries, width] of a block plane,
        where only the entries that exist are taken (a partly filled block ends there).

    Invariants: pure. ``import_sequence`` of it, into any slot and any blocks, gives the same future.
    """
    planes: dict[str, Tensor] = {}
    for plane in cache_planes(config):
        held = storage[plane.name]
        if plane.kind == "state":
            planes[plane.name] = held[slot, :, : plane.width].clone()
            continue
        count = num_cached * plane.rows // block_tokens(config)
        # A storage may have blocks of several times as many tokens; entries are counted by their ratio.
        block, row = _entry_places(blocks, count, held.shape[1])
        planes[plane.name] = held[block, row, : plane.width].clone()
    return planes


def import_sequence(
    storage: Mapping[str, Tensor], slot: int, blocks: SequenceOf[int], planes: Mapping[str, Tensor]
) -> None:
    """Write a state from ``export_sequence`` into a slot and blocks, which need not be those it came from.

    Args:
        storage: from ``allocate_cache``, of the same layout. Mutated, in these units alone.
        slot: a slot of the sequence. blocks: its blocks in order, enough for the entries of the planes.
        planes: from ``export_sequence``.
    """
    for name, rows in planes.items():
        held = storage[name]
        width = rows.shape[1]
        if name.endswith("entries"):
            block, row = _entry_places(blocks, len(rows), held.shape[1])
            held[block, row, :width] = rows
        else:
            held[slot, :, :width] = rows


def _entry_places(blocks: SequenceOf[int], count: int, per_block: int) -> tuple[Tensor, Tensor]:
    ordinal = torch.arange(count)
    owned = torch.tensor([*blocks], dtype=torch.int64)
    assert count <= len(owned) * per_block, f"{count} entries in {len(owned)} blocks of {per_block}"
    assert not bool((owned == 0).any()), "block 0 stands for absent entries"
    return owned[ordinal // per_block], ordinal % per_block


class KvStore:
    """The directory of one replica's saved states. One process (the holder of the log beside it), one thread.

    A state is written whole (under a temporary name, synced, renamed) or not at all, its manifest last. It goes when
    the same request is saved again, when the request is closed, when newer weights are in use, or when a longer one
    needs its bytes.
    """

    def __init__(self, directory: Path, config: ModelConfig, precision: Precision, *, max_bytes: int) -> None:
        """Open the directory, make it if absent, and remove what a killed process left half done.

        Args:
            directory: of this replica alone. What is not named as our files are is left alone.
            config: the model. precision: number formats of the forward.
            max_bytes: of planes kept. The longest sequences are kept first: a state has a fixed part, so they save
                the most prefill per byte. One that is replaced goes after the new one has come.

        Invariants: never raises: a directory that cannot be made or listed holds nothing, and refuses what is saved.
        """
        self.directory = directory
        self._max_bytes = max_bytes
        self._layout = layout_of(config)
        self.fingerprint = fingerprint_of(config, precision, self._layout)
        self._stats = KvStats()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._kept = self._scan()
        except OSError:
            # All of it can be computed again; the log must be opened all the same.
            self._kept = {}

    @property
    def stats(self) -> KvStats:
        """What was written since the store was opened."""
        return self._stats

    @property
    def num_bytes(self) -> int:
        """Bytes of the planes kept."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def save(
        self,
        request_id: RequestId,
        attempt: int,
        *,
        num_cached: int,
        weights: WeightsId,
        token_ids: SequenceOf[int],
        planes: Mapping[str, Tensor],
    ) -> str | None:
        """Write one sequence's state; when this returns it is durable.

        Args:
            request_id: the request. attempt: its attempt.
            num_cached: tokens that the state stands for.
            weights: which computed it.
            token_ids: the sequence's tokens, ``num_cached`` of them or more.
            planes: from ``export_sequence``.

        Returns:
            The manifest's name, for the log's KV_SAVED record; None where longer states fill the budget or the disk
            refuses, which is counted. What the request had saved before is there still; shorter states of others may
            have made room for one that the disk then refused.
        """
        data, manifest = encode_state(
            planes,
            request_id=request_id,
            attempt=attempt,
            weights=weights,
            num_cached=num_cached,
            token_ids=token_ids,
            fingerprint=self.fingerprint,
        )
        replaced = [stem for stem, kept in self._kept.items() if kept.request == str(request_id)]
        evicted = self._room_for(len(data), num_cached, replaced)
        if evicted is None:
            self._count(refused_budget=1)
            return None
        # A name is never used twice, so that no pair of files is ever one of each of two states.
        stem = f"{request_id}.a{attempt}.{secrets.token_hex(4)}"
        for name in evicted:
            self._remove(name)
        self._count(evicted=len(evicted))
        try:
            replace_file(self.directory / (stem + _PLANES_SUFFIX), data)
            replace_file(self.directory / (stem + _MANIFEST_SUFFIX), encode_manifest(manifest))
        except OSError:
            self._unlink(stem)
            self._count(refused_disk=1)
            return None
        self._kept[stem] = _Kept(str(request_id), weights.policy_version, num_cached, len(data))
        for name in replaced:
            self._remove(name)
        self._count(saved=1, saved_bytes=len(data))
        return stem + _MANIFEST_SUFFIX

    def load(
        self,
        name: str,
        request_id: RequestId,
        attempt: int,
        *,
        weights: WeightsId,
        token_ids: SequenceOf[int],
        max_cached: int,
    ) -> KvState | KvRejection:
        """Read a state back, or say why it may not be used.

        Args:
            name: of the manifest, as the log's KV_SAVED record has it.
            request_id, attempt: whose it must be.
            weights: in use.
            token_ids: the sequence's tokens in the log.
            max_cached: tokens that the state may stand for at most.

        Returns:
            The state, bit for bit as it was saved; or why it may not be used, and then its files are gone.

        Invariants: never raises on what is in the directory.
        """
        match = _OUR_NAME.fullmatch(name)
        if match is None or match["suffix"] != _MANIFEST_SUFFIX:
            return KvRejection.MISSING
        stem = match["stem"]
        found = self._load(
            stem,
            (str(request_id), attempt),
            weights=weights,
            token_ids=token_ids,
            max_cached=max_cached,
        )
        if isinstance(found, KvRejection):
            self._kept.pop(stem, None)
            self._unlink(stem)
        return found

    def discard(self, request_id: RequestId) -> None:
        """Remove what is saved of a request: it is closed."""
        self._remove_where(lambda kept: kept.request == str(request_id))

    def discard_older(self, policy_version: int) -> None:
        """Remove what weights before these computed."""
        for stem, kept in self._kept.items():
            if kept.policy_version == _UNKNOWN_VERSION:
                # A damaged manifest stays for the request that may still ask for it, and no longer.
                self._kept[stem] = kept._replace(policy_version=policy_version)
        self._remove_where(lambda kept: kept.policy_version < policy_version)

    def _load(
        self,
        stem: str,
        owner: tuple[str, int],
        *,
        weights: WeightsId,
        token_ids: SequenceOf[int],
        max_cached: int,
    ) -> KvState | KvRejection:
        content = self._read(stem + _MANIFEST_SUFFIX)
        if content is None:
            return KvRejection.MISSING
        manifest = decode_manifest(content)
        if manifest is None:
            return KvRejection.DAMAGED
        is_foreign = (manifest.request, manifest.attempt) != owner
        for rejection, is_met in (
            (KvRejection.FOREIGN, is_foreign),
            (KvRejection.OTHER_WEIGHTS, manifest.weights != weights),
            (KvRejection.OTHER_LAYOUT, manifest.fingerprint != self.fingerprint),
            (KvRejection.BEYOND_LOG, not 0 < manifest.num_cached <= max_cached),
            (KvRejection.FOREIGN, manifest.tokens != tokens_digest(token_ids[: max(0, manifest.num_cached)])),
        ):
            if is_met:
                return rejection
        data = self._read(stem + _PLANES_SUFFIX)
        if data is None:
            return KvRejection.MISSING
        planes = decode_planes(data, manifest, self._layout)
        return KvRejection.DAMAGED if planes is None else KvState(manifest.num_cached, planes)

    def _room_for(self, num_bytes: int, num_cached: int, replaced: SequenceOf[str]) -> list[str] | None:
        """Return which states make room, the shortest first and none that is longer than the new one; None where they
        cannot."""
        others = sorted(
            ((kept.num_cached, stem) for stem, kept in self._kept.items() if stem not in replaced), reverse=True
        )
        used = num_bytes + sum(self._kept[stem].num_bytes for _, stem in others)
        evicted: list[str] = []
        while used > self._max_bytes:
            if not others or others[-1][0] >= num_cached:
                return None
            stem = others.pop()[1]
            used -= self._kept[stem].num_bytes
            evicted.append(stem)
        return evicted

    def _scan(self) -> dict[str, _Kept]:
        """Return what is there, and remove temporary files and planes that no manifest followed."""
        found: dict[str, set[str]] = {}
        for path in self.directory.iterdir():
            match = _OUR_NAME.fullmatch(path.name)
            if match is not None:
                found.setdefault(match["stem"], set()).add(match["suffix"])
        kept: dict[str, _Kept] = {}
        for stem, suffixes in found.items():
            for suffix in suffixes - {_PLANES_SUFFIX, _MANIFEST_SUFFIX}:
                _unlink_quietly(self.directory / (stem + suffix))
            if _MANIFEST_SUFFIX not in suffixes:
                self._unlink(stem)
                continue
            manifest = decode_manifest(self._read(stem + _MANIFEST_SUFFIX) or b"")
            if manifest is None:
                # Stays until its request is loaded, which counts it, or closed; its planes take room.
                num_bytes = _size(self.directory / (stem + _PLANES_SUFFIX))
                kept[stem] = _Kept(stem.split(".")[0], _UNKNOWN_VERSION, 0, num_bytes)
            else:
                kept[stem] = _Kept(
                    manifest.request, manifest.weights.policy_version, manifest.num_cached, manifest.file_bytes
                )
        return kept

    def _read(self, name: str) -> bytes | None:
        """Return the content of a file, or None where it cannot be read."""
        try:
            return read_regular(self.directory / name)
        except OSError:
            return None

    def _remove_where(self, is_gone: Callable[[_Kept], bool]) -> None:
        for stem in [stem for stem, kept in self._kept.items() if is_gone(kept)]:
            self._remove(stem)

    def _remove(self, stem: str) -> None:
        del self._kept[stem]
        self._unlink(stem)

    def _unlink(self, stem: str) -> None:
        # The manifest first: planes without one do not count.
        for suffix in (_MANIFEST_SUFFIX, _PLANES_SUFFIX):
            for name in (stem + suffix, stem + suffix + TEMPORARY_SUFFIX):
                _unlink_quietly(self.directory / name)

    def _count(self, **more: int) -> None:
        stats = self._stats
        self._stats = msgspec.structs.replace(stats, **{name: getattr(stats, name) + n for name, n in more.items()})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unlink_quietly(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # It takes room and is refused when read; the next opening tries again.
        return
