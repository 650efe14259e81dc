"""One mixture of experts: hash and learned routing, the shared expert, clamps.

Not proven here: routed experts alone (kernels/moe/), native quantisers (parity/test_native_layers.py).
"""

import math

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.kernels.moe.experts import clamped_swiglu
from rollforward.model.moe import moe
from rollforward.model.numerics import Numerics
from rollforward.model.weights import MoEWeights
from tests.helpers.tiny import tiny_config

FP32 = Numerics("fp32")


def make_case(num_experts: int = 8, width: int = 32, inner: int = 32, **changes):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    config = msgspec.structs.replace(
        tiny_config(), n_routed_experts=num_experts, hidden_size=width, moe_intermediate_size=inner, **changes
    )
    weights = MoEWeights(
        gate=normal(num_experts, width) / math.sqrt(width),
        bias=0.3 * normal(num_experts),
        tid2eid=None,
        w1=normal(num_experts, inner, width),
        w2=normal(num_experts, width, inner),
        w3=normal(num_experts, inner, width),
        shared_w1=normal(inner, width),
        shared_w2=normal(width, inner),
        shared_w3=normal(inner, width),
    )
    return config, weights, normal(10, width)


def replaced(weights: MoEWeights, **changes) -> MoEWeights:
    return MoEWeights(**{**vars(weights), **changes})


def expected_output(config, weights: MoEWeights, x_TD: Tensor, experts_TK: Tensor) -> Tensor:
    scores = torch.nn.functional.softplus(x_TD @ weights.gate.t()).sqrt()
    limit = config.swiglu_limit
    rows = []
    for token, x in enumerate(x_TD):
        chosen = scores[token, experts_TK[token]]
        total = torch.zeros_like(x)
        for weight, expert in zip(chosen / chosen.sum() * config.routed_scaling_factor, experts_TK[token], strict=True):
            inner = clamped_swiglu(weights.w1[expert] @ x, weights.w3[expert] @ x, limit=limit)
            total = total + weights.w2[expert] @ (inner * weight)
        shared = clamped_swiglu(weights.shared_w1 @ x, weights.shared_w3 @ x, limit=limit)
        rows.append(total + weights.shared_w2 @ shared)
    return torch.stack(rows)


@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_learned_routing_and_both_clamps(limit):
    config, weights, x_TD = make_case(swiglu_limit=limit)
    scores = torch.nn.functional.softplus(x_TD @ weights.gate.t()).sqrt()
    experts_TK = torch.topk(scores + weights.bias, config.num_experts_per_tok).indices
    token_T = torch.arange(10)
    expected = expected_output(config, weights, x_TD, experts_TK)
    torch.testing.assert_close(moe(weights, x_TD, token_T, config, FP32), expected, rtol=1e-4, atol=1e-4)


def test_the_shared_expert_clamps_too():
    config, weights, x_TD = make_case()
    silent = replaced(weights, w2=torch.zeros_like(weights.w2), shared_w3=1e3 * weights.shared_w3)
    output = moe(silent, x_TD, torch.arange(10), config, FP32)
    gate = (x_TD @ weights.shared_w1.t()).clamp(max=10.0)
    up = (x_TD @ silent.shared_w3.t()).clamp(-10, 10)
    expected = (gate * torch.sigmoid(gate) * up) @ weights.shared_w2.t()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)
    assert (x_TD @ silent.shared_w3.t()).abs().max() > 1000


def test_hash_routing_looks_experts_up_by_token_id_and_still_weighs_by_score():
    config, weights, x_TD = make_case()
    table = torch.stack([torch.tensor([token % 8, (token + 3) % 8]) for token in range(50)])
    hashed = replaced(weights, tid2eid=table, bias=None)
    token_T = torch.tensor([0, 1, 2, 49, 48, 7, 8, 7, 7, 30])
    expected = expected_output(config, weights, x_TD, table[token_T])
    torch.testing.assert_close(moe(hashed, x_TD, token_T, config, FP32), expected, rtol=1e-4, atol=1e-4)


def test_hash_routing_keeps_ids_above_256_exact():
    # A table that passed through BF16 would send 257 to 256 and 383 to 384, which does not exist.
    config, weights, x_TD = make_case(num_experts=384, inner=32)
    table = torch.tensor([[383, 257], [259, 381], [301, 1]])
    hashed = replaced(weights, tid2eid=table, bias=None)
    token_T = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    expected = expected_output(config, weights, x_TD, table[token_T])
    torch.testing.assert_close(moe(hashed, x_TD, token_T, config, FP32), expected, rtol=1e-4, atol=1e-4)
    assert int(table.to(torch.bfloat16).long().max()) == 384


def test_the_selection_bias_gets_no_gradient_and_the_gate_does():
    config, weights, x_TD = make_case()
    weights = replaced(weights, gate=weights.gate.requires_grad_(True), bias=weights.bias.requires_grad_(True))
    moe(weights, x_TD, torch.arange(10), config, FP32).sum().backward()
    assert weights.bias.grad is None
    assert weights.gate.grad.abs().sum() > 0


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_router_sees_the_scores_before_the_bias_and_the_choice_and_decides(is_hashed):
    config, weights, x_TD = make_case()
    scores = torch.nn.functional.softplus(x_TD @ weights.gate.t()).sqrt()
    live_TK = torch.topk(scores + weights.bias, config.num_experts_per_tok).indices
    if is_hashed:
        table = torch.stack([torch.tensor([token % 8, (token + 3) % 8]) for token in range(50)])
        weights, live_TK = replaced(weights, tid2eid=table, bias=None), table[:10]
    seen = []

    def router(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        seen.append((scores_TE, experts_TK))
        return (experts_TK + 1) % 8

    output = moe(weights, x_TD, torch.arange(10), config, FP32, router=router)
    ((seen_scores, seen_experts),) = seen
    torch.testing.assert_close(seen_scores, scores, rtol=1e-5, atol=1e-6)
    assert torch.equal(seen_experts, live_TK)
    torch.testing.assert_close(output, expected_output(config, weights, x_TD, (live_TK + 1) % 8), rtol=1e-4, atol=1e-4)
