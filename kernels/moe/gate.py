"""Routing: which experts a token visits and how much each counts. Public functions."""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_shapes
from rollforward.kernels.moe.gate_ref import (
    gate_scores_backward_ref,
    gate_scores_ref,
    route_weights_ref,
    select_experts_ref,
)


class _GateScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE):
        scores_TE = gate_scores_ref(logits_TE)
        ctx.save_for_backward(logits_TE, scores_TE)
        return scores_TE

    @staticmethod
    def backward(ctx, grad):
        return gate_scores_backward_ref(*ctx.saved_tensors, grad)


def gate_scores(logits_TE: Tensor) -> Tensor:
    """Return sqrt(softplus(logits)), [T, E] float32, >= 0. s(-5) = .0819472, s(0) = .8325546, s(5) = 2.2375691.

    The gradient is finite for every finite logit.
    """
    check_shapes("gate_scores", logits_TE=logits_TE)
    return _GateScores.apply(logits_TE)


@torch.no_grad()
def select_experts(scores_TE: Tensor, bias_E: Tensor, *, k: int) -> Tensor:
    """Choose k experts per token by score + bias.

    Args:
        scores_TE: [T, E] float32. bias_E: [E] float32, used for the choice only. k: num_experts_per_tok.

    Returns:
        int64 [T, K], best first; equal sums go to the smaller index.
    """
    check_shapes("select_experts", scores_TE=scores_TE, bias_E=bias_E)
    return select_experts_ref(scores_TE, bias_E, k)


def route_weights(scores_TE: Tensor, experts_TK: Tensor, *, scale: float) -> Tensor:
    """Normalise the chosen scores to sum to ``scale``; gradient flows to the scores. [T, K] float32.

    Hash-routed layers use the same weights: only the choice differs.
    """
    check_shapes("route_weights", scores_TE=scores_TE, experts_TK=experts_TK)
    return route_weights_ref(scores_TE, experts_TK, scale)
