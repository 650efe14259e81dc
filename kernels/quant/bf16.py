"""Public op: BF16 rounding with a straight-through gradient (norms, embedding, head, streams)."""

import torch

from rollforward.kernels.checks import check_dtype
from rollforward.kernels.quant.bf16_ref import round_bf16_ref
from rollforward.kernels.quant.straight_through import straight_through


def fake_quant_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to BF16 values, ties to even, and keep the dtype; the gradient is the identity.

    Args:
        x: [...] float32 (or bfloat16, which comes back unchanged).

    Returns:
        [...] same dtype, every value exact in BF16.

    Invariants: elementwise, deterministic, saves nothing.
    """
    check_dtype("fake_quant_bf16", "x", x, torch.float32, torch.bfloat16)
    return straight_through(round_bf16_ref, x)
