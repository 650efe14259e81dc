"""Routing: check values of the score, selection with bias and ties, weights, gradients.

Not proven here: hash layers (model/test_moe.py).
"""

import math

import pytest
import torch

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.moe.gate import gate_scores, route_weights, select_experts
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_check_values_of_the_score():
    scores = gate_scores(torch.tensor([[-5.0, 0.0, 5.0, 20.0, 400.0]]))
    expected = torch.tensor([[0.0819472, 0.8325546, 2.2375691, math.sqrt(20.0), 20.0]])
    torch.testing.assert_close(scores, expected, rtol=2e-7, atol=5e-8)


def test_score_gradient():
    logits = torch.tensor([[-30.0, -5.0, -1e-3, 0.0, 0.7, 25.0]], dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(gate_scores(logits).sum(), logits)[0]
    plain = torch.autograd.grad(torch.nn.functional.softplus(logits, threshold=50).sqrt().sum(), logits)[0]
    torch.testing.assert_close(ours, plain)
    zero = torch.zeros(1, 3, requires_grad=True)  # a gate that starts at zero must be able to learn
    torch.testing.assert_close(
        torch.autograd.grad(gate_scores(zero).sum(), zero)[0], torch.full((1, 3), 0.25 / math.sqrt(math.log(2)))
    )


def test_gradients_of_extreme_logits_are_finite():
    logits = torch.tensor([[-1e4, -200.0, -95.0, -88.0, 88.0, 1e4]], requires_grad=True)
    scores = gate_scores(logits)
    weights = route_weights(scores, torch.tensor([[2, 5]]), scale=1.5)
    (gradient,) = torch.autograd.grad(weights.square().sum() + scores.sum(), logits)
    assert torch.isfinite(scores).all()
    assert torch.isfinite(gradient).all()


def test_bias_chooses_and_does_not_weigh():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.5]])
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    experts = select_experts(scores, bias, k=2)
    assert experts.tolist() == [[2, 0]]
    assert experts.dtype == torch.int64
    torch.testing.assert_close(route_weights(scores, experts, scale=2.0), torch.tensor([[0.5, 1.5]]))


def test_equal_sums_go_to_the_smaller_index():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.5, 0.5, 0.5, 0.5]])
    assert select_experts(scores, torch.zeros(4), k=3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert select_experts(scores, torch.tensor([1.0, 0.0, 0.0, 0.0]), k=2).tolist() == [[0, 1], [0, 1]]


def test_a_nan_score_is_not_chosen_over_a_number():
    scores = torch.tensor([[math.nan, 0.1, math.nan, 0.2]])
    assert select_experts(scores, torch.zeros(4), k=2).tolist() == [[3, 1]]


def test_weights_sum_to_the_scale_in_any_order_of_slots():
    scores = gate_scores(normal(20, 8))
    experts = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(row))[:3] for row in range(20)])
    weights = route_weights(scores, experts, scale=1.5)
    torch.testing.assert_close(weights.sum(1), torch.full((20,), 1.5))
    expected = scores.gather(1, experts) / scores.gather(1, experts).sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(weights, expected)


def test_weights_of_vanished_scores_are_zero_not_nan():
    assert torch.equal(route_weights(torch.zeros(1, 4), torch.tensor([[1, 3]]), scale=1.5), torch.zeros(1, 2))


def test_weight_gradient_in_float64():
    scores = gate_scores(normal(3, 5, dtype=torch.float64)).detach().requires_grad_(True)
    experts = torch.tensor([[0, 4], [2, 1], [3, 0]])
    assert torch.autograd.gradcheck(lambda s: route_weights(s, experts, scale=1.5), (scores,))


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_belong_to_the_token(threads):
    logits, bias = normal(90, 8) * 3, normal(8, seed=1)

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = gate_scores(x)
        experts = select_experts(scores, bias, k=2)
        return experts, route_weights(scores, experts, scale=1.5)

    with torch_threads(threads):
        experts, weights = route(logits)
        for rows in (slice(0, 1), slice(5, 8), slice(60, 77), slice(89, 90)):
            part_experts, part_weights = route(logits[rows].clone())
            assert torch.equal(part_experts, experts[rows])
            assert different_bits(part_weights, weights[rows]) == 0


def test_no_tokens_and_wrong_shapes():
    experts = select_experts(torch.zeros(0, 8), torch.zeros(8), k=2)
    assert experts.shape == (0, 2)
    assert route_weights(torch.zeros(0, 8), experts, scale=1.0).shape == (0, 2)
    with pytest.raises(ShapeError, match="E"):
        select_experts(torch.zeros(1, 8), torch.zeros(7), k=2)
