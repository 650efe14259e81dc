"""The learner of distillation: teachers score the student's trajectories, then the student takes a step towards them.

    score   for each teacher, one after another: all ranks forward their share of its micro-batches through its trunk
            --> hidden vectors, in the cache
    update  each rank its micro-batches, those of one teacher together: the student's forward --> hidden_RD
            --> loss with the cached vectors and the one head --> backward --> optimizer step
    canary  the published student as its own teacher, the same way: divergence and gradient must be exactly 0

Here: the machine that an actor wraps, one rank. Not here: Ray (actors.py), who teaches what (schedule.py), the files
(hidden_cache.py), teachers in memory (teachers.py), losses (losses.py).

Letters: T packed tokens, R trained rows of a micro-batch, N its trajectories, V vocabulary, D width of the student, E
of the teacher.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollforward.distill.config import DistillLoss
from rollforward.distill.errors import HiddenCacheError
from rollforward.distill.hidden_cache import HiddenCache
from rollforward.distill.hidden_shard import CachedShard, ShardKey, shard_key
from rollforward.distill.losses import DistillInputs, distill_loss
from rollforward.distill.schedule import TeacherPlan
from rollforward.distill.teacher_files import fetch, naming
from rollforward.distill.teacher_source import TeacherSource, local_teacher
from rollforward.distill.teachers import HeadShelf, TeacherScorer, TeacherShelf
from rollforward.kernels.config import KernelBackends
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.reverse_kl import reverse_kl
from rollforward.kernels.loss.sweep import CHUNK_TOKENS
from rollforward.model.backends import check_programs
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.collectives import RankGroups
from rollforward.model.config import ModelConfig
from rollforward.model.gradient_tree import subtree_bounds
from rollforward.model.metrics import Metric, Reduction, merge_metrics
from rollforward.model.scoring import ScoringBatch, hidden_logprobs, scored_rows
from rollforward.model.train_config import Precision
from rollforward.model.trainer import LossPart
from rollforward.rl.batch import PackedBatch
from rollforward.rl.learner import (
    MicroBatches,
    PolicySettings,
    TrainedPolicy,
    start_masters,
    step_metrics,
    worst_sequences,
)
from rollforward.rl.losses.base import loss_inputs, shared_metrics, without_garbage
from rollforward.rl.samples import SpokenTokens, open_step
from rollforward.rollout.types import RequestId
from rollforward.rollout.weights import canary_ids

CANARY_NAME = "canary"
"""Begins the name of a rank's folder for the student's own vectors, which is gone when it has compared them."""

_SELF = "student"


class DistillSettings(PolicySettings, frozen=True, kw_only=True):
    """What a learner needs to know of a run of distillation."""

    loss: DistillLoss
    """What is made small."""
    keep_routing: bool
    """Visit the recorded experts again."""
    teachers: dict[str, TeacherSource]
    """By name, as they lie on the node of the run's own process."""
    teacher_configs: dict[str, ModelConfig]
    """Hyper-parameters of each."""
    teacher_urls: dict[str, str]
    """Where each comes from."""
    teacher_cache_dir: str
    """Where one with a URL is kept on every node."""
    hidden_root: str
    """Folder of the hidden vectors, which all ranks see."""
    max_hidden_bytes: int
    """That it may hold."""


def check_distill(settings: DistillSettings, name: str) -> None:
    """Refuse tile forms whose programs for student or teachers are not compiled on the machine of a rank.

    Args:
        settings: of the run. name: the rank's, for an error.

    Raises:
        BackendError: see ``check_programs``.
    """
    student = load_checkpoint_config(Path(settings.model_dir), is_announced=False)
    check_students(settings.kernels, student, settings.teacher_configs, f"the model of {name}")
    for teacher, config in settings.teacher_configs.items():
        check_programs(settings.kernels, config, f"teacher {teacher} of {name}")


