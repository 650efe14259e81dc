"""Row-invariant linear maps: the only matrix products on the path whose bits must not depend on the batch.

Here: the public functions with their gradients. The arithmetic is in ``row_linear_ref.py``.
"""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_shapes
from rollforward.kernels.linear.row_linear_ref import row_linear_ref, tile_matmul_ref


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK):
        ctx.save_for_backward(x_TK, w_NK)
        return row_linear_ref(x_TK, w_NK)

    @staticmethod
    def backward(ctx, grad_TN):
        x_TK, w_NK = ctx.saved_tensors
        grad_x = grad_TN @ w_NK if ctx.needs_input_grad[0] else None
        grad_w = grad_TN.t() @ x_TK if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


class _TileMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a_GRK, b_GKN):
        ctx.save_for_backward(a_GRK, b_GKN)
        return tile_matmul_ref(a_GRK, b_GKN)

    @staticmethod
    def backward(ctx, grad_GRN):
        a_GRK, b_GKN = ctx.saved_tensors
        grad_a = torch.bmm(grad_GRN, b_GKN.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        grad_b = torch.bmm(a_GRK.transpose(1, 2), grad_GRN) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def row_linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """Multiply each row by the transposed weight.

    Args:
        x_TK: [T, K] float32, any T including 0.
        w_NK: [N, K] float32.

    Returns:
        [T, N] float32.

    Raises:
        ShapeError: when K differs between the two.

    Invariants: forward is row-invariant for 1 and 2 threads, with autograd on or off. Gradients sum over the batch and
    repeat bit for bit, but depend on it.
    """
    check_shapes("row_linear", x_TK=x_TK, w_NK=w_NK)
    return _RowLinear.apply(x_TK, w_NK)


def tile_matmul(a_GRK: Tensor, b_GKN: Tensor) -> Tensor:
    """Multiply the rows of each group by that group's matrix.

    Args:
        a_GRK: [G, R, K] float32.
        b_GKN: [G, K, N] float32; N and K are one key tile or a head width, so one product is one K pass.

    Returns:
        [G, R, N] float32.

    Invariants: a row's bits depend on its own values and its group's matrix alone, not on R or G.
    """
    check_shapes("tile_matmul", a_GRK=a_GRK, b_GKN=b_GKN)
    return _TileMatmul.apply(a_GRK, b_GKN)
