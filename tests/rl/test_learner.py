"""Proves: a learner reads its micro-batches one at a time; a loss that is not finite stops it before the step, named
with micro-batch and worst sequences; each sequence carries its share in the step's loss; a tensor that is not trained
through its published format is found.

Real files, model and trainer on one rank. That steps do not depend on micro-batches and ranks is proved in
tests/parity/test_step_invariance.py.
"""

import gc
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.encoding_version import APRIL, ENCODING_FILE, encoding_file, find_encoding_version
from rollforward.model.errors import NonFiniteLossError
from rollforward.model.precision import PackedTensor
from rollforward.model.published import PublishedWeights
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import AdamW, Precision
from rollforward.rl import learner as learner_module
from rollforward.rl.algorithms import GRPO
from rollforward.rl.batch import StepBatch, build_step_batch
from rollforward.rl.errors import QuantisationError
from rollforward.rl.learner import TOKENIZER_NAME, Learner, LearnerSettings, scoring_batch, worst_sequences
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rl.quantised import check_quantised
from rollforward.rl.samples import write_step
from rollforward.rollout.types import Group, RequestId, Segment, StopReason, Trajectory
from rollforward.rollout.weights import version_directory
from tests.helpers.ranks import join_alone
from tests.helpers.tiny import random_params, random_tokens, tiny_config

