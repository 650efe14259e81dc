"""Public op: the orthogonal factor of a batch of matrices of one shape, for Muon."""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_dtype, check_shapes
from rollforward.kernels.errors import DtypeError
from rollforward.kernels.optim.newton_schulz_ref import newton_schulz_ref


@torch.no_grad()
def orthogonalise(x_BNM: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return nearly U V^T of every matrix X = U S V^T, by 8 + 2 Newton-Schulz steps on X / ||X||_F.

    Args:
        x_BNM: [B, N, M] float32, any B including 0. N > M runs transposed, so X^T gives the transposed bits.
        dtype: float32 or bfloat16, format of the iterate and of the products' results; sums are float32 in both.

    Returns:
        [B, N, M] float32. Singular values from 1e-3 to 1 of the Frobenius norm become 1 within 0.01 (0.02 in
        bfloat16, where the directions of small ones are partly rounding noise); smaller ones end between 0 and about
        1. All zero stays all zero; a matrix with NaN or infinity becomes NaN.

    Raises:
        ShapeError: x_BNM has not three dimensions.
        DtypeError: x_BNM is not float32, or dtype is neither of the two.

    Invariants: a matrix's bits depend on its own values alone, not on B, its place or its neighbours, for a fixed
    thread count. Scaling a matrix by a power of two changes no bit. No gradient.
    Source: DeepSeek-V4 report, 2.4.
    Example: [[[0, -3], [2, 0]]] -> about [[[0, -1], [1, 0]]].
    """
    check_shapes("orthogonalise", x_BNM=x_BNM)
    check_dtype("orthogonalise", "x_BNM", x_BNM, torch.float32)
    if dtype not in (torch.float32, torch.bfloat16):
        raise DtypeError(f"orthogonalise: dtype is {dtype}; products are in float32 or bfloat16. Choose one of them.")
    if x_BNM.shape[1] > x_BNM.shape[2]:
        return newton_schulz_ref(x_BNM.transpose(1, 2), dtype).float().transpose(1, 2)
    return newton_schulz_ref(x_BNM, dtype).float()
