"""Policy gradient on the log-ratio of the sampled token, in plain torch: value and gradient by the student's logits.

Letters: N tokens of a chunk, V vocabulary.
"""

import torch
from torch import Tensor

from rollforward.kernels.loss.sweep_ref import log_probs_ref


def sampled_kl_rows_ref(
    student_logits_NV: Tensor, token_N1: Tensor, teacher_logprob_N1: Tensor, baseline_N1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return r = log p - log q at each row's token [N, 1] and (r - baseline) (onehot - p), its surrogate's gradient by
    the student's logits [N, V]."""
    student_log_NV = log_probs_ref(student_logits_NV)
    least = torch.finfo(student_log_NV.dtype).min / 4
    ratio_N1 = student_log_NV.gather(1, token_N1) - teacher_logprob_N1.clamp(min=least)
    advantage_N1 = -ratio_N1 if baseline_N1 is None else baseline_N1 - ratio_N1
    grad_NV = torch.exp(student_log_NV)
    grad_NV.scatter_add_(1, token_N1, -torch.ones_like(ratio_N1))
    return ratio_N1, grad_NV.mul_(advantage_N1)
