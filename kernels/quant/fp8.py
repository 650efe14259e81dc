"""Public ops on FP8: weights in 128x128 blocks, GEMM inputs and KV entries in groups along the last dimension.

What does not live here: the FP8 GEMM (`kernels/linear`); FP4 to FP8 (`mxfp4.py`).
"""

from functools import partial

import torch

from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.quant.formats import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from rollforward.kernels.quant.fp8_ref import (
    fake_quant_fp8_block_ref,
    fake_quant_fp8_group_ref,
    fp8_block_dequantise_ref,
    fp8_block_quantise_ref,
    fp8_group_dequantise_ref,
    fp8_group_quantise_ref,
)
from rollforward.kernels.quant.straight_through import straight_through


def _check_weight(op: str, w: torch.Tensor) -> None:
    bind_shapes(op, w=(w, "... R K"))
    check_dtype(op, "w", w, torch.float32)


def fp8_block_quantise(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise master weights to E4M3 with one E8M0 scale per 128x128 block.

    scale = 2^ceil(log2(amax / 448)); elements round to nearest even, nothing saturates.

    Args:
        w: [..., R, K] float32 masters, finite. Edge blocks may be partial.

    Returns:
        payload: [..., R, K] float8_e4m3fn; zeros have code 0.
        scale: [..., ceil(R/128), ceil(K/128)] uint8, 1..246; 127 for blocks that come out as zeros.

    Raises:
        NonFiniteError: w holds NaN or infinity.

    Invariants: deterministic; blocks are independent. Requantising the dequantised value keeps the value.
    Source: official convert.py (layout), kernel.py (scale rule).
    """
    _check_weight("fp8_block_quantise", w)
    return fp8_block_quantise_ref(w.detach())


def fp8_block_dequantise(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the exact float32 value of block FP8: E4M3 x 2^(byte - 127).

    Args:
        payload: [..., R, K] float8_e4m3fn.
        scale: [..., ceil(R/128), ceil(K/128)] uint8; byte 255 gives NaN.

    Returns:
        [..., R, K] float32.
    """
    op = "fp8_block_dequantise"
    sizes = bind_shapes(op, payload=(payload, "... R K"))
    check_dtype(op, "payload", payload, torch.float8_e4m3fn)
    check_dtype(op, "scale", scale, torch.uint8)
    num_row_blocks, num_column_blocks = -(-sizes["R"] // FP8_BLOCK), -(-sizes["K"] // FP8_BLOCK)
    bind_shapes(op, payload=(payload, "... R K"), scale=(scale, f"... {num_row_blocks} {num_column_blocks}"))
    return fp8_block_dequantise_ref(payload, scale)


def fake_quant_fp8_block(w: torch.Tensor) -> torch.Tensor:
    """Return fp8_block_dequantise(*fp8_block_quantise(w)), bit for bit, with the gradient of the identity.

    Args:
        w: [..., R, K] float32 masters, finite.

    Returns:
        [..., R, K] float32.

    Raises:
        NonFiniteError: w holds NaN or infinity.

    Invariants: deterministic; blocks of 128x128 are independent; saves nothing for the backward pass.
    """
    _check_weight("fake_quant_fp8_block", w)
    return straight_through(fake_quant_fp8_block_ref, w)


def _check_activation(op: str, x: torch.Tensor, group: int) -> None:
    bind_shapes(op, x=(x, "... K"))
    check_dtype(op, "x", x, torch.float32, torch.bfloat16)
    if group < 1:
        raise ShapeError(f"{op}: group is {group}; it must be at least 1. Use 128 for GEMM inputs, 64 for KV.")


def fp8_group_quantise(
    x: torch.Tensor, group: int = FP8_BLOCK, floor: float = ACTIVATION_AMAX_FLOOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to E4M3 with one E8M0 scale per `group` elements of the last dimension.

    scale = 2^ceil(log2(max(amax, floor) / 448)); elements round to nearest even, nothing saturates.

    Args:
        x: [..., K] float32 or bfloat16. The last group may be partial.
        group: elements per scale; 128 for GEMM inputs, 64 for KV entries.
        floor: smallest amax used for a scale.

    Returns:
        payload: [..., K] float8_e4m3fn.
        scale: [..., ceil(K/group)] uint8.

    Invariants: deterministic and row-invariant; non-finite input gives NaN, so a loss made of it is not finite.
    Source: official kernel.py, activation quantisation.
    Example: one group of 64 with 1.0, -0.3, 0.017, 2.7 -> scale byte 120 (2^-7), values 1.0, -0.3125, 0.017578125, 2.75
    """
    _check_activation("fp8_group_quantise", x, group)
    return fp8_group_quantise_ref(x.detach(), group, floor)


def fp8_group_dequantise(payload: torch.Tensor, scale: torch.Tensor, group: int = FP8_BLOCK) -> torch.Tensor:
    """Return the exact float32 value of group FP8.

    Args:
        payload: [..., K] float8_e4m3fn.
        scale: [..., ceil(K/group)] uint8.
        group: elements per scale.

    Returns:
        [..., K] float32.
    """
    op = "fp8_group_dequantise"
    check_dtype(op, "payload", payload, torch.float8_e4m3fn)
    check_dtype(op, "scale", scale, torch.uint8)
    sizes = bind_shapes(op, payload=(payload, "... K"))
    bind_shapes(op, payload=(payload, "... K"), scale=(scale, f"... {-(-sizes['K'] // group)}"))
    return fp8_group_dequantise_ref(payload, scale, group)


def fake_quant_fp8_group(x: torch.Tensor, group: int = FP8_BLOCK, floor: float = ACTIVATION_AMAX_FLOOR) -> torch.Tensor:
    """Return fp8_group_dequantise(*fp8_group_quantise(x)) in the dtype of x, with the gradient of the identity.

    Args:
        x: [..., K] float32 or bfloat16. The last group may be partial.
        group: elements per scale; 128 for GEMM inputs, 64 for KV entries.
        floor: smallest amax used for a scale.

    Returns:
        [..., K], dtype of x.

    Invariants: deterministic and row-invariant; saves nothing for the backward pass.
    Source: official kernel.py (in-place fake quantisation that passes through E4M3).
    """
    _check_activation("fake_quant_fp8_group", x, group)
    return straight_through(partial(fake_quant_fp8_group_ref, group=group, floor=floor), x)
