"""MXFP4 weights in plain torch: quantise, dequantise, and the lossless conversion to block FP8.

Letters: R rows, K columns (the reduction dimension), J = K / 32 groups, Y x Z 128x128 blocks.
"""

import torch
from torch.nn.functional import pad

from rollforward.kernels.errors import ScaleRangeError
from rollforward.kernels.quant.formats import (
    E2M1,
    E2M1_VALUES,
    FP8_BLOCK,
    FP8_HEADROOM,
    MAX_SCALE_SPREAD,
    MXFP4_GROUP,
    SCALE_NAN,
    SCALE_ONE,
    ceil_scale_bytes,
    check_finite_amax,
    e2m1_decode,
    e2m1_encode,
    e8m0_decode,
    pack_nibbles,
    power_of_two,
    round_to_grid,
    unpack_nibbles,
)

_GROUPS_PER_BLOCK = FP8_BLOCK // MXFP4_GROUP
NAN_MESSAGE = "mxfp4_to_fp8: scale holds byte 255 (NaN); every E8M0 scale must be 0..254. Reload it."
_LOWEST_SHIFT = -13
"""At 2^-13 and below even 6 rounds to zero in E4M3."""


def _block_max(byte_RJ: torch.Tensor) -> torch.Tensor:
    """Return [..., R, J] int32: for each group the largest byte of its 128x128 block (edge blocks are smaller)."""
    rows, groups = byte_RJ.shape[-2:]
    pad_rows, pad_groups = -rows % FP8_BLOCK, -groups % _GROUPS_PER_BLOCK
    padded = pad(byte_RJ, (0, pad_groups, 0, pad_rows))
    blocks = padded.unflatten(-1, (-1, _GROUPS_PER_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    largest = blocks.amax(dim=(-3, -1), keepdim=True).expand(blocks.shape)
    return largest.flatten(-2).flatten(-3, -2)[..., :rows, :groups]


def mxfp4_scales_ref(w_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the scale byte of every 1x32 group under the clamped-group policy.

    The byte is ceil(log2(amax / 6)) + 127. A non-zero group whose byte lies more than 14 below the largest of its
    128x128 block is raised to that bound, so that the tensor always converts to FP8 without loss. Groups that come
    out as zeros carry the largest byte of the block; blocks of zeros carry 127.

    Returns:
        (byte [..., R, J] int32, is_clamped [..., R, J] bool).
    """
    amax_RJ = w_RK.abs().unflatten(-1, (-1, MXFP4_GROUP)).amax(-1)
    check_finite_amax("mxfp4", E2M1, amax_RJ, w_RK)
    byte_RJ = ceil_scale_bytes(E2M1, amax_RJ)
    # A group rounds to zeros when its amax is at most half of the smallest non-zero value, 0.5 x scale.
    byte_RJ.masked_fill_(amax_RJ <= 0.25 * power_of_two(byte_RJ), 0)
    largest_RJ = _block_max(byte_RJ)
    lowest_RJ = largest_RJ - MAX_SCALE_SPREAD
    is_clamped_RJ = (byte_RJ > 0) & (byte_RJ < lowest_RJ)
    byte_RJ = torch.where(is_clamped_RJ, lowest_RJ, byte_RJ)
    is_zero_RJ = (byte_RJ == 0) | (is_clamped_RJ & (amax_RJ <= 0.25 * power_of_two(byte_RJ)))
    return torch.where(is_zero_RJ, largest_RJ.masked_fill(largest_RJ == 0, SCALE_ONE), byte_RJ), is_clamped_RJ


def _round_mxfp4(w_RK: torch.Tensor, byte_RJ: torch.Tensor) -> torch.Tensor:
    """Return [..., R, J, 32] float32: E2M1 grid values w / scale; the product with a power of two is exact."""
    groups = w_RK.unflatten(-1, (-1, MXFP4_GROUP))
    return round_to_grid(E2M1, groups * power_of_two(254 - byte_RJ).unsqueeze(-1))


def mxfp4_quantise_ref(w_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Quantise [..., R, K] float32 to (packed int8 [..., R, K/2], scale bytes uint8 [..., R, K/32], groups whose scale
    was raised)."""
    byte_RJ, is_clamped_RJ = mxfp4_scales_ref(w_RK)
    codes = e2m1_encode(_round_mxfp4(w_RK, byte_RJ)).flatten(-2)
    return pack_nibbles(codes), byte_RJ.to(torch.uint8), int(is_clamped_RJ.sum())


def fake_quant_mxfp4_ref(w_RK: torch.Tensor) -> torch.Tensor:
    """Return dequantise(quantise(w)) in one pass, bit for bit."""
    byte_RJ, _ = mxfp4_scales_ref(w_RK)
    return _round_mxfp4(w_RK, byte_RJ).mul_(power_of_two(byte_RJ).unsqueeze(-1)).flatten(-2)


def mxfp4_dequantise_ref(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., K] = E2M1 value x 2^(byte - 127)."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, MXFP4_GROUP))
    return values.mul_(e8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def _shift_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each (shift, code) the E4M3 byte of value x 2^shift, and whether that is exact."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    shifts = torch.arange(_LOWEST_SHIFT, FP8_HEADROOM + 1, device=device)
    exact = values * torch.exp2(shifts.to(torch.float32)).unsqueeze(-1)
    rounded = exact.to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8), rounded.to(torch.float32) == exact


def mxfp4_to_fp8_ref(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Convert to (float8_e4m3fn [..., R, K], block scale bytes uint8 [..., Y, Z], groups that lost something)."""
    if bool((scale == SCALE_NAN).any()):
        raise ScaleRangeError(NAN_MESSAGE)
    codes = unpack_nibbles(packed).unflatten(-1, (-1, MXFP4_GROUP))
    has_value_RJ = (codes & 7).amax(-1) > 0
    # One is added so that byte 0 (2^-127) of a non-zero group differs from "all zeros".
    largest_RJ = _block_max(torch.where(has_value_RJ, scale.to(torch.int32) + 1, 0)) - 1
    block_byte_RJ = torch.where(largest_RJ < 0, SCALE_ONE, (largest_RJ - FP8_HEADROOM).clamp_min(0))
    shift_RJ = (scale.to(torch.int32) - block_byte_RJ).clamp(_LOWEST_SHIFT, FP8_HEADROOM)
    bytes_by_shift, is_exact_by_shift = _shift_tables(packed.device)
    index = (shift_RJ - _LOWEST_SHIFT).unsqueeze(-1).to(torch.int64) * 16 + codes
    payload = bytes_by_shift.flatten()[index].flatten(-2).view(torch.float8_e4m3fn)
    num_lossy = int((~is_exact_by_shift.flatten()[index].all(-1)).sum())
    block_scale = block_byte_RJ[..., ::FP8_BLOCK, ::_GROUPS_PER_BLOCK].to(torch.uint8)
    return payload, block_scale, num_lossy


def clamp_message(op: str, num_groups: int) -> str:
    """What is said of groups outside the binades that FP8 carries, where they are refused."""
    return (
        f"{op}: {num_groups} groups of 32 have a scale more than 2^{MAX_SCALE_SPREAD} below the largest of their "
        "128x128 block and would lose bits in FP8. Drop strict=True to clamp and count them."
    )
