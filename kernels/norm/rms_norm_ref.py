"""RMS normalisation in plain torch."""

import torch
from torch import Tensor

from rollforward.kernels.rowwise import row_sum


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension. [..., D] float32."""
    scale = 1.0 / torch.sqrt(row_sum(x * x) / x.shape[-1] + eps)
    normed = x * scale
    return normed if weight is None else normed * weight


def rms_norm_backward_ref(x: Tensor, weight: Tensor | None, eps: float, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of weight (None without one) for ``rms_norm_ref``."""
    width = x.shape[-1]
    scale = 1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) / width + eps)
    normed = x * scale
    grad_weight = None
    grad_normed = grad
    if weight is not None:
        grad_weight = (grad * normed).reshape(-1, width).sum(0)
        grad_normed = grad * weight
    grad_x = scale * (grad_normed - normed * ((grad_normed * normed).sum(-1, keepdim=True) / width))
    return grad_x, grad_weight
