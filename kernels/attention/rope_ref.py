"""Rotary embedding on interleaved pairs, in real arithmetic (the complex form does not keep its bits)."""

import torch
from torch import Tensor


def rotate_pairs_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) by angle i. x [..., 2P], cos and sin broadcastable to [..., P]; float32."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
