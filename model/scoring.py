"""Log-probs of given tokens under a model: what a learner computes with grad, a frozen reference without, and an engine
of what it drew."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.linear_logprob_ref import KeptSets, outside_kept_ref
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
    return transformer.hidden(weights, streams_TMD.index_select(0, scored_rows(batch).to(streams_TMD.device)))


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
    zeros_T = logprob_R.new_zeros(batch.token_ids_T.shape)
    rows_R = rows_R.to(zeros_T.device)
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


def head_logprobs(
    head_VD: Tensor,
    hidden_ND: Tensor,
    token_N: Tensor,
    *,
    temperature: float,
    kept: KeptSets | None = None,
    logits_NV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of tokens and the entropies of the rows that they were drawn from: what the learner trains
    on and what engines log, in the form of ``linear_logprob`` that this process runs.

    Args:
        head_VD: [V, D] float32, of BF16 values in native mode.
        hidden_ND: [N, D] float32, of the same device and likewise; from ``Transformer.hidden``.
        token_N: int64 [N], inside the kept sets; on any device.
        temperature: divides the logits, > 0.
        kept: the sets that the rows were drawn from; None is the whole vocabulary for all.
        logits_NV: what ``Transformer.logits`` makes of ``hidden_ND``, where the caller has it: the reference makes it
            anew otherwise. The tile form does not look at it.

    Returns:
        Log-probs (<= 0) and entropies in nats, [N] float32 each, with gradients of head and hidden vectors.

    Invariants: row-invariant, with autograd on or off, in both forms; so equal rows have equal bits in learner and
    engine.
    """
    token_N = token_N.to(hidden_ND.device)
    kept = None if kept is None else KeptSets(*(one.to(hidden_ND.device) for one in kept))
    if dispatch.is_tile("linear_logprob"):
        counts_N, kept_ids = (None, None) if kept is None else kept
        return linear_logprob(
            hidden_ND, head_VD, token_N, temperature=temperature, kept_counts_T=counts_N, kept_ids=kept_ids
        )
    if logits_NV is None:
        logits_NV = row_linear(hidden_ND, head_VD)
    if kept is not None:
        logits_NV = logits_NV.masked_fill(
            outside_kept_ref(kept, torch.arange(len(token_N), device=token_N.device), len(head_VD)), -torch.inf
        )
    return token_logprob(logits_NV, token_N, temperature=temperature)


def _rows_logprobs(
    head_VD: Tensor, hidden_ND: Tensor, rows_N: Tensor, batch: ScoringBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets of some scored rows, over the sets they were drawn from, and entropies: [N] each."""
    kept = _kept_of_rows(batch, rows_N)
    return head_logprobs(head_VD, hidden_ND, batch.target_ids_T[rows_N], temperature=temperature, kept=kept)


def _kept_of_rows(batch: ScoringBatch, rows_N: Tensor) -> KeptSets | None:
    """The kept sets of some rows, which ascend."""
    if batch.kept_counts_T is None or batch.kept_ids is None:
        return None
    is_wanted_T = torch.zeros_like(batch.kept_counts_T, dtype=torch.bool)
    is_wanted_T[rows_N] = True
    return KeptSets(batch.kept_counts_T[rows_N], batch.kept_ids[is_wanted_T.repeat_interleave(batch.kept_counts_T)])
