"""GRPO's loss: every term by hand on three tokens, gradients against the plain formula, off-policy sequence masking.

What the other algorithms do with these terms is in test_algorithms.py; what must not matter (micro-batches, order,
ranks, garbage) in test_loss_invariance.py.
"""

import itertools
import math
import typing
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.metrics import metric_values
from rollforward.rl.algorithms import GRPO, Algorithm
from rollforward.rl.errors import LossInputError
from rollforward.rl.losses.base import (
    LossInputs,
    log_ratio_means,
    log_ratio_sums,
    without_garbage,
)
from rollforward.rl.losses.registry import LOSSES, policy_loss
from rollforward.rl.losses.terms import off_policy_keep, unbiased_kl
from tests.helpers.bits import probs_diff
from tests.helpers.losses import gradient, random_inputs, three_tokens

LN2 = math.log(2.0)
PLAIN = GRPO(kl_beta=0.0, opsm_delta=None)


def test_policy_term_worked_by_hand() -> None:
    """Token 0: min(1.5, 1.2) = 1.2, clipped. Token 1: min(0.5, 0.8) = 0.5. Token 2: min(-1, -1) = -1.

    Loss: -(1.2 + 0.5) / 4 + 1 / 2 = 0.075. d/dlog p of -r A is -r A: 0 where clipped, -0.5, +1; times the weights.
    """
    inputs = three_tokens()
    output = policy_loss(PLAIN, inputs)
    assert output.loss.item() == pytest.approx(0.075, rel=1e-12)
    assert gradient(output, inputs).tolist() == pytest.approx([0.0, -0.125, 0.5], rel=1e-12)
    assert output.trajectory_loss_N.tolist() == pytest.approx([-0.425, 0.5], rel=1e-12)


def test_negative_advantages_clip_on_the_other_side() -> None:
    """A = -1: token 0 min(-1.5, -1.2) = -1.5 keeps its gradient; token 1 min(-0.5, -0.8) = -0.8 is clipped."""
    inputs = three_tokens(advantages_T=torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64))
    output = policy_loss(PLAIN, inputs)
    assert output.loss.item() == pytest.approx((1.5 + 0.8) / 4, rel=1e-12)
    assert gradient(output, inputs).tolist() == pytest.approx([0.375, 0.0, 0.0], rel=1e-12)


def test_clip_bounds_are_separate() -> None:
    """high 0.6: token 0 is not clipped, -1.5. low 0.6 with A = -1: token 1 (r 0.5 > 0.4) is not clipped, +0.5."""
    inputs = three_tokens()
    output = policy_loss(GRPO(kl_beta=0.0, opsm_delta=None, clip_eps_high=0.6), inputs)
    assert output.loss.item() == pytest.approx(-(1.5 + 0.5) / 4 + 0.5, rel=1e-12)
    inputs = three_tokens(advantages_T=torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64))
    output = policy_loss(GRPO(kl_beta=0.0, opsm_delta=None, clip_eps_low=0.6), inputs)
    assert output.loss.item() == pytest.approx((1.5 + 0.5) / 4 + 0.5, rel=1e-12)


def test_kl_term_worked_by_hand() -> None:
    """D = r (x - log x - 1): 1.5 (0.5 + ln 2 - 1), 0.5 (2 - ln 2 - 1), 0. Gradient r log(p / q): 1.5 ln 2, -0.5 ln 2,
    0."""
    inputs = three_tokens(advantages_T=torch.zeros(3, dtype=torch.float64))
    output = policy_loss(GRPO(kl_beta=0.1, opsm_delta=None), inputs)
    kl_T = [1.5 * (LN2 - 0.5), 0.5 * (1 - LN2), 0.0]
    assert output.loss.item() == pytest.approx(0.1 * (kl_T[0] + kl_T[1]) / 4, rel=1e-12)
    expected = [0.1 * 1.5 * LN2 / 4, -0.1 * 0.5 * LN2 / 4, 0.0]
    assert gradient(output, inputs).tolist() == pytest.approx(expected, rel=1e-12)


