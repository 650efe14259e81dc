"""BF16 rounding: nearest, ties to even."""

import torch


def round_bf16_ref(x: torch.Tensor) -> torch.Tensor:
    """Return the BF16 value nearest to each element, in the dtype of x."""
    return x.to(torch.bfloat16).to(x.dtype)
