"""Elementwise functions and sums whose bits belong to the row alone.

On a CPU the library's own sigmoid, softplus and silu use one code path for full vectors and another for the tail, and a
plain sum groups its terms by the padded width; a row's bits would then depend on where it lies in a batch. The forms
here use only operations that keep their bits (exp, log1p, division, products, additions in a written order).

Here: the shared forms. Not here: matrix products (``linear/``), selections with ties (``attention/index_topk_ref.py``).
"""

import torch
from torch import Tensor
from torch.nn import functional

SUM_TILE = 64
"""Width of one tile of a row sum; keys and vocabulary are summed tile by tile, left to right."""


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        value = 1.0 / (1.0 + torch.exp(-x))
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        return grad * value * (1.0 - value)


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x) + torch.log1p(torch.exp(-x.abs()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1.0 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), any shape, float32; saturates to 0 and 1, and its gradient to 0, without NaN."""
    return _Sigmoid.apply(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) as relu(x) + log1p(exp(-|x|)), any shape, float32; the gradient is sigmoid(x), also at
    0."""
    return _Softplus.apply(x)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), any shape, float32."""
    return x * sigmoid(x)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in tiles of 64 from left to right.

    Args:
        x: [..., N] float32. N is padded with zeros to a multiple of 64; padding never changes the bits.

    Returns:
        [..., 1] float32.

    Invariants: row-invariant, whatever the strides; zeros to the right of the last non-zero tile are neutral.
    """
    width = x.shape[-1]
    padded = -(-max(width, 1) // SUM_TILE) * SUM_TILE
    if padded != width:
        x = functional.pad(x, (0, padded - width))
    # The library adds a strided row in another order than a contiguous one.
    tiles = x.contiguous().view(*x.shape[:-1], padded // SUM_TILE, SUM_TILE).sum(-1)
    total = tiles[..., 0]
    for tile in range(1, padded // SUM_TILE):
        total = total + tiles[..., tile]
    return total.unsqueeze(-1)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension by halving it, so that only elementwise additions take place.

    Args:
        x: any shape, float32. The length of ``dim`` is padded with zeros to a power of two.
        dim: the dimension that goes away.

    Returns:
        x without ``dim``; the order of additions depends on the length alone.
    """
    x = x.movedim(dim, 0)
    length = x.shape[0]
    size = 1 << max(0, (length - 1).bit_length())
    if size != length:
        x = torch.cat([x, x.new_zeros((size - length, *x.shape[1:]))])
    while size > 1:
        size //= 2
        x = x[:size] + x[size:]
    return x[0]


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of the first dimension; x [N, ...], int64 index [...] -> [index shape, ...].

    The gradient adds rows in an order that repeats: that of ``x[index]`` does on a GPU and changes from run to run on a
    CPU, that of ``index_select`` the other way round.
    """
    if x.is_cuda:
        return x[index]
    return x.index_select(0, index.reshape(-1)).reshape(*index.shape, *x.shape[1:])
