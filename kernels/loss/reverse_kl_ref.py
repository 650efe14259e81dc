"""Reverse KL over the whole vocabulary from hidden states, in plain torch, by the sweep of `sweep_ref.py`.

Letters: T tokens, N tokens of a chunk, V vocabulary, D width of the student, E width of the teacher.
"""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import row_linear_ref
from rollforward.kernels.loss.sweep_ref import log_probs_ref, sweep_ref
from rollforward.kernels.rowwise import row_sum


def reverse_kl_rows_ref(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) of each row [N, 1] and its gradient by the student's logits [N, V].

    The sum's terms are p (log p - log q) + q - p, none below 0: the plain form cancels where the two are close, and
    goes negative.
    """
    student_log_NV, teacher_log_NV = log_probs_ref(student_logits_NV), log_probs_ref(teacher_logits_NV)
    ratio_NV = student_log_NV - teacher_log_NV
    probs_NV = torch.exp(student_log_NV)
    terms_NV = probs_NV * ratio_NV + (torch.exp(teacher_log_NV) - probs_NV)
    kl_N1 = row_sum(terms_NV.clamp_(min=0))
    return kl_N1, ratio_NV.sub_(kl_N1).mul_(probs_NV)


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
    """Return sum of row_weight * KL, KL of each row, and the gradients of the former that are asked for; see
    `sweep_ref`.

    Returns:
        loss [], kl_T [T], gradient of the hidden states [T, D] or None, of the student's head [V, D] or None.
    """

    def rows(index_N: Tensor, student_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        return reverse_kl_rows_ref(student_logits_NV, row_linear_ref(teacher_hidden_TE[index_N], teacher_head_VE))

    return sweep_ref(
        rows,
        student_hidden_TD,
        student_head_VD,
        row_weight_T,
        chunk_tokens=chunk_tokens,
        needs_hidden=needs_hidden,
        needs_head=needs_head,
    )
