"""Autograd of the losses over the whole vocabulary: gradients are made in the forward sweep, beside the value, and
multiplied by the loss's own in backward."""

import torch
from torch import Tensor

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
