"""Attention of query groups over key tiles of 64 with a sink, in plain torch, with its gradient.

Local letters: G groups, Q queries of a group, N heads, d head width, S keys (a multiple of 64, absolute tiles), R =
Q*N. One key-value head serves as key and value.
"""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import tile_matmul_ref
from rollforward.kernels.rowwise import SUM_TILE, row_sum


def attention_weights_ref(
    q_GQNd: Tensor, kv_GSd: Tensor, visible_GQS: Tensor, sink_N: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the softmax weights of the keys [G, R, S] and of the sink [G, R, 1]; absent keys weigh exactly 0."""
    groups, queries, heads, width = q_GQNd.shape
    num_keys = kv_GSd.shape[1]
    logits = tile_matmul_ref(q_GQNd.reshape(groups, queries * heads, width), kv_GSd.transpose(1, 2)) * scale
    logits = logits.view(groups, queries, heads, num_keys)
    logits = logits.masked_fill(~visible_GQS.unsqueeze(2), -torch.inf)
    sink = sink_N.view(1, 1, heads, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sink)
    weights = torch.exp(logits - top)
    sink_weight = torch.exp(sink - top)
    total = row_sum(weights) + sink_weight
    return (weights / total).view(groups, -1, num_keys), (sink_weight / total).view(groups, -1, 1)


def sparse_attention_ref(
    q_GQNd: Tensor, kv_GSd: Tensor, visible_GQS: Tensor, sink_N: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [G, Q, N, d], the key weights [G, R, S] and the sink weights [G, R, 1].

    The weighted sum runs over tiles of 64 keys from left to right, starting from +0, so that tiles without a visible
    key are neutral.
    """
    weights, sink_weights = attention_weights_ref(q_GQNd, kv_GSd, visible_GQS, sink_N, scale)
    output = torch.zeros_like(q_GQNd).reshape(weights.shape[0], weights.shape[1], -1)
    for start in range(0, kv_GSd.shape[1], SUM_TILE):
        tile = slice(start, start + SUM_TILE)
        output = output + tile_matmul_ref(weights[:, :, tile], kv_GSd[:, tile])
    return output.view(q_GQNd.shape), weights, sink_weights


def sparse_attention_backward_ref(
    q_GQNd: Tensor,
    kv_GSd: Tensor,
    weights_GRS: Tensor,
    sink_weights_GR1: Tensor,
    output_GQNd: Tensor,
    grad_GQNd: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, of kv and of the sinks."""
    groups, queries, heads, width = q_GQNd.shape
    grad_GRd = grad_GQNd.reshape(groups, -1, width)
    q_GRd = q_GQNd.reshape(groups, -1, width)
    delta_GR1 = (grad_GQNd * output_GQNd).sum(-1).view(groups, -1, 1)
    grad_logits = weights_GRS * (torch.bmm(grad_GRd, kv_GSd.transpose(1, 2)) - delta_GR1)
    grad_q = (torch.bmm(grad_logits, kv_GSd) * scale).view(q_GQNd.shape)
    grad_kv = torch.bmm(grad_logits.transpose(1, 2), q_GRd) * scale + torch.bmm(weights_GRS.transpose(1, 2), grad_GRd)
    grad_sink = -(sink_weights_GR1 * delta_GR1).view(groups * queries, heads).sum(0)
    return grad_q, grad_kv, grad_sink
