"""What the programs of hyper-connections on a GPU share: the numbers of a site and where they stand.

Not here: launches (`mix_sweep`, `mix_grad_sweep`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

STREAMS, PLACES = 4, 32
"""As in `mix_tile`: a token's streams, and the places of its mixing numbers."""

PRE, POST, COMB = slice(0, 4), slice(4, 8), slice(8, 24)
"""Places of the mixing numbers and of the weights made of them."""

HEAD_ITERS = 1
"""Of the head, whose programs have no Sinkhorn."""


def halves(fn_XJ: Tensor) -> Tensor:
    """Return a projection [X, J] float32 as two bfloat16 whose sum it is to 16 bits, each in 32 places: [2, 32, J]."""
    parts = fn_XJ.new_zeros((2, PLACES, fn_XJ.shape[1]), dtype=torch.bfloat16)
    rest = fn_XJ.detach()
    for part in parts:
        part[: len(rest)] = rest
        rest = rest - part[: len(rest)].float()
    return parts


class Site(NamedTuple):
    """The numbers of one site, as the programs take them."""

    fn: Tensor
    """[2, 32, J] bfloat16, from `halves`."""
    base: Tensor
    """[24] float32, or [4] of the head."""
    scale: Tensor
    """[3] float32, or [1] of the head."""
    iters: int
    eps: float
    norm_eps: float

    @property
    def head(self) -> bool:
        """Whether it has pre alone."""
        return len(self.scale) == 1
