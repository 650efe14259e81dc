"""Public ops on MXFP4 weights (routed experts): quantise, dequantise, fake-quantise, convert to block FP8.

One quantiser serves the trainer's forward, the exporter, the checkpoint writer and the tests. The tile form of each op
gives the same bytes and reads what it is given once (`mxfp4_sweep`); operands on the CPU are copied to the device, and
results come back to where they were. Between FP4 and FP8 it takes R and K that are multiples of 128; weights may also
be bfloat16. Ops that count or refuse wait for the device.
What does not live here: FP4 activations of the indexer (`fp4_group.py`).
"""

from typing import NamedTuple

import torch

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype, check_multiple
from rollforward.kernels.errors import DtypeError, ScaleRangeError
from rollforward.kernels.operators import on_device
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.kernels.quant.formats import E2M1, FP8_BLOCK, MXFP4_GROUP, check_finite_amax
from rollforward.kernels.quant.mxfp4_ref import (
    NAN_MESSAGE,
    clamp_message,
    fake_quant_mxfp4_ref,
    mxfp4_dequantise_ref,
    mxfp4_quantise_ref,
    mxfp4_scales_ref,
    mxfp4_to_fp8_ref,
)
from rollforward.kernels.quant.straight_through import straight_through


def _check_weight(op: str, w: torch.Tensor) -> None:
    sizes = bind_shapes(op, w=(w, "... R K"))
    check_dtype(op, "w", w, torch.float32)
    check_multiple(op, "K, the last dimension of w,", sizes["K"], MXFP4_GROUP)


