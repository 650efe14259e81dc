"""Row-invariant matrix products in plain torch: the reference form of ``row_linear`` and ``tile_matmul``."""

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 16
"""Rows of one product. Below 12 rows the CPU's GEMM changes its summation order, from 16 on it does not."""

MIN_OUTPUTS = 16
"""Columns of one product. Below 10 columns a row's bits depend on its place in the tile (measured for odd K and N =
1)."""


def row_linear_ref(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """Return x @ w.T, computed in zero-padded tiles of 16 rows and at least 16 outputs. [T, K], [N, K] -> [T, N]."""
    rows, width = x_TK.shape
    outputs = w_NK.shape[0]
    tiles = -(-rows // ROW_TILE)
    if rows != tiles * ROW_TILE:
        x_TK = functional.pad(x_TK, (0, 0, 0, tiles * ROW_TILE - rows))
    if outputs < MIN_OUTPUTS:
        w_NK = functional.pad(w_NK, (0, 0, 0, MIN_OUTPUTS - outputs))
    y = torch.bmm(x_TK.reshape(tiles, ROW_TILE, width), w_NK.t().expand(tiles, -1, -1))
    return y.reshape(tiles * ROW_TILE, w_NK.shape[0])[:rows, :outputs]


def tile_matmul_ref(a_GRK: Tensor, b_GKN: Tensor) -> Tensor:
    """Return a @ b per group with R padded to a multiple of 16 rows. [G, R, K], [G, K, N] -> [G, R, N], float32."""
    rows = a_GRK.shape[1]
    padded = -(-rows // ROW_TILE) * ROW_TILE
    if rows != padded:
        a_GRK = functional.pad(a_GRK, (0, 0, 0, padded - rows))
    return torch.bmm(a_GRK, b_GKN)[:, :rows]
