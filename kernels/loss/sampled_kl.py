"""Reverse KL estimated from the sampled token alone (k1), with the policy gradient as its gradient: what distillation
over the whole vocabulary is compared with."""

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.loss.sampled_kl_ref import sampled_kl_rows_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS, sweep


def sampled_kl(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    token_T: Tensor,
    teacher_logprob_T: Tensor,
    row_weight_T: Tensor,
    *,
    baseline_T: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the log-ratio of each row's token, and the log-ratio of each.

        p = softmax(h W), r = log p(y) - log q(y), A = baseline - r
        loss = sum_t w r, with the gradient of -sum_t w A log p(y), A held fixed:   dz = w A (p - onehot y)

    For y drawn from p, r is an unbiased estimate of KL(student || teacher), and dz of its gradient by the logits, for
    any baseline that does not depend on y. (Going backward through r itself has expectation 0.)

    Args:
        student_hidden_TD: [T, D] float32 or float64, the vector that the student's head multiplies. Gets a gradient.
        student_head_VD: [V, D] of the same dtype. Gets a gradient.
        token_T: int64 [T], drawn at temperature 1 from the whole vocabulary.
        teacher_logprob_T: [T] of the student's dtype, log q(y).
        row_weight_T: [T] of the student's dtype: the token's share of the loss. A row of weight 0 is not looked at,
            whatever it holds.
        baseline_T: [T] of the student's dtype, subtracted from r; vOPD takes the row's KL. None is 0.
        chunk_tokens: >= 1. Memory is chunk_tokens * V numbers and a few temporaries of that size, whatever T.

    Returns:
        loss [], and ratio_T [T] in nats, of either sign, 0 where the weight is 0; the latter has no gradient.

    Raises:
        ShapeError: letters disagree. DtypeError: a dtype is none of these.

    Invariants: those of `reverse_kl`. Exactly 0 where the teacher's log-prob has the bits that `linear_logprob` gives
    the student.
    Source: the estimator is k1 with a policy gradient; the baseline is vOPD's (arXiv 2605.07865).
    """
    arguments = {"token_T": token_T, "teacher_logprob_T": teacher_logprob_T, "row_weight_T": row_weight_T}
    if baseline_T is not None:
        arguments["baseline_T"] = baseline_T
    bind_shapes(
        "sampled_kl",
        student_hidden_TD=(student_hidden_TD, "T D"),
        student_head_VD=(student_head_VD, "V D"),
        **{name: (tensor, "T") for name, tensor in arguments.items()},
    )
    check_dtype("sampled_kl", "student_hidden_TD", student_hidden_TD, torch.float32, torch.float64)
    check_dtype("sampled_kl", "student_head_VD", student_head_VD, student_hidden_TD.dtype)
    for name, tensor in arguments.items():
        check_dtype("sampled_kl", name, tensor, torch.int64 if name == "token_T" else student_hidden_TD.dtype)

    def rows(index_N: Tensor, student_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        baseline_N1 = None if baseline_T is None else baseline_T[index_N].unsqueeze(1)
        token_N1, teacher_N1 = token_T[index_N].unsqueeze(1), teacher_logprob_T[index_N].unsqueeze(1)
        return sampled_kl_rows_ref(student_logits_NV, token_N1, teacher_N1, baseline_N1)

    return sweep(rows, student_hidden_TD, student_head_VD, row_weight_T, chunk_tokens=chunk_tokens)
