"""The balance loss by hand, against a float64 oracle and bit by bit; the bias update by hand and at the edge of exact
comparison.

Not proven here: which layers are judged and counted (test_routing.py).
"""

import pytest
import torch
from torch import Tensor

from rollforward.kernels.moe.gate import gate_scores, select_experts
from rollforward.model.balance import sequence_balance_loss, updated_bias
from rollforward.model.errors import ModelInputError
from tests.helpers.bits import different_bits, torch_threads

RISING = [1.0, 2.0, 3.0, 4.0]
FALLING = [4.0, 3.0, 2.0, 1.0]


def loss_of(rows: list[list[float]], lengths: list[int], weights: list[float], k: int = 2) -> float:
    return float(
        sequence_balance_loss(torch.tensor(rows), k=k, sequence_lengths=lengths, sequence_weights=weights).item()
    )


def random_scores(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    return gate_scores(torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)))


def oracle(scores_TE: Tensor, k: int, lengths: list[int], weights: list[float]) -> Tensor:
    """The report's sums as written: token by token, expert by expert, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    num_experts, start = scores_TE.shape[1], 0
    for length, weight in zip(lengths, weights, strict=True):
        rows = scores_TE[start : start + length].double()
        start += length
        for expert in range(num_experts):
            chosen = sum(int(expert in row.topk(k).indices) for row in rows)
            share = sum(row[expert] / row.sum() for row in rows) / length
            total = total + weight * num_experts / (k * length) * chosen * share
    return total


def test_values_by_hand() -> None:
    # Both tokens agree on experts 2 and 3: f = 0, 0, 2, 2 and P = .1, .2, .3, .4.
    assert loss_of([RISING, RISING], [2], [1.0]) == pytest.approx(1.4, abs=1e-6)
    # Each expert once: f = 1, so the sum of P.
    assert loss_of([RISING, FALLING], [2], [1.0]) == pytest.approx(1.0, abs=1e-6)
    # The same tokens as two sequences: each is as lopsided as it can be with these scores.
    assert loss_of([RISING, FALLING], [1, 1], [1.0, 1.0]) == pytest.approx(2.8, abs=1e-6)
    assert loss_of([RISING, RISING, RISING, FALLING], [2, 2], [0.5, 2.0]) == pytest.approx(2.7, abs=1e-6)
    # Three tokens: f = 4/6 x (1, 1, 2, 2), P = (.6, .7, .8, .9) / 3.
    assert loss_of([RISING, FALLING, RISING], [3], [1.0]) == pytest.approx(4 / 18 * (0.6 + 0.7 + 1.6 + 1.8), abs=1e-6)


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (8, 2), (8, 8), (96, 6), (256, 6)])
def test_the_constant_is_one_for_uniform_routing_and_bounds_hold(num_experts: int, k: int) -> None:
    uniform = [[0.7] * num_experts] * 5
    assert loss_of(uniform, [5], [1.0], k) == pytest.approx(1.0, abs=1e-5)
    rotated = [
        [1.0 if (expert - token) % num_experts < k else 0.25 for expert in range(num_experts)]
        for token in range(num_experts)
    ]
    assert loss_of(rotated, [num_experts], [1.0], k) == pytest.approx(1.0, abs=1e-5)
    collapsed = [[1.0] * k + [0.0] * (num_experts - k)] * 3
    assert loss_of(collapsed, [3], [1.0], k) == pytest.approx(num_experts / k, rel=1e-5)


def test_value_and_gradient_equal_the_oracles() -> None:
    lengths, weights, k = [7, 1, 20], [0.25, 1.5, 0.0625], 3
    scores_TE = random_scores(28, 10).double().requires_grad_()
    expected = oracle(scores_TE, k, lengths, weights)
    (expected_grad,) = torch.autograd.grad(expected, scores_TE)
    loss = sequence_balance_loss(scores_TE, k=k, sequence_lengths=lengths, sequence_weights=weights)
    (grad,) = torch.autograd.grad(loss, scores_TE)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-15)
    single_TE = scores_TE.detach().float().requires_grad_()
    loss = sequence_balance_loss(single_TE, k=k, sequence_lengths=lengths, sequence_weights=weights)
    (grad,) = torch.autograd.grad(loss, single_TE)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-7)


def test_gradient_by_hand() -> None:
    # f = 0, 0, 2, 2 is a constant; d/ds_j of sum_i f_i s_i / 10 per token, halved by the mean: (f_j - 1.4) / 20.
    scores_TE = torch.tensor([RISING, RISING]).requires_grad_()
    sequence_balance_loss(scores_TE, k=2, sequence_lengths=[2], sequence_weights=[1.0]).backward()
    expected = torch.tensor([[-0.07, -0.07, 0.03, 0.03]] * 2)
    torch.testing.assert_close(scores_TE.grad, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("num_experts", [8, 96, 100])
def test_a_sequences_part_does_not_depend_on_its_neighbours(num_experts: int) -> None:
    """Value and gradient of one sequence alone equal, bit for bit, those among others of weight 0."""
    lengths = [40, 3, 70, 1]
    scores_TE = random_scores(sum(lengths), num_experts)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        alone_TE = scores_TE[start : start + length].clone().requires_grad_()
        alone = sequence_balance_loss(alone_TE, k=2, sequence_lengths=[length], sequence_weights=[0.3])
        alone.backward()
        packed_TE = scores_TE.clone().requires_grad_()
        weights = [0.3 if other == index else 0.0 for other in range(len(lengths))]
        packed = sequence_balance_loss(packed_TE, k=2, sequence_lengths=lengths, sequence_weights=weights)
        packed.backward()
        assert alone_TE.grad is not None
        assert packed_TE.grad is not None
        assert different_bits(packed, alone) == 0
        assert different_bits(packed_TE.grad[start : start + length], alone_TE.grad) == 0
        rest = torch.cat((packed_TE.grad[:start], packed_TE.grad[start + length :]))
        assert not rest.any()


def test_value_and_gradient_repeat_bit_for_bit_for_any_number_of_threads() -> None:
    lengths, weights = [300, 41, 159], [0.2, 0.3, 0.5]
    runs = []
    for threads in (1, 2, 2, 1, 1, 2):
        with torch_threads(threads):
            scores_TE = random_scores(500, 96).requires_grad_()
            loss = sequence_balance_loss(scores_TE, k=6, sequence_lengths=lengths, sequence_weights=weights)
            loss.backward()
            assert scores_TE.grad is not None
            runs.append((loss.detach(), scores_TE.grad))
    for loss, grad in runs[1:]:
        assert different_bits(loss, runs[0][0]) == 0
        assert different_bits(grad, runs[0][1]) == 0


def test_equal_scores_count_for_the_smaller_experts() -> None:
    # P of the two tied experts differs only through the other token, which prefers the last.
    rows = [[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]]
    assert loss_of(rows, [2], [1.0], k=1) == pytest.approx(
        1.5 * (1 / 3 + 1 / 4) / 2 + 1.5 * (1 / 3 + 1 / 2) / 2, abs=1e-6
    )


def test_scores_that_underflow_to_zero_stay_finite() -> None:
    logits_TE = torch.tensor([[-300.0] * 4, FALLING]).requires_grad_()
    loss = sequence_balance_loss(gate_scores(logits_TE), k=2, sequence_lengths=[2], sequence_weights=[1.0])
    loss.backward()
    assert torch.isfinite(loss)
    assert logits_TE.grad is not None
    assert torch.isfinite(logits_TE.grad).all()
    assert logits_TE.grad[1].any()


@pytest.mark.parametrize("lengths", [[3], [5], [2, 3], [4, 1]])
def test_lengths_of_another_batch_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ModelInputError, match=rf"sum to {sum(lengths)}, the batch has 4 tokens"):
        sequence_balance_loss(torch.ones(4, 6), k=2, sequence_lengths=lengths, sequence_weights=[1.0] * len(lengths))


@pytest.mark.parametrize(
    ("load", "direction"),
    [
        ([3, 1, 2], [-1, 1, 0]),
        ([3, 3, 4], [1, 1, -1]),  # mean 10/3
        ([0, 0, 0], [0, 0, 0]),
        ([7, 7, 7], [0, 0, 0]),
        ([0, 0, 1], [1, 1, -1]),
        ([2**53 + 1, 2**53 - 1, 2**53], [-1, 1, 0]),  # equal as float64
        ([2**24 + 1, 2**24, 2**24 - 1], [-1, 0, 1]),  # equal as float32
    ],
)
def test_the_bias_moves_against_the_load_by_exact_comparison(load: list[int], direction: list[int]) -> None:
    bias_E = torch.tensor([0.5, -0.25, 1e-3])
    speed = 1e-3
    moved_E = updated_bias(bias_E, torch.tensor(load), speed=speed)
    expected_E = torch.stack([one + sign * torch.tensor(speed) for one, sign in zip(bias_E, direction, strict=True)])
    assert moved_E.dtype == torch.float32
    assert different_bits(moved_E, expected_E) == 0
    assert torch.equal(bias_E, torch.tensor([0.5, -0.25, 1e-3]))


def test_the_update_belongs_to_the_expert_and_needs_no_graph() -> None:
    bias_E = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    load_E = torch.tensor([5, 0, 9, 2, 2, 7, 1, 30])
    order = torch.tensor([3, 1, 7, 0, 6, 5, 2, 4])
    moved_E = updated_bias(bias_E, load_E, speed=0.01)
    assert not moved_E.requires_grad
    assert different_bits(updated_bias(bias_E[order], load_E[order], speed=0.01), moved_E[order]) == 0


@pytest.mark.parametrize(
    "load_E", [torch.tensor([1.0, 2.0]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3])]
)
def test_loads_that_are_no_counts_of_the_experts_are_refused(load_E: Tensor) -> None:
    with pytest.raises(ModelInputError, match="one int64 count for each expert"):
        updated_bias(torch.zeros(2), load_E, speed=1e-3)


def test_the_bias_evens_out_a_lopsided_router() -> None:
    """The closed loop: scores that prefer some experts, choices by score + bias, updates from their counts."""
    skew_E = torch.linspace(0, 2.5, 8)
    scores_TE = gate_scores(torch.randn(512, 8, generator=torch.Generator().manual_seed(1)) + skew_E)
    bias_E = torch.zeros(8)
    ratios = []
    for _ in range(200):
        load_E = torch.bincount(select_experts(scores_TE, bias_E, k=2).flatten(), minlength=8)
        ratios.append(float(load_E.max() / load_E.double().mean()))
        bias_E = updated_bias(bias_E, load_E, speed=0.005)
    assert ratios[0] > 2.0
    assert max(ratios[-20:]) < 1.1
