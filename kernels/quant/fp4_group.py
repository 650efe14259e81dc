"""Public ops on FP4 activations: the indexer's queries and keys, in groups along the last dimension.

What does not live here: MXFP4 weights (`mxfp4.py`), the rotation before it (`hadamard.py`).
"""

from functools import partial

import torch

from rollforward.kernels.checks import bind_shapes, check_dtype, check_multiple
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.quant.formats import MXFP4_GROUP
from rollforward.kernels.quant.fp4_group_ref import (
    fake_quant_fp4_group_ref,
    fp4_group_dequantise_ref,
    fp4_group_quantise_ref,
)
from rollforward.kernels.quant.straight_through import straight_through


def _check_activation(op: str, x: torch.Tensor, group: int) -> None:
    sizes = bind_shapes(op, x=(x, "... K"))
    check_dtype(op, "x", x, torch.float32, torch.bfloat16)
    if group < 2 or group % 2:
        raise ShapeError(f"{op}: group is {group}; it must be even and at least 2. The indexer uses 32.")
    check_multiple(op, "K, the last dimension of x,", sizes["K"], group)


def fp4_group_quantise(x: torch.Tensor, group: int = MXFP4_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to packed E2M1 with one E8M0 scale per `group` elements.

    scale = 2^ceil(log2(max(amax, 6 x 2^-126) / 6)); elements round to nearest even, nothing saturates.

    Args:
        x: [..., K] float32 or bfloat16, K a multiple of `group`.
        group: elements per scale.

    Returns:
        packed: [..., K/2] int8, low nibble = even index.
        scale: [..., K/group] uint8.

    Invariants: deterministic and row-invariant. The codes of non-finite input are unspecified.
    Source: official kernel.py, FP4 activation quantisation.
    """
    _check_activation("fp4_group_quantise", x, group)
    return fp4_group_quantise_ref(x.detach(), group)


def fp4_group_dequantise(packed: torch.Tensor, scale: torch.Tensor, group: int = MXFP4_GROUP) -> torch.Tensor:
    """Return the exact float32 value of group FP4.

    Args:
        packed: [..., K/2] int8.
        scale: [..., K/group] uint8.
        group: elements per scale.

    Returns:
        [..., K] float32.
    """
    op = "fp4_group_dequantise"
    check_dtype(op, "packed", packed, torch.int8)
    check_dtype(op, "scale", scale, torch.uint8)
    sizes = bind_shapes(op, packed=(packed, "... K/2"))
    check_multiple(op, "K/2, the last dimension of packed,", sizes["K/2"], group // 2)
    bind_shapes(op, packed=(packed, "... K/2"), scale=(scale, f"... {sizes['K/2'] * 2 // group}"))
    return fp4_group_dequantise_ref(packed, scale, group)


def fake_quant_fp4_group(x: torch.Tensor, group: int = MXFP4_GROUP) -> torch.Tensor:
    """Return fp4_group_dequantise(*fp4_group_quantise(x)) in the dtype of x, with the gradient of the identity.

    Args:
        x: [..., K] float32 or bfloat16, K a multiple of `group`.
        group: elements per scale.

    Returns:
        [..., K], dtype of x; NaN in a group that holds a non-finite value.

    Invariants: deterministic and row-invariant; saves nothing for the backward pass.
    Source: official kernel.py.
    Example: one group with 1.0, -0.3, 0.25, 2.7 -> scale 0.5, values 1.0, -0.25, 0.25, 3.0
    """
    _check_activation("fake_quant_fp4_group", x, group)
    return straight_through(partial(fake_quant_fp4_group_ref, group=group), x)
