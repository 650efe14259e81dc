"""Proves: loss and gradients of a step through the real learner do not depend on the number of micro-batches or ranks,
on order, packing, or on what lies where nothing is trained.

Real are files, model with replayed routes and kept sets, GRPO loss, DeepSpeed's sum over ranks. The bar is 1e-5
relative, for the loss and for the gradient of every tensor that DeepSpeed hands to the optimizer. What the losses alone
promise is in tests/rl/test_loss_invariance.py.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.metrics import metric_values
from rollforward.model.train_config import AdamW
from rollforward.rl.batch import PackedBatch, StepBatch, build_step_batch, inert_like
from rollforward.rl.algorithms import GRPO
from rollforward.rl.learner import TOKENIZER_NAME, Learner, LearnerSettings
from rollforward.rl.packing import MicroBatchPlan, split_plans
from rollforward.rl.samples import write_step
from rollforward.rollout.types import Group, KeptSets, RequestId, Segment, StopReason, Trajectory
from tests.helpers.ranks import join_alone, run_on_ranks
from tests.helpers.tiny import random_params, random_tokens, tiny_config

TOLERANCE = 1e-5


def _sequence(seed: int, length: int) -> dict[str, Any]:
    """A prompt of 3 tokens and an answer; log-probs around those of a random model.

    Two of three have routes of their own, and tokens drawn from a cut vocabulary or, every third one, from the whole.
    """
    config = tiny_config()
    generator = np.random.default_rng(seed)
    mask = np.arange(length) >= 3
    token_ids = random_tokens(config, (length,), seed=seed).numpy().astype(np.int32)
    counts_T = np.zeros(length, np.int32)
    records: dict[str, Any] = {}
    if seed % 3 != 2:
        experts = generator.random((length, config.num_hidden_layers, config.n_routed_experts)).argsort(axis=-1)
        sets = [
            np.union1d(token, generator.integers(0, config.vocab_size, 200)).astype(np.int32)[: 1000 * is_cut]
            for token, is_cut in zip(token_ids, mask & (np.arange(length) % 3 != 0), strict=True)
        ]
        counts_T = np.array([one.size for one in sets], np.int32)
        records["routes_TLK"] = experts[:, :, : config.num_experts_per_tok].astype(np.int16)
        records["kept"] = KeptSets(counts_T=counts_T, token_ids=np.concatenate(sets))
    logprobs_T = -np.log(np.where(counts_T > 0, counts_T, config.vocab_size)) + 0.8 * generator.standard_normal(length)
    return {
        "token_ids_T": token_ids,
        "trained_mask_T": mask,
        "behavior_logprobs_T": np.where(mask, np.minimum(logprobs_T, 0), 0).astype(np.float32),
        **records,
    }


def _batch() -> StepBatch:
    """Four groups of two, ragged, long enough for every kind of layer; one trajectory has an earlier segment."""
    groups = []
    for prompt in range(4):
        members = [
            Trajectory(
                id=RequestId(0, prompt, member),
                task="t",
                policy_version=0,
                reward=[0.0, 1.0, 0.25, 1.0, 0.5, 0.0, 0.0, 1.0][2 * prompt + member],
                stop_reason=StopReason.EOS,
                earlier_segments=(Segment(**_sequence(77, 9)),) if (prompt, member) == (2, 1) else (),
                **_sequence(10 * prompt + member, 5 + 12 * prompt + 3 * member),
            )
            for member in range(2)
        ]
        groups.append(Group(step=0, prompt=prompt, trajectories=tuple(members)))
    return build_step_batch(groups, normalisation="trajectory_mean")


def _plans(*packs: Sequence[int]) -> tuple[MicroBatchPlan, ...]:
    return tuple(MicroBatchPlan(rows=tuple(pack)) for pack in packs)


WHOLE = _plans(range(8))
FOUR = _plans((0, 1), (2, 3), (4, 5), (6, 7))
THREE = _plans((0, 1, 2), (3, 4), (5, 6, 7))


def _model_dir(directory: Path) -> Path:
    config = tiny_config()
    write_checkpoint(
        directory, config, random_params(config), precision="fp32", extra_files={TOKENIZER_NAME: b"not read here"}
    )
    return directory


Step = tuple[float, dict[str, Tensor], dict[str, float]]


def _step(model_dir: Path, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> Step:
    """This rank's loss, the gradients that reach the optimizer, and metrics, of one step of a real learner.

    The masters are moved off the reference first, so that the KL has a gradient. DeepSpeed takes the mean over ranks of
    losses that the trainer has multiplied by their number: the gradient is the sum's.
    """
    settings = LearnerSettings(
        model_dir=str(model_dir),
        algorithm=GRPO(group_size=2, kl_beta=0.2, opsm_delta=0.1),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=0.9,
        threads=1,
    )
    learner = Learner(settings)
    trainer = learner._trainer
    trained = dict(trainer._masters.trained.items())
    generator = torch.Generator().manual_seed(5)
    for parameter in trained.values():
        parameter.data *= 1 + 0.05 * torch.randn(parameter.shape, generator=generator)
    engine_step, train_step = trainer._engine.step, trainer.train_step
    gradients: dict[str, Tensor] = {}
    losses: list[float] = []

    def note_gradients() -> None:
        for name, parameter in trained.items():
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None, name
            gradients[name] = gradient.clone()
        engine_step()

    def note_loss(*arguments: Any, **options: Any) -> Any:
        result = train_step(*arguments, **options)
        losses.append(result.loss)
        return result

    trainer._engine.step = note_gradients
    trainer.train_step = note_loss  # type: ignore[method-assign]
    metrics = learner.update(step_dir, plans)
    return losses[0], gradients, metric_values(metrics)


def _assert_same(actual: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=TOLERANCE)
    for name, gradient in expected[1].items():
        difference = (actual[1][name] - gradient).double().norm()
        assert difference <= TOLERANCE * gradient.double().norm(), (name, float(difference / gradient.double().norm()))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def step_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(tmp_path_factory.mktemp("samples"), 0, _batch())


@pytest.fixture(scope="module")
def whole(model_dir: Path, step_dir: Path) -> Step:
    """The step in one micro-batch on one rank."""
    join_alone(model_dir)
    step = _step(model_dir, step_dir, WHOLE)
    assert 0 < step[2]["actor/opsm_frac"] < 1, "the case must have masked and unmasked sequences"
    assert step[2]["actor/pg_clipfrac"] > 0
    assert step[2]["actor/kl_loss"] > 0
    assert [name for name, gradient in step[1].items() if not gradient.any()] == []
    return step


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(_plans((0, 1, 2, 3), (4, 5, 6, 7)), id="2-micro-batches"),
        pytest.param(FOUR, id="4-micro-batches"),
        pytest.param(_plans((7, 6, 5, 4, 3, 2, 1, 0)), id="order"),
        pytest.param(_plans((5,), (0, 7, 2), (6, 1), (4, 3)), id="packing"),
    ],
)
def test_micro_batches_order_and_packing_do_not_matter(
    model_dir: Path, step_dir: Path, whole: Step, plans: tuple[MicroBatchPlan, ...]
) -> None:
    _assert_same(_step(model_dir, step_dir, plans)[:2], whole[:2])


def _poisoned(packed: PackedBatch) -> PackedBatch:
    """NaN, infinities and foreign tokens wherever nothing is trained."""
    size = packed.token_ids_T.size
    bad_T = np.resize(np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), size)
    mask_T = packed.trained_mask_T
    names = ("behavior_logprobs_T", "advantages_T", "token_weight_T")
    floats = {name: np.where(mask_T, getattr(packed, name), bad_T) for name in names}
    return msgspec.structs.replace(packed, target_ids_T=np.where(mask_T, packed.target_ids_T, 2), **floats)


def test_garbage_where_nothing_is_trained_changes_no_bit(model_dir: Path, tmp_path: Path, whole: Step) -> None:
    batch = _batch()
    bad = msgspec.structs.replace(batch, trajectories=tuple(_poisoned(packed) for packed in batch.trajectories))
    loss, gradients, _ = _step(model_dir, write_step(tmp_path, 0, bad), WHOLE)
    assert loss == whole[0]
    assert all(torch.equal(gradients[name], gradient) for name, gradient in whole[1].items())


def test_padding_sequences_do_not_matter(model_dir: Path, tmp_path: Path, whole: Step) -> None:
    """Trajectories of other tokens between the others, with nothing trained and garbage everywhere."""
    batch = _batch()
    other = random.Random(0).sample(range(8), 8)
    padding = [
        (row, _poisoned(inert_like(msgspec.structs.replace(packed, token_ids_T=packed.token_ids_T[::-1].copy()))))
        for row, packed in zip(batch.rows, batch.trajectories, strict=True)
    ]
    rows = tuple(row for index in range(8) for row in (batch.rows[index], padding[other[index]][0]))
    packs = tuple(pack for index in range(8) for pack in (batch.trajectories[index], padding[other[index]][1]))
    untrained = tuple(
        row if index % 2 == 0 else msgspec.structs.replace(row, num_trained_tokens=0) for index, row in enumerate(rows)
    )
    padded = msgspec.structs.replace(batch, rows=untrained, trajectories=packs)
    step_dir = write_step(tmp_path, 0, padded)
    _assert_same(_step(model_dir, step_dir, _plans(range(16)))[:2], whole[:2])


def step_on_a_rank(rank: int, model_dir: str, step_dir: str, out_dir: str) -> None:
    """Take this rank's share of the same step, in three micro-batches: the second rank runs an inert one."""
    share = split_plans(THREE, 2)[rank]
    assert [plan.is_inert for plan in share] == [False, rank == 1]
    loss, gradients, _ = _step(Path(model_dir), Path(step_dir), share)
    torch.save((loss, gradients), Path(out_dir) / f"rank{rank}.pt")


def test_ranks_do_not_matter(model_dir: Path, step_dir: Path, tmp_path: Path, whole: Step) -> None:
    run_on_ranks(step_on_a_rank, 2, tmp_path, str(model_dir), str(step_dir), str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for _, gradients in ranks:
        _assert_same((ranks[0][0] + ranks[1][0], gradients), whole[:2])
