"""Forward KL and Jensen-Shannon divergence between two rows of logits, in plain torch: value and gradient by the
student's logits.

Letters: N tokens of a chunk, V vocabulary.
"""

import math

import torch
from torch import Tensor

from rollforward.kernels.loss.sweep_ref import log_probs_ref
from rollforward.kernels.rowwise import row_sum


def forward_kl_rows_ref(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(q || p) of each row [N, 1] and its gradient by the student's logits, p - q [N, V].

    The sum's terms are q (log q - log p) + p - q, none below 0: the plain form cancels where the two are close, and
    goes negative.
    """
    student_log_NV, teacher_log_NV = log_probs_ref(student_logits_NV), log_probs_ref(teacher_logits_NV)
    teacher_probs_NV = torch.exp(teacher_log_NV)
    grad_NV = torch.exp(student_log_NV) - teacher_probs_NV
    terms_NV = teacher_log_NV.sub_(student_log_NV).mul_(teacher_probs_NV).add_(grad_NV)
    return row_sum(terms_NV.clamp_(min=0)), grad_NV


def jensen_shannon_rows_ref(student_logits_NV: Tensor, teacher_logits_NV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p, of each row [N, 1], and its gradient by the
    student's logits [N, V].

    With d = log p - log q and s = log(m / max(p, q)) = log1p(w expm1(-|d|)), w being the weight of the smaller one,
    log(p / m) = min(d, 0) - s and log(q / m) = -max(d, 0) - s: nothing overflows, and all is exactly 0 where p is q.
    The terms b q log(q / m) + (1 - b) p log(p / m) are none below 0 but by rounding, since x log x is convex.
    """
    student_log_NV, teacher_log_NV = log_probs_ref(student_logits_NV), log_probs_ref(teacher_logits_NV)
    distance_NV = student_log_NV - teacher_log_NV
    probs_NV, teacher_probs_NV = student_log_NV.exp_(), teacher_log_NV.exp_()
    of_smaller_NV = torch.where(distance_NV >= 0, distance_NV.new_tensor(beta), distance_NV.new_tensor(1 - beta))
    # Bounded, because 1 - beta is 1 in this dtype for a small enough beta.
    least = min(math.log(beta), math.log1p(-beta))
    shift_NV = distance_NV.abs().neg_().expm1_().mul_(of_smaller_NV).log1p_().clamp_(min=least)
    slope_NV = distance_NV.clamp(max=0).sub_(shift_NV).mul_(1 - beta)
    teacher_ratio_NV = distance_NV.clamp_(min=0).add_(shift_NV).neg_()
    weighted_NV = probs_NV * slope_NV
    terms_NV = teacher_ratio_NV.mul_(teacher_probs_NV).mul_(beta).add_(weighted_NV)
    return row_sum(terms_NV.clamp_(min=0)), slope_NV.sub_(row_sum(weighted_NV)).mul_(probs_NV)