def check_students(
    kernels: KernelBackends, student: ModelConfig, teachers: Mapping[str, ModelConfig], what: str
) -> None:
    """Refuse tile forms without programs here for a student, which ``what`` names: beside teachers, and as its own
    teacher, which the canary makes it.

    Raises:
        BackendError: see ``check_programs``; names the teacher.
    """
    for name, config in teachers.items():
        check_programs(kernels, student, f"{what} beside teacher {name}", teachers=[config])
    check_programs(kernels, student, what, teachers=[student])


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """How far the published student is from itself as its own teacher; every number must be exactly 0."""

    kl_max: float
    """Largest reverse KL of a position, nats."""
    gradient_max: float
    """Largest absolute entry of the gradients of hidden vectors and head."""
    num_rows: int
    """Positions compared."""


class DistillLearner(TrainedPolicy):
    """One rank of the learner of distillation. Needs an initialised process group; every method is collective."""

    def __init__(self, settings: DistillSettings) -> None:
        """Read the student's checkpoint, build the trainer, and prove that the teachers on this node are those of the
        run; they are loaded when their turn comes.

        Raises:
            TeacherError, TeacherReadError: a teacher is not; names it.
        """
        super().__init__(settings, start_masters(settings))
        self._settings = settings
        self._groups = RankGroups(torch.distributed.get_world_size())
        cache_dir = Path(settings.teacher_cache_dir)
        sources: dict[str, TeacherSource] = {}
        for name, source in settings.teachers.items():
            with naming(f"teachers.{name}"):
                directory = fetch(settings.teacher_urls[name], cache_dir)
            sources[name] = local_teacher(source, directory, cache_dir)
        self._trunks = TeacherShelf(sources, self._groups, precision=settings.precision)
        self._heads = HeadShelf(sources, precision=settings.precision)
        self._scorer = TeacherScorer(self._trunks, self._heads, precision=settings.precision)
        self._cache = HiddenCache(Path(settings.hidden_root), max_bytes=settings.max_hidden_bytes)

    def canary(self, weights_dir: Path) -> Canary:
        """Compare the student with itself through the path that teachers take: trunk sharded over ranks, file, head.

        Args:
            weights_dir: the version that was published last.

        Raises:
            TeacherReadError, HiddenCacheError: the path itself fails.
        """
        batch = _canary_batch(canary_ids(self.model_config))
        source = TeacherSource(name=_SELF, directory=weights_dir, version="canary", width=self.model_config.hidden_size)
        sources, precision = {_SELF: source}, self._settings.precision
        trunks = TeacherShelf(sources, self._groups, precision=precision)
        heads = HeadShelf(sources, precision=precision)
        root = Path(self._settings.hidden_root) / f"{CANARY_NAME}-{self._groups.rank}"
        cache = HiddenCache(root, max_bytes=self._settings.max_hidden_bytes)
        try:
            key = ShardKey(
                teacher=_SELF,
                teacher_version=source.version,
                policy_version=0,
                precision=precision,
                trajectories=(RequestId(0, 0, 0),),
                tokens_checksum=0,
                num_rows=int(batch.scored_mask_T.sum()),
                width=source.width,
            )
            for scored in TeacherScorer(trunks, heads, precision=precision).score(_SELF, None, [batch]):
                assert scored is not None, "the batch is not empty"
                cache.write(0, 0, key, *scored)
            shard = cache.read(0, 0, key)
            hidden_RD, head_VD = (one.detach().requires_grad_() for one in self.trainer.head_inputs(batch))
            weight_R = torch.ones(hidden_RD.shape[0])
            loss, kl_R = reverse_kl(hidden_RD, head_VD, shard.hidden_RE, heads.use(_SELF, None), weight_R)
            gradients = torch.autograd.grad(loss, (hidden_RD, head_VD))
            # Torch's max, which keeps what is not a number.
            gradient_max = torch.stack([gradient.abs().max() for gradient in gradients]).max()
            return Canary(kl_max=float(kl_R.max()), gradient_max=float(gradient_max), num_rows=hidden_RD.shape[0])
        finally:
            trunks.close()
            heads.close()
            shutil.rmtree(root, ignore_errors=True)

    def score(
        self, step: int, step_dir: Path, plans: Sequence[TeacherPlan], missing: Sequence[int]
    ) -> tuple[Metric, ...]:
        """Have the teachers score micro-batches, this rank its share, and write what they say into the cache.

        Args:
            step: of the run. step_dir: its samples.
            plans: of the whole step, those of one teacher together.
            missing: positions of the plans that are to be scored, ascending; the same on every rank.

        Raises:
            TeacherReadError, HiddenCacheError, SampleFileError: what was finished before is kept.
        """
        samples, rank, num_ranks = open_step(step_dir), self._groups.rank, self._groups.num_ranks
        teachers = list(dict.fromkeys(plans[index].teacher for index in missing))
        num_bytes, num_rows, loads = 0, 0, self._trunks.loads
        for teacher, then in zip(teachers, [*teachers[1:], None], strict=True):
            indices = [index for index in missing if plans[index].teacher == teacher]
            # Ranks gather a teacher's layers together, so each takes part in as many passes as the busiest.
            mine = indices[rank::num_ranks]
            padding = -(-len(indices) // num_ranks) - len(mine)
            micro_batches = MicroBatches(samples, [plans[index].micro_batch for index in mine], keep_routing=False)
            scores = self._scorer.score(teacher, then, _Padded(micro_batches, padding))
            for position, scored in enumerate(scores):
                if scored is None:
                    continue
                packed, _ = micro_batches.read(position)
                key = self._key(packed, teacher, step)
                num_bytes += self._cache.write(step, mine[position], key, *scored)
                num_rows += key.num_rows
        self._trunks.clear()
        self._heads.clear()
        return (
            _total("opd/teacher_loads", self._trunks.loads - loads, reduction="max"),
            _total("opd/scored_tokens", num_rows),
            _total("opd/cache_written_bytes", num_bytes),
        )

    def update(self, step: int, step_dir: Path, plans: Sequence[TeacherPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step on this rank's micro-batches of a step.

        Args:
            step: of the run. step_dir: its samples.
            plans: of the whole step; a rank takes those below its node of the gradients' tree.

        Returns:
            Loss metrics, merged over this rank's micro-batches, and what the trainer measured of the step.

        Raises:
            NonFiniteLossError, HiddenCacheError, SampleFileError: before the optimizer step.
        """
        start, stop = subtree_bounds(len(plans), self._groups.num_ranks)[self._groups.rank]
        mine = plans[start:stop]
        micro_batches = MicroBatches(
            open_step(step_dir), [plan.micro_batch for plan in mine], keep_routing=self._settings.keep_routing
        )
        metrics: list[Metric] = []
        loads = self._heads.loads

        def loss_of(index: int, hidden_RD: Tensor, head_VD: Tensor) -> LossPart:
            packed, batch = micro_batches.read(index)
            shard = self._cache.read(step, start + index, self._key(packed, mine[index].teacher, step))
            teacher_head_VE = self._heads.use(mine[index].teacher, _next_teacher(mine, index))
            rows_R = scored_rows(batch)
            _check_alignment(shard, teacher_head_VE, batch.target_ids_T[rows_R])
            self._note_parity(packed, batch, hidden_RD, head_VD, metrics)
            trajectory_R = torch.tensor(packed.trajectory_T, dtype=torch.int64)[rows_R]
            weight_R = torch.tensor(packed.token_weight_T)[rows_R] * torch.tensor(mine[index].weights)[trajectory_R]
            output = distill_loss(
                self._settings.loss,
                DistillInputs(
                    teacher=mine[index].teacher,
                    hidden_RD=hidden_RD,
                    head_VD=head_VD,
                    teacher_hidden_RE=shard.hidden_RE,
                    teacher_head_VE=teacher_head_VE,
                    teacher_logprobs_R=shard.teacher_logprobs_R,
                    token_ids_R=batch.target_ids_T[rows_R],
                    row_weight_R=weight_R,
                    trajectory_R=trajectory_R,
                    num_trajectories=len(packed.ids),
                ),
            )
            metrics.extend(output.metrics)
            name = f"micro-batch {start + index + 1} of {len(plans)}, teacher {mine[index].teacher}, in {step_dir}"
            return LossPart(loss=output.loss, name=name, worst=worst_sequences(packed.ids, output.trajectory_loss_N))

        result = self.trainer.hidden_step(micro_batches, loss_of, num_leaves=len(plans))
        metrics.append(_total("opd/head_loads", self._heads.loads - loads))
        metrics.append(_total("opd/heads_held_max", self._heads.held_max, reduction="max"))
        metrics.append(_total("opd/teachers_held_max", self._trunks.held_max, reduction="max"))
        self._heads.clear()
        return (*merge_metrics(metrics), *step_metrics(result))

    def _key(self, packed: PackedBatch, teacher: str, step: int) -> ShardKey:
        return teacher_key(packed, self._settings.teachers[teacher], step=step, precision=self._settings.precision)

    def _note_parity(
        self, packed: PackedBatch, batch: ScoringBatch, hidden_RD: Tensor, head_VD: Tensor, metrics: list[Metric]
    ) -> None:
        """Compare this forward's log-probs of the sampled tokens with those that the engine logged."""
        logprob_R, entropy_R = hidden_logprobs(
            head_VD.detach(),
            hidden_RD.detach(),
            batch,
            temperature=self._settings.temperature,
            chunk_tokens=CHUNK_TOKENS,
        )
        zeros_T, rows_R = torch.zeros(batch.token_ids_T.shape), scored_rows(batch)
        inputs = loss_inputs(
            packed,
            policy_logprobs_T=zeros_T.index_copy(0, rows_R, logprob_R),
            entropy_T=zeros_T.index_copy(0, rows_R, entropy_R),
        )
        metrics.extend(shared_metrics(without_garbage(inputs)))


def teacher_key(
    packed: PackedBatch | SpokenTokens, source: TeacherSource, *, step: int, precision: Precision
) -> ShardKey:
    """Return the identity of what a teacher says of a micro-batch of a step, which the policy after ``step`` steps
    sampled."""
    return shard_key(
        packed,
        teacher=source.name,
        teacher_version=source.version,
        policy_version=step,
        precision=precision,
        width=source.width,
    )


class _Padded(Sequence[ScoringBatch | None]):
    """Micro-batches, and as many empty passes behind them."""

    def __init__(self, micro_batches: MicroBatches, padding: int) -> None:
        self._micro_batches, self._padding = micro_batches, padding

    def __len__(self) -> int:
        return len(self._micro_batches) + self._padding

    def __getitem__(self, index: int) -> ScoringBatch | None:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._micro_batches[index] if index < len(self._micro_batches) else None


def _next_teacher(plans: Sequence[TeacherPlan], index: int) -> str | None:
    """The teacher that a rank needs after that of plan ``index``, if there is another."""
    return next((plan.teacher for plan in plans[index:] if plan.teacher != plans[index].teacher), None)


def _check_alignment(shard: CachedShard, teacher_head_VE: Tensor, token_ids_R: Tensor) -> None:
    """Make sure, at the first, the middle and the last row, that vectors, head and tokens belong together: the head
    must give the very log-prob that the teacher gave when it scored.

    Raises:
        HiddenCacheError: it does not.
    """
    rows = torch.tensor(sorted({0, len(token_ids_R) // 2, len(token_ids_R) - 1}))
    logprobs, _ = linear_logprob(shard.hidden_RE[rows].float(), teacher_head_VE, token_ids_R[rows], temperature=1.0)
    wrong = (logprobs != shard.teacher_logprobs_R[rows]).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise HiddenCacheError(
            f"teacher {shard.key.teacher}: its head gives the token of row {int(rows[row])} a log-prob of"
            f" {float(logprobs[row])!r}; when it scored it gave {float(shard.teacher_logprobs_R[rows[row]])!r}."
            " Vectors, head and tokens do not belong together: was the teacher's directory replaced during the run? Put"
            " it back and resume"
        )


def _canary_batch(token_ids: Sequence[int]) -> ScoringBatch:
    """A whole sequence and one with a single scored row, end to end."""
    short = list(token_ids[:2])
    ids_T = torch.tensor([*token_ids, *short])
    mask_T = torch.ones(len(ids_T), dtype=torch.bool)
    mask_T[[len(token_ids) - 1, -1]] = False
    return ScoringBatch(
        token_ids_T=ids_T,
        sequence_lengths=(len(token_ids), len(short)),
        target_ids_T=ids_T.roll(-1),
        scored_mask_T=mask_T,
    )


def _total(name: str, value: int, *, reduction: Reduction = "sum") -> Metric:
    return Metric(name=name, numerator=value, denominator=1, per="step", reduction=reduction)