def test_metrics_worked_by_hand() -> None:
    """ppo_kl: mean log(behavior / policy) = (ln 2/3 + ln 2 + 0) / 3. Probability differences: 0.2, 0.2, 0."""
    values = metric_values(policy_loss(GRPO(kl_beta=0.1, opsm_delta=None), three_tokens()).metrics)
    kl = (1.5 * (LN2 - 0.5) + 0.5 * (1 - LN2)) / 4
    assert values == pytest.approx(
        {
            "actor/pg_loss": 0.075,
            "actor/kl_loss": kl,
            "actor/loss": 0.075 + 0.1 * kl,
            "actor/pg_clipfrac": 1 / 3,
            "actor/ppo_kl": (math.log(2 / 3) + LN2) / 3,
            "actor/entropy": 0.5,
            "training/rollout_probs_diff_mean": 0.4 / 3,
            "training/rollout_probs_diff_max": 0.2,
        },
        rel=1e-12,
    )


def test_equal_bits_differ_by_exactly_zero() -> None:
    """On-policy, float32: difference, KL to sampler and to reference are 0.0, the ratio's gradient is -A w in every
    bit."""
    logprobs_T = -torch.rand(37, generator=torch.Generator().manual_seed(0)) * 20
    advantages_T = torch.randn(37, generator=torch.Generator().manual_seed(1))
    inputs = LossInputs(
        policy_logprobs_T=logprobs_T.clone().requires_grad_(),
        behavior_logprobs_T=logprobs_T,
        reference_logprobs_T=logprobs_T,
        advantages_T=advantages_T,
        trained_mask_T=torch.ones(37, dtype=torch.bool),
        token_weight_T=torch.full((37,), 1 / 32),
        trajectory_T=torch.zeros(37, dtype=torch.int64),
        trajectory_tokens_N=torch.tensor([37]),
    )
    output = policy_loss(GRPO(kl_beta=0.5), inputs)
    values = metric_values(output.metrics)
    for name in (
        "training/rollout_probs_diff_mean",
        "training/rollout_probs_diff_max",
        "actor/ppo_kl",
        "actor/kl_loss",
    ):
        assert values[name] == 0.0
    assert torch.equal(gradient(output, inputs), -advantages_T / 32)


@pytest.mark.parametrize(
    "logprob", [-0.0, -1e-44, -1e-30, -1e-12, -1e-8, -1e-3, -0.5, -1.0, -20.0, -100.0, -1e4, -1e30]
)
def test_one_different_bit_is_not_zero(logprob: float) -> None:
    """Whether the token is nearly certain or all but impossible: exp() rounds many log-probs to one probability."""
    policy_T = torch.full((3,), logprob)
    for end in (-math.inf, 0.0) if logprob else (-math.inf,):
        behavior_T = policy_T.clone()
        behavior_T[1] = torch.nextafter(behavior_T[1], torch.tensor(end))
        inputs = three_tokens(
            torch.float32, policy_logprobs_T=policy_T.clone().requires_grad_(), behavior_logprobs_T=behavior_T
        )
        values = metric_values(policy_loss(PLAIN, inputs).metrics)
        assert values["training/rollout_probs_diff_max"] > 0.0
        assert values["training/rollout_probs_diff_mean"] > 0.0
        exact = probs_diff(policy_T.numpy(), behavior_T.numpy())
        assert exact[0] == exact[2] == 0.0
        assert values["training/rollout_probs_diff_max"] == pytest.approx(exact[1], rel=1e-12, abs=0.0)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_what_is_left_after_cancellation_is_not_lost(order: tuple[int, ...]) -> None:
    """float32 terms 1, 1e-9, -1: summed in float32 most orders give 0."""
    logprobs_T = torch.full((3,), -1.0)
    inputs = three_tokens(
        policy_logprobs_T=logprobs_T.clone().requires_grad_(),
        behavior_logprobs_T=logprobs_T,
        reference_logprobs_T=None,
        advantages_T=torch.tensor([-1.0, -1e-9, 1.0])[list(order)],
        token_weight_T=torch.ones(3),
    )
    assert policy_loss(PLAIN, inputs).loss.item() == pytest.approx(1e-9, rel=1e-6)


def test_zero_advantage_leaves_only_the_kl() -> None:
    inputs = three_tokens(advantages_T=torch.zeros(3, dtype=torch.float64))
    output = policy_loss(PLAIN, inputs)
    assert output.loss.item() == 0.0
    assert not gradient(output, inputs).any()


