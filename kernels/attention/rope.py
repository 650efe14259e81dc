"""Partial rotary embedding: the last dims of a head rotate, the others pass through.

Here: tables and the public rotation. The pair arithmetic is in ``rope_ref.py``.
"""

import math

import torch
from torch import Tensor

from rollforward.kernels.attention.rope_ref import rotate_pairs_ref
from rollforward.kernels.checks import bind_shapes
from rollforward.kernels.errors import ShapeError


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate_tail(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate_tail(grad, cos, -sin), None, None


def _rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = 2 * cos.shape[-1]
    plain = x.shape[-1] - rotary
    return torch.cat((x[..., :plain], rotate_pairs_ref(x[..., plain:], cos, sin)), dim=-1)


def rope_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_positions: int = 0,
) -> Tensor:
    """Return the angle per position of every pair, with YaRN's ramp when ``factor`` > 1.

    f_i = theta^(-2i/r); ramp_i = clamp((i - low)/(high - low), 0, 1); f'_i = (f_i/factor) ramp_i + f_i (1 - ramp_i)

    Args:
        rotary_dim: r, even, > 0.
        theta: base, > 1.
        factor, beta_fast, beta_slow, original_positions: YaRN; factor 1 turns it off. There is no amplitude term.

    Returns:
        [r/2] float32.

    Source: DeepSeek-V4 reference precompute_freqs_cis; check values in tests/kernels/attention/test_rope.py.
    """
    pairs = rotary_dim // 2
    frequencies = theta ** (-torch.arange(pairs, dtype=torch.float64) * 2 / rotary_dim)
    if factor > 1.0 and original_positions > 0:

        def correction(rotations: float) -> float:
            return rotary_dim * math.log(original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(correction(beta_fast)), 0)
        high = min(math.ceil(correction(beta_slow)), rotary_dim - 1)
        span = max(high - low, 0.001)
        ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / span).clamp(0, 1)
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
    return frequencies.float()


def rope_tables(frequencies_P: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency. positions [...] int64 -> [..., P] float32 each.

    The angle is formed in float32 from the same product as the reference; sine and cosine are taken in float64 and
    rounded once, so that the bits do not depend on where a position lies in the batch.
    """
    angle = (positions.unsqueeze(-1).float() * frequencies_P).double()
    return torch.cos(angle).float(), torch.sin(angle).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2P dims of x, interleaved pairs.

    Args:
        x: [..., d] float32; only the last 2P dims rotate.
        cos, sin: broadcastable to [..., P] float32, from ``rope_tables``.
        inverse: rotate by the negative angle (the attention output is turned back at the query's position).

    Returns:
        [..., d] float32.

    Raises:
        ShapeError: cos and sin differ, or they have more pairs than x.

    Invariants: row-invariant; the gradient is the opposite rotation.
    Source: DeepSeek-V4 reference apply_rotary_emb (GPT-J pairing, not halves).
    """
    bind_shapes("rope", cos=(cos, "... P"), sin=(sin, "... P"))
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ShapeError(
            f"rope: x has shape {list(x.shape)} and cos {list(cos.shape)}; two dimensions of x rotate for each of cos."
            " Pass tables of at most half its width."
        )
    return _Rope.apply(x, cos, -sin if inverse else sin)
