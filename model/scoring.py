"""Log-probs of given tokens under a model: what a learner computes with grad and a frozen reference without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.routing import Routing
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
    sequence_weights: tuple[float, ...] | None = None
    """Share of each sequence in the step's loss, which the balance loss takes over; None where nobody asks for it."""
    routes_TLK: Tensor | None = None
    """int16 or int64 [T, L, K], experts to visit (``routing.py``); -1, and None for all, chooses live."""
    kept_counts_T: Tensor | None = None
    """int64 [T], size of the set that the row's target was drawn from; 0, and None for all, is the whole vocabulary."""
    kept_ids: Tensor | None = None
    """int64 [sum of kept_counts_T], the sets one after another; None as kept_counts_T."""


def target_logprobs(
    transformer: Transformer,
    weights: ModelWeights,
    batch: ScoringBatch,
    *,
    temperature: float,
    routing: Routing | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies of the rows, [T] float32 each, 0 where not scored.

    Both are of the distribution that the target was drawn from: softmax over its kept set, where there is one.

    Args:
        transformer: the arithmetic. weights: of its mode.
        batch: what to score.
        temperature: divides the logits, > 0.
        routing: replays and records instead of the batch's routes, for a caller that reads what was visited. None:
            replays the batch's routes, where there are any.

    Raises:
        ModelInputError: routes that are not this model's, see ``Routing``.

    Invariants: bit-equal to what an engine computes for the same tokens, weights, temperature and kept sets, however
    batched, with autograd on or off, and with its routes replayed or not.
    """
    config = transformer.config
    if routing is None and batch.routes_TLK is not None:
        routing = Routing(config, replay_TLK=batch.routes_TLK)
    streams_TMD = transformer.streams(
        weights, batch.token_ids_T, packed_batch(config, batch.sequence_lengths), routing=routing
    )
    rows_R = torch.nonzero(batch.scored_mask_T).squeeze(1)
    hidden_RD = transformer.hidden(weights, streams_TMD.index_select(0, rows_R))
    logits_RV = transformer.logits(weights, hidden_RD)
    if batch.kept_counts_T is not None and batch.kept_ids is not None:
        outside_RV = _outside_kept(batch.kept_counts_T, batch.kept_ids, rows_R, config.vocab_size)
        logits_RV = logits_RV.masked_fill(outside_RV, -torch.inf)
    logprob_R, entropy_R = token_logprob(logits_RV, batch.target_ids_T[rows_R], temperature=temperature)
    zeros_T = torch.zeros(batch.token_ids_T.shape)
    return zeros_T.index_copy(0, rows_R, logprob_R), zeros_T.index_copy(0, rows_R, entropy_R)


def _outside_kept(counts_T: Tensor, kept_ids: Tensor, rows_R: Tensor, vocab_size: int) -> Tensor:
    """Return bool [R, V], True where a row's kept set leaves the token out."""
    rank_T = torch.full_like(counts_T, -1).index_copy(0, rows_R, torch.arange(len(rows_R)))
    rank_of_id = rank_T.repeat_interleave(counts_T)
    is_scored = rank_of_id >= 0
    outside_RV = (counts_T[rows_R] > 0).unsqueeze(1).repeat(1, vocab_size)
    outside_RV[rank_of_id[is_scored], kept_ids[is_scored]] = False
    return outside_RV
