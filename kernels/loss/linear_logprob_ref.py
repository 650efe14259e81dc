"""Log-probability of the drawn token and entropy from hidden states, in plain torch: one chunk of logits at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE, row_linear_ref
from rollforward.kernels.loss.logprob_ref import token_logprob_backward_ref, token_logprob_ref


class KeptSets(NamedTuple):
    """Tokens that each row's distribution is restricted to."""

    counts_T: Tensor
    """int64 [T], size of the row's set; 0 is the whole vocabulary."""
    ids: Tensor
    """int64 [sum of counts], the sets one after another."""


def outside_kept_ref(kept: KeptSets, rows_N: Tensor, vocab_size: int) -> Tensor:
    """Return bool [N, V], True where the kept set of one of these rows (int64, positions in T) leaves a token out."""
    counts_N = kept.counts_T[rows_N]
    start_N = (kept.counts_T.cumsum(0) - kept.counts_T)[rows_N]
    row_of_id = torch.arange(len(rows_N), device=rows_N.device).repeat_interleave(counts_N)
    place_of_id = torch.arange(len(row_of_id), device=rows_N.device) - (counts_N.cumsum(0) - counts_N)[row_of_id]
    outside_NV = (counts_N > 0).unsqueeze(1).repeat(1, vocab_size)
    outside_NV[row_of_id, kept.ids[start_N[row_of_id] + place_of_id]] = False
    return outside_NV


def _logits_ref(hidden_TD: Tensor, head_VD: Tensor, kept: KeptSets | None, rows_N: Tensor) -> Tensor:
    """Logits [N, V] of some rows, -inf outside their kept sets."""
    logits_NV = row_linear_ref(hidden_TD[rows_N], head_VD)
    if kept is None:
        return logits_NV
    return logits_NV.masked_fill_(outside_kept_ref(kept, rows_N, head_VD.shape[0]), -torch.inf)


def _chunks(rows_N: Tensor, chunk_tokens: int) -> tuple[Tensor, ...]:
    """Chunks of chunk_tokens rows, rounded up to a tile of 16."""
    return rows_N.split(-(-chunk_tokens // ROW_TILE) * ROW_TILE) if len(rows_N) else ()


def linear_logprob_ref(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    temperature: float,
    kept: KeptSets | None = None,
    *,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return `token_logprob_ref` of the logits hidden @ head.T, -inf outside the kept sets, [T] each."""
    logprob_T, entropy_T = hidden_TD.new_empty((2, len(token_T)))
    for rows in _chunks(torch.arange(len(token_T), device=token_T.device), chunk_tokens):
        logits_NV = _logits_ref(hidden_TD, head_VD, kept, rows)
        logprob_T[rows], entropy_T[rows] = token_logprob_ref(logits_NV, token_T[rows], temperature)
    return logprob_T, entropy_T


def linear_logprob_backward_ref(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    temperature: float,
    kept: KeptSets | None,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    *,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_head: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and of the head that are asked for, from chunks of logits made anew.

    Rows whose two gradients are 0 are not looked at. A logit outside the row's kept set has gradient 0.
    """
    grad_hidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
    grad_head_VD = torch.zeros_like(head_VD) if needs_head else None
    active_N = ((grad_logprob_T != 0) | (grad_entropy_T != 0)).nonzero().squeeze(1)
    for rows in _chunks(active_N, chunk_tokens):
        logits_NV = _logits_ref(hidden_TD, head_VD, kept, rows)
        grad_NV = token_logprob_backward_ref(
            logits_NV, token_T[rows], temperature, grad_logprob_T[rows], grad_entropy_T[rows]
        )
        if grad_hidden_TD is not None:
            grad_hidden_TD[rows] = row_linear_ref(grad_NV, head_VD.t())
        if grad_head_VD is not None:
            grad_head_VD.addmm_(grad_NV.t(), hidden_TD[rows])
    return grad_hidden_TD, grad_head_VD
