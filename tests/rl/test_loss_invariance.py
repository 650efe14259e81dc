"""What must not change any algorithm's loss, gradients and metrics: micro-batches, order, packing, ranks, segments,
garbage, temperature.

A table of log-softmax rows is the policy, so that gradients are those of shared parameters. Does not prove anything
about the model's own invariance (tests/parity).
"""

import functools
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.metrics import Metric, metric_values
from rollforward.rl.algorithms import GSPO, Algorithm, IcePop
from rollforward.rl.batch import PackedBatch, StepBatch, build_step_batch
from rollforward.rl.losses.base import LossInputs, loss_inputs
from rollforward.rl.losses.registry import policy_loss
from rollforward.rollout.types import Group, RequestId, Segment, StopReason, Trajectory
from tests.helpers.losses import EVERY
from tests.helpers.packing import micro_batches

VOCABULARY = 16
every = pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY)


def _groups(prompts: int = 5, members: int = 4) -> list[Group]:
    """Groups of ragged trajectories; every third one has an earlier segment."""
    generator = random.Random(1)

    def sequence(answer_tokens: int) -> dict[str, Any]:
        prompt_tokens = generator.randint(1, 4)
        tokens = prompt_tokens + answer_tokens
        trained = [False] * prompt_tokens + [True] * answer_tokens
        return {
            "token_ids_T": np.array([generator.randrange(VOCABULARY) for _ in range(tokens)], dtype=np.int32),
            "trained_mask_T": np.array(trained),
            "behavior_logprobs_T": np.array([-7 * generator.random() if t else 0.0 for t in trained], dtype=np.float32),
        }

    return [
        Group(
            step=0,
            prompt=p,
            trajectories=tuple(
                Trajectory(
                    id=RequestId(0, p, m),
                    task="sum",
                    policy_version=0,
                    reward=generator.choice([0.0, 0.3, 1.0]),
                    stop_reason=StopReason.EOS,
                    earlier_segments=(Segment(**sequence(3)),) if m % 3 == 0 else (),
                    **sequence(generator.randint(1, 11)),
                )
                for m in range(members)
            ),
        )
        for p in range(prompts)
    ]


def _tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, VOCABULARY, VOCABULARY, generator=generator))  # type: ignore[return-value]


def _logprobs(table_VV: Tensor, pack: PackedBatch) -> Tensor:
    """Log-prob of each target by the row of the token before it: a policy with shared parameters and no neighbours."""
    rows_TV = table_VV[torch.tensor(pack.token_ids_T, dtype=torch.int64)].log_softmax(-1)
    return rows_TV.gather(1, torch.tensor(pack.target_ids_T, dtype=torch.int64)[:, None])[:, 0]


def _inputs(pack: PackedBatch, policy_T: Tensor, *, poison: bool = False) -> LossInputs:
    """What a learner hands to the loss of one micro-batch."""
    inputs = loss_inputs(
        pack,
        policy_logprobs_T=policy_T,
        reference_logprobs_T=_logprobs(_tables()[1], pack),
        entropy_T=policy_T.detach() ** 2,
    )
    return _poisoned(inputs) if poison else inputs