def _check_packed(op: str, packed: torch.Tensor, scale: torch.Tensor) -> None:
    sizes = bind_shapes(op, packed=(packed, "... R K/2"), scale=(scale, "... R J"))
    check_dtype(op, "packed", packed, torch.int8)
    check_dtype(op, "scale", scale, torch.uint8)
    check_multiple(op, "K/2, the last dimension of packed,", sizes["K/2"], MXFP4_GROUP // 2)
    num_groups = sizes["K/2"] * 2 // MXFP4_GROUP
    bind_shapes(op, scale=(scale, f"... R {num_groups}"))


class MXFP4AndFP8(NamedTuple):
    """The same weights [..., R, K] in both formats."""

    packed: torch.Tensor
    """[..., R, K/2] int8; low nibble = even index."""
    scale: torch.Tensor
    """[..., R, K/32] uint8."""
    payload: torch.Tensor
    """[..., R, K] float8_e4m3fn."""
    block_scale: torch.Tensor
    """[..., ceil(R/128), ceil(K/128)] uint8."""
    payload_turned: torch.Tensor | None
    """[..., K, R] float8_e4m3fn, contiguous; None: not asked for."""
    clamped_groups: int
    """Groups whose scale was raised."""


def _check_blocks(op: str, w: torch.Tensor, *, what: str = "w", packing: int = 1) -> None:
    for name, size in zip("RK", (w.shape[-2], w.shape[-1] * packing), strict=True):
        check_multiple(op, f"{name} of {what}, in the tile form,", size, FP8_BLOCK)


def _matrices(stacked: torch.Tensor) -> torch.Tensor:
    """[..., R, K] as [E, R, K] on the device."""
    return on_device(stacked.detach())[0].reshape(-1, *stacked.shape[-2:]).contiguous()


def _given_back(like: torch.Tensor, *results: torch.Tensor) -> list[torch.Tensor]:
    """[E, ...] as [..., ...], where and stacked as an operand was."""
    return [one.reshape(*like.shape[:-2], *one.shape[1:]).to(like.device) for one in results]


def _quantise_tile(op: str, w: torch.Tensor, *, fp8: bool, turned: bool) -> tuple[mxfp4_sweep.Quantised, int]:
    bind_shapes(op, w=(w, "... R K"))
    check_dtype(op, "w", w, torch.float32, torch.bfloat16)
    _check_blocks(op, w)
    stacked = _matrices(w)
    out = mxfp4_sweep.Quantised(*mxfp4_sweep.quantise(stacked, fp8, turned))
    if not len(stacked):
        return out, 0
    lowest, num_clamped = torch.stack([out.raised.amin(), out.raised.sum()]).tolist()
    if lowest < 0:
        check_finite_amax(op, E2M1, w.abs().amax().float(), w.float())
    return out, num_clamped


def _to_fp8_tile(packed: torch.Tensor, scale: torch.Tensor, *, turned: bool) -> tuple[mxfp4_sweep.Converted, int]:
    _check_blocks("mxfp4_to_fp8", packed, what="packed", packing=2)
    stacked = _matrices(packed)
    out = mxfp4_sweep.Converted(*mxfp4_sweep.to_fp8(stacked, _matrices(scale), turned))
    if not len(stacked):
        return out, 0
    lowest, num_lossy = torch.stack([out.lost.amin(), out.lost.sum()]).tolist()
    if lowest < 0:
        raise ScaleRangeError(NAN_MESSAGE)
    return out, num_lossy


def _to_fp8(
    packed: torch.Tensor, scale: torch.Tensor, *, turned: bool, strict: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Payload, its transpose (anything unless `turned`), block scales, groups that lost something."""
    _check_packed("mxfp4_to_fp8", packed, scale)
    if dispatch.is_tile("mxfp4"):
        out, num_lossy = _to_fp8_tile(packed, scale, turned=turned)
        payload, block_scale = _given_back(packed, out.payload, out.block_scale)
        back = _given_back(packed, out.turned)[0] if turned else payload
    else:
        payload, block_scale, num_lossy = mxfp4_to_fp8_ref(packed, scale)
        back = _turned(payload) if turned else payload
    if strict and num_lossy:
        raise ScaleRangeError(clamp_message("mxfp4_to_fp8", num_lossy))
    return payload, back, block_scale, num_lossy


def _turned(payload: torch.Tensor) -> torch.Tensor:
    return payload.view(torch.uint8).mT.contiguous().view(payload.dtype)


def mxfp4_quantise_fp8(w: torch.Tensor, *, turned: bool = False) -> MXFP4AndFP8:
    """Quantise master weights to MXFP4 and to the block FP8 of the same values, `mxfp4_to_fp8` of it, in one pass.

    Args:
        w: [..., R, K] float32, finite, K a multiple of 32.
        turned: also the FP8 payload transposed, for products over R.

    Returns:
        Both formats.

    Raises:
        NonFiniteError: w holds NaN or infinity.

    Invariants: as `mxfp4_quantise`; the bytes of the tile form are those of the reference.
    """
    if dispatch.is_tile("mxfp4"):
        out, num_clamped = _quantise_tile("mxfp4_quantise_fp8", w, fp8=True, turned=turned)
        results = out.packed.view(torch.int8), out.scale, out.payload, out.block_scale
        back = _given_back(w, out.turned)[0] if turned else None
        return MXFP4AndFP8(*_given_back(w, *results), back, num_clamped)
    packed, scale, num_clamped = mxfp4_quantise_counted(w)
    payload, block_scale, _ = mxfp4_to_fp8_ref(packed, scale)
    back = _turned(payload) if turned else None
    return MXFP4AndFP8(packed, scale, payload, block_scale, back, num_clamped)


def mxfp4_quantise(w: torch.Tensor, *, strict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise master weights to packed E2M1 with one E8M0 scale per 1x32 group along K.

    scale = 2^ceil(log2(amax / 6)), elements round to nearest even, nothing saturates. Clamped-group policy: within a
    128x128 block no scale of a non-zero group lies more than 14 binades below the largest, so `mxfp4_to_fp8` is
    lossless on every tensor made here; a group below the bound is raised to it and rounds more coarsely.

    Args:
        w: [..., R, K] float32 masters (stacked experts: [E, R, K]), finite, K a multiple of 32.
        strict: raise instead of raising scales.

    Returns:
        packed: [..., R, K/2] int8; low nibble = even index; zeros have code 0.
        scale: [..., R, K/32] uint8, 1..252. Groups of zeros carry the block's largest scale, blocks of zeros 127.

    Raises:
        NonFiniteError: w holds NaN or infinity.
        ScaleRangeError: strict, and a group lies outside the 14 binades.

    Invariants: deterministic; blocks are independent. Requantising the dequantised value keeps the value.
    Source: official convert.py (layout), kernel.py (scale rule, rounding).
    Example: one group with 1.0, -0.3, 0.25, 2.7 -> scale byte 126 (0.5), values 1.0, -0.25, 0.25, 3.0
    """
    packed, scale, num_clamped = mxfp4_quantise_counted(w)
    if strict and num_clamped:
        raise ScaleRangeError(clamp_message("mxfp4_quantise", num_clamped))
    return packed, scale


def mxfp4_quantise_counted(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return `mxfp4_quantise(w)` and `mxfp4_clamped_groups(w)`, with the scales computed once."""
    if dispatch.is_tile("mxfp4"):
        out, num_clamped = _quantise_tile("mxfp4_quantise", w, fp8=False, turned=False)
        packed, scale = _given_back(w, out.packed.view(torch.int8), out.scale)
        return packed, scale, num_clamped
    _check_weight("mxfp4_quantise", w)
    return mxfp4_quantise_ref(w.detach())


def mxfp4_clamped_groups(w: torch.Tensor) -> int:
    """Return how many 1x32 groups of [..., R, K] float32 the clamped-group policy touches (health metric)."""
    if dispatch.is_tile("mxfp4"):
        return _quantise_tile("mxfp4_clamped_groups", w, fp8=False, turned=False)[1]
    _check_weight("mxfp4_clamped_groups", w)
    return int(mxfp4_scales_ref(w.detach())[1].sum())


def mxfp4_dequantise(packed: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the exact value of packed MXFP4: E2M1 code x 2^(byte - 127).

    Args:
        packed: [..., R, K/2] int8.
        scale: [..., R, K/32] uint8; byte 255 gives NaN, 253 and 254 infinity for the codes that float32 has not.
        dtype: float32 or bfloat16; both hold every value.

    Returns:
        [..., R, K] of that dtype.

    Source: official convert.py.
    """
    _check_packed("mxfp4_dequantise", packed, scale)
    if dtype not in (torch.float32, torch.bfloat16):
        raise DtypeError(f"mxfp4_dequantise: dtype is {dtype}; the op gives float32 or bfloat16.")
    if dispatch.is_tile("mxfp4"):
        numbers = mxfp4_sweep.dequantise(*(one.contiguous() for one in on_device(packed, scale)), dtype)
        return numbers.to(packed.device)
    return mxfp4_dequantise_ref(packed, scale).to(dtype)


def fake_quant_mxfp4(w: torch.Tensor) -> torch.Tensor:
    """Return mxfp4_dequantise(*mxfp4_quantise(w)), bit for bit, with the gradient of the identity.

    Args:
        w: [..., R, K] float32 masters, finite, K a multiple of 32.

    Returns:
        [..., R, K] float32.

    Raises:
        NonFiniteError: w holds NaN or infinity.

    Invariants: deterministic; blocks of 128x128 are independent; saves nothing for the backward pass.
    """
    if dispatch.is_tile("mxfp4"):
        return straight_through(_fake_quant_tile, w)
    _check_weight("fake_quant_mxfp4", w)
    return straight_through(fake_quant_mxfp4_ref, w)


def _fake_quant_tile(w: torch.Tensor) -> torch.Tensor:
    out, _ = _quantise_tile("fake_quant_mxfp4", w, fp8=False, turned=False)
    return _given_back(w, mxfp4_sweep.dequantise(out.packed.view(torch.int8), out.scale, w.dtype))[0]


def mxfp4_to_fp8(
    packed: torch.Tensor, scale: torch.Tensor, *, strict: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Convert MXFP4 to E4M3 with one power-of-two scale per 128x128 block: the same values, exactly.

    block scale = max(scale of non-zero groups) / 2^6; element = E2M1 x scale / block scale. Exact for every payload
    while the scales of a block span at most 2^14; beyond, elements round to nearest even, which is what the
    quantiser's clamped-group policy gives, and the groups that lost something are counted.

    Args:
        packed: [..., R, K/2] int8.
        scale: [..., R, K/32] uint8, none 255.
        strict: raise if a group would lose something.

    Returns:
        payload: [..., R, K] float8_e4m3fn.
        block_scale: [..., ceil(R/128), ceil(K/128)] uint8; 127 for blocks of zeros.
        clamped_groups: number of groups that are not reproduced exactly; 0 for every output of `mxfp4_quantise`.

    Raises:
        ScaleRangeError: a scale is NaN; or strict and a group is not exact.

    Source: official convert.py (FP4 to FP8 cast); report 5.2.1; exactness proved over all codes in the tests.
    """
    payload, _, block_scale, num_lossy = _to_fp8(packed, scale, turned=False, strict=strict)
    return payload, block_scale, num_lossy


def mxfp4_to_fp8_turned(
    packed: torch.Tensor, scale: torch.Tensor, *, strict: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return what `mxfp4_to_fp8` returns, and after the payload its transpose [..., K, R], contiguous, for products
    over R; in one pass in the tile form."""
    return _to_fp8(packed, scale, turned=True, strict=strict)


def mxfp4_canonicalise(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the canonical bytes of the same values: requantised, so the largest code of a group is 4 or 6 when it can.

    Args:
        packed: [..., R, K/2] int8.
        scale: [..., R, K/32] uint8.

    Returns:
        (packed, scale) with equal dequantised values if the clamped-group policy touches nothing.

    Invariants: idempotent byte for byte; hashes of published weights are over this form.
    """
    _check_packed("mxfp4_canonicalise", packed, scale)
    return mxfp4_quantise(mxfp4_dequantise(packed, scale))
