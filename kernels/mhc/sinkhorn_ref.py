"""Sinkhorn normalisation of the stream mixing matrix; component-major, so every sum is a chain of additions."""

import torch
from torch import Tensor


def _sum_over(m_MMT: Tensor, dim: int) -> Tensor:
    terms = m_MMT.unbind(dim)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.unsqueeze(dim)


def sinkhorn_ref(m_MMT: Tensor, iters: int, eps: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Normalise rows and columns in turn; the last pass is over columns.

    M <- softmax over k (max-subtracted) + eps; columns divided by (column sum + eps);
    then iters - 1 times: rows divided by (row sum + eps), columns divided by (column sum + eps).

    Args:
        m_MMT: [M (j), M (k), T] float32, raw mixing logits.
        iters: number of row (and of column) normalisations, >= 1.
        eps: hc_eps.

    Returns:
        comb_MMT, the normalised matrix; the results of every pass and its divisors (for the backward).
    """
    top = m_MMT.amax(1, keepdim=True)
    exps = torch.exp(m_MMT - top)
    divisor = _sum_over(exps, 1)
    current = exps / divisor
    results, divisors = [current], [divisor]
    current = current + eps
    for step in range(2 * iters - 1):
        divisor = _sum_over(current, step % 2) + eps
        current = current / divisor
        results.append(current)
        divisors.append(divisor)
    return current, results, divisors


def sinkhorn_backward_ref(results: list[Tensor], divisors: list[Tensor], grad_MMT: Tensor) -> Tensor:
    """Return the gradient of the raw logits from what ``sinkhorn_ref`` kept."""
    grad = grad_MMT
    for step in reversed(range(len(results) - 1)):
        result, divisor = results[step + 1], divisors[step + 1]
        grad = (grad - _sum_over(grad * result, step % 2)) / divisor
    softmax = results[0]
    return softmax * (grad - _sum_over(grad * softmax, 1))
