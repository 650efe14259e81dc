"""Walsh-Hadamard transform by butterflies: log2(n) rounds of additions in one fixed order."""

import torch


def hadamard_ref(x: torch.Tensor) -> torch.Tensor:
    """Transform the last dimension (a power of two) in Sylvester order, scaled by n^-0.5, computed in fp32.

    Round h adds and subtracts the elements whose indices differ in bit h. The transformed dimension is moved to the
    front so that every addition runs over contiguous rows.
    """
    size = x.shape[-1]
    y_nT = x.to(torch.float32).reshape(-1, size).t().contiguous()
    for bit in range(size.bit_length() - 1):
        pairs = y_nT.view(size >> (bit + 1), 2, -1)
        y_nT = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
    return (y_nT.view(size, -1).t() * size**-0.5).reshape(x.shape).to(x.dtype)
