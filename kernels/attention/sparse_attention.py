"""Sparse attention with a sink: public function and gradient. Which keys a query sees is decided by the caller's
mask."""

import torch
from torch import Tensor

from rollforward.kernels.attention.sparse_attention_ref import sparse_attention_backward_ref, sparse_attention_ref
from rollforward.kernels.checks import check_multiple, check_shapes
from rollforward.kernels.rowwise import SUM_TILE


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_GQNd, kv_GSd, visible_GQS, sink_N, scale):
        output, weights, sink_weights = sparse_attention_ref(q_GQNd, kv_GSd, visible_GQS, sink_N, scale)
        ctx.save_for_backward(q_GQNd, kv_GSd, weights, sink_weights, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx, grad):
        grad_q, grad_kv, grad_sink = sparse_attention_backward_ref(*ctx.saved_tensors, grad, ctx.scale)
        return grad_q, grad_kv, None, grad_sink, None


def sparse_attention(q_GQNd: Tensor, kv_GSd: Tensor, visible_GQS: Tensor, sink_N: Tensor, *, scale: float) -> Tensor:
    """Attend from groups of queries to their keys, with one sink logit per head that carries no value.

    p_j = exp(l_j - m) / (sum_j exp(l_j - m) + exp(sink - m)), o = sum_j p_j kv_j

    Local letters: G groups of queries that share keys, Q queries of a group, N heads, d head width, S keys.

    Args:
        q_GQNd: [G, Q, N, d] float32.
        kv_GSd: [G, S, d] float32, key and value at once; S is a multiple of 64 and key s of a group stands at an
            absolute place of its tile, so that padding and batch never change the order of a sum. Absent keys are 0.
        visible_GQS: bool [G, Q, S], True where the query may read the key. A query without keys gets zeros.
        sink_N: [N] float32.
        scale: head_dim ** -0.5; there is no YaRN amplitude.

    Returns:
        [G, Q, N, d] float32.

    Raises:
        ShapeError: for shapes that disagree or an S that is no multiple of 64.

    Invariants: a query's bits do not depend on G, Q or on tiles that it does not see.
    Source: DeepSeek-V4 reference sparse_attn; report section 3.3 for the order.
    """
    check_shapes("sparse_attention", q_GQNd=q_GQNd, kv_GSd=kv_GSd, visible_GQS=visible_GQS, sink_N=sink_N)
    check_multiple("sparse_attention", "the number of keys S", kv_GSd.shape[1], SUM_TILE)
    return _SparseAttention.apply(q_GQNd, kv_GSd, visible_GQS, sink_N, scale)
