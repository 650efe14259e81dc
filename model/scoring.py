"""Log-probs of given tokens under a model: what a learner computes with grad and a frozen reference without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear import row_linear
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


def scored_rows(batch: ScoringBatch) -> Tensor:
    """Return int64 [R], the positions of the rows that are scored, in their order."""
    return torch.nonzero(batch.scored_mask_T).squeeze(1)


def target_hidden(
    transformer: Transformer, weights: ModelWeights, batch: ScoringBatch, *, routing: Routing | None = None
) -> Tensor:
    """Return the vectors that the head reads at the scored rows, [R, D] float32; see ``target_logprobs``.

    Invariants: row-invariant, as ``Transformer.streams``; in native mode every value is a BF16 number.
    """
    config = transformer.config
    if routing is None and batch.routes_TLK is not None:
        routing = Routing(config, replay_TLK=batch.routes_TLK)
    streams_TMD = transformer.streams(
        weights, batch.token_ids_T, packed_batch(config, batch.sequence_lengths), routing=routing
    )
    return transformer.hidden(weights, streams_TMD.index_select(0, scored_rows(batch)))


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
    rows_R = scored_rows(batch)
    hidden_RD = target_hidden(transformer, weights, batch, routing=routing)
    logprob_R, entropy_R = _rows_logprobs(weights.head, hidden_RD, rows_R, batch, temperature)
    zeros_T = torch.zeros(batch.token_ids_T.shape)
    return zeros_T.index_copy(0, rows_R, logprob_R), zeros_T.index_copy(0, rows_R, entropy_R)


@torch.no_grad()
def hidden_logprobs(
    head_VD: Tensor, hidden_RD: Tensor, batch: ScoringBatch, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return what ``target_logprobs`` returns at the scored rows, bit for bit, from the vectors that the head reads,
    with the logits of ``chunk_tokens`` rows at a time and without a gradient.

    Args:
        head_VD: [V, D]. hidden_RD: [R, D], from ``target_hidden`` for this batch.
        batch: what is scored. temperature: divides the logits. chunk_tokens: >= 1.

    Returns:
        Log-probs of the targets and entropies in nats, [R] float32 each.
    """
    rows_R = scored_rows(batch)
    parts = [
        _rows_logprobs(head_VD, hidden_ND, rows_N, batch, temperature)
        for hidden_ND, rows_N in zip(hidden_RD.split(chunk_tokens), rows_R.split(chunk_tokens), strict=True)
    ]
    logprob_R, entropy_R = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprob_R, entropy_R


def _rows_logprobs(
    head_VD: Tensor, hidden_ND: Tensor, rows_N: Tensor, batch: ScoringBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets of some scored rows, over the sets they were drawn from, and entropies: [N] each."""
    logits_NV = row_linear(hidden_ND, head_VD)
    if batch.kept_counts_T is not None and batch.kept_ids is not None:
        outside_NV = _outside_kept(batch.kept_counts_T, batch.kept_ids, rows_N, head_VD.shape[0])
        logits_NV = logits_NV.masked_fill(outside_NV, -torch.inf)
    return token_logprob(logits_NV, batch.target_ids_T[rows_N], temperature=temperature)


def _outside_kept(counts_T: Tensor, kept_ids: Tensor, rows_R: Tensor, vocab_size: int) -> Tensor:
    """Return bool [R, V], True where a row's kept set leaves the token out."""
    rank_T = torch.full_like(counts_T, -1).index_copy(0, rows_R, torch.arange(len(rows_R)))
    rank_of_id = rank_T.repeat_interleave(counts_T)
    is_scored = rank_of_id >= 0
    outside_RV = (counts_T[rows_R] > 0).unsqueeze(1).repeat(1, vocab_size)
    outside_RV[rank_of_id[is_scored], kept_ids[is_scored]] = False
    return outside_RV