def _train(
    algorithm: Algorithm, packs: Sequence[PackedBatch], *, poison: bool = False
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient of the table and metrics, added over micro-batches as a trainer does."""
    table_VV = _tables()[0].requires_grad_()
    total = 0.0
    metrics: list[Metric] = []
    for pack in packs:
        output = policy_loss(algorithm, _inputs(pack, _logprobs(table_VV, pack), poison=poison))
        output.loss.backward()
        total += float(output.trajectory_loss_N.sum())
        metrics.extend(output.metrics)
    assert table_VV.grad is not None
    return total, table_VV.grad, metric_values(metrics)


def _token_gradients(algorithm: Algorithm, packs: Sequence[PackedBatch]) -> dict[RequestId, tuple[list[float], float]]:
    """For each trajectory, the gradient of its tokens' log-probs and its part of the loss, every bit of them."""
    found: dict[RequestId, tuple[list[float], float]] = {}
    for pack in packs:
        leaf_T = _logprobs(_tables()[0], pack).requires_grad_()
        output = policy_loss(algorithm, _inputs(pack, leaf_T))
        output.loss.backward()
        assert leaf_T.grad is not None
        for index, identity in enumerate(pack.ids):
            own_T = leaf_T.grad[torch.tensor(pack.trajectory_T) == index]
            found[identity] = (own_T.tolist(), float(output.trajectory_loss_N[index]))
    return found


def _assert_same(
    actual: tuple[float, Tensor, dict[str, float]], expected: tuple[float, Tensor, dict[str, float]]
) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    largest = expected[1].abs().max()
    assert torch.all((actual[1] - expected[1]).abs() <= 1e-6 * largest)
    assert actual[2] == pytest.approx(expected[2], rel=1e-6, abs=1e-9)


def _step_batch(normalisation: str = "trajectory_mean") -> StepBatch:
    return build_step_batch(_groups(), normalisation=normalisation, max_new_tokens=16)  # type: ignore[arg-type]


DECISIONS = (
    "actor/opsm_frac",
    "actor/pg_clipfrac",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/rollout_is_ratio_fraction_high",
)


@every
@pytest.mark.parametrize("normalisation", ["trajectory_mean", "token_mean", "constant"])
@pytest.mark.parametrize("parts", [2, 4, 20])
def test_micro_batches_do_not_matter(algorithm: Algorithm, normalisation: str, parts: int) -> None:
    batch = _step_batch(normalisation)
    (whole,) = micro_batches(batch, 10_000)
    expected = _train(algorithm, [whole])
    decided = [expected[2][name] for name in DECISIONS if name in expected[2]]
    assert decided, "every algorithm decides something"
    assert all(0 < share < 1 for share in decided), "the case must have both outcomes of every decision"
    packs = micro_batches(batch, _budget(parts))
    assert len(packs) > 1
    _assert_same(_train(algorithm, packs), expected)


@functools.cache
def _budget(parts: int) -> int:
    """The least one that makes at most so many micro-batches."""
    batch = _step_batch()
    least = max(trajectory.token_ids_T.size for trajectory in batch.trajectories)
    return next(budget for budget in itertools.count(least) if len(micro_batches(batch, budget)) <= parts)


def _shuffled(batch: StepBatch, seed: int) -> StepBatch:
    order = random.Random(seed).sample(range(len(batch.rows)), len(batch.rows))
    parts = {name: tuple(getattr(batch, name)[index] for index in order) for name in ("rows", "trajectories")}
    return msgspec.structs.replace(batch, **parts)


@every
@pytest.mark.parametrize("seed", range(3))
def test_order_and_packing_do_not_matter(algorithm: Algorithm, seed: int) -> None:
    batch = _step_batch()
    expected = _train(algorithm, micro_batches(batch, 10_000))
    _assert_same(_train(algorithm, micro_batches(_shuffled(batch, seed), 45)), expected)


@every
def test_neighbours_change_no_bit_of_a_token(algorithm: Algorithm) -> None:
    """Ratios of whole sequences too: each gradient by a log-prob, whatever lies beside the trajectory."""
    batch = _step_batch()
    expected = _token_gradients(algorithm, micro_batches(batch, 10_000))
    assert len(expected) == len(batch.rows)
    for seed, budget in ((0, 45), (1, 33), (2, 10_000)):
        assert _token_gradients(algorithm, micro_batches(_shuffled(batch, seed), budget)) == expected
    assert _token_gradients(algorithm, batch.trajectories) == expected, "each alone"


@every
def test_ranks_do_not_matter(algorithm: Algorithm) -> None:
    """Two ranks take every other micro-batch: sums of losses and gradients agree."""
    batch = _step_batch()
    expected = _train(algorithm, micro_batches(batch, 10_000))
    packs = micro_batches(batch, 45)
    first, second = _train(algorithm, packs[::2]), _train(algorithm, packs[1::2])
    merged = (first[0] + second[0], first[1] + second[1])
    assert merged[0] == pytest.approx(expected[0], rel=1e-6)
    assert torch.all((merged[1] - expected[1]).abs() <= 1e-6 * expected[1].abs().max())


def _split(trajectory: Trajectory) -> Trajectory:
    """The same drawn tokens in two segments: the second begins with the token before its first drawn one."""
    half = trajectory.token_ids_T.size // 2
    if trajectory.earlier_segments or not trajectory.trained_mask_T[half] or not trajectory.trained_mask_T[half - 1]:
        return trajectory
    cut = {
        name: (getattr(trajectory, name)[:half], getattr(trajectory, name)[half - 1 :].copy())
        for name in ("token_ids_T", "trained_mask_T", "behavior_logprobs_T")
    }
    cut["trained_mask_T"][1][0] = False
    cut["behavior_logprobs_T"][1][0] = 0.0
    first, last = ({name: parts[index] for name, parts in cut.items()} for index in (0, 1))
    return msgspec.structs.replace(trajectory, earlier_segments=(Segment(**first),), **last)


@every
@pytest.mark.parametrize("normalisation", ["trajectory_mean", "token_mean", "constant"])
def test_a_trajectory_in_segments_weighs_one(algorithm: Algorithm, normalisation: Any) -> None:
    """The policy here reads one token back, so the same tokens have the same log-probs in one sequence and in two:
    loss, gradient and every metric are those of the trajectory in one piece."""
    groups = _groups()
    cut = [msgspec.structs.replace(g, trajectories=tuple(_split(one) for one in g.trajectories)) for g in groups]
    num_cut = sum(
        a is not b
        for g, h in zip(groups, cut, strict=True)
        for a, b in zip(g.trajectories, h.trajectories, strict=True)
    )
    assert num_cut >= 5
    whole, parts = (build_step_batch(each, normalisation=normalisation, max_new_tokens=16) for each in (groups, cut))
    for one, other in zip(whole.trajectories, parts.trajectories, strict=True):
        assert one.token_weight_T.sum() == pytest.approx(other.token_weight_T.sum(), rel=1e-6)
        assert one.trajectory_tokens_N.tolist() == other.trajectory_tokens_N.tolist()
    packs = [micro_batches(batch, 10_000) for batch in (whole, parts)]
    _assert_same(_train(algorithm, packs[1]), _train(algorithm, packs[0]))


def _poisoned(inputs: LossInputs) -> LossInputs:
    """Put NaN and infinities wherever nothing is trained, and append padding made of nothing else."""
    mask_T = torch.cat([inputs.trained_mask_T, torch.zeros(7, dtype=torch.bool)])
    bad_T = torch.tensor([math.nan, math.inf, -math.inf, 1e30]).repeat(mask_T.numel())[: mask_T.numel()]
    changes: dict[str, Tensor] = {"trained_mask_T": mask_T}
    for name in inputs.__struct_fields__:
        tensor = getattr(inputs, name)
        if tensor is None or name in ("trained_mask_T", "trajectory_tokens_N", "log_ratio_mean_N"):
            continue
        padded_T = torch.cat([tensor, torch.zeros(7, dtype=tensor.dtype)])
        if name == "trajectory_T":
            changes[name] = torch.where(mask_T, padded_T, 10**9)
        elif name == "policy_logprobs_T":
            # Poison the value and keep the graph, as a padded row of a real forward would.
            changes[name] = padded_T + torch.where(mask_T, 0.0, bad_T)
        else:
            changes[name] = torch.where(mask_T, padded_T, bad_T)
    return msgspec.structs.replace(inputs, **changes)


@every
def test_garbage_where_nothing_is_trained_does_not_matter(algorithm: Algorithm) -> None:
    packs = micro_batches(_step_batch(), 60)
    clean, poisoned = _train(algorithm, packs), _train(algorithm, packs, poison=True)
    _assert_same(poisoned, clean)
    assert poisoned[0] == clean[0]


@every
def test_the_gradient_of_untrained_positions_is_exactly_zero(algorithm: Algorithm) -> None:
    (pack,) = micro_batches(_step_batch(), 10_000)
    inputs = _inputs(pack, _logprobs(_tables()[0], pack), poison=True)
    leaf_T = inputs.policy_logprobs_T.detach().clone().requires_grad_()
    policy_loss(algorithm, msgspec.structs.replace(inputs, policy_logprobs_T=leaf_T)).loss.backward()
    assert leaf_T.grad is not None
    assert torch.isfinite(leaf_T.grad).all()
    assert not leaf_T.grad[~inputs.trained_mask_T].any()
    assert leaf_T.grad[inputs.trained_mask_T].any()


def _on_policy(recorded: float) -> tuple[Tensor, PackedBatch]:
    """A step whose tokens were logged as an engine does it, one row at a time, at temperature `recorded`."""
    (pack,) = micro_batches(_step_batch(), 10_000)
    table_VV = _tables()[0]
    rows_T, targets_T = (torch.tensor(ids, dtype=torch.int64) for ids in (pack.token_ids_T, pack.target_ids_T))
    logged = [
        float(token_logprob(table_VV[row][None], target[None], temperature=recorded)[0])
        for row, target in zip(rows_T, targets_T, strict=True)
    ]
    return table_VV, msgspec.structs.replace(pack, behavior_logprobs_T=np.array(logged, dtype=np.float32))


@every
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.9])
def test_on_policy_the_ratio_is_exactly_one_at_any_temperature(algorithm: Algorithm, temperature: float) -> None:
    """Both sides divide the logits: no token is clipped, dropped or off-policy, and each gradient is -A w in every bit
    (the KL left out)."""
    table_VV, pack = _on_policy(temperature)
    rows_T, targets_T = (torch.tensor(ids, dtype=torch.int64) for ids in (pack.token_ids_T, pack.target_ids_T))
    leaf_T = token_logprob(table_VV[rows_T], targets_T, temperature=temperature)[0].requires_grad_()
    inputs = _inputs(pack, leaf_T)
    output = policy_loss(msgspec.structs.replace(algorithm, kl_beta=0.0), inputs)
    values = metric_values(output.metrics)
    assert values["training/rollout_probs_diff_max"] == values["actor/ppo_kl"] == 0.0
    assert all(values[name] == 0.0 for name in DECISIONS if name in values)
    assert values.get("rollout_corr/rollout_is_mean", 1.0) == 1.0
    output.loss.backward()
    assert leaf_T.grad is not None
    expected_T = torch.where(inputs.trained_mask_T, -inputs.advantages_T * inputs.token_weight_T, 0)
    assert torch.equal(leaf_T.grad, expected_T)


@pytest.mark.parametrize("algorithm", [GSPO(), IcePop(ratio_min=0.9, ratio_max=1.1)], ids=["gspo", "icepop"])
def test_a_temperature_on_one_side_only_is_seen(algorithm: Algorithm) -> None:
    table_VV, pack = _on_policy(1.0)
    rows_T, targets_T = (torch.tensor(ids, dtype=torch.int64) for ids in (pack.token_ids_T, pack.target_ids_T))
    policy_T = token_logprob(table_VV[rows_T], targets_T, temperature=0.7)[0].requires_grad_()
    values = metric_values(policy_loss(algorithm, _inputs(pack, policy_T)).metrics)
    assert values["training/rollout_probs_diff_max"] > 0.01
    assert any(values.get(name, 0.0) > 0 for name in DECISIONS)
