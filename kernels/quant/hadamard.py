"""Public op: the normalised Walsh-Hadamard rotation that the indexer applies before FP4."""

from typing import Any

import torch

from rollforward.kernels.checks import check_dtype
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.quant.hadamard_ref import hadamard_ref


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return hadamard_ref(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return hadamard_ref(grads[0])  # the matrix is symmetric


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return x H / sqrt(n) along the last dimension, H the n x n Hadamard matrix in Sylvester order.

    Args:
        x: [..., n] float32 or bfloat16, n a power of two. Computed in fp32, returned in the dtype of x.

    Returns:
        [..., n], same dtype. Applying it twice gives x up to rounding.

    Raises:
        ShapeError: n is not a power of two.

    Invariants: deterministic and row-invariant (elementwise additions in a fixed order).
    Source: official model.py, rotation of indexer queries and keys.
    Example: [1, 0, 0, 0] -> [.5, .5, .5, .5]; [0, 1, 0, 0] -> [.5, -.5, .5, -.5]
    """
    check_dtype("hadamard", "x", x, torch.float32, torch.bfloat16)
    size = x.shape[-1] if x.dim() else 0
    if size < 1 or size & (size - 1):
        raise ShapeError(f"hadamard: the last dimension of x is {size}; it must be a power of two. Pad or reshape x.")
    return _Hadamard.apply(x)  # pyright: ignore[reportReturnType]
