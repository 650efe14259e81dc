"""Number formats of DeepSeek-V4 as records, and the bit-level helpers that every quantiser shares.

What lives here: E2M1, E4M3 and E8M0 (limits, tables, rounding, scales, nibble packing), block sizes, amax floors.
What does not: the quantisers, in `mxfp4.py`, `fp8.py`, `fp4_group.py`, `bf16.py` beside this file.

All scales are powers of two and travel as one E8M0 byte: value = 2^(byte - 127), byte 255 = NaN. They are made by
integer arithmetic on the float's bits, never by log2, so no rounding error can move an exponent.
Source: official inference code (kernel.py, convert.py); OCP Microscaling Formats 1.0 for E2M1 and E8M0.
"""

import math

import msgspec
import torch

from rollforward.kernels.errors import NonFiniteError

MXFP4_GROUP = 32
"""Weights and indexer activations: elements along K that share one scale."""

FP8_BLOCK = 128
"""Dense FP8 weights: rows and columns of the block that shares one scale; also the activation group along K."""

KV_GROUP = 64
"""KV cache entries: non-rotary dimensions that share one scale."""

ACTIVATION_AMAX_FLOOR = 1e-4
"""Smallest amax of an FP8 activation or KV group; a group below it is quantised with the floor's scale."""

MAX_SCALE_SPREAD = 14
"""Binades between the largest and the smallest scale of a 128x128 block up to which FP4 -> FP8 is lossless.

E2M1 x 2^k is exact in E4M3 for every magnitude exactly when -8 <= k <= 6.
"""

FP8_HEADROOM = 6
"""The FP8 block scale is the largest MXFP4 scale / 2^6: 6 x 2^6 = 384 <= 448."""

SCALE_ONE = 127
"""E8M0 byte of 1.0; the canonical scale of a block that holds only zeros."""

SCALE_NAN = 255
"""E8M0 byte that is not a number; never valid in a checkpoint."""

_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_MANTISSA_BITS = 23


class FloatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A small float: a grid of values with `mantissa_bits` bits after the leading one, subnormals included."""

    name: str
    max_value: float
    """Largest finite magnitude."""
    mantissa_bits: int
    """Explicit bits of the significand."""
    min_exponent: int
    """Exponent of the smallest normal value; below it the grid is uniform."""

    @property
    def min_step(self) -> float:
        """Distance between neighbours in the subnormal range, also the smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def max_scale_byte(self) -> int:
        """Largest E8M0 byte under which `max_value` is still a finite float32."""
        return 2 * SCALE_ONE + 1 - math.frexp(self.max_value)[1]

    @property
    def max_weight(self) -> float:
        """Largest magnitude that quantises to a finite float32."""
        return self.max_value * 2.0 ** (self.max_scale_byte - SCALE_ONE)


E2M1 = FloatFormat(name="e2m1", max_value=6.0, mantissa_bits=1, min_exponent=0)
"""Values 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign."""

E4M3 = FloatFormat(name="e4m3", max_value=448.0, mantissa_bits=3, min_exponent=-6)
"""float8_e4m3fn: no infinity, NaN only as code 0x7F / 0xFF."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each of the 16 codes; bit 3 is the sign."""


def round_to_grid(grid: FloatFormat, scaled: torch.Tensor) -> torch.Tensor:
    """Round to the nearest value of the format, ties to even, without saturation; zero comes back as +0.

    Adding and subtracting 1.5 x 2^23 steps leaves the fp32 adder itself to round at the wanted bit.

    Args:
        grid: the target format.
        scaled: [...] float32, magnitudes up to `grid.max_value` (a larger one rounds on the extended grid).

    Returns:
        [...] float32. Grid values; NaN for non-finite input.

    Invariants: elementwise, so a value's result depends on nothing else.
    """
    power_of_two = (scaled.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    magic = power_of_two.mul_(2.0**-grid.mantissa_bits * 1.5 * 2**23).clamp_min_(grid.min_step * 1.5 * 2**23)
    return (scaled + magic).sub_(magic)


def ceil_scale_bytes(grid: FloatFormat, amax: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 byte of 2^ceil(log2(amax / grid.max_value)), exactly, never below byte 1.

    With grid.max_value = m x 2^e the ceiling is the exponent field of amax minus e, plus one if the significand of
    amax exceeds m; the addition below carries into the exponent in that case. Nothing saturates under this scale.

    Args:
        grid: the format of the elements.
        amax: [...] float32, >= 0. Up to grid.max_weight it gives at most grid.max_scale_byte.

    Returns:
        [...] int32. Bytes, so the scale is 2^(byte - 127).

    Source: kernel.py (rounding of scales up to a power of two).
    """
    significand, exponent = math.frexp(grid.max_value)
    max_mantissa = round((2 * significand - 1) * 2**_MANTISSA_BITS)
    carried = amax.view(torch.int32) + (_MANTISSA_MASK - max_mantissa)
    return (carried >> _MANTISSA_BITS).sub_(exponent - 1).clamp_min_(1)


def check_finite_amax(op: str, grid: FloatFormat, amax: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise NonFiniteError if a weight to be quantised holds NaN, infinity or a value that would round to infinity.

    Args:
        op: for the message.
        grid: the format of the elements.
        amax: float32, largest magnitudes of all groups of `weight`; only these are looked at unless one is bad.
        weight: float32.
    """
    if bool((amax <= grid.max_weight).all()):
        return
    bad = torch.nonzero(~(weight.abs() <= grid.max_weight))[0].tolist()
    raise NonFiniteError(
        f"{op}: w holds {weight[tuple(bad)].item()} at {bad}; weights must be finite, at most {grid.max_weight:.4g}. "
        "Stop before publishing and look at the step that wrote it."
    )


def power_of_two(byte: torch.Tensor) -> torch.Tensor:
    """Return 2^(byte - 127) for int32 bytes 1..254 (normal floats only), as float32."""
    return (byte << _MANTISSA_BITS).view(torch.float32)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of E8M0 bytes: 2^(byte - 127), byte 0 = 2^-127 (a subnormal float), 255 = NaN."""
    wide = byte.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << _MANTISSA_BITS)
    return bits.masked_fill_(wide == SCALE_NAN, 0x7FC00000).view(torch.float32)


def e2m1_encode(on_grid: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes (uint8, one per element) of float32 values that already lie on the E2M1 grid."""
    bits = on_grid.view(torch.int32)
    # From 1.0 on, exponent and first mantissa bit make the code: 1.0 is 2, 1.5 is 3, 2.0 is 4. Below lie 0 and 0.5.
    code = ((bits >> (_MANTISSA_BITS - 1)) & 0x1FF).sub_(2 * 126).clamp_min_(0).add_(on_grid.abs() == 0.5)
    return code.bitwise_or_((bits >> 28) & 8).to(torch.uint8)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of each 4-bit code (uint8, one per element)."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack [..., K] 4-bit codes into [..., K/2] int8; the low nibble holds the even index."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack [..., K/2] int8 into [..., K] uint8 codes; inverse of `pack_nibbles`."""
    both = packed.view(torch.uint8)
    return torch.stack((both & 0xF, both >> 4), dim=-1).flatten(-2)
