"""Comparison bit by bit, and a thread count for a block of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the block with that many threads in torch's operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
