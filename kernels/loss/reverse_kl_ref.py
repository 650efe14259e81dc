"""Reverse KL over the whole vocabulary from hidden states, in plain torch: one chunk of tokens at a time, its logits
made once, used for the value and for the gradient, and dropped.

Letters: T tokens, N tokens of a chunk, V vocabulary, D width of the student, E width of the teacher.
"""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE, row_linear_ref
from rollforward.kernels.loss.logprob_ref import log_normaliser_ref
from rollforward.kernels.rowwise import row_sum


def log_probs_ref(logits_NV: Tensor) -> Tensor:
    """Return log-softmax, [N, V], no element below a quarter of the smallest number: sums with it stay finite."""
    top_N1, log_sum_N1 = log_normaliser_ref(logits_NV)
    least = torch.finfo(logits_NV.dtype).min / 4
    return (logits_NV - top_N1 - log_sum_N1).clamp_(min=least)


def reverse_kl_rows_ref(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(p || q) of each row [N, 1], p [N, V] and log p - log q [N, V].

    The sum's terms are p (log p - log q) + q - p, none below 0: the plain form cancels where the two are close, and
    goes negative.
    """
    student_log_NV, teacher_log_NV = log_probs_ref(student_logits_NV), log_probs_ref(teacher_logits_NV)
    ratio_NV = student_log_NV - teacher_log_NV
    probs_NV = torch.exp(student_log_NV)
    terms_NV = probs_NV * ratio_NV + (torch.exp(teacher_log_NV) - probs_NV)
    return row_sum(terms_NV.clamp_(min=0)), probs_NV, ratio_NV


def reverse_kl_ref(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_head: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return sum of row_weight * KL, KL of each row, and the gradients of the former that are asked for.

    Rows of weight 0 are not looked at; their KL is 0. A chunk has `chunk_tokens` tokens, rounded up to a tile of 16.

    Returns:
        loss [], kl_T [T], gradient of the hidden states [T, D] or None, of the student's head [V, D] or None.
    """
    active_N = row_weight_T.nonzero().squeeze(1)
    kl_T = torch.zeros_like(row_weight_T)
    grad_hidden_TD = torch.zeros_like(student_hidden_TD) if needs_hidden else None
    grad_head_VD = torch.zeros_like(student_head_VD) if needs_head else None
    chunk = -(-chunk_tokens // ROW_TILE) * ROW_TILE
    for index_N in active_N.split(chunk):
        hidden_ND, weight_N1 = student_hidden_TD[index_N], row_weight_T[index_N].unsqueeze(1)
        kl_N1, probs_NV, grad_NV = reverse_kl_rows_ref(
            row_linear_ref(hidden_ND, student_head_VD), row_linear_ref(teacher_hidden_TE[index_N], teacher_head_VE)
        )
        kl_T[index_N] = kl_N1.squeeze(1)
        if not (needs_hidden or needs_head):
            continue
        grad_NV.sub_(kl_N1).mul_(probs_NV).mul_(weight_N1)
        if grad_hidden_TD is not None:
            grad_hidden_TD[index_N] = row_linear_ref(grad_NV, student_head_VD.t())
        if grad_head_VD is not None:
            grad_head_VD.addmm_(grad_NV.t(), hidden_ND)
    loss = row_sum((row_weight_T * kl_T).unsqueeze(0)).reshape(())
    return loss, kl_T, grad_hidden_TD, grad_head_VD
