"""The model as the engine runs it: weights, cache storage, and a forward over chunks of many sequences.

Here: tensors. Not here: who owns which slot or block (pool.py), which tokens are due (local.py).
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollforward.model.cache import allocate_cache, copy_sequence
from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.routing import Routing
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer
from rollforward.model.weights import ModelWeights, build_weights
from rollforward.rollout.engine.sequence import Sequence
from rollforward.rollout.types import Int16Array


class Chunk(NamedTuple):
    """Tokens of one sequence that the next forward computes: the first ones that are not in its cache."""

    sequence: Sequence
    """Whose tokens."""
    length: int
    """How many, at least 1."""


class ForwardRunner:
    """Runs the model's forward over the cache. One thread.

    States: empty -> with weights (``load``) -> with storage (``allocate``); both may be replaced while no sequence is
    in flight.
    """

    def __init__(self, model_config: ModelConfig, precision: Precision) -> None:
        """Allocate nothing yet."""
        self._model_config = model_config
        self._transformer = Transformer(model_config, precision)
        self._values: dict[str, Tensor] = {}
        self._weights: ModelWeights | None = None
        self._storage: dict[str, Tensor] = {}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The very tensors that the forward reads, by canonical name."""
        return self._values

    def load(self, tensors: Mapping[str, PackedTensor]) -> None:
        """Unpack published bytes into own memory: what is hashed is what is sampled with."""
        self._values = {name: unpack_published(packed).clone() for name, packed in tensors.items()}
        self._weights = build_weights(self._model_config, self._values)

    def allocate(self, *, num_slots: int, num_blocks: int) -> None:
        """Replace the cache storage."""
        self._storage = allocate_cache(self._model_config, num_slots=num_slots, num_blocks=num_blocks)

    @property
    def storage(self) -> dict[str, Tensor]:
        """The cache planes, by name; see model/cache.py."""
        return self._storage

    def copy(self, source: Sequence, targets: SequenceOf[Sequence], *, num_shared: int) -> None:
        """Copy one sequence's cache and routes to others with the same tokens, which have its first blocks already.
        Mutates the targets as ``run`` does."""
        owners = [(target.slot, target.blocks[num_shared:]) for target in targets]
        copy_sequence(self._storage, (source.slot, source.blocks[num_shared:]), owners)
        for target in targets:
            target.num_cached = source.num_cached
            if source.routes is not None and target.routes is not None:
                target.routes.record(0, np.concatenate(source.routes.known()))

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        """Copy what a slot holds to another: a prefix's snapshot is taken or given."""
        copy_sequence(self._storage, (source_slot, ()), [(target_slot, ())])

    def run(self, chunks: SequenceOf[Chunk]) -> Tensor:
        """Compute the chunks' tokens, cache them, and record their routes where a sequence asks.

        Args:
            chunks: at least one; each sequence has slot and blocks, and occurs once.

        Returns:
            [B, M, D] float32: streams after the last token of each chunk, for ``logits``.

        Invariants: a chunk's result does not depend on the other chunks. Mutates the cache and what the sequences know
        of it: ``num_cached`` and ``routes``.
        """
        assert self._weights is not None, "generate checks that weights are loaded"
        segments = [
            Segment(start=sequence.num_cached, length=length, slot=sequence.slot, blocks=sequence.blocks)
            for sequence, length in chunks
        ]
        batch = SegmentBatch(segments, window=self._model_config.sliding_window)
        token_T = torch.tensor(
            [
                token
                for sequence, length in chunks
                for token in sequence.token_ids[sequence.num_cached : sequence.num_cached + length]
            ]
        )
        routing = Routing(self._model_config) if any(one.sequence.routes is not None for one in chunks) else None
        streams_TMD = self._transformer.streams(self._weights, token_T, batch, self._storage, routing=routing)
        if routing is not None:
            _record_routes(chunks, routing.taken_TLK().numpy())
        for sequence, length in chunks:
            sequence.num_cached += length
        return streams_TMD[batch.last_token_B]

    def logits(self, streams_BMD: Tensor) -> Tensor:
        """Return the logits of the next token, [B, V] float32."""
        assert self._weights is not None, "run comes before"
        return self._transformer.logits(self._weights, self._transformer.hidden(self._weights, streams_BMD))


def _record_routes(chunks: SequenceOf[Chunk], routes_TLK: Int16Array) -> None:
    offset = 0
    for sequence, length in chunks:
        if sequence.routes is not None:
            sequence.routes.record(sequence.num_cached, routes_TLK[offset : offset + length])
        offset += length
