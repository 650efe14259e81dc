"""Reverse KL over the whole vocabulary, in plain torch: what the sweep of `sweep_ref.py` does with a chunk's logits.

Letters: N tokens of a chunk, V vocabulary.
"""

import torch
from torch import Tensor

from rollforward.kernels.loss.sweep_ref import log_probs_ref
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
