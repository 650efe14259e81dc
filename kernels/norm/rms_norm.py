"""RMS normalisation: public function and gradient."""

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes
from rollforward.kernels.norm.rms_norm_ref import rms_norm_backward_ref, rms_norm_ref


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_ref(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = rms_norm_backward_ref(x, weight, ctx.eps, grad)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """Normalise the last dimension to unit mean square.

    x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: [..., D] float32.
        weight: [D] float32, or None for the unweighted per-head form of the query.
        eps: added to the mean square; > 0.

    Returns:
        [..., D] float32.

    Invariants: row-invariant forward; the gradient repeats bit for bit.
    Source: DeepSeek-V4 reference, RMSNorm (fp32 inside).
    """
    sizes = bind_shapes("rms_norm", x=(x, "... D"))
    if weight is not None:
        bind_shapes("rms_norm", weight=(weight, f"{sizes['D']}"))
    return _RmsNorm.apply(x, weight, eps)
