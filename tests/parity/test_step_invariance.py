"""Proves: loss and gradients of a step through the real learner do not depend on the number of micro-batches or ranks,
on order, packing, segments, or on what lies where nothing is trained.

Real are files, model with replayed routes and kept sets, GRPO loss, the sums over micro-batches and ranks. The bar is
1e-5 relative, for the loss and for the gradient of every tensor as the optimizer gets it; over ranks it is every bit.
What the losses alone promise is in tests/rl/test_loss_invariance.py, what the trainer alone does in test_ranks.py.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.gradient_tree import subtree_bounds
from rollforward.model.metrics import Metric, merge_metrics, metric_values
from rollforward.model.optim_hybrid import StepGradients
from rollforward.model.train_config import AdamW, BalanceConfig, HybridMuon
from rollforward.model.transformer import Model
from rollforward.rl.algorithms import GRPO
from rollforward.rl.batch import PackedBatch, StepBatch, build_step_batch, concatenate
from rollforward.rl.learner import TOKENIZER_NAME, Learner, LearnerSettings
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rl.samples import StepSamples, write_step
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


EARLIER = (Segment(**_sequence(77, 9)), Segment(**_sequence(78, 6)))
SEGMENTED = 5
"""Position in the batch of the trajectory in segments."""


def _batch() -> StepBatch:
    """Four groups of two, ragged, long enough for every kind of layer; one trajectory has three segments, of which the
    first has no records."""
    groups = []
    for prompt in range(4):
        members = [
            Trajectory(
                id=RequestId(0, prompt, member),
                task="t",
                policy_version=0,
                reward=[0.0, 1.0, 0.25, 1.0, 0.5, 0.0, 0.0, 1.0][2 * prompt + member],
                stop_reason=StopReason.EOS,
                earlier_segments=EARLIER if (prompt, member) == (2, 1) else (),
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


ALGORITHM = GRPO(group_size=2, kl_beta=0.2, opsm_delta=0.1)
Step = tuple[float, dict[str, Tensor], tuple[Metric, ...]]


def _learner(model_dir: Path, **changes: Any) -> Learner:
    """A learner whose reference is another model than its policy, so that the KL has a gradient."""
    values: dict[str, Any] = {
        "algorithm": ALGORITHM,
        "optim": AdamW(lr=1e-3),
        "precision": "native",
        "temperature": 0.9,
        "threads": 1,
        "kernels": KernelBackends(),
    }
    learner = Learner(LearnerSettings(model_dir=str(model_dir), **(values | changes)))
    generator = torch.Generator().manual_seed(5)
    named = random_params(tiny_config())
    for tensor in named.values():
        if tensor.is_floating_point():
            tensor *= 1 + 0.05 * torch.randn(tensor.shape, generator=generator)
    learner._reference = Model(tiny_config(), named, precision="native")
    return learner


def _step(model_dir: Path, step_dir: Path, plans: Sequence[MicroBatchPlan], **changes: Any) -> Step:
    """A fresh learner's first step: this rank's loss, the gradients that reach AdamW before they are clipped, and
    metrics."""
    learner = _learner(model_dir, **changes)
    trainer = learner.trainer
    optimizer = trainer._optimizer
    begin, train_step = optimizer.begin, trainer.train_step
    gradients: dict[str, Tensor] = {}
    losses: list[float] = []

    def note_gradients(step: int, num_leaves: int) -> StepGradients:
        sums = begin(step, num_leaves)
        reduce = sums.reduce

        def noted() -> Any:
            reduced = reduce()
            gradients.update({name: part.clone() for name, part in optimizer._split_adamw(reduced[0]).items()})
            return reduced

        sums.reduce = noted  # type: ignore[method-assign]
        return sums

    def note_loss(*arguments: Any, **options: Any) -> Any:
        result = train_step(*arguments, **options)
        losses.append(result.loss)
        return result

    optimizer.begin = note_gradients  # type: ignore[method-assign]
    trainer.train_step = note_loss  # type: ignore[method-assign]
    metrics = learner.update(step_dir, plans)
    return losses[0], gradients, metrics


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
    values = metric_values(step[2])
    assert 0 < values["actor/opsm_frac"] < 1, "the case must have masked and unmasked sequences"
    assert values["actor/pg_clipfrac"] > 0
    assert values["actor/kl_loss"] > 0
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


def test_nor_do_they_where_a_balance_loss_is_added(model_dir: Path, step_dir: Path, whole: Step) -> None:
    """Each sequence's balance loss counts by its share in the step's loss, whatever pack it is in."""
    options = {"algorithm": msgspec.structs.replace(ALGORITHM, keep_routing=False), "recompute": True}
    balance = BalanceConfig(loss_weight=0.5)
    one = _step(model_dir, step_dir, WHOLE, balance=balance, **options)
    _assert_same(_step(model_dir, step_dir, _plans((5,), (0, 7, 2), (6, 1), (4, 3)), balance=balance, **options), one)
    router = "layers.1.ffn.gate.weight"
    without = _step(model_dir, step_dir, WHOLE, **options)
    assert (one[1][router] - without[1][router]).norm() > 1e-3 * without[1][router].norm()


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
        (row, _poisoned(_untrained(msgspec.structs.replace(packed, token_ids_T=packed.token_ids_T[::-1].copy()))))
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


def _untrained(packed: PackedBatch) -> PackedBatch:
    return msgspec.structs.replace(
        packed,
        trained_mask_T=np.zeros_like(packed.trained_mask_T),
        trajectory_tokens_N=np.zeros_like(packed.trajectory_tokens_N),
    )


def _alone(packed: PackedBatch) -> list[PackedBatch]:
    """Each segment of one trajectory as a batch of its own, with the weights and advantages that it has."""
    assert packed.kept_counts_T is not None
    assert packed.kept_ids is not None
    parts: list[PackedBatch] = []
    ends_B = np.cumsum(packed.sequence_lengths_B)
    kept_ends_T = np.concatenate(([0], np.cumsum(packed.kept_counts_T)))
    for start, end in zip(ends_B - packed.sequence_lengths_B, ends_B, strict=True):
        names = [name for name in PackedBatch.__struct_fields__ if name.endswith(("_T", "_TLK"))]
        parts.append(
            msgspec.structs.replace(
                packed,
                **{name: getattr(packed, name)[start:end] for name in names},
                kept_ids=packed.kept_ids[kept_ends_T[start] : kept_ends_T[end]],
                sequence_lengths_B=np.array([end - start], np.int32),
                trajectory_tokens_N=np.array([packed.trained_mask_T[start:end].sum()], np.int32),
            )
        )
    return parts


def _rewritten(batch: StepBatch, parts: Sequence[PackedBatch]) -> StepBatch:
    """The batch with other packs in the place of the trajectory in segments."""
    rows = [
        msgspec.structs.replace(
            batch.rows[SEGMENTED],
            segment_lengths=tuple(part.sequence_lengths_B.tolist()),
            num_trained_tokens=int(part.trained_mask_T.sum()),
        )
        for part in parts
    ]
    return msgspec.structs.replace(
        batch,
        rows=(*batch.rows[:SEGMENTED], *rows, *batch.rows[SEGMENTED + 1 :]),
        trajectories=(*batch.trajectories[:SEGMENTED], *parts, *batch.trajectories[SEGMENTED + 1 :]),
    )


def test_a_trajectory_in_segments_weighs_one_and_is_the_sum_of_its_segments(model_dir: Path, tmp_path: Path) -> None:
    """Without a decision per sequence, segments give the same as trajectories of their own with the same weights, in
    any order of theirs; all together they have the weight of one of the eight trajectories."""
    batch = _batch()
    packed = batch.trajectories[SEGMENTED]
    assert batch.rows[SEGMENTED].segment_lengths == (9, 6, 32)
    weights = [float(part.token_weight_T.astype(np.float64).sum()) for part in batch.trajectories]
    assert weights == pytest.approx([1 / 8] * 8, rel=1e-6)
    options = {"algorithm": msgspec.structs.replace(ALGORITHM, opsm_delta=None)}
    expected = _step(model_dir, write_step(tmp_path / "one", 0, batch), WHOLE, **options)
    parts = _alone(packed)
    apart = write_step(tmp_path / "apart", 0, _rewritten(batch, parts))
    _assert_same(_step(model_dir, apart, _plans((0, 6, 1), (2, 3, 5, 9), (4, 7, 8)), **options), expected)
    joined = concatenate([parts[2], parts[0], parts[1]])
    turned = msgspec.structs.replace(
        joined,
        ids=packed.ids,
        trajectory_T=np.zeros_like(joined.trajectory_T),
        trajectory_tokens_N=packed.trajectory_tokens_N,
    )
    step_dir = write_step(tmp_path / "turned", 0, _rewritten(batch, [turned]))
    _assert_same(_step(model_dir, step_dir, WHOLE, **options), expected)


MUON = HybridMuon(lr=1e-3)


def _digests(model_dir: Path, step_dir: Path, root: Path) -> dict[str, str]:
    """Hashes of what a learner with rounded expert gradients publishes after the step."""
    learner = _learner(model_dir, optim=MUON, seed=11)
    learner.update(step_dir, THREE)
    return learner.publish(root, 1).tensors


def step_on_a_rank(rank: int, num_ranks: int, model_dir: str, step_dir: str, out_dir: str) -> None:
    """Take this rank's share of the step in three micro-batches, reading no other's."""
    read: list[tuple[int, ...]] = []
    micro_batch = StepSamples.micro_batch

    def noting(self: StepSamples, plan: MicroBatchPlan) -> PackedBatch:
        read.append(plan.rows)
        return micro_batch(self, plan)

    StepSamples.micro_batch = noting  # type: ignore[method-assign]
    loss, gradients, metrics = _step(Path(model_dir), Path(step_dir), THREE)
    start, stop = subtree_bounds(3, num_ranks)[rank]
    assert read == [plan.rows for plan in THREE[start:stop]]
    torch.save((loss, gradients), Path(out_dir) / f"rank{rank}.pt")
    (Path(out_dir) / f"rank{rank}.json").write_bytes(msgspec.json.encode(metrics))
    digests = _digests(Path(model_dir), Path(step_dir), Path(out_dir) / f"weights{rank}")
    (Path(out_dir) / f"digests{rank}.json").write_text(json.dumps(digests))


def test_ranks_change_no_bit_and_one_without_a_micro_batch_takes_part(
    model_dir: Path, step_dir: Path, tmp_path: Path, whole: Step
) -> None:
    num_ranks = 4
    alone = _step(model_dir, step_dir, THREE)
    _assert_same(alone[:2], whole[:2])
    digests = _digests(model_dir, step_dir, tmp_path / "alone")
    run_on_ranks(step_on_a_rank, num_ranks, tmp_path, num_ranks, str(model_dir), str(step_dir), str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]
    assert sum(loss for loss, _ in ranks) == pytest.approx(alone[0], rel=1e-6)
    assert ranks[-1][0] == 0.0, "three micro-batches"
    for rank, (_, gradients) in enumerate(ranks):
        assert all(torch.equal(gradients[name], gradient) for name, gradient in alone[1].items())
        assert json.loads((tmp_path / f"digests{rank}.json").read_text()) == digests
    reports = [
        msgspec.json.decode((tmp_path / f"rank{rank}.json").read_bytes(), type=tuple[Metric, ...])
        for rank in range(num_ranks)
    ]
    merged = metric_values(merge_metrics(metric for report in reports for metric in report))
    assert merged == pytest.approx(metric_values(alone[2]), rel=1e-12)
