"""Order of routed rows: by expert, then token, each expert padded to whole row tiles."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE


def permute_plan_ref(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return source_R (flat (token, slot) index, T*K for padding), expert_of_tile and row_TK (where a slot went)."""
    flat, device = experts_TK.reshape(-1), experts_TK.device
    order = torch.argsort(flat, stable=True)
    counts_E = torch.bincount(flat, minlength=num_experts)
    tiles_E = (counts_E + ROW_TILE - 1) // ROW_TILE
    first_row_E = (tiles_E.cumsum(0) - tiles_E) * ROW_TILE
    first_rank_E = counts_E.cumsum(0) - counts_E
    sorted_experts = flat[order]
    row = first_row_E[sorted_experts] + torch.arange(flat.numel(), device=device) - first_rank_E[sorted_experts]
    source_R = torch.full((int(tiles_E.sum()) * ROW_TILE,), flat.numel(), device=device)
    source_R[row] = order
    row_TK = torch.empty_like(flat)
    row_TK[order] = row
    expert_of_tile = torch.repeat_interleave(torch.arange(num_experts, device=device), tiles_E)
    return source_R, expert_of_tile, row_TK.view_as(experts_TK)
