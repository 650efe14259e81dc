"""One product per row tile with that tile's expert matrix, in plain torch. Tiles lie in the order of their experts."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE


def grouped_linear_ref(x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor) -> Tensor:
    """Return x @ w[expert].T per tile of 16 rows. [R, K], [E, N, K] -> [R, N] float32."""
    products = [
        torch.bmm(x, w_ENK[expert].t().expand(len(x), -1, -1)).flatten(0, 1)
        for expert, x in _by_expert(x_RK, expert_of_tile)
    ]
    return torch.cat(products)


def grouped_linear_backward_ref(
    x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor, grad_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w; an expert's rows are added in one product, in row order."""
    grad_w = torch.zeros_like(w_ENK)
    grad_x: list[Tensor] = []
    rows = zip(_by_expert(x_RK, expert_of_tile), _by_expert(grad_RN, expert_of_tile), strict=True)
    for (expert, x), (_, grad) in rows:
        grad_x.append(torch.bmm(grad, w_ENK[expert].expand(len(grad), -1, -1)).flatten(0, 1))
        torch.mm(grad.flatten(0, 1).t(), x.flatten(0, 1), out=grad_w[expert])
    return torch.cat(grad_x), grad_w


def _by_expert(rows_RK: Tensor, expert_of_tile: Tensor) -> list[tuple[int, Tensor]]:
    """Each expert that has tiles, with its tiles [t, 16, K]. No matrix is gathered per tile."""
    experts, counts = torch.unique_consecutive(expert_of_tile, return_counts=True)
    tiles = rows_RK.reshape(-1, ROW_TILE, rows_RK.shape[1]).split(counts.tolist())
    return list(zip(experts.tolist(), tiles, strict=True))
