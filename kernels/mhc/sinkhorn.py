"""Sinkhorn normalisation: public function and gradient."""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_shapes
from rollforward.kernels.mhc.sinkhorn_ref import sinkhorn_backward_ref, sinkhorn_ref


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m_MMT, iters, eps):
        comb, results, divisors = sinkhorn_ref(m_MMT, iters, eps)
        ctx.save_for_backward(*results, *divisors)
        return comb

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        half = len(saved) // 2
        return sinkhorn_backward_ref(list(saved[:half]), list(saved[half:]), grad), None, None


def sinkhorn(m_MMT: Tensor, *, iters: int, eps: float) -> Tensor:
    """Turn mixing logits into a nearly doubly stochastic matrix per token.

    Args:
        m_MMT: [M (j), M (k), T] float32 logits, component-major.
        iters: hc_sinkhorn_iters, >= 1: that many row and column passes, the last over columns.
        eps: hc_eps, added once after the softmax and in every divisor.

    Returns:
        [M, M, T] float32; columns (sum over j) are 1 up to eps.

    Invariants: row-invariant in T; deterministic gradient.
    Source: DeepSeek-V4 reference kernel.py (released code, not the report's equation 8).
    """
    check_shapes("sinkhorn", m_MMT=m_MMT)
    return _Sinkhorn.apply(m_MMT, iters, eps)
