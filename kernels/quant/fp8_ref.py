"""FP8 (E4M3, power-of-two scales) in plain torch: 128x128 weight blocks and 1-row activation groups.

Letters: R rows, K columns, J groups along K.
"""

import torch
from torch.nn.functional import pad

from rollforward.kernels.quant.formats import (
    E4M3,
    FP8_BLOCK,
    SCALE_ONE,
    ceil_scale_bytes,
    check_finite_amax,
    e8m0_decode,
    power_of_two,
    round_to_grid,
)


def _to_blocks(w_RK: torch.Tensor) -> torch.Tensor:
    """Return [..., Y, 128, Z, 128], zero-padded; blocks no larger than the matrix need no copy."""
    rows, columns = w_RK.shape[-2:]
    padded = pad(w_RK, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))


def _round_blocks(w_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E4M3 grid values [..., Y, 128, Z, 128] float32, bytes [..., Y, 1, Z, 1] int32)."""
    blocks = _to_blocks(w_RK)
    amax = blocks.abs().amax(-1, keepdim=True).amax(-3, keepdim=True)
    check_finite_amax("fp8_block", E4M3, amax, w_RK)
    byte = ceil_scale_bytes(E4M3, amax)
    # A block whose amax is at most half of the smallest step comes out as zeros, whatever its scale.
    byte.masked_fill_(amax <= 0.5 * E4M3.min_step * power_of_two(byte), SCALE_ONE)
    return round_to_grid(E4M3, blocks * power_of_two(254 - byte)), byte


def _from_blocks(blocks: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns]


def fp8_block_quantise_ref(w_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., R, K] float32 to (float8_e4m3fn [..., R, K], bytes uint8 [..., Y, Z])."""
    blocks, byte = _round_blocks(w_RK)
    payload = _from_blocks(blocks.to(torch.float8_e4m3fn), *w_RK.shape[-2:]).contiguous()
    return payload, byte.squeeze(-1).squeeze(-2).to(torch.uint8)


def fake_quant_fp8_block_ref(w_RK: torch.Tensor) -> torch.Tensor:
    """Return dequantise(quantise(w)) in one pass, bit for bit."""
    blocks, byte = _round_blocks(w_RK)
    return _from_blocks(blocks.mul_(power_of_two(byte)), *w_RK.shape[-2:]).contiguous()


def fp8_block_dequantise_ref(payload_RK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., R, K] = E4M3 value x 2^(byte - 127) of its 128x128 block."""
    rows, columns = payload_RK.shape[-2:]
    scale_RK = e8m0_decode(scale).repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return payload_RK.to(torch.float32) * scale_RK.repeat_interleave(FP8_BLOCK, -1)[..., :columns]


def _round_groups(x: torch.Tensor, group: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E4M3 grid values [..., J, group] float32, bytes [..., J, 1] int32), the last group zero-padded."""
    missing = -x.shape[-1] % group
    groups = pad(x, (0, missing)) if missing else x
    groups = groups.to(torch.float32).unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(floor)
    byte = ceil_scale_bytes(E4M3, amax)
    return round_to_grid(E4M3, groups * power_of_two(254 - byte)), byte


def fp8_group_quantise_ref(x: torch.Tensor, group: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., K] to (float8_e4m3fn [..., K], bytes uint8 [..., ceil(K/group)])."""
    groups, byte = _round_groups(x, group, floor)
    payload = groups.to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]].contiguous()
    return payload, byte.squeeze(-1).to(torch.uint8)


def fp8_group_dequantise_ref(payload: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Return float32 [..., K] = E4M3 value x scale of its group."""
    return payload.to(torch.float32) * e8m0_decode(scale).repeat_interleave(group, -1)[..., : payload.shape[-1]]


def fake_quant_fp8_group_ref(x: torch.Tensor, group: int, floor: float) -> torch.Tensor:
    """Return dequantise(quantise(x)) in the dtype of x, bit for bit (four significant bits are exact in BF16)."""
    groups, byte = _round_groups(x, group, floor)
    return groups.mul_(power_of_two(byte)).flatten(-2)[..., : x.shape[-1]].to(x.dtype)
