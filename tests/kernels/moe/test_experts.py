"""Routed experts: permutation, clamp, where the routing weight enters, gradients, bits.

Not proven here: the shared expert and hash routing (model/test_moe.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.kernels.moe.experts import clamped_swiglu, routed_experts
from rollforward.kernels.moe.permute_ref import permute_plan_ref
from tests.helpers.bits import different_bits, torch_threads

ROW_TILE = 16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_case(tokens=21, experts=5, slots=2, width=32, inner=24, dtype=torch.float32):
    chosen = [torch.randperm(experts, generator=torch.Generator().manual_seed(row))[:slots] for row in range(tokens)]
    return (
        normal(tokens, width, dtype=dtype),
        torch.stack(chosen),
        normal(tokens, slots, seed=1, dtype=dtype).abs(),
        normal(experts, inner, width, seed=2, dtype=dtype) / math.sqrt(width),
        normal(experts, inner, width, seed=3, dtype=dtype) / math.sqrt(width),
        normal(experts, width, inner, seed=4, dtype=dtype) / math.sqrt(inner),
    )


def plain_experts(x, experts, weights, w1, w3, w2, limit):
    """Send every token through its experts one by one."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for slot, expert in enumerate(experts[token].tolist()):
            gate = (w1[expert] @ x[token]).clamp(max=limit)
            up = (w3[expert] @ x[token]).clamp(-limit, limit)
            total = total + w2[expert] @ (gate * torch.sigmoid(gate) * up * weights[token, slot])
        rows.append(total)
    return torch.stack(rows)


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def test_clamped_swiglu_by_hand():
    # The gate is clamped from above only, the other input on both sides.
    gate = torch.tensor([50.0, 1.0, -50.0, 0.0])
    up = torch.tensor([1.0, -70.0, 70.0, 3.0])
    expected = torch.tensor([10 / (1 + math.exp(-10)), -10 / (1 + math.exp(-1)), -500 / (1 + math.exp(50)), 0.0])
    torch.testing.assert_close(clamped_swiglu(gate, up, limit=10.0), expected)


def test_clamped_swiglu_gradient_is_zero_where_it_clamps_and_finite_everywhere():
    gate = torch.tensor([50.0, 1.0, -300.0, -1e4], requires_grad=True)
    up = torch.tensor([1.0, -70.0, 1.0, 1.0], requires_grad=True)
    gate_gradient, up_gradient = torch.autograd.grad(clamped_swiglu(gate, up, limit=10.0).sum(), (gate, up))
    assert torch.isfinite(gate_gradient).all()
    assert torch.isfinite(up_gradient).all()
    assert gate_gradient[0] == 0
    assert up_gradient[1] == 0
    assert up_gradient[0] > 9


@pytest.mark.parametrize("limit", [0.3, 10.0])
def test_equals_the_written_out_form_and_its_gradient(limit):
    case = random_case(dtype=torch.float64)
    x, experts, weights, *matrices = case
    parts = [part.requires_grad_(True) for part in (x, weights, *matrices)]
    ours = routed_experts(x, experts, weights, *matrices, limit=limit, quantise=identity)
    plain = plain_experts(x, experts, weights, *matrices, limit)
    torch.testing.assert_close(ours, plain)
    cotangent = normal(*ours.shape, seed=8, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad((ours * cotangent).sum(), parts),
        torch.autograd.grad((plain * cotangent).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_the_weight_enters_before_the_quantiser_of_w2():
    x, experts, weights, w1, w3, w2 = random_case(tokens=1, slots=1)
    seen = []

    def record(value: torch.Tensor) -> torch.Tensor:
        seen.append(value)
        return value

    routed_experts(x, experts, weights, w1, w3, w2, limit=10.0, quantise=record)
    expert = int(experts[0, 0])
    gate, up = w1[expert] @ x[0], w3[expert] @ x[0]
    torch.testing.assert_close(seen[0], x)
    torch.testing.assert_close(seen[1][0], gate * torch.sigmoid(gate) * up * weights[0, 0], rtol=1e-4, atol=1e-5)
    assert len(seen) == 2


def test_the_quantiser_is_applied_to_both_inputs():
    case = random_case()
    rounded = routed_experts(*case, limit=10.0, quantise=lambda x: (x * 4).round() / 4)
    x, experts, weights, w1, w3, w2 = case
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1])
        for slot, expert in enumerate(experts[token].tolist()):
            entry = (x[token] * 4).round() / 4
            inner = clamped_swiglu(w1[expert] @ entry, w3[expert] @ entry, limit=10.0) * weights[token, slot]
            total = total + w2[expert] @ ((inner * 4).round() / 4)
        rows.append(total)
    different = (rounded - torch.stack(rows)).abs().amax(1) > 1e-4
    assert different.float().mean() < 0.1  # a value on a rounding edge may fall to either side