def _plain_formula(algorithm: GRPO, inputs: LossInputs, policy_T: Tensor) -> Tensor:
    """The objective as it is written, one token after the other."""
    loss = torch.zeros((), dtype=torch.float64)
    reference_T = typing.cast(Tensor, inputs.reference_logprobs_T)
    for i in range(len(inputs.trajectory_tokens_N)):
        tokens = [t for t in range(len(policy_T)) if inputs.trained_mask_T[t] and inputs.trajectory_T[t] == i]
        if not tokens:
            continue
        mean = sum((inputs.behavior_logprobs_T[t] - policy_T[t]).item() for t in tokens) / len(tokens)
        for t in tokens:
            ratio = policy_T[t].exp() / inputs.behavior_logprobs_T[t].exp()
            advantage = inputs.advantages_T[t]
            clipped = ratio.clamp(1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high)
            objective = torch.minimum(ratio * advantage, clipped * advantage)
            if algorithm.opsm_delta is not None and advantage < 0 and mean > algorithm.opsm_delta:
                objective = objective * 0
            x = reference_T[t].exp() / policy_T[t].exp()
            kl = ratio * (x - x.log() - 1)
            loss = loss + inputs.token_weight_T[t] * (algorithm.kl_beta * kl - objective)
    return loss


@pytest.mark.parametrize("seed", range(6))
def test_value_and_gradient_are_those_of_the_plain_formula(seed: int) -> None:
    algorithm = GRPO(kl_beta=0.3, opsm_delta=0.02, clip_eps_low=0.1, clip_eps_high=0.3)
    inputs = random_inputs(23, torch.float64, seed)
    output = policy_loss(algorithm, inputs)
    plain_T = inputs.policy_logprobs_T.detach().clone().requires_grad_()
    expected = _plain_formula(algorithm, inputs, plain_T)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert torch.allclose(gradient(output, inputs), torch.autograd.grad(expected, plain_T)[0], rtol=1e-10, atol=1e-14)


def test_only_the_policy_gets_agradient() -> None:
    inputs = three_tokens()
    leaves = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("behavior_logprobs_T", "reference_logprobs_T", "advantages_T", "token_weight_T", "entropy_T")
    }
    policy_loss(GRPO(kl_beta=0.1), msgspec.structs.replace(inputs, **leaves)).loss.backward()
    assert inputs.policy_logprobs_T.grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


def test_unbiased_kl_over_an_enumerated_vocabulary() -> None:
    """Five tokens, behavior, policy and reference all different: the expectation under the behavior policy of the
    term's gradient is the gradient of KL(policy || reference) with respect to the logits; plain k3 gives another
    gradient.
    """
    generator = torch.Generator().manual_seed(3)
    logits_V, behavior_logits_V, reference_logits_V = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    logits_V = logits_V.requires_grad_()
    behavior_V = behavior_logits_V.log_softmax(-1)
    reference_V = reference_logits_V.log_softmax(-1)
    policy_V = logits_V.log_softmax(-1)

    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    (exact_gradient_V,) = torch.autograd.grad(exact, logits_V, retain_graph=True)

    ratio_V = (policy_V - behavior_V).exp()
    term_V = unbiased_kl(ratio_V, policy_V, reference_V)
    expected = (behavior_V.exp() * term_V).sum()
    (gradient_V,) = torch.autograd.grad(expected, logits_V, retain_graph=True)
    assert expected.item() == pytest.approx(exact.item(), abs=1e-12)
    assert torch.allclose(gradient_V, exact_gradient_V, rtol=0, atol=1e-6)

    log_x_V = reference_V - policy_V
    k3_V = log_x_V.exp() - log_x_V - 1
    (k3_gradient_V,) = torch.autograd.grad((behavior_V.exp() * k3_V).sum(), logits_V, retain_graph=True)
    assert (k3_gradient_V - exact_gradient_V).abs().max() > 0.05
    detached_V = ratio_V.detach() * k3_V
    (detached_gradient_V,) = torch.autograd.grad((behavior_V.exp() * detached_V).sum(), logits_V)
    assert (detached_gradient_V - exact_gradient_V).abs().max() > 0.05, "the ratio must be differentiable"


def test_plain_k3_is_wrong_on_policy_too() -> None:
    """r = 1 in value: the estimates agree, the gradients log(p / q) and 1 - q / p do not."""
    policy_T = torch.tensor([0.6], dtype=torch.float64).log().requires_grad_()
    reference_T = torch.tensor([0.3], dtype=torch.float64).log()
    term_T = unbiased_kl((policy_T - policy_T.detach()).exp(), policy_T, reference_T)
    assert term_T.item() == pytest.approx(LN2 - 0.5, rel=1e-12)
    assert torch.autograd.grad(term_T.sum(), policy_T)[0].item() == pytest.approx(LN2, rel=1e-12)


