"""FP4 activations of the indexer in plain torch: E2M1 elements, one power-of-two scale per group."""

import torch

from rollforward.kernels.quant.formats import (
    E2M1,
    ceil_scale_bytes,
    e2m1_decode,
    e2m1_encode,
    e8m0_decode,
    pack_nibbles,
    power_of_two,
    round_to_grid,
    unpack_nibbles,
)


def _round_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E2M1 grid values [..., J, group] float32, bytes [..., J, 1] int32).

    The published floor of amax is 6 x 2^-126, whose scale is byte 1, the smallest that `ceil_scale_bytes` gives.
    """
    groups = x.to(torch.float32).unflatten(-1, (-1, group))
    byte = ceil_scale_bytes(E2M1, groups.abs().amax(-1, keepdim=True))
    return round_to_grid(E2M1, groups * power_of_two(254 - byte)), byte


def fp4_group_quantise_ref(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., K] to (packed int8 [..., K/2], bytes uint8 [..., K/group])."""
    groups, byte = _round_groups(x, group)
    return pack_nibbles(e2m1_encode(groups).flatten(-2)), byte.squeeze(-1).to(torch.uint8)


def fp4_group_dequantise_ref(packed: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Return float32 [..., K] = E2M1 value x scale of its group."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, group))
    return values.mul_(e8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def fake_quant_fp4_group_ref(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return dequantise(quantise(x)) in the dtype of x, bit for bit."""
    groups, byte = _round_groups(x, group)
    return groups.mul_(power_of_two(byte)).flatten(-2).to(x.dtype)
