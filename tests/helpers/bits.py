"""Comparison bit by bit, of probabilities too, and a thread count for a block of a test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Context, Decimal

import numpy as np
import torch
from torch import Tensor

_EXACT = Context(prec=200)
"""Digits enough for the difference of two probabilities that are 1 but for a last bit of a float32 log-prob."""

_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}


def different_bits(a: Tensor, b: Tensor) -> int:
    """Count elements whose bits differ (0.0 and -0.0 do; a NaN equals the same NaN)."""
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    kind = _INTEGER_OF.get(a.dtype)
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return int(((a != b) if kind is None else (a.view(kind) != b.view(kind))).sum())


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Return the largest difference over the largest magnitude of the reference."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float((ours.double() - reference.double()).abs().max() / reference.double().abs().max())


def probs_diff(logprobs: np.ndarray, others: np.ndarray) -> list[float]:
    """Return |exp(a) - exp(b)| of each pair in decimal arithmetic, nowhere 0 but where the log-probs are equal: what
    `rl.losses.base.probability_difference` says, without its formula."""
    exp = [[Decimal(float(one)).exp(_EXACT) for one in side.ravel()] for side in (logprobs, others)]
    return [
        0.0 if a == b else max(float(abs(_EXACT.subtract(p, q))), sys.float_info.min)
        for a, b, p, q in zip(logprobs.ravel(), others.ravel(), *exp, strict=True)
    ]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the block with that many threads in torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
