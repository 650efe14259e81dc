"""Exact distillation from one teacher: reverse KL over the whole vocabulary from hidden states (docs/design.md, P5)."""

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.reverse_kl_ref import reverse_kl_rows_ref
from rollforward.kernels.loss.rounded_head import rounded_head
from rollforward.kernels.loss.sweep import CHUNK_TOKENS, teacher_sweep
from rollforward.kernels.operators import device_of, on_device, operator


def _run(hidden_TD, head_VD, rounded_VD, teacher_hidden_TE, teacher_VE, weight_T, needs_hidden, needs_head):
    space = vocab_sweep.workspace(*head_VD.shape, hidden_TD.device, teacher=True)
    kl_T = torch.empty_like(weight_T)
    grads = vocab_sweep.gradients_of((hidden_TD, needs_hidden), (rounded_VD, needs_head))
    operands = hidden_TD, rounded_VD, teacher_hidden_TE, teacher_VE, weight_T
    vocab_sweep.reverse_kl_into(*operands, kl_T, *grads, space, adds=False)
    return (weight_T * kl_T).sum(), kl_T, *(kl_T.new_empty(0) if one is None else one for one in grads)


def _shapes(hidden_TD, head_VD, rounded_VD, teacher_hidden_TE, teacher_VE, weight_T, needs_hidden, needs_head):
    del rounded_VD, teacher_hidden_TE, teacher_VE
    grads = (
        weight_T.new_empty(one.shape if need else (0,))
        for one, need in ((hidden_TD, needs_hidden), (head_VD, needs_head))
    )
    return weight_T.new_empty(()), torch.empty_like(weight_T), *grads


def _save(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[2:])
    asked = zip(inputs[:2], inputs[-2:], strict=True)
    ctx.kinds = [(one.device, one.dtype) if need else None for one, need in asked]


def _gradients(ctx, grad_loss, *_):
    of_loss = zip(ctx.saved_tensors, ctx.kinds, strict=True)
    grads = (None if kind is None else (one * grad_loss).to(*kind) for one, kind in of_loss)
    return *grads, *[None] * 6


_TILE = operator(
    "reverse_kl(Tensor hidden, Tensor head, Tensor rounded_head, Tensor teacher_hidden, Tensor rounded_teacher_head,"
    " Tensor row_weight, bool needs_hidden, bool needs_head) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _shapes,
    save=_save,
    gradients=_gradients,
)
"""Loss, KL of each row, and the gradients of the loss, float32; of what needs none it is empty. The head gets the
gradient, and its rounded copy is read."""


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
    check_dtype("reverse_kl", "row_weight_T", row_weight_T, torch.float32)
    vocab_sweep.check_operands(
        "reverse_kl",
        student_hidden_TD=student_hidden_TD,
        student_head_VD=student_head_VD,
        teacher_hidden_TE=teacher_hidden_TE,
        teacher_head_VE=teacher_head_VE,
    )
    grows = torch.is_grad_enabled()
    needs = grows and student_hidden_TD.requires_grad, grows and student_head_VD.requires_grad
    heads = student_head_VD, teacher_head_VE
    tensors = student_hidden_TD, teacher_hidden_TE.detach(), row_weight_T.detach()
    device = device_of(*tensors, *heads)
    hidden_TD, teacher_hidden_TE, weight_T = on_device(*tensors, device=device)
    rounded_VD, teacher_VE = (rounded_head(one, device) for one in heads)
    loss, kl_T, _, _ = _TILE(hidden_TD, student_head_VD, rounded_VD, teacher_hidden_TE, teacher_VE, weight_T, *needs)
    return loss.to(student_hidden_TD.device), kl_T.to(student_hidden_TD.device)


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
        student_head_VD: [V, D] of the same dtype. Gets a gradient.
        teacher_hidden_TE: [T, E], any floating dtype; E need not be D.
        teacher_head_VE: [V, E], any floating dtype. Whoever has several teachers calls once for each.
        row_weight_T: [T] of the student's dtype: the token's share of the loss. A row of weight 0 is not looked at,
            whatever it holds; the tile form: float32.
        chunk_tokens: >= 1. Memory is at most 11 * chunk_tokens * V numbers, both logits among them, whatever T.
            The tile form has its own (`vocab_sweep`).

    The tile form takes hidden states and heads that are each float32, which is rounded to bfloat16, or bfloat16, on
    the CPU or one device; results come to where the student's hidden states are, gradients to where their tensor is.
    Float32 heads are rounded once, until they are written to (`rounded_head`).

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
