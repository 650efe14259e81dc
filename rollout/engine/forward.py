"""The model as the engine runs it: weights, cache storage, and a forward over chunks of many sequences.

Here: tensors. Not here: who owns which slot or block (pool.py), which tokens are due (local.py).
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear import row_linear
from rollforward.model.cache import allocate_cache, block_tokens, copy_sequence
from rollforward.model.config import ModelConfig
from rollforward.model.errors import WeightShapeError
from rollforward.model.fingerprint import value_fingerprint, with_format
from rollforward.model.precision import PackedTensor, unpack_into
from rollforward.model.routing import Routing
from rollforward.model.scoring import head_logprobs
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.shapes import TensorFormat, TensorSpec, param_specs
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer
from rollforward.model.weights import ModelWeights, build_weights
from rollforward.rollout.engine.sequence import Sequence
from rollforward.rollout.errors import WeightsError
from rollforward.rollout.types import Float32Array, Int16Array

_SCORED_ALONE = 8
"""So many last tokens of a scored prompt are computed one by one, as in decoding."""


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
        self._specs = {spec.name: spec for spec in param_specs(model_config)}
        self._values: dict[str, Tensor] = {}
        self._formats: dict[str, TensorFormat] = {}
        self._weights: ModelWeights | None = None
        self._storage: dict[str, Tensor] = {}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The very tensors that the forward reads, by canonical name."""
        return self._values

    @property
    def never_written(self) -> tuple[str, ...]:
        """Tensors that the last ``load`` did not write."""
        return tuple(name for name in self._specs if name not in self._formats)

    def load(self, tensors: Iterable[tuple[str, PackedTensor]]) -> None:
        """Unpack published bytes into the tensors that are there, one after another; the first time they are made.

        Args:
            tensors: canonical names and bytes; each is let go before the next is taken.

        Raises:
            WeightsError: a name or a shape is not this model's. What was written before stays written.
        """
        if self._weights is None:
            self._values = {name: _unwritten(spec) for name, spec in self._specs.items()}
            self._weights = build_weights(self._model_config, self._values)
        self._formats = {}
        for name, packed in tensors:
            if name not in self._values:
                raise WeightsError(f"{name} is no tensor of this engine's model. Publish the model that it serves")
            try:
                unpack_into(self._values[name], packed)
            except WeightShapeError as error:
                raise WeightsError(f"{name}: {error}") from error
            self._formats[name] = packed.format

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of every tensor that was written, from the values that the forward reads now."""
        return {
            name: value_fingerprint(with_format(self._specs[name], tensor_format), self._values[name])
            for name, tensor_format in self._formats.items()
        }

    def score(self, token_ids: SequenceOf[int]) -> Float32Array:
        """Return the log-probs of all tokens but the first, [T - 1], over a cache of their own; see ``Engine``."""
        assert self._weights is not None, "LocalEngine checks that weights are loaded"
        config = self._model_config
        num_blocks = 1 + -(-len(token_ids) // block_tokens(config))
        storage = allocate_cache(config, num_slots=1, num_blocks=num_blocks)
        # Odd cuts, which fall into windows and compressed entries.
        prefilled = max(len(token_ids) - 1 - _SCORED_ALONE, 1)
        first = (2 * prefilled + 2) // 3
        lengths = [first, prefilled - first, *[1] * (len(token_ids) - 1 - prefilled)]
        logprobs: list[Tensor] = []
        start = 0
        for length in filter(None, lengths):
            segment = Segment(start=start, length=length, slot=0, blocks=tuple(range(1, num_blocks)))
            batch = SegmentBatch([segment], window=config.sliding_window)
            token_T = torch.tensor(token_ids[start : start + length])
            next_T = torch.tensor(token_ids[start + 1 : start + 1 + length])
            hidden_TD = self.hidden(self._transformer.streams(self._weights, token_T, batch, storage))
            logprobs.append(head_logprobs(self.head, hidden_TD, next_T, temperature=1.0)[0])
            start += length
        return torch.cat(logprobs).numpy()

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
            [B, M, D]: streams after the last token of each chunk, for ``hidden``.

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

    def hidden(self, streams_BMD: Tensor) -> Tensor:
        """Return the vectors that the head reads, [B, D] float32."""
        assert self._weights is not None, "run comes before"
        return self._transformer.hidden(self._weights, streams_BMD)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return the logits of the next token, [B, V] float32."""
        return row_linear(hidden_BD, self.head)

    @property
    def head(self) -> Tensor:
        """The head that the forward reads, [V, D] float32."""
        assert self._weights is not None, "LocalEngine checks that weights are loaded"
        return self._weights.head


def _unwritten(spec: TensorSpec) -> Tensor:
    """A tensor that shows wherever it is read before it is written."""
    if spec.format == "int64":
        return torch.full(spec.shape, -1, dtype=torch.int64)
    return torch.full(spec.shape, torch.nan)


def _record_routes(chunks: SequenceOf[Chunk], routes_TLK: Int16Array) -> None:
    offset = 0
    for sequence, length in chunks:
        if sequence.routes is not None:
            sequence.routes.record(sequence.num_cached, routes_TLK[offset : offset + length])
        offset += length
