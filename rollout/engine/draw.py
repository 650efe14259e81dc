"""One draw for every sequence whose logits are there: from sequences to the columns of a STEP record.

Not here: the sampler's arithmetic (sampler.py), log-probs (model/scoring.py, which the trainer calls too).
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.loss import linear_logprob_ref
from rollforward.model.scoring import head_logprobs
from rollforward.rollout.engine.sampler import cut_vocabulary, draw_tokens, signed_seed
from rollforward.rollout.engine.sequence import Sequence, split_sets
from rollforward.rollout.types import Float32Array, Int32Array, KeptSets
from rollforward.rollout.wal_step import StepRoutes


class Drawn(NamedTuple):
    """Columns of one step, a row per sequence."""

    token_ids: Int32Array
    """[B] int32."""
    logprobs: Float32Array
    """[B] float32. Log-prob of each under the distribution that it was drawn from."""
    kept: KeptSets | None
    """[B] sets that they were drawn from; None where no sequence cuts the vocabulary."""


def draw_next(sequences: SequenceOf[Sequence], logits_BV: Tensor, hidden_BD: Tensor, head_VD: Tensor) -> Drawn:
    """Draw the next token of every sequence.

    Args:
        sequences: B sequences; seed and position key the draw, so it can be made again anywhere.
        logits_BV: [B, V] float32, at the last token of each.
        hidden_BD, head_VD: [B, D] and [V, D] float32, which made them: log-probs are what the trainer makes of these.
    """
    samplings = [sequence.request.sampling for sequence in sequences]
    seed_B = torch.tensor([signed_seed(sequence.request.seed) for sequence in sequences])
    position_B = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    temperature_B = torch.tensor([sampling.temperature for sampling in samplings])
    top_p_B = torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64)
    top_k_B = torch.tensor([sampling.top_k for sampling in samplings])
    cut_BV, kept = cut_vocabulary(logits_BV, temperature_B, top_p_B, top_k_B)
    token_B = draw_tokens(cut_BV, seed_B, position_B, temperature_B)
    logprob_B = torch.empty(len(sequences))
    # A greedy token has its log-prob at temperature 1.
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    for temperature in set(temperatures):
        rows = [row for row, other in enumerate(temperatures) if other == temperature]
        logprob_B[rows], _ = head_logprobs(
            head_VD,
            hidden_BD[rows],
            token_B[rows],
            temperature=temperature,
            kept=None if kept is None else _kept_of(kept, rows),
            logits_NV=logits_BV if len(rows) == len(sequences) else logits_BV[rows],  # [B, V] is much to copy
        )
    return Drawn(token_B.numpy().astype(np.int32), logprob_B.numpy(), kept)


def _kept_of(kept: KeptSets, rows: SequenceOf[int]) -> linear_logprob_ref.KeptSets:
    """The sets of some rows, as the trainer has them."""
    sets = split_sets(kept)
    counts_N = torch.tensor(kept.counts_T[rows], dtype=torch.int64)
    return linear_logprob_ref.KeptSets(counts_N, torch.tensor(np.concatenate([sets[row] for row in rows])).long())


def step_routes(sequences: SequenceOf[Sequence]) -> StepRoutes | None:
    """Return the routes that became known since each sequence's last step; they count as logged from here on. None
    where no sequence asks for them."""
    if all(sequence.routes is None for sequence in sequences):
        return None
    pieces_N = [[] if sequence.routes is None else sequence.routes.take_pending() for sequence in sequences]
    counts_N = np.array([sum(map(len, pieces)) for pieces in pieces_N], dtype=np.int32)
    return StepRoutes(counts_N=counts_N, routes_PLK=np.concatenate([one for pieces in pieces_N for one in pieces]))
