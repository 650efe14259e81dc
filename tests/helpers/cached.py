"""Sequences on one explicit cache, advanced in any order and in chunks of any size."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from rollforward.model.cache import allocate_cache, block_tokens, copy_sequence
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.transformer import Model


class CachedSequences:
    """A cache whose blocks are dealt to slots at random; rows that no sequence has written hold NaN.

    ``restart`` begins another sequence in a slot. As in an engine, it clears nothing: what the last one left stays.
    """

    def __init__(self, model: Model, *, num_slots: int, max_tokens: int, seed: int = 0) -> None:
        self._model = model
        self._per_slot = -(-max_tokens // block_tokens(model.config))
        num_blocks = num_slots * self._per_slot + 1
        self.storage = allocate_cache(
            model.config, num_slots=num_slots, num_blocks=num_blocks, device=model.weights.embed.device
        )
        for name, plane in self.storage.items():
            plane[1 if name.endswith("entries") else 0 :] = torch.nan
        self._random = random.Random(seed)
        blocks = self._random.sample(range(1, num_blocks), num_blocks - 1)
        self._blocks = [blocks[slot * self._per_slot :][: self._per_slot] for slot in range(num_slots)]
        self._position = [0] * num_slots

    def restart(self, *slots: int) -> None:
        """Begin other sequences in these slots; their blocks are dealt anew among them."""
        blocks = [block for slot in slots for block in self._blocks[slot]]
        self._random.shuffle(blocks)
        for index, slot in enumerate(slots):
            self._position[slot] = 0
            self._blocks[slot] = blocks[index * self._per_slot :][: self._per_slot]

    def place(self, slot: int, position: int) -> None:
        """Go on from a position whose past was written into the slot's own place from outside."""
        self._position[slot] = position

    def owner(self, slot: int) -> tuple[int, tuple[int, ...]]:
        """A slot and its blocks in order."""
        return slot, tuple(self._blocks[slot])

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give the targets the source's past."""
        copy_sequence(self.storage, self.owner(source), [self.owner(slot) for slot in targets])
        for slot in targets:
            self._position[slot] = self._position[source]

    @torch.no_grad()
    def step(self, pieces: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Run one forward over (slot, next tokens) pieces; return the logits [n, V] of each."""
        model = self._model
        segments = [
            Segment(start=self._position[slot], length=len(tokens), slot=slot, blocks=self.owner(slot)[1])
            for slot, tokens in pieces
        ]
        batch = SegmentBatch(segments, window=model.config.sliding_window)
        token_T = torch.cat([tokens for _, tokens in pieces])
        streams = model.transformer.streams(model.weights, token_T, batch, self.storage)
        logits = model.transformer.logits(model.weights, model.transformer.hidden(model.weights, streams))
        for slot, tokens in pieces:
            self._position[slot] += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in pieces]))

    def run(self, slot: int, token_T: Tensor, chunk: int) -> Tensor:
        """Advance one slot over all tokens, ``chunk`` at a time; return the logits [T, V]."""
        return torch.cat([self.step([(slot, part)])[0] for part in token_T.split(chunk)])