def _masking_inputs(advantage: float, mean_log_ratio: float, **changes: Any) -> LossInputs:
    """One trajectory of four tokens whose mean of log(behavior / policy) is as given, though single tokens differ
    much."""
    behavior_T = torch.full((4,), -1.0, dtype=torch.float64)
    offsets_T = torch.tensor([0.75, -0.5, 0.25, -0.5], dtype=torch.float64)
    fields = {
        "policy_logprobs_T": (behavior_T - offsets_T - mean_log_ratio).requires_grad_(),
        "behavior_logprobs_T": behavior_T,
        "reference_logprobs_T": torch.full((4,), -1.5, dtype=torch.float64),
        "advantages_T": torch.full((4,), advantage, dtype=torch.float64),
        "trained_mask_T": torch.ones(4, dtype=torch.bool),
        "token_weight_T": torch.full((4,), 0.25, dtype=torch.float64),
        "trajectory_T": torch.zeros(4, dtype=torch.int64),
        "trajectory_tokens_N": torch.tensor([4]),
        **changes,
    }
    return LossInputs(**fields)


@pytest.mark.parametrize(
    ("advantage", "mean_log_ratio", "is_masked"),
    [
        (-1.0, 0.501, True),
        (-1.0, 0.499, False),
        (-1.0, 0.5, False),
        (1.0, 0.501, False),
        (0.0, 0.501, False),
        (-1.0, -0.9, False),
    ],
)
def test_off_policy_masking_around_delta(advantage: float, mean_log_ratio: float, is_masked: bool) -> None:
    """Masked: the policy term is gone for all four tokens, also for those below delta; the KL term stays as it was."""
    algorithm = GRPO(kl_beta=0.1, opsm_delta=0.5)
    inputs = _masking_inputs(advantage, mean_log_ratio)
    output = policy_loss(algorithm, inputs)
    values = metric_values(output.metrics)
    unmasked = metric_values(policy_loss(GRPO(kl_beta=0.1, opsm_delta=None), inputs).metrics)
    assert values["actor/opsm_frac"] == float(is_masked)
    assert values["actor/kl_loss"] == unmasked["actor/kl_loss"] > 0
    if is_masked:
        assert values["actor/pg_loss"] == 0.0
        kl_only = _masking_inputs(0.0, mean_log_ratio)
        assert torch.equal(gradient(output, inputs), gradient(policy_loss(algorithm, kl_only), kl_only))
    else:
        assert values["actor/pg_loss"] == unmasked["actor/pg_loss"]


def test_off_policy_masking_is_per_sequence() -> None:
    """Two trajectories of one call, means 0.6 and 0.4 at delta 0.5: only the first loses its policy term."""
    first, second = _masking_inputs(-1.0, 0.6), _masking_inputs(-1.0, 0.4)
    joined = msgspec.structs.replace(
        first,
        **{
            name: torch.cat([getattr(first, name), getattr(second, name)])
            for name in first.__struct_fields__
            if name.endswith("_T") and getattr(first, name) is not None
        },
    )
    joined = msgspec.structs.replace(
        joined,
        policy_logprobs_T=joined.policy_logprobs_T.detach().requires_grad_(),
        trajectory_T=torch.tensor([0] * 4 + [1] * 4),
        trajectory_tokens_N=torch.tensor([4, 4]),
    )
    output = policy_loss(GRPO(kl_beta=0.0, opsm_delta=0.5), joined)
    gradient_T = gradient(output, joined)
    assert not gradient_T[:4].any()
    assert gradient_T[4:].any()
    assert metric_values(output.metrics)["actor/opsm_frac"] == 0.5


def test_the_decision_compares_with_the_engine_and_not_with_recomputed_logprobs() -> None:
    """The engine logged -1, the trainer recomputes -1.6 at the same weights: by the engine's value the sequence is off
    policy by 0.6, by the recomputed one by 0.
    """
    engine = _masking_inputs(-1.0, 0.6)
    recomputed = msgspec.structs.replace(engine, behavior_logprobs_T=engine.policy_logprobs_T.detach().clone())
    assert off_policy_keep(without_garbage(engine), 0.5).tolist() == [False]
    assert off_policy_keep(without_garbage(recomputed), 0.5).tolist() == [True]


def test_untrained_tokens_do_not_count_in_the_mean() -> None:
    """Mean over the three trained tokens: 0.4 + (0.75 - 0.5 + 0.25) / 3 = 0.567, over four it would be 0.4."""
    inputs = _masking_inputs(
        -1.0, 0.4, trained_mask_T=torch.tensor([True, True, True, False]), trajectory_tokens_N=torch.tensor([3])
    )
    assert log_ratio_means(inputs).item() == pytest.approx(0.4 + 0.5 / 3, abs=1e-9)
    assert off_policy_keep(without_garbage(inputs), 0.5).tolist() == [False]


