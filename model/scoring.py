"""Log-probs of given tokens under a model: what a learner computes with grad and a frozen reference without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class ScoringBatch:
    """Sequences end to end and the rows whose target's log-prob is wanted."""

    token_ids_T: Tensor
    """int64 [T]."""
    sequence_lengths: tuple[int, ...]
    """They sum to T."""
    target_ids_T: Tensor
    """int64 [T], the token that each row predicts."""
    scored_mask_T: Tensor
    """bool [T], True where the log-prob is wanted; the head runs on these rows only."""


def target_logprobs(
    transformer: Transformer, weights: ModelWeights, batch: ScoringBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies of the rows, [T] float32 each, 0 where not scored.

    Invariants: bit-equal to what an engine computes for the same tokens, weights and temperature, however batched and
    with autograd on or off.
    """
    streams_TMD = transformer.streams(
        weights, batch.token_ids_T, packed_batch(transformer.config, batch.sequence_lengths)
    )
    rows_R = torch.nonzero(batch.scored_mask_T).squeeze(1)
    hidden_RD = transformer.hidden(weights, streams_TMD.index_select(0, rows_R))
    logits_RV = transformer.logits(weights, hidden_RD)
    logprob_R, entropy_R = token_logprob(logits_RV, batch.target_ids_T[rows_R], temperature=temperature)
    zeros_T = torch.zeros(batch.token_ids_T.shape)
    return zeros_T.index_copy(0, rows_R, logprob_R), zeros_T.index_copy(0, rows_R, entropy_R)
