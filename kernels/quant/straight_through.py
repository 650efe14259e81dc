"""The straight-through estimator: a rounding in the forward pass, the identity in the backward pass, nothing saved.

What does not live here: the roundings themselves, in `*_ref.py` beside this file.
"""

from collections.abc import Callable
from typing import Any

import torch


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        del ctx
        return rounding(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return grads[0], None


def straight_through(rounding: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return `rounding(tensor)` with the gradient of the identity.

    Args:
        rounding: pure function that keeps shape and dtype and returns a new tensor.
        tensor: any float tensor.

    Returns:
        The rounded tensor; its bits do not depend on whether a gradient is recorded.

    Invariants: saves no tensor for the backward pass.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _StraightThrough.apply(tensor, rounding)  # pyright: ignore[reportReturnType]
    return rounding(tensor.detach())
