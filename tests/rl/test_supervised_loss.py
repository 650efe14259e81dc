"""Negative log-likelihood: by hand, masked garbage, parts that add up, and each conversation's own part."""

import math

import pytest
import torch

from rollforward.model.metrics import metric_values
from rollforward.rl.losses.supervised import supervised_loss


def test_worked_by_hand_with_garbage_in_the_middle() -> None:
    """Probabilities 1/2 and 1/4 with weights 3/4 and 1/4: 3/4 ln 2 + 1/4 ln 4 = 5/4 ln 2; plain mean 3/2 ln 2."""
    policy_T = torch.tensor([math.log(0.5), math.nan, math.log(0.25)], dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([True, False, True])
    weight_T = torch.tensor([0.75, math.inf, 0.25], dtype=torch.float64)
    output = supervised_loss(policy_T, mask_T, weight_T, [3])
    loss, metrics = output.loss, output.metrics
    assert loss.item() == pytest.approx(1.25 * math.log(2), rel=1e-12)
    assert metric_values(metrics) == pytest.approx({"train/loss": 1.25 * math.log(2), "train/nll": 1.5 * math.log(2)})
    assert torch.autograd.grad(loss, policy_T)[0].tolist() == [-0.75, 0.0, -0.25]


def test_parts_add_up_and_nothing_trained_is_a_connected_zero() -> None:
    policy_T = -torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask_T, weight_T = torch.ones(9, dtype=torch.bool), torch.full((9,), 1 / 9, dtype=torch.float64)
    whole = supervised_loss(policy_T, mask_T, weight_T, [9]).loss
    parts = [
        supervised_loss(policy_T[rows], mask_T[rows], weight_T[rows], [rows.stop - rows.start]).loss
        for rows in (slice(0, 2), slice(2, 9))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)

    leaf_T = policy_T.clone().requires_grad_()
    output = supervised_loss(leaf_T, ~mask_T, weight_T, [4, 5])
    nothing, metrics = output.loss, output.metrics
    assert output.trajectory_loss_N.tolist() == [0.0, 0.0]
    assert nothing.item() == 0.0
    assert not torch.autograd.grad(nothing, leaf_T)[0].any()
    assert metric_values(metrics) == {}


def test_each_conversations_part_by_hand() -> None:
    """Log-probs -1, -2 | -3 (not trained: NaN) | -4 with weights 1/2, 1/4, -, 1/8: parts 1, 0, 1/2; one that is not
    finite is seen in its own part alone."""
    policy_T = torch.tensor([-1.0, -2.0, math.nan, -4.0], requires_grad=True)
    mask_T = torch.tensor([True, True, False, True])
    weight_T = torch.tensor([0.5, 0.25, math.nan, 0.125])
    output = supervised_loss(policy_T, mask_T, weight_T, [2, 1, 1])
    assert output.trajectory_loss_N.tolist() == [1.0, 0.0, 0.5]
    assert output.trajectory_loss_N.dtype == torch.float64
    assert not output.trajectory_loss_N.requires_grad
    broken_T = torch.tensor([-1.0, -2.0, 0.0, -math.inf])
    parts_N = supervised_loss(broken_T, mask_T, weight_T, [2, 1, 1]).trajectory_loss_N
    assert parts_N.tolist() == [1.0, 0.0, math.inf]


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="token_weight_T"):
        supervised_loss(torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.zeros(4), [3])