PLANS = tuple(MicroBatchPlan(rows=rows) for rows in ((0, 1), (2, 3, 4), (5,)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    join_alone(directory)
    config = tiny_config()
    files = {TOKENIZER_NAME: b"not read here"}
    write_checkpoint(directory / "tiny", config, random_params(config), precision="fp32", extra_files=files)
    return directory / "tiny"


def _learner(model_dir: Path, precision: Precision = "native") -> Learner:
    return Learner(
        LearnerSettings(
            model_dir=str(model_dir),
            algorithm=GRPO(group_size=2, kl_beta=0.0),
            optim=AdamW(lr=1e-3),
            precision=precision,
            temperature=1.0,
            threads=1,
            kernels=KernelBackends(),
        )
    )


def _sequence(seed: int, length: int) -> dict[str, Any]:
    trained = np.arange(length) >= 3
    return {
        "token_ids_T": random_tokens(tiny_config(), (length,), seed=seed).numpy().astype(np.int32),
        "trained_mask_T": trained,
        "behavior_logprobs_T": np.where(trained, -6.0, 0.0).astype(np.float32),
    }


def _batch() -> StepBatch:
    """Three groups of two; the fourth trajectory has an earlier segment of 4 trained tokens beside its own of 6."""
    groups = [
        Group(
            step=12,
            prompt=prompt,
            trajectories=tuple(
                Trajectory(
                    id=RequestId(12, prompt, member),
                    task="t",
                    policy_version=12,
                    reward=float(member),
                    stop_reason=StopReason.EOS,
                    earlier_segments=(Segment(**_sequence(50, 7)),) if (prompt, member) == (1, 1) else (),
                    **_sequence(2 * prompt + member, 9),
                )
                for member in range(2)
            ),
        )
        for prompt in range(3)
    ]
    return build_step_batch(groups, normalisation="trajectory_mean")


def _spoiled(batch: StepBatch, index: int, value: float) -> StepBatch:
    """The batch with one advantage of one trajectory replaced."""
    packed = batch.trajectories[index]
    advantages_T = packed.advantages_T.copy()
    advantages_T[np.flatnonzero(packed.trained_mask_T)[1]] = value
    packs = list(batch.trajectories)
    packs[index] = msgspec.structs.replace(packed, advantages_T=advantages_T)
    return msgspec.structs.replace(batch, trajectories=tuple(packs))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step_with_its_micro_batch_and_worst_sequences(
    model_dir: Path, tmp_path: Path, value: float
) -> None:
    learner = _learner(model_dir)
    good = write_step(tmp_path / "good", 11, _batch())
    learner.update(good, PLANS)
    before = {name: master.clone() for name, master in learner.trainer.masters().items()}
    step_dir = write_step(tmp_path / "bad", 12, _spoiled(_batch(), 4, value))
    message = (
        rf"^step 1, micro-batch 2 of 3 in {step_dir}: the loss is -?(nan|inf); it must be finite\."
        r" Worst sequences: s12-p2-m0 \((nan|-?inf)\), s12-p1-m\d \(\S+\), s12-p1-m\d \(\S+\)\. Nothing was updated\. "
    )
    with pytest.raises(NonFiniteLossError, match=message):
        learner.update(step_dir, PLANS)
    after = learner.trainer.masters()
    assert all(torch.equal(after[name], master) for name, master in before.items())
    assert learner.trainer.num_steps == 1
    learner.update(good, PLANS)


def test_the_worst_sequences_are_the_three_largest_in_size_and_what_is_not_finite_first() -> None:
    loss_N = torch.tensor([0.5, -3.0, math.nan, 2.0, -math.inf, 0.0])
    ids = [RequestId(0, prompt, 0) for prompt in range(6)]
    assert worst_sequences(ids, loss_N) == ("s0-p2-m0 (nan)", "s0-p4-m0 (-inf)", "s0-p1-m0 (-3)")
    assert worst_sequences(ids[:2], loss_N[:2]) == ("s0-p1-m0 (-3)", "s0-p0-m0 (0.5)")


def test_a_micro_batch_is_read_when_its_turn_comes_and_let_go_before_the_next(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[ScoringBatch]] = []

    def noting(*arguments: Any, **options: Any) -> ScoringBatch:
        gc.collect()
        assert [one for one in made if one() is not None] == [], "an earlier micro-batch is still held"
        batch = scoring_batch(*arguments, **options)
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(learner_module, "scoring_batch", noting)
    learner = _learner(model_dir)
    learner.update(write_step(tmp_path, 12, _batch()), PLANS)
    assert len(made) == len(PLANS), "each is made once"


def test_each_sequence_has_its_share_in_the_steps_loss() -> None:
    """Six trajectories of weight 1/6; the one in segments has 4 and 6 trained tokens: 4/60 and 6/60."""
    batch = _batch()
    weights = scoring_batch(batch.trajectories[3]).sequence_weights
    assert weights == pytest.approx((4 / 60, 6 / 60), rel=1e-6)
    packed = batch.trajectories[0]
    spoiled = np.where(packed.trained_mask_T, packed.token_weight_T, np.float32(np.nan))
    assert scoring_batch(msgspec.structs.replace(packed, token_weight_T=spoiled)).sequence_weights == pytest.approx(
        (1 / 6,), rel=1e-6
    )


@pytest.mark.parametrize("name", ["layers.1.ffn.experts.w2.weight", "layers.0.attn.wq_a.weight", "embed.weight"])
def test_a_trainer_that_leaves_one_tensor_out_of_its_format_is_caught(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = tiny_config()
    check_quantised([_learner(model_dir).quantised()], config, "native")
    check_quantised([_learner(model_dir, "fp32").quantised()], config, "fp32")
    pack = PublishedWeights.pack

    def leaving_one_out(self: PublishedWeights, tensor: str, master: torch.Tensor) -> PackedTensor:
        return PackedTensor(format="fp32", data=master, scale=None) if tensor == name else pack(self, tensor, master)

    monkeypatch.setattr(PublishedWeights, "pack", leaving_one_out)
    with pytest.raises(
        QuantisationError, match=r"^rank 0 takes \d+ tensors through (mxfp4|fp8|bf16), planned are \d+ \("
    ):
        check_quantised([_learner(model_dir).quantised()], config, "native")


def test_a_run_without_formats_is_caught_where_formats_are_planned(model_dir: Path) -> None:
    reports = [_learner(model_dir).quantised(), _learner(model_dir, "fp32").quantised()]
    with pytest.raises(QuantisationError, match="rank 1 takes 0 tensors through mxfp4"):
        check_quantised(reports, tiny_config(), "native")


def test_a_published_model_keeps_its_encoding(model_dir: Path, tmp_path: Path) -> None:
    """Without `encoding.json` whoever serves the weights would ask them in the later version's words."""
    april = tmp_path / "april"
    shutil.copytree(model_dir, april)
    (april / ENCODING_FILE).write_bytes(encoding_file(APRIL))
    for directory in (april, model_dir):
        root = tmp_path / f"published of {directory.name}"
        _learner(directory).publish(root, 1)
        assert find_encoding_version(version_directory(root, 1)) == find_encoding_version(directory)
