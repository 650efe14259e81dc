"""What must not change GRPO's loss, gradients and metrics: micro-batches, order, packing, ranks, segments, garbage.

A table of log-softmax rows is the policy, so that gradients are those of shared parameters. Does not prove anything
about the model's own invariance (tests/parity).
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.model.metrics import Metric, metric_values
from rollforward.rl.algorithms import GRPO
from rollforward.rl.batch import PackedBatch, StepBatch, build_step_batch
from rollforward.rl.losses.base import LossInputs, loss_inputs
from rollforward.rl.losses.registry import policy_loss
from rollforward.rollout.types import Group, RequestId, Segment, StopReason, Trajectory
from tests.helpers.packing import micro_batches

ALGORITHM = GRPO(kl_beta=0.2, opsm_delta=0.05)
VOCABULARY = 16


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
            "behavior_logprobs_T": np.array([-3 * generator.random() if t else 0.0 for t in trained], dtype=np.float32),
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


def _train(packs: Sequence[PackedBatch], *, poison: bool = False) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient of the table and metrics, added over micro-batches as a trainer does."""
    table_VV, reference_VV = _tables()
    table_VV.requires_grad_()
    total = 0.0
    metrics: list[Metric] = []
    for pack in packs:
        inputs = loss_inputs(
            pack,
            policy_logprobs_T=_logprobs(table_VV, pack),
            reference_logprobs_T=_logprobs(reference_VV, pack),
        )
        output = policy_loss(ALGORITHM, _poisoned(inputs) if poison else inputs)
        output.loss.backward()
        total += float(output.trajectory_loss_N.sum())
        metrics.extend(output.metrics)
    assert table_VV.grad is not None
    return total, table_VV.grad, metric_values(metrics)


def _assert_same(
    actual: tuple[float, Tensor, dict[str, float]], expected: tuple[float, Tensor, dict[str, float]]
) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    largest = expected[1].abs().max()
    assert torch.all((actual[1] - expected[1]).abs() <= 1e-6 * largest)
    assert actual[2] == pytest.approx(expected[2], rel=1e-6, abs=1e-9)


def _step_batch(normalisation: str = "trajectory_mean") -> StepBatch:
    return build_step_batch(_groups(), normalisation=normalisation)  # type: ignore[arg-type]


@pytest.mark.parametrize("normalisation", ["trajectory_mean", "token_mean"])
@pytest.mark.parametrize("parts", [2, 4, 20])
def test_micro_batches_do_not_matter(normalisation: str, parts: int) -> None:
    batch = _step_batch(normalisation)
    (whole,) = micro_batches(batch, 10_000)
    expected = _train([whole])
    assert expected[2]["actor/opsm_frac"] not in (0.0, 1.0), "the case must have masked and unmasked sequences"
    assert expected[2]["actor/pg_clipfrac"] > 0
    budgets = [
        budget for budget in range(14, 400) if _fits(batch, budget) and len(micro_batches(batch, budget)) <= parts
    ]
    packs = micro_batches(batch, budgets[0])
    assert len(packs) > 1
    _assert_same(_train(packs), expected)


def _fits(batch: StepBatch, budget: int) -> bool:
    return max(trajectory.token_ids_T.size for trajectory in batch.trajectories) <= budget


@pytest.mark.parametrize("seed", range(3))
def test_order_and_packing_do_not_matter(seed: int) -> None:
    batch = _step_batch()
    expected = _train(micro_batches(batch, 10_000))
    order = random.Random(seed).sample(range(len(batch.rows)), len(batch.rows))
    shuffled = {name: tuple(getattr(batch, name)[index] for index in order) for name in ("rows", "trajectories")}
    repacked = micro_batches(msgspec.structs.replace(batch, **shuffled), 45)
    _assert_same(_train(repacked), expected)


def test_ranks_do_not_matter() -> None:
    """Two ranks take every other micro-batch: sums of losses and gradients agree."""
    batch = _step_batch()
    expected = _train(micro_batches(batch, 10_000))
    packs = micro_batches(batch, 45)
    first, second = _train(packs[::2]), _train(packs[1::2])
    merged = (first[0] + second[0], first[1] + second[1])
    assert merged[0] == pytest.approx(expected[0], rel=1e-6)
    assert torch.all((merged[1] - expected[1]).abs() <= 1e-6 * expected[1].abs().max())


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


def test_garbage_where_nothing_is_trained_does_not_matter() -> None:
    packs = micro_batches(_step_batch(), 60)
    clean, poisoned = _train(packs), _train(packs, poison=True)
    _assert_same(poisoned, clean)
    assert poisoned[0] == clean[0]


def test_the_gradient_of_untrained_positions_is_exactly_zero() -> None:
    (pack,) = micro_batches(_step_batch(), 10_000)
    table_VV, reference_VV = _tables()
    policy_T, reference_T = _logprobs(table_VV, pack), _logprobs(reference_VV, pack)
    inputs = _poisoned(loss_inputs(pack, policy_logprobs_T=policy_T, reference_logprobs_T=reference_T))
    leaf_T = inputs.policy_logprobs_T.detach().clone().requires_grad_()
    policy_loss(ALGORITHM, msgspec.structs.replace(inputs, policy_logprobs_T=leaf_T)).loss.backward()
    assert leaf_T.grad is not None
    assert torch.isfinite(leaf_T.grad).all()
    assert not leaf_T.grad[~inputs.trained_mask_T].any()
    assert leaf_T.grad[inputs.trained_mask_T].any()
