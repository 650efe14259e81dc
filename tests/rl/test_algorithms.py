"""Every algorithm's loss: each branch by hand on three tokens, value and gradient against the objective as it is
written, and what an exact importance correction must give over an enumerated vocabulary.

The terms themselves (KL, off-policy masking) are worked in test_losses.py, invariance in test_loss_invariance.py.
"""

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.metrics import metric_values
from rollforward.rl.algorithms import CISPO, DAPO, GRPO, GSPO, TIS, Algorithm, DrGRPO, IcePop
from rollforward.rl.errors import LossInputError
from rollforward.rl.losses.base import LossInputs, log_ratio_sums
from rollforward.rl.losses.registry import policy_loss
from tests.helpers.losses import EVERY, gradient, random_inputs, three_tokens

LN2 = math.log(2.0)
every = pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY)


def _advantages(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _case(algorithm: Algorithm, loss: float, grad: list[float], **changes: Any) -> dict[str, float]:
    """Loss and gradient of three_tokens are as given; returns the metrics."""
    inputs = three_tokens(**changes)
    output = policy_loss(algorithm, inputs)
    assert output.loss.item() == pytest.approx(loss, rel=1e-9)
    assert gradient(output, inputs).tolist() == pytest.approx(grad, rel=1e-9)
    assert output.trajectory_loss_N.sum().item() == pytest.approx(loss, rel=1e-9)
    return metric_values(output.metrics)


def test_dapo_clips_higher_than_lower() -> None:
    """A = 1: token 0 min(1.5, 1.28) is clipped, token 1 min(0.5, 0.8) is not. A = -1: the other way round."""
    values = _case(DAPO(), -(1.28 + 0.5) / 4 + 0.5, [0.0, -0.125, 0.5])
    assert values["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert values["actor/pg_loss"] == values["actor/loss"] == pytest.approx(0.055)
    _case(DAPO(), (1.5 + 0.8) / 4, [0.375, 0.0, 0.0], advantages_T=_advantages(-1.0, -1.0, 0.0))
    _case(DAPO(clip_eps_high=0.5), -(1.5 + 0.5) / 4 + 0.5, [-0.375, -0.125, 0.5])


def test_dr_grpo_has_the_surrogate_and_weights_that_no_length_divides() -> None:
    """Two trajectories, 8 tokens allowed: each token weighs 1/16, and the logged losses are sums, not means."""
    weights = {"token_weight_T": torch.full((3,), 1 / 16, dtype=torch.float64)}
    values = _case(DrGRPO(), (-1.2 - 0.5 + 1.0) / 16, [0.0, -0.5 / 16, 1 / 16], **weights)
    assert values["actor/pg_loss"] == pytest.approx(-0.7 / 16)
    assert values["actor/loss"] == pytest.approx(-0.7 / 16)
    values = _case(
        DrGRPO(), (1.5 + 0.8) / 16, [1.5 / 16, 0.0, 0.0], advantages_T=_advantages(-1.0, -1.0, 0.0), **weights
    )
    assert values["actor/pg_clipfrac"] == pytest.approx(1 / 3)


DOWN = math.sqrt(1.5 * 0.5)
UP = math.sqrt(1.5 * 0.75)


@pytest.mark.parametrize(
    ("advantage", "second", "value", "is_clipped"),
    [
        (1.0, 0.2, DOWN, False),
        (-1.0, 0.2, 1 - 3e-4, True),
        (1.0, 0.3, 1 + 4e-4, True),
        (-1.0, 0.3, UP, False),
    ],
)
def test_gspo_clips_whole_sequences(advantage: float, second: float, value: float, is_clipped: bool) -> None:
    """Ratios 1.5 and 0.5 (or 0.75): s = sqrt of their product, which both tokens take. Token 2 has s = 1."""
    policy_T = torch.tensor([0.6, second, 0.5], dtype=torch.float64).log().requires_grad_()
    slope = 0.0 if is_clipped else -advantage * value / 4
    values = _case(
        GSPO(),
        -advantage * value / 2 + 0.5,
        [slope, slope, 0.5],
        policy_logprobs_T=policy_T,
        advantages_T=_advantages(advantage, advantage, -1.0),
    )
    assert values["actor/pg_clipfrac"] == pytest.approx(2 / 3 if is_clipped else 0.0)


def test_gspo_within_its_bounds_is_not_clipped() -> None:
    for advantage in (1.0, -1.0):
        _case(
            GSPO(clip_eps_low=0.2, clip_eps_high=0.2),
            -advantage * DOWN / 2 + 0.5,
            [-advantage * DOWN / 4] * 2 + [0.5],
            advantages_T=_advantages(advantage, advantage, -1.0),
        )


@pytest.mark.parametrize(
    ("low", "high", "weights", "clipped"),
    [(1.0, 0.28, (1.28, 0.5, 1.0), 1), (0.2, 0.28, (1.28, 0.8, 1.0), 2), (1.0, 0.5, (1.5, 0.5, 1.0), 0)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cispo_clips_the_weight_and_keeps_every_gradient(
    low: float, high: float, weights: tuple[float, float, float], clipped: int, sign: float
) -> None:
    """-sg(weight) A log p: the sign of A decides nothing about clipping."""
    logprobs = [math.log(0.6), math.log(0.2), math.log(0.5)]
    shares = (sign / 4, sign / 4, -1 / 2)
    loss = -sum(share * weight * logprob for share, weight, logprob in zip(shares, weights, logprobs, strict=True))
    values = _case(
        CISPO(clip_eps_low=low, clip_eps_high=high),
        loss,
        [-share * weight for share, weight in zip(shares, weights, strict=True)],
        advantages_T=_advantages(sign, sign, -1.0),
    )
    assert values["actor/pg_clipfrac"] == pytest.approx(clipped / 3)


@pytest.mark.parametrize(
    ("cap", "level", "weights", "high"),
    [
        (2.0, "token", (1.5, 0.5, 1.0), 0),
        (1.2, "token", (1.2, 0.5, 1.0), 1),
        (0.4, "token", (0.4, 0.4, 0.4), 3),
        (2.0, "sequence", (0.75, 0.75, 1.0), 0),
        (0.7, "sequence", (0.7, 0.7, 0.7), 3),
        (0.8, "sequence", (0.75, 0.75, 0.8), 1),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tis_truncates_the_ratio_of_a_token_or_the_product_of_a_sequence(
    cap: float, level: Any, weights: tuple[float, float, float], high: int, sign: float
) -> None:
    """Token ratios 1.5, 0.5 and 1, products 0.75 and 1. The trainer's own ratio is 1, so the loss is -w weight A."""
    shares = (sign / 4, sign / 4, -1 / 2)
    grads = [-share * weight for share, weight in zip(shares, weights, strict=True)]
    values = _case(TIS(cap=cap, level=level), sum(grads), grads, advantages_T=_advantages(sign, sign, -1.0))
    assert values["rollout_corr/rollout_is_mean"] == pytest.approx(sum(weights) / 3)
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(high / 3)


@pytest.mark.parametrize(
    ("bounds", "weights", "dropped"),
    [
        ((0.4, 5.0), (1.5, 0.5, 1.0), 0),
        ((0.6, 5.0), (1.5, 0.0, 1.0), 1),
        ((0.4, 1.4), (0.0, 0.5, 1.0), 1),
        ((0.6, 1.4), (0.0, 0.0, 1.0), 2),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_icepop_drops_tokens_on_both_sides(
    bounds: tuple[float, float], weights: tuple[float, float, float], dropped: int, sign: float
) -> None:
    shares = (sign / 4, sign / 4, -1 / 2)
    grads = [-share * weight for share, weight in zip(shares, weights, strict=True)]
    algorithm = IcePop(ratio_min=bounds[0], ratio_max=bounds[1])
    values = _case(algorithm, sum(grads), grads, advantages_T=_advantages(sign, sign, -1.0))
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(dropped / 3)
    assert values["rollout_corr/rollout_is_mean"] == pytest.approx(sum(weights) / 3)


def test_icepops_bounds_are_inside() -> None:
    inputs = three_tokens()
    up, down, _ = (inputs.policy_logprobs_T - inputs.behavior_logprobs_T).exp().tolist()
    for low, high, dropped in (
        (down, up, 0),
        (math.nextafter(down, 1), up, 1),
        (down, math.nextafter(up, 1), 1),
    ):
        values = metric_values(policy_loss(IcePop(ratio_min=low, ratio_max=high), inputs).metrics)
        assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(dropped / 3)


@every
def test_the_kl_is_the_same_term_whatever_the_policy_term_weighs(algorithm: Algorithm) -> None:
    """A = 0 leaves beta D, also for tokens that are clipped or dropped: D = 1.5 (ln 2 - 1/2), 0.5 (1 - ln 2), 0, with
    the gradient r log(policy / reference)."""
    kl = (1.5 * (LN2 - 0.5) + 0.5 * (1 - LN2)) / 4
    values = _case(
        msgspec.structs.replace(algorithm, kl_beta=0.1),
        0.1 * kl,
        [0.1 * 1.5 * LN2 / 4, -0.1 * 0.5 * LN2 / 4, 0.0],
        advantages_T=torch.zeros(3, dtype=torch.float64),
    )
    assert values["actor/kl_loss"] == pytest.approx(kl)
    assert values["actor/loss"] == pytest.approx(0.1 * kl)


@every
def test_zero_advantage_teaches_nothing(algorithm: Algorithm) -> None:
    inputs = three_tokens(advantages_T=torch.zeros(3, dtype=torch.float64))
    output = policy_loss(msgspec.structs.replace(algorithm, kl_beta=0.0), inputs)
    assert output.loss.item() == 0.0
    assert not gradient(output, inputs).any()


@every
def test_the_reference_is_needed_exactly_when_the_kl_is_weighted(algorithm: Algorithm) -> None:
    without = three_tokens(reference_logprobs_T=None)
    with pytest.raises(LossInputError, match=r"algo\.kl_beta is 0\.3 and there are no reference"):
        policy_loss(msgspec.structs.replace(algorithm, kl_beta=0.3), without)
    plain = msgspec.structs.replace(algorithm, kl_beta=0.0)
    assert policy_loss(plain, without).loss.item() == policy_loss(plain, three_tokens()).loss.item()


@every
def test_a_micro_batch_that_trains_nothing_has_a_zero_loss_connected_to_the_graph(algorithm: Algorithm) -> None:
    inputs = three_tokens(
        trained_mask_T=torch.zeros(3, dtype=torch.bool), trajectory_tokens_N=torch.zeros(2, dtype=torch.int64)
    )
    output = policy_loss(algorithm, inputs)
    assert output.loss.item() == 0.0
    assert gradient(output, inputs).tolist() == [0.0, 0.0, 0.0]
    assert metric_values(output.metrics) == {}


@every
def test_a_broken_policy_stays_visible(algorithm: Algorithm) -> None:
    """Neither clipping, capping nor dropping may hide a NaN, with the KL or without: the trainer must stop, and name
    the trajectory."""
    policy_T = torch.tensor([-1.0, math.nan, -1.0], dtype=torch.float64, requires_grad=True)
    alone = three_tokens(policy_logprobs_T=policy_T, reference_logprobs_T=None)
    for inputs, beta in ((alone, 0.0), (three_tokens(policy_logprobs_T=policy_T), 0.1)):
        output = policy_loss(msgspec.structs.replace(algorithm, kl_beta=beta), inputs)
        assert torch.isnan(output.loss)
        assert torch.isnan(output.trajectory_loss_N).tolist() == [True, False]


@pytest.mark.parametrize("name", ["gspo", "cispo", "tis", "tis_sequence", "icepop"])
def test_an_impossible_token_stays_visible(name: str) -> None:
    """The policy gives probability 0 to what the engine drew: a weight of 0 must not make that a loss of 0."""
    policy_T = torch.tensor([-1.0, -math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = three_tokens(policy_logprobs_T=policy_T, reference_logprobs_T=None)
    output = policy_loss(msgspec.structs.replace(EVERY[name], kl_beta=0.0), inputs)
    assert torch.isfinite(output.trajectory_loss_N).tolist() == [False, True]


@pytest.mark.parametrize("algorithm", [CISPO(), TIS(), TIS(level="sequence"), IcePop()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinite_ratio_is_capped_or_dropped(algorithm: Algorithm, dtype: torch.dtype) -> None:
    """The engine logged -2000 where the policy has -1: exp(1999) is infinite in either format."""
    inputs = three_tokens(
        dtype, behavior_logprobs_T=torch.tensor([-2000.0, -1.0, -1.0], dtype=dtype), reference_logprobs_T=None
    )
    output = policy_loss(algorithm, inputs)
    gradient_T = gradient(output, inputs)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient_T).all()
    caps: dict[type, float] = {CISPO: 1.28, TIS: 2.0, IcePop: 0.0}
    assert gradient_T[0].item() == pytest.approx(-caps[type(algorithm)] / 4, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo_plain", "dapo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_ratio_beyond_float32_is_bounded_where_it_is_clipped(name: str, advantage: float, beta: float) -> None:
    """exp(99) and exp(1999) are infinite in float32, and infinity x 0 is NaN, in the branch that clipping did not take
    too. A bound takes their place, and their gradient away; other tokens are trained as ever."""
    algorithm = msgspec.structs.replace(EVERY[name], kl_beta=beta)
    advantages_T = torch.tensor([advantage, advantage, -1.0])
    plain = three_tokens(torch.float32, advantages_T=advantages_T)
    expected = gradient(policy_loss(algorithm, plain), plain)
    for log_ratio in (99.0, 1999.0):
        behavior_T = plain.behavior_logprobs_T.clone()
        behavior_T[0] = math.log(0.6) - log_ratio
        inputs = three_tokens(torch.float32, advantages_T=advantages_T, behavior_logprobs_T=behavior_T)
        output = policy_loss(algorithm, inputs)
        gradient_T = gradient(output, inputs)
        assert torch.isfinite(output.loss)
        assert torch.isfinite(gradient_T).all()
        assert gradient_T[2] == expected[2]
        if name != "gspo":
            assert gradient_T[1] == expected[1]
        if advantage > 0 and beta == 0:
            assert gradient_T[0] == 0.0
        if advantage < 0 and beta == 0:
            worst = 0.5 * math.exp(20.0) * (1.0 if name == "gspo" else 0.5)
            assert output.trajectory_loss_N[0].item() == pytest.approx(worst, rel=1e-6)


@every
def test_only_the_policy_gets_a_gradient(algorithm: Algorithm) -> None:
    inputs = three_tokens()
    leaves = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("behavior_logprobs_T", "reference_logprobs_T", "advantages_T", "token_weight_T", "entropy_T")
    }
    policy_loss(algorithm, msgspec.structs.replace(inputs, **leaves)).loss.backward()
    assert inputs.policy_logprobs_T.grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


@every
def test_what_is_left_after_cancellation_is_not_lost(algorithm: Algorithm) -> None:
    """float32 terms 1, 1e-9, -1 (times log p for CISPO, which is -1): summed in float32 nothing is left."""
    logprobs_T = torch.full((3,), -1.0)
    inputs = three_tokens(
        policy_logprobs_T=logprobs_T.clone().requires_grad_(),
        behavior_logprobs_T=logprobs_T,
        reference_logprobs_T=None,
        advantages_T=torch.tensor([-1.0, -1e-9, 1.0]),
        token_weight_T=torch.ones(3),
        trajectory_T=torch.arange(3),
        trajectory_tokens_N=torch.ones(3, dtype=torch.int64),
    )
    loss = policy_loss(msgspec.structs.replace(algorithm, kl_beta=0.0), inputs).loss.item()
    assert abs(loss) == pytest.approx(1e-9, rel=1e-6)


def _written(algorithm: Algorithm, inputs: LossInputs, policy_T: Tensor) -> Tensor:
    """The objective as the paper writes it, one trajectory and one token after the other, in float64 with autograd."""
    loss = torch.zeros((), dtype=torch.float64)
    assert inputs.reference_logprobs_T is not None
    for i in range(len(inputs.trajectory_tokens_N)):
        tokens = [t for t in range(len(policy_T)) if inputs.trained_mask_T[t] and inputs.trajectory_T[t] == i]
        if not tokens:
            continue
        logs = [policy_T[t] - inputs.behavior_logprobs_T[t] for t in tokens]
        mean = torch.stack(logs).mean()
        for t, log in zip(tokens, logs, strict=True):
            ratio, advantage = log.exp(), inputs.advantages_T[t]
            match algorithm:
                case GRPO() | DAPO() | DrGRPO() | GSPO():
                    if isinstance(algorithm, GSPO):
                        ratio = mean.exp()
                    clipped = ratio.clamp(1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high)
                    objective = torch.minimum(ratio * advantage, clipped * advantage)
                    delta = algorithm.opsm_delta if isinstance(algorithm, GRPO) else None
                    if delta is not None and advantage < 0 and -mean.item() > delta:
                        objective = objective * 0
                case CISPO():
                    weight = min(max(ratio.item(), 1 - algorithm.clip_eps_low), 1 + algorithm.clip_eps_high)
                    objective = weight * advantage * policy_T[t]
                case TIS():
                    product = math.exp(sum(one.item() for one in logs))
                    weight = min(ratio.item() if algorithm.level == "token" else product, algorithm.cap)
                    objective = weight * advantage * (policy_T[t] - policy_T[t].detach()).exp()
                case IcePop():
                    k = ratio.item()
                    weight = k if algorithm.ratio_min <= k <= algorithm.ratio_max else 0.0
                    objective = weight * advantage * (policy_T[t] - policy_T[t].detach()).exp()
            x = inputs.reference_logprobs_T[t].exp() / policy_T[t].exp()
            kl = log.exp() * (x - x.log() - 1)
            loss = loss + inputs.token_weight_T[t] * (algorithm.kl_beta * kl - objective)
    return loss


@every
@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_the_objective_as_written(algorithm: Algorithm, seed: int) -> None:
    """GSPO's gradient here flows through the mean of the log-ratios: the straight-through one must be the same."""
    algorithm = msgspec.structs.replace(algorithm, kl_beta=0.3)
    inputs = random_inputs(29, torch.float64, seed)
    output = policy_loss(algorithm, inputs)
    plain_T = inputs.policy_logprobs_T.detach().clone().requires_grad_()
    expected = _written(algorithm, inputs, plain_T)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(gradient(output, inputs), torch.autograd.grad(expected, plain_T)[0], rtol=1e-8, atol=1e-12)


SEQUENCE_LEVEL = {name: EVERY[name] for name in ("grpo", "gspo", "tis_sequence")}


@pytest.mark.parametrize("algorithm", SEQUENCE_LEVEL.values(), ids=SEQUENCE_LEVEL)
def test_part_of_a_trajectory_decides_nothing_alone_and_agrees_with_the_sums_of_all_parts(algorithm: Algorithm) -> None:
    """Two calls with a share of every trajectory each: refused without the whole mean, the same bits with it."""
    whole = random_inputs(40, torch.float32, 3)
    expected_T = gradient(policy_loss(algorithm, whole), whole)
    halves = []
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        named = {name: getattr(whole, name) for name in whole.__struct_fields__ if name.endswith("_T")}
        cut = {name: tensor[rows].detach() for name, tensor in named.items() if tensor is not None}
        halves.append(msgspec.structs.replace(whole, **cut))
    with pytest.raises(LossInputError, match="trained tokens, of which this call sees"):
        policy_loss(algorithm, halves[0])
    sums_N = log_ratio_sums(halves[0]) + log_ratio_sums(halves[1])
    mean_N = sums_N / whole.trajectory_tokens_N.clamp(min=1)
    for half, rows in zip(halves, (slice(0, None, 2), slice(1, None, 2)), strict=True):
        leaf_T = half.policy_logprobs_T.requires_grad_()
        part = msgspec.structs.replace(half, policy_logprobs_T=leaf_T, log_ratio_mean_N=mean_N)
        assert torch.equal(gradient(policy_loss(algorithm, part), part), expected_T[rows])


WIDE: dict[str, Algorithm] = {
    "grpo": GRPO(clip_eps_low=0.999999, clip_eps_high=1e9, kl_beta=0.0, opsm_delta=None),
    "dapo": DAPO(clip_eps_low=0.999999, clip_eps_high=1e9),
    "dr_grpo": DrGRPO(clip_eps_low=0.999999, clip_eps_high=1e9),
    "gspo": GSPO(clip_eps_low=0.999999, clip_eps_high=1e9),
    "cispo": CISPO(clip_eps_high=1e9),
    "tis": TIS(cap=1e9),
    "tis_sequence": TIS(cap=1e9, level="sequence"),
    "icepop": IcePop(ratio_min=1e-9, ratio_max=1e9),
}
"""Bounds that never bind."""


def _expected_gradient(algorithm: Algorithm, length: int, seed: int = 4, vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    """By enumeration of all sequences of `length` tokens: the expectation under the behavior policy of the loss's
    gradient, and the gradient of -(expected advantage under the policy) x length. Each position has logits of its own,
    every trained token weighs 1, and the advantage is a table over sequences."""
    generator = torch.Generator().manual_seed(seed)
    logits_LV, behavior_logits_LV = torch.randn(2, length, vocabulary, generator=generator, dtype=torch.float64)
    logits_LV = logits_LV.requires_grad_()
    policy_LV, behavior_LV = logits_LV.log_softmax(-1), behavior_logits_LV.log_softmax(-1)
    sequences = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
    advantages_N = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    positions = torch.arange(length)
    policy_NL, behavior_NL = policy_LV[positions, sequences], behavior_LV[positions, sequences]
    inputs = LossInputs(
        policy_logprobs_T=policy_NL.flatten(),
        behavior_logprobs_T=behavior_NL.flatten().detach(),
        advantages_T=advantages_N.repeat_interleave(length),
        trained_mask_T=torch.ones(policy_NL.numel(), dtype=torch.bool),
        token_weight_T=behavior_NL.sum(1).exp().repeat_interleave(length),
        trajectory_T=torch.arange(len(sequences)).repeat_interleave(length),
        trajectory_tokens_N=torch.full((len(sequences),), length),
    )
    (actual,) = torch.autograd.grad(policy_loss(algorithm, inputs).loss, logits_LV, retain_graph=True)
    target = -(policy_NL.sum(1).exp() * advantages_N).sum()
    (exact,) = torch.autograd.grad(target, logits_LV)
    return actual, exact


@pytest.mark.parametrize("algorithm", WIDE.values(), ids=WIDE)
def test_one_token_over_an_enumerated_vocabulary_gives_the_policy_gradient(algorithm: Algorithm) -> None:
    """Behavior and policy differ: unclipped, every correction gives the exact gradient of the policy's own return."""
    actual, exact = _expected_gradient(algorithm, length=1)
    assert torch.allclose(actual, exact, rtol=0, atol=1e-9)


def test_of_two_tokens_only_the_product_of_their_ratios_is_unbiased() -> None:
    """Twenty-five sequences whose advantage is any function of both tokens. The fixed point's 2^-32 is the error."""
    actual, exact = _expected_gradient(WIDE["tis_sequence"], length=2)
    assert torch.allclose(actual, exact, rtol=0, atol=1e-8)
    for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "tis", "icepop"):
        actual, exact = _expected_gradient(WIDE[name], length=2)
        assert (actual - exact).abs().max() > 0.02, name


def test_truncation_is_a_bias_and_the_cap_bounds_it() -> None:
    exact = _expected_gradient(TIS(cap=1e9), length=1)[1]
    errors = [(_expected_gradient(TIS(cap=cap), length=1)[0] - exact).abs().max().item() for cap in (0.5, 1.0, 2.0)]
    assert errors[0] > errors[1] > errors[2] > 1e-3


def test_truncated_importance_sampling_and_cispo_have_one_gradient() -> None:
    """sg(min(r, cap)) A grad log p is both: cap 1.3 is clip_eps_high 0.3. Their values differ (A against A log p)."""
    inputs = random_inputs(50, torch.float64, 1)
    tis, cispo = policy_loss(TIS(cap=1.3), inputs), policy_loss(CISPO(clip_eps_high=0.3), inputs)
    assert torch.allclose(gradient(tis, inputs), gradient(cispo, inputs), rtol=1e-12, atol=0)
    assert tis.loss.item() != pytest.approx(cispo.loss.item(), rel=1e-3)


def test_of_one_token_a_sequence_gspo_is_the_token_ratio() -> None:
    inputs = random_inputs(30, torch.float64, 2, num_trajectories=30)
    gspo = policy_loss(GSPO(clip_eps_low=0.1, clip_eps_high=0.3), inputs)
    dapo = policy_loss(DAPO(clip_eps_low=0.1, clip_eps_high=0.3), inputs)
    assert gspo.loss.item() == pytest.approx(dapo.loss.item(), rel=1e-8)
    assert torch.allclose(gradient(gspo, inputs), gradient(dapo, inputs), rtol=1e-8, atol=1e-14)
