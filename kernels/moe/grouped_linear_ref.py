"""One product per row tile with that tile's expert matrix, in plain torch. Tiles lie in the order of their experts."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE


def grouped_linear_ref(x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor) -> Tensor:
    """Return x @ w[expert].T per tile of 16 rows. [R, K], [E, N, K] -> [R, N] float32."""
    experts, counts = _runs(expert_of_tile)
    products = [
        torch.bmm(x, w_ENK[expert].t().expand(len(x), -1, -1)).flatten(0, 1)
        for expert, x in zip(experts, _tiles(x_RK, counts), strict=True)
    ]
    return torch.cat(products)


def grouped_linear_backward_ref(
    x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor, grad_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w; an expert's rows are added in one product, in row order."""
    experts, counts = _runs(expert_of_tile)
    grad_w = torch.zeros_like(w_ENK)
    grad_x: list[Tensor] = []
    for expert, x, grad in zip(experts, _tiles(x_RK, counts), _tiles(grad_RN, counts), strict=True):
        grad_x.append(torch.bmm(grad, w_ENK[expert].expand(len(grad), -1, -1)).flatten(0, 1))
        torch.mm(grad.flatten(0, 1).t(), x.flatten(0, 1), out=grad_w[expert])
    return torch.cat(grad_x), grad_w


def _runs(expert_of_tile: Tensor) -> tuple[list[int], list[int]]:
    """Return the experts that have tiles, and how many each has."""
    experts, counts = torch.unique_consecutive(expert_of_tile, return_counts=True)
    return experts.tolist(), counts.tolist()


def _tiles(rows_RK: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return each expert's tiles, [count, 16, K]. No matrix is gathered per tile."""
    return rows_RK.reshape(-1, ROW_TILE, rows_RK.shape[1]).split(counts)