def test_part_of_a_trajectory_cannot_decide_alone_but_with_the_sums_of_all_parts() -> None:
    """Tokens 0, 1 and 2, 3 in two calls. Alone the halves would decide by means 0.525 and 0.275, together it is 0.4."""
    whole = _masking_inputs(-1.0, 0.4)
    algorithm = GRPO(kl_beta=0.1, opsm_delta=0.5)
    expected = policy_loss(algorithm, whole)
    halves = [
        msgspec.structs.replace(
            whole,
            **{
                name: getattr(whole, name)[rows].detach()
                for name in whole.__struct_fields__
                if name.endswith("_T") and getattr(whole, name) is not None
            },
        )
        for rows in (slice(0, 2), slice(2, 4))
    ]
    with pytest.raises(LossInputError, match="has 4 trained tokens, of which this call sees 2"):
        policy_loss(algorithm, halves[0])
    mean_N = sum((log_ratio_sums(half) for half in halves), torch.zeros(1)) / whole.trajectory_tokens_N
    outputs = [policy_loss(algorithm, msgspec.structs.replace(half, log_ratio_mean_N=mean_N)) for half in halves]
    assert sum(output.loss.item() for output in outputs) == pytest.approx(expected.loss.item(), rel=1e-12)
    merged = metric_values(metric for output in outputs for metric in output.metrics)
    assert merged == pytest.approx(metric_values(expected.metrics), rel=1e-12)


def test_the_mean_log_ratio_is_the_same_bit_in_any_order() -> None:
    inputs = random_inputs(400, torch.float32, 5)
    expected_N = log_ratio_means(inputs)
    for seed in range(5):
        order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
        shuffled = {
            name: getattr(inputs, name)[order]
            for name in inputs.__struct_fields__
            if name.endswith("_T") and getattr(inputs, name) is not None
        }
        assert torch.equal(log_ratio_means(msgspec.structs.replace(inputs, **shuffled)), expected_N)


def test_nan_of_a_trained_token_stays_visible() -> None:
    """Neither masking of sequences nor clipping may hide it: the trainer must stop."""
    for reference_T in (torch.full((3,), -1.0), None):
        inputs = three_tokens(
            torch.float32,
            reference_logprobs_T=reference_T,
            policy_logprobs_T=torch.tensor([-1.0, math.nan, -1.0], requires_grad=True),
            advantages_T=torch.tensor([-1.0, -1.0, -1.0]),
            log_ratio_mean_N=torch.tensor([1.0, 0.0]),
        )
        algorithm = GRPO(kl_beta=0.0 if reference_T is None else 0.1, opsm_delta=0.05)
        output = policy_loss(algorithm, inputs)
        assert metric_values(output.metrics)["actor/opsm_frac"] == 0.5
        assert torch.isnan(output.loss)
        assert torch.isnan(output.trajectory_loss_N).tolist() == [True, False]


def test_a_micro_batch_that_trains_nothing_has_a_zero_loss_connected_to_the_graph() -> None:
    inputs = three_tokens(
        trained_mask_T=torch.zeros(3, dtype=torch.bool), trajectory_tokens_N=torch.zeros(2, dtype=torch.int64)
    )
    output = policy_loss(GRPO(), inputs)
    assert output.loss.item() == 0.0
    assert gradient(output, inputs).tolist() == [0.0, 0.0, 0.0]
    assert metric_values(output.metrics) == {}


def test_every_algorithm_has_a_loss() -> None:
    members = typing.get_args(Algorithm) or (Algorithm,)
    assert set(LOSSES) == set(members)


def test_the_reference_is_needed_exactly_when_the_kl_is_weighted() -> None:
    with pytest.raises(LossInputError, match="kl_beta is"):
        policy_loss(GRPO(kl_beta=0.1), three_tokens(reference_logprobs_T=None))
    assert policy_loss(PLAIN, three_tokens(reference_logprobs_T=None)).loss.item() == pytest.approx(0.075, rel=1e-12)


def test_lengths_and_the_mask_are_checked() -> None:
    with pytest.raises(ValueError, match="advantages_T"):
        policy_loss(PLAIN, three_tokens(advantages_T=torch.zeros(4)))
    with pytest.raises(LossInputError, match="must be bool"):
        policy_loss(PLAIN, three_tokens(trained_mask_T=torch.ones(3)))
