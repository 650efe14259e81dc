"""One product per row tile with that tile's expert matrix, in plain torch."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE


def grouped_linear_ref(x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor) -> Tensor:
    """Return x @ w[expert].T per tile of 16 rows. [R, K], [E, N, K] -> [R, N] float32."""
    tiles = expert_of_tile.shape[0]
    x = x_RK.view(tiles, ROW_TILE, -1)
    return torch.bmm(x, w_ENK[expert_of_tile].transpose(1, 2)).view(tiles * ROW_TILE, -1)


def grouped_linear_backward_ref(
    x_RK: Tensor, w_ENK: Tensor, expert_of_tile: Tensor, grad_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w; an expert's tiles are added in row order."""
    tiles = expert_of_tile.shape[0]
    grad = grad_RN.reshape(tiles, ROW_TILE, -1)
    grad_x = torch.bmm(grad, w_ENK[expert_of_tile]).view_as(x_RK)
    per_tile = torch.bmm(grad.transpose(1, 2), x_RK.view(tiles, ROW_TILE, -1))
    return grad_x, torch.zeros_like(w_ENK).index_add_(0, expert_of_tile, per_tile)
