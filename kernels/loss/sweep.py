"""Autograd of the losses over the whole vocabulary: gradients are made in the forward sweep, beside the value, and
multiplied by the loss's own in backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.linear.row_linear_ref import row_linear_ref
from rollforward.kernels.loss.sweep_ref import Rows, sweep_ref

CHUNK_TOKENS = 256
"""Tokens whose logits exist at one time."""


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, row_weight_T, rows, chunk_tokens, needs):
        needs_hidden, needs_head = needs
        loss, value_T, *ctx.grads = sweep_ref(
            rows,
            hidden_TD,
            head_VD,
            row_weight_T,
            chunk_tokens=chunk_tokens,
            needs_hidden=needs_hidden,
            needs_head=needs_head,
        )
        ctx.mark_non_differentiable(value_T)
        return loss, value_T

    @staticmethod
    def backward(ctx, grad_loss, _):
        hidden, head = (None if grad is None else grad * grad_loss for grad in ctx.grads)
        return hidden, head, None, None, None, None


def sweep(
    rows: Rows, hidden_TD: Tensor, head_VD: Tensor, row_weight_T: Tensor, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of what `rows` makes of each token's logits, and its value for each.

    Args:
        rows: called without autograd on chunks of the tokens whose weight is not 0; see `Rows`.
        hidden_TD: [T, D] float32 or float64. Gets a gradient.
        head_VD: [V, D] of the same dtype. Gets a gradient.
        row_weight_T: [T] of the same dtype.
        chunk_tokens: >= 1.

    Returns:
        loss [] with grad, and value_T [T] without, 0 where the weight is 0.

    Invariants: a row's value and the gradient of its hidden state are row-invariant where `rows` is; the head's
    gradient sums over tokens chunk by chunk and repeats bit for bit.
    """
    grows = torch.is_grad_enabled()
    needs = grows and hidden_TD.requires_grad, grows and head_VD.requires_grad
    return _Sweep.apply(hidden_TD, head_VD, row_weight_T, rows, chunk_tokens, needs)


def teacher_sweep(
    op: str,
    rows_ref: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of a divergence of the student's from the teacher's logits over tokens, and each.

    Args:
        op: name of the public op, for errors.
        rows_ref: student's and teacher's logits [N, V] give the value of each row [N, 1] and its gradient by the
            student's [N, V].
        student_hidden_TD, student_head_VD, teacher_hidden_TE, teacher_head_VE, row_weight_T, chunk_tokens: as
            `reverse_kl`.

    Returns, Raises: as `reverse_kl`. Invariants: those of `sweep`.
    """
    bind_shapes(
        op,
        student_hidden_TD=(student_hidden_TD, "T D"),
        student_head_VD=(student_head_VD, "V D"),
        teacher_hidden_TE=(teacher_hidden_TE, "T E"),
        teacher_head_VE=(teacher_head_VE, "V E"),
        row_weight_T=(row_weight_T, "T"),
    )
    dtype = student_hidden_TD.dtype
    check_dtype(op, "student_hidden_TD", student_hidden_TD, torch.float32, torch.float64)
    check_dtype(op, "student_head_VD", student_head_VD, dtype)
    check_dtype(op, "row_weight_T", row_weight_T, dtype)
    teacher_hidden_TE, teacher_head_VE = teacher_hidden_TE.detach().to(dtype), teacher_head_VE.detach().to(dtype)

    def rows(index_N: Tensor, student_logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        return rows_ref(student_logits_NV, row_linear_ref(teacher_hidden_TE[index_N], teacher_head_VE))

    return sweep(rows, student_hidden_TD, student_head_VD, row_weight_T, chunk_tokens=chunk_tokens)
