"""The sweep that losses over the whole vocabulary share, in plain torch: one chunk of tokens at a time, its logits made
once, used for the value and for the gradient, and dropped.

Letters: T tokens, N tokens of a chunk, V vocabulary, D width of the student.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE, row_linear_ref
from rollforward.kernels.loss.logprob_ref import log_normaliser_ref
from rollforward.kernels.rowwise import row_sum

Rows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What a loss makes of a chunk: positions [N] and the student's logits [N, V] give the value of each row [N, 1] and the
gradient of its surrogate by the logits [N, V], which the sweep overwrites."""


def log_probs_ref(logits_NV: Tensor) -> Tensor:
    """Return log-softmax, [N, V], no element below a quarter of the smallest number: sums with it stay finite."""
    top_N1, log_sum_N1 = log_normaliser_ref(logits_NV)
    least = torch.finfo(logits_NV.dtype).min / 4
    return (logits_NV - top_N1 - log_sum_N1).clamp_(min=least)


def sweep_ref(
    rows: Rows,
    hidden_TD: Tensor,
    head_VD: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_head: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return sum of row_weight * value, value of each row, and the gradients of the former that are asked for.

    Rows of weight 0 are not looked at; their value is 0. A chunk has `chunk_tokens` tokens, rounded up to a tile of 16.

    Returns:
        loss [], value_T [T], gradient of the hidden states [T, D] or None, of the head [V, D] or None.
    """
    active_N = row_weight_T.nonzero().squeeze(1)
    value_T = torch.zeros_like(row_weight_T)
    grad_hidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
    grad_head_VD = torch.zeros_like(head_VD) if needs_head else None
    chunk = -(-chunk_tokens // ROW_TILE) * ROW_TILE
    for index_N in active_N.split(chunk):
        hidden_ND = hidden_TD[index_N]
        value_N1, grad_NV = rows(index_N, row_linear_ref(hidden_ND, head_VD))
        value_T[index_N] = value_N1.squeeze(1)
        grad_NV.mul_(row_weight_T[index_N].unsqueeze(1))
        if grad_hidden_TD is not None:
            grad_hidden_TD[index_N] = row_linear_ref(grad_NV, head_VD.t())
        if grad_head_VD is not None:
            grad_head_VD.addmm_(grad_NV.t(), hidden_ND)
        del grad_NV
    loss = row_sum((row_weight_T * value_T).unsqueeze(0)).reshape(())
    return loss, value_T, grad_hidden_TD, grad_head_VD