def test_outputs_add_in_slot_order():
    # Three slots whose outputs are 2^24, 1 and 1: from left to right both ones are lost, from the right they are not.
    x = torch.full((1, 32), 1.0)
    gate, up = torch.zeros(3, 1, 32), torch.zeros(3, 1, 32)
    gate[:, 0, 0], up[:, 0, 0] = 1.0, 1.0
    down = torch.zeros(3, 32, 1)
    down[:, 0, 0] = torch.tensor([2.0**24, 1.0, 1.0])
    silu_of_one = 1 / (1 + math.exp(-1))
    weights = torch.full((1, 3), 1 / silu_of_one)
    results = []
    for order in ([0, 1, 2], [2, 1, 0]):
        out = routed_experts(x, torch.tensor([order]), weights, gate, up, down, limit=10.0, quantise=identity)
        results.append(out[0, 0].item())
    assert results == [2.0**24, 2.0**24 + 2]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plan_places_every_slot_once_in_expert_then_token_order(data):
    num_experts = data.draw(st.integers(1, 9))
    slots = data.draw(st.integers(1, min(3, num_experts)))
    tokens = data.draw(st.integers(1, 50))
    few = data.draw(st.integers(slots, num_experts))  # some experts get nothing
    experts = torch.tensor([data.draw(st.permutations(range(few)))[:slots] for _ in range(tokens)])
    source, expert_of_tile, row = permute_plan_ref(experts, num_experts)
    assert source.shape[0] == expert_of_tile.shape[0] * ROW_TILE
    assert torch.equal(source[row.reshape(-1)], torch.arange(tokens * slots))
    assert int((source < tokens * slots).sum()) == tokens * slots
    assert torch.equal(expert_of_tile.repeat_interleave(ROW_TILE)[row], experts)
    for expert in range(num_experts):
        rows = row[experts == expert]
        if rows.numel():
            first = int(rows.min())
            assert first % ROW_TILE == 0
            assert rows.tolist() == list(range(first, first + rows.numel()))  # by token
        assert int((expert_of_tile == expert).sum()) == -(-rows.numel() // ROW_TILE)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_belong_to_the_token(threads):
    case = random_case(tokens=140, experts=8, width=128, inner=64)
    x, experts, weights, *matrices = case
    with torch_threads(threads):
        whole = routed_experts(*case, limit=10.0, quantise=identity)
        for rows in (slice(0, 1), slice(3, 5), slice(20, 37), slice(139, 140)):
            part = routed_experts(x[rows], experts[rows], weights[rows], *matrices, limit=10.0, quantise=identity)
            assert different_bits(part, whole[rows]) == 0
        order = torch.randperm(140, generator=torch.Generator().manual_seed(0))
        shuffled = routed_experts(x[order], experts[order], weights[order], *matrices, limit=10.0, quantise=identity)
        assert different_bits(shuffled, whole[order]) == 0
        dirty = x.clone()
        dirty[7] = torch.nan
        others = [row for row in range(140) if row != 7]
        contaminated = routed_experts(dirty, experts, weights, *matrices, limit=10.0, quantise=identity)
        assert different_bits(contaminated[others], whole[others]) == 0


def test_gradients_repeat_with_many_tokens_on_one_expert():
    x, _, weights, *matrices = random_case(tokens=300, experts=4)
    experts = torch.tensor([[1, 0]]).expand(300, 2).contiguous()
    parts = [part.requires_grad_(True) for part in (x, weights, *matrices)]
    runs = []
    for _ in range(10):
        out = routed_experts(x, experts, weights, *matrices, limit=10.0, quantise=identity)
        runs.append(torch.autograd.grad(out.square().sum(), parts))
    assert all(different_bits(run[part], runs[0][part]) == 0 for run in runs for part in range(len(parts)))
    assert torch.equal(runs[0][2][2:], torch.zeros_like(runs[0][2][2:]))  # experts without a token


def test_no_tokens():
    x, experts, weights, *matrices = random_case()
    x = x[:0].requires_grad_(True)
    out = routed_experts(x, experts[:0], weights[:0], *matrices, limit=10.0, quantise=identity)
    assert out.shape == (0, 32)
