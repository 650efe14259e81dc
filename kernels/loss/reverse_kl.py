"""Exact distillation from one teacher: reverse KL over the whole vocabulary from hidden states (docs/design.md, P5)."""

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.reverse_kl_ref import reverse_kl_rows_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS, teacher_sweep


class _ReverseKLTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, teacher_hidden_TE, teacher_head_VE, weight_T, needs):
        space = vocab_sweep.workspace(*head_VD.shape, hidden_TD.device, teacher=True)
        kl_T = torch.empty_like(weight_T)
        ctx.grads = tuple(
            torch.zeros(one.shape, dtype=torch.float32, device=one.device) if need else None
            for one, need in zip((hidden_TD, head_VD), needs, strict=True)
        )
        vocab_sweep.reverse_kl_into(
            hidden_TD, head_VD, teacher_hidden_TE, teacher_head_VE, weight_T, kl_T, *ctx.grads, space, adds=False
        )
        ctx.mark_non_differentiable(kl_T)
        return (weight_T * kl_T).sum(), kl_T

    @staticmethod
    def backward(ctx, grad_loss, _):
        hidden, head = (None if grad is None else grad * grad_loss for grad in ctx.grads)
        return hidden, head, None, None, None, None


def _reverse_kl_tile(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
) -> tuple[Tensor, Tensor]:
    bind_shapes(
        "reverse_kl",
        student_hidden_TD=(student_hidden_TD, "T D"),
        student_head_VD=(student_head_VD, "V D"),
        teacher_hidden_TE=(teacher_hidden_TE, "T E"),
        teacher_head_VE=(teacher_head_VE, "V E"),
        row_weight_T=(row_weight_T, "T"),
    )
    check_dtype("reverse_kl", "student_hidden_TD", student_hidden_TD, torch.float32, torch.bfloat16)
    check_dtype("reverse_kl", "row_weight_T", row_weight_T, torch.float32)
    operands = {
        "student_head_VD": student_head_VD,
        "teacher_hidden_TE": teacher_hidden_TE,
        "teacher_head_VE": teacher_head_VE,
    }
    vocab_sweep.check_operands("reverse_kl", **operands)
    grows = torch.is_grad_enabled()
    needs = grows and student_hidden_TD.requires_grad, grows and student_head_VD.requires_grad
    return _ReverseKLTile.apply(student_hidden_TD, *operands.values(), row_weight_T, needs)


def reverse_kl(
    student_hidden_TD: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of KL(student || teacher) over tokens, and the KL of each.

        z = h W, u = g U, p = softmax z, q = softmax u, r = log p - log q
        K = sum_v max(0, p r + q - p);   loss = sum_t w K;   d loss / dz = w p (r - K)

    Args:
        student_hidden_TD: [T, D] float32 or float64, the vector that the student's head multiplies. Gets a gradient.
            The tile form: float32, which is rounded to bfloat16, or bfloat16.
        student_head_VD: [V, D] of the same dtype; the tile form: bfloat16. Gets a gradient.
        teacher_hidden_TE: [T, E], any floating dtype; E need not be D. The tile form: bfloat16.
        teacher_head_VE: [V, E], any floating dtype. Whoever has several teachers calls once for each. The tile form:
            bfloat16.
        row_weight_T: [T] of the student's dtype: the token's share of the loss. A row of weight 0 is not looked at,
            whatever it holds. The tile form: float32.
        chunk_tokens: >= 1. Memory is at most 11 * chunk_tokens * V numbers, both logits among them, whatever T.
            The tile form has its own (`vocab_sweep`).

    Returns:
        loss [], and kl_T [T] in nats, >= 0, 0 where the weight is 0; the latter has no gradient.

    Raises:
        ShapeError: letters disagree. DtypeError: a dtype is none of these.

    Invariants: gradients are made in the forward sweep and multiplied by the loss's own. kl_T and the gradient of the
    hidden states are row-invariant: chunk, order and the other rows have no say. The head's gradient sums over tokens
    chunk by chunk and repeats bit for bit. The KL of finite inputs is finite.
    Source: DeepSeek-V4 report, 5.1 (on-policy distillation) and 5.2; docs/design.md, P5.
    """
    if dispatch.is_tile("reverse_kl"):
        return _reverse_kl_tile(student_hidden_TD, student_head_VD, teacher_hidden_TE, teacher_head_VE, row_weight_T)
    return teacher_sweep(
        "reverse_kl",
        reverse_kl_rows_ref,
        student_hidden_TD,
        student_head_VD,
        teacher_hidden_TE,
        teacher_head_VE,
        row_weight_T,
        chunk_tokens=chunk_tokens,
    )
