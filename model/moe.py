"""Mixture of experts of one layer: hash or learned routing, routed experts, shared expert."""

from collections.abc import Callable

from torch import Tensor

from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.moe.experts import clamped_swiglu, routed_experts
from rollforward.kernels.moe.gate import gate_scores, route_weights, select_experts
from rollforward.model.config import ModelConfig
from rollforward.model.numerics import Numerics
from rollforward.model.weights import MoEWeights

Router = Callable[[Tensor, Tensor], Tensor]
"""From the scores before the selection bias, [T, E], and the experts that a layer's own router chose, int64 [T, K], to
the experts that are visited (``routing.py``)."""


def moe(
    weights: MoEWeights,
    x_TD: Tensor,
    token_T: Tensor,
    config: ModelConfig,
    numerics: Numerics,
    *,
    router: Router | None = None,
) -> Tensor:
    """Run one mixture of experts.

    Args:
        weights: the layer's weights; ``tid2eid`` present means hash routing.
        x_TD: [T, D] float32, normed input.
        token_T: int64 [T], token ids, read by hash layers only.
        config: widths, top-k, clamp and scale. numerics: quantisers.
        router: may replace the chosen experts; their weights come from the live scores all the same. None keeps them.

    Returns:
        [T, D] float32: routed experts in slot order, then the shared expert.

    Invariants: row-invariant.
    Source: DeepSeek-V4 reference Gate, Expert, MoE.
    """
    scores_TE = gate_scores(row_linear(x_TD, weights.gate))
    if weights.tid2eid is not None:
        experts_TK = weights.tid2eid[token_T]
    else:
        assert weights.bias is not None, "a layer without tid2eid has a selection bias"
        experts_TK = select_experts(scores_TE, weights.bias, k=config.num_experts_per_tok)
    if router is not None:
        experts_TK = router(scores_TE, experts_TK)
    weights_TK = route_weights(scores_TE, experts_TK, scale=config.routed_scaling_factor)
    routed_TD = routed_experts(
        x_TD,
        experts_TK,
        weights_TK,
        weights.w1,
        weights.w3,
        weights.w2,
        limit=config.swiglu_limit,
        quantise=numerics.gemm_input,
    )
    return routed_TD + _shared_expert(weights, x_TD, config, numerics)


def _shared_expert(weights: MoEWeights, x_TD: Tensor, config: ModelConfig, numerics: Numerics) -> Tensor:
    quantised = numerics.gemm_input(x_TD)
    gate_TF = row_linear(quantised, weights.shared_w1)
    up_TF = row_linear(quantised, weights.shared_w3)
    return row_linear(numerics.gemm_input(clamped_swiglu(gate_TF, up_TF, limit=config.swiglu_limit)), weights.shared_w2)
