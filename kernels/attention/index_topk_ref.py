"""Indexer scores and the stable selection of compressed entries, in plain torch."""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import tile_matmul_ref
from rollforward.kernels.rowwise import tree_sum

INDEX_BITS = 31


def ordered_key(score: Tensor) -> Tensor:
    """Map float32 to int64 so that integer order is the order of the values (-0 equals +0, NaN below all numbers)."""
    score = torch.where(torch.isnan(score), torch.full_like(score, -torch.inf), score)
    bits = score.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _stable_key(score: Tensor) -> Tensor:
    """Return distinct int64 keys over the last dim: score in the high half, inverted index in the low half."""
    width = score.shape[-1]
    return (ordered_key(score) << INDEX_BITS) + (width - 1 - torch.arange(width, device=score.device))


def stable_top(score: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest over the last dim, larger first, the smaller index first on ties."""
    return _stable_key(score).topk(k, dim=-1).indices


def index_scores_ref(q_GQNh: Tensor, k_GSh: Tensor, head_weight_GQN: Tensor) -> Tensor:
    """Return sum_n weight_n relu(q_n . k_s). [G, Q, N, h], [G, S, h], [G, Q, N] -> [G, Q, S] float32."""
    groups, queries, heads, width = q_GQNh.shape
    dots = tile_matmul_ref(q_GQNh.reshape(groups, queries * heads, width), k_GSh.transpose(1, 2))
    dots = torch.relu(dots).reshape(groups, queries, heads, -1)
    return tree_sum(dots * head_weight_GQN.unsqueeze(-1), 2)


def select_entries_ref(score_GQS: Tensor, visible_GQS: Tensor, k: int) -> Tensor:
    """Return the mask of the k best visible entries of every query. [G, Q, S] -> bool [G, Q, S]."""
    k = min(k, score_GQS.shape[-1])
    key = torch.where(visible_GQS, _stable_key(score_GQS), torch.iinfo(torch.int64).min)
    chosen = torch.zeros_like(visible_GQS).scatter_(-1, key.topk(k, dim=-1).indices, True)
    return chosen & visible_GQS
