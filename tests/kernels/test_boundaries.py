"""Proves: the public functions refuse arguments whose shapes do not fit, by the name of the function."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollforward.kernels.attention.rope import rope
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.mhc.mix import mhc_head, mhc_mix
from rollforward.kernels.mhc.sinkhorn import sinkhorn
from rollforward.kernels.moe.experts import clamped_swiglu, routed_experts
from rollforward.kernels.moe.gate import gate_scores
from rollforward.kernels.norm.rms_norm import rms_norm

STREAMS = torch.zeros(2, 4, 8)


def _experts(w2: Tensor) -> Tensor:
    w1 = torch.zeros(3, 16, 8)
    slots = torch.tensor([[0, 1]])
    return routed_experts(torch.zeros(1, 8), slots, torch.zeros(1, 2), w1, w1, w2, limit=1.0, quantise=torch.clone)


CASES: dict[str, Callable[[], object]] = {
    "mhc_mix": lambda: mhc_mix(
        STREAMS, torch.zeros(24, 31), torch.zeros(24), torch.zeros(3), iters=1, eps=1e-6, norm_eps=1e-6
    ),
    "mhc_mix: scale_3": lambda: mhc_mix(
        STREAMS, torch.zeros(24, 32), torch.zeros(24), torch.zeros(1), iters=1, eps=1e-6, norm_eps=1e-6
    ),
    "mhc_head": lambda: mhc_head(STREAMS, torch.zeros(4, 31), torch.zeros(4), torch.zeros(1), eps=1e-6, norm_eps=1e-6),
    "sinkhorn": lambda: sinkhorn(torch.zeros(4, 3, 5), iters=1, eps=1e-6),
    "gate_scores": lambda: gate_scores(torch.zeros(4)),
    "clamped_swiglu": lambda: clamped_swiglu(torch.zeros(2, 4), torch.zeros(2, 1), limit=1.0),
    "routed_experts": lambda: _experts(torch.zeros(3, 16, 8)),
    "rms_norm": lambda: rms_norm(torch.zeros(2, 4), torch.zeros(1), eps=1e-6),
    "rope": lambda: rope(torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(2, 3)),
    "rope: sin": lambda: rope(torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(2, 1)),
}


@pytest.mark.parametrize("message", CASES)
def test_shapes_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(ShapeError, match=f"^{message}"):
        CASES[message]()
