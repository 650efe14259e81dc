"""Proves: two data-parallel ranks take the step that one takes (loss and gradient norm to 1e-5, masters to rounding),
hold the same masters to the bit, and stop together when one of them has a bad loss.

The batch has an odd number of micro-batches, so one rank runs an inert one.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.errors import NonFiniteLossError
from rollforward.model.train_config import AdamW
from rollforward.model.trainer import LossPart, Trainer
from rollforward.rl.batch import PackedBatch, build_step_batch
from rollforward.rl.learner import scoring_batch
from rollforward.rl.packing import plan_micro_batches, split_plans
from rollforward.rollout.types import Group, RequestId, StopReason, Trajectory
from tests.helpers.packing import gather
from tests.helpers.ranks import join_alone, run_on_ranks
from tests.helpers.tiny import random_params, random_tokens, tiny_config


def _shares(config: ModelConfig, num_ranks: int) -> list[tuple[PackedBatch, ...]]:
    """Each rank's micro-batches of three groups of two; lengths from 6 to 26; three micro-batches."""
    groups = []
    for prompt in range(3):
        members = []
        for member in range(2):
            length = 6 + 8 * prompt + 4 * member
            mask = np.arange(length) >= 3
            members.append(
                Trajectory(
                    id=RequestId(0, prompt, member),
                    task="t",
                    token_ids_T=random_tokens(config, (length,), seed=10 * prompt + member).numpy().astype(np.int32),
                    trained_mask_T=mask,
                    behavior_logprobs_T=np.where(mask, np.float32(-6), np.float32(0)),
                    policy_version=0,
                    reward=float(member),
                    stop_reason=StopReason.EOS,
                )
            )
        groups.append(Group(step=0, prompt=prompt, trajectories=tuple(members)))
    batch = build_step_batch(groups, normalisation="trajectory_mean")
    plans = plan_micro_batches(batch.rows, 40)
    assert len(plans) == 3
    return [gather(batch, share) for share in split_plans(plans, num_ranks)]


def _step(share: tuple[PackedBatch, ...]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss of this rank, gradient norm and masters after one step on a share."""
    config = tiny_config()
    trainer = Trainer(config, random_params(config), precision="native", optim=AdamW(lr=1e-3))

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        weight_T = torch.tensor(share[index].token_weight_T * share[index].advantages_T)
        return LossPart(loss=-(weight_T * logprobs_T).sum(), name=f"micro-batch {index}")

    result = trainer.train_step([scoring_batch(packed) for packed in share], loss)
    return result.loss, result.grad_norm, trainer.masters()


def step_on_a_rank(rank: int, directory: str) -> None:
    """Take the step on this rank's share and leave the result in a file."""
    share = _shares(tiny_config(), 2)[rank]
    torch.save(_step(share), Path(directory) / f"rank{rank}.pt")


def bad_loss_on_one_rank(rank: int) -> None:
    """Rank 1 has a loss that is not a number; both must raise and keep their masters."""
    config = tiny_config()
    share = _shares(config, 2)[rank]
    trainer = Trainer(config, random_params(config), precision="native", optim=AdamW(lr=1e-3))
    before = trainer.masters()

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        factor = float("nan") if (rank, index) == (1, 0) else 1.0
        return LossPart(loss=logprobs_T.sum() * factor, name=f"micro-batch {index}")

    with pytest.raises(NonFiniteLossError, match="is nan" if rank == 1 else "not finite on another rank"):
        trainer.train_step([scoring_batch(packed) for packed in share], loss)
    for name, tensor in trainer.masters().items():
        assert torch.equal(tensor, before[name]), name


def test_two_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    run_on_ranks(step_on_a_rank, 2, tmp_path, str(tmp_path))
    join_alone(tmp_path)
    loss, norm, masters = _step(_shares(tiny_config(), 1)[0])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert sum(rank[0] for rank in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert ranks[0][1] == ranks[1][1] == pytest.approx(norm, rel=1e-5)
    for name, master in masters.items():
        assert torch.equal(ranks[0][2][name], ranks[1][2][name]), name
        # Adam's first step is the sign of a gradient: where that is near 0, rounding decides it.
        difference = (ranks[0][2][name] - master).abs().float()
        assert float(difference.max()) <= 2.1e-3, name
        assert float((difference > 1e-6).float().mean()) <= 0.01, name


def test_ranks_stop_together_at_a_bad_loss(tmp_path: Path) -> None:
    run_on_ranks(bad_loss_on_one_rank, 2, tmp_path)
