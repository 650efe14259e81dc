"""Log-probability of the drawn token and entropy from hidden states, in plain torch: one chunk of logits at a time."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE, row_linear_ref
from rollforward.kernels.loss.logprob_ref import token_logprob_backward_ref, token_logprob_ref


def _chunks(count: int, chunk_tokens: int) -> list[slice]:
    """Spans of chunk_tokens tokens, rounded up to a tile of 16."""
    size = -(-chunk_tokens // ROW_TILE) * ROW_TILE
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def linear_logprob_ref(
    hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor, temperature: float, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return `token_logprob_ref` of the logits hidden @ head.T, [T] each."""
    logprob_T, entropy_T = hidden_TD.new_empty((2, len(token_T)))
    for rows in _chunks(len(token_T), chunk_tokens):
        logits_NV = row_linear_ref(hidden_TD[rows], head_VD)
        logprob_T[rows], entropy_T[rows] = token_logprob_ref(logits_NV, token_T[rows], temperature)
    return logprob_T, entropy_T


def linear_logprob_backward_ref(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    temperature: float,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    *,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_head: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and of the head that are asked for, from chunks of logits made anew.

    Rows whose two gradients are 0 are not looked at.
    """
    grad_hidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
    grad_head_VD = torch.zeros_like(head_VD) if needs_head else None
    active_N = ((grad_logprob_T != 0) | (grad_entropy_T != 0)).nonzero().squeeze(1)
    for span in _chunks(len(active_N), chunk_tokens):
        rows = active_N[span]
        hidden_ND = hidden_TD[rows]
        grad_NV = token_logprob_backward_ref(
            row_linear_ref(hidden_ND, head_VD), token_T[rows], temperature, grad_logprob_T[rows], grad_entropy_T[rows]
        )
        if grad_hidden_TD is not None:
            grad_hidden_TD[rows] = row_linear_ref(grad_NV, head_VD.t())
        if grad_head_VD is not None:
            grad_head_VD.addmm_(grad_NV.t(), hidden_ND)
    return grad_hidden_TD, grad_head_VD
