"""Newton-Schulz iterations of DeepSeek-V4's Muon in plain torch: eight fast steps, then two that settle at 1.

Each step maps every singular value s to a s + b s^3 + c s^5 and leaves the singular vectors alone.
Local letters: B matrices, N their smaller and M their larger side.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rollforward.kernels.rowwise import tree_sum

FAST = (3.4445, -4.7750, 2.0315)
"""Slope 3.4445 at 0: lifts a singular value of 1e-3 near 1 within eight steps, where it then swings between 0.7 and
1.2."""

SETTLING = (2.0, -1.5, 0.5)
"""1 is a fixed point with slope 0: an error e becomes about e^2 / 2."""

COEFFICIENTS = (FAST,) * 8 + (SETTLING,) * 2
"""(a, b, c) of every step."""

SIDE_TILE = 32
"""Both sides are padded with zeros to a multiple, which stay zeros in every step. Below, the CPU's float32 products sum
in an order that depends on the batch, and bfloat16 ones take another path while the whole batch has up to 16^3
multiplications."""


def frobenius_norm_ref(x_BNM: Tensor) -> Tensor:
    """Return the Frobenius norm of every matrix, [B, 1, 1] float64.

    Squares of float32 are exact in float64 and neither overflow nor vanish; only elementwise additions take place, so
    the bits depend on the matrix alone.
    """
    return tree_sum(tree_sum(x_BNM.double().square(), 2), 1).sqrt()[:, None, None]


def newton_schulz_ref(x_BNM: Tensor, dtype: torch.dtype) -> Tensor:
    """Return nearly U V^T of every X = U S V^T.

    X <- X / ||X||_F; then ten times A = X X^T, X <- a X + (b A + c A A) X.

    Args:
        x_BNM: [B, N, M] float32 or float64 with N <= M.
        dtype: of X, A and the products' results.

    Returns:
        [B, N, M] dtype; zeros where X is all zero.
    """
    num_rows, num_columns = x_BNM.shape[1:]
    norm_B11 = frobenius_norm_ref(x_BNM)
    x_BNM = (x_BNM / torch.where(norm_B11 == 0, 1.0, norm_B11)).to(dtype)
    # Contiguous, because large bfloat16 products of strided matrices have other bits.
    x_BNM = functional.pad(x_BNM, (0, -num_columns % SIDE_TILE, 0, -num_rows % SIDE_TILE)).contiguous()
    for a, b, c in COEFFICIENTS:
        gram_BNN = torch.bmm(x_BNM, x_BNM.transpose(1, 2))
        polynomial_BNN = torch.baddbmm(gram_BNN, gram_BNN, gram_BNN, beta=b, alpha=c)
        x_BNM = torch.baddbmm(x_BNM, polynomial_BNN, x_BNM, beta=a)
    return x_BNM[:, :num_rows, :num_columns]
