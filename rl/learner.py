"""The learner: a trainer, an algorithm's loss, and the frozen reference that its KL compares with.

Here: the machine that an actor wraps, one rank. Not here: Ray (actors.py), the optimizer (model/trainer.py), losses
(losses/), batches (batch.py).
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.config import KernelBackends
from rollforward.model.backends import check_programs
from rollforward.model.checkpoint import read_checkpoint
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.encoding_version import encoding_files
from rollforward.model.gradient_tree import subtree_bounds
from rollforward.model.metrics import Metric, merge_metrics
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.train_config import BalanceConfig, OptimConfig, Precision
from rollforward.model.trainer import LossPart, StepResult, Trainer
from rollforward.model.transformer import Model
from rollforward.rl.algorithms import Algorithm
from rollforward.rl.batch import PackedBatch
from rollforward.rl.conversations import PackedConversations
from rollforward.rl.errors import ModelDirectoryError
from rollforward.rl.losses.base import loss_inputs
from rollforward.rl.losses.registry import policy_loss
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rl.samples import StepSamples, open_step
from rollforward.rollout.weights import (
    Canary,
    WeightsManifest,
    canary_ids,
    canonical_source,
    logprob_bits,
    publish_weights,
)

_NUM_WORST = 3
TOKENIZER_NAME = "tokenizer.json"
"""Travels with every published version, so that each is a complete model directory."""


def publish_trained(
    root: Path, policy_version: int, trainer: Trainer, extra_files: Mapping[str, bytes]
) -> WeightsManifest:
    """Publish what a trainer's next forward reads, with what that forward makes of the fixed prompt; see
    ``publish_weights``. Of one rank.

    Raises:
        TrainerError: a value is not what its bytes say; nothing was published.
    """
    token_ids = canary_ids(trainer.config)
    return publish_weights(
        root,
        policy_version,
        trainer.config,
        canonical_source(trainer.config, trainer.formats, trainer.proven_values()),
        extra_files=extra_files,
        canary=Canary(token_ids=token_ids, logprobs=logprob_bits(trainer.logprobs(token_ids))),
    )


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to know to train a policy, whatever the loss."""

    model_dir: str
    """Checkpoint to start from; in RL also the reference of the KL."""
    optim: OptimConfig
    """Optimizer."""
    precision: Precision
    """Number formats of the forward."""
    temperature: float
    """Divides the logits, as when sampling."""
    threads: int
    """CPU threads of this process."""
    kernels: KernelBackends
    """Forms of ops, which the rank's process takes at its start."""
    balance: BalanceConfig = BalanceConfig()
    """Balancing of experts."""
    recompute: bool = False
    """Compute each layer again for the backward pass instead of keeping what it made."""
    seed: int = 0
    """Seed of the run; keys stochastic rounding."""


class LearnerSettings(PolicySettings, frozen=True, kw_only=True):
    """What a learner needs to know of a run of reinforcement learning."""

    algorithm: Algorithm
    """Loss and its constants."""


def check_model_dir(model_dir: str, name: str) -> None:
    """Refuse a model directory that the machine of a rank does not see.

    Args:
        model_dir: of the run. name: the rank's, for an error.

    Raises:
        ModelDirectoryError: names the machine.
    """
    needed = Path(model_dir) / TOKENIZER_NAME
    if not needed.is_file():
        raise ModelDirectoryError(
            f"{name} finds no {needed} on {socket.gethostname()}; every node must see all of model_dir. Put it into a"
            " file system that they share, or to the same place on each"
        )


def check_policy(settings: PolicySettings, name: str) -> None:
    """Refuse tile forms whose programs for the policy are not compiled on the machine of a rank.

    Args:
        settings: of the run. name: the rank's, for an error.

    Raises:
        BackendError: see ``check_programs``.
    """
    config = load_checkpoint_config(Path(settings.model_dir), is_announced=False)
    check_programs(settings.kernels, config, f"the model of {name}")


def start_masters(settings: PolicySettings) -> dict[str, Tensor]:
    """Return the masters of the checkpoint that a run starts from, by canonical name."""
    model_dir = Path(settings.model_dir)
    return read_checkpoint(model_dir, load_checkpoint_config(model_dir, is_announced=False))


class TrainedPolicy:
    """The policy of one rank that is trained, published and saved. Needs an initialised process group."""

    def __init__(self, settings: PolicySettings, named: Mapping[str, Tensor]) -> None:
        """Build the trainer.

        Args:
            settings: of the run. named: the masters to start from, of ``start_masters``; copied.
        """
        torch.set_num_threads(settings.threads)
        model_dir = Path(settings.model_dir)
        self.model_config = load_checkpoint_config(model_dir, is_announced=False)
        self._files = {TOKENIZER_NAME: (model_dir / TOKENIZER_NAME).read_bytes(), **encoding_files(model_dir)}
        self.trainer = Trainer(
            self.model_config,
            named,
            precision=settings.precision,
            optim=settings.optim,
            balance=settings.balance,
            recompute=settings.recompute,
            seed=settings.seed,
        )

    def quantised(self) -> dict[str, int]:
        """Return how many official tensors this rank's forward takes through each published format."""
        return dict(self.trainer.quantised)

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """Write the weights of the next forward as a version; see ``publish_trained``."""
        return publish_trained(root, policy_version, self.trainer, self._files)

    def save(self, directory: Path) -> None:
        """Write masters and optimizer state into an existing directory."""
        self.trainer.save(directory)

    def load(self, directory: Path) -> None:
        """Take masters and optimizer state from a checkpoint's directory."""
        self.trainer.load(directory)


class Learner(TrainedPolicy):
    """One rank of the learner of reinforcement learning.

    The reference is the model that the run started from, in its published values, and never changes.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        """Read the checkpoint and build trainer and reference."""
        named = start_masters(settings)
        super().__init__(settings, named)
        self._settings = settings
        # Without a KL term the reference would cost a forward pass and change nothing.
        self._reference: Model | None = None
        if settings.algorithm.kl_beta > 0:
            self._reference = Model(self.model_config, named, precision=settings.precision)

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step on this rank's micro-batches of a step. Collective: every rank gets the same call.

        Args:
            step_dir: the step's samples, from ``rl.samples.write_step``; mapped into memory, and only this rank's
                trajectories are read, one micro-batch at a time.
            plans: of the whole step, from ``rl.packing``; a rank takes those below its node of the gradients' tree, at
                times none. Token weights are of the whole step too.

        Returns:
            Loss metrics, merged over this rank's micro-batches, and what the trainer measured of the step.

        Raises:
            NonFiniteLossError, SampleFileError: before the optimizer step.
        """
        start, stop = subtree_bounds(len(plans), torch.distributed.get_world_size())[torch.distributed.get_rank()]
        algorithm = self._settings.algorithm
        micro_batches = MicroBatches(open_step(step_dir), plans[start:stop], keep_routing=algorithm.keep_routing)
        metrics: list[Metric] = []

        def loss_of(index: int, policy_logprobs_T: Tensor, entropy_T: Tensor) -> LossPart:
            packed, batch = micro_batches.read(index)
            inputs = loss_inputs(
                packed,
                policy_logprobs_T=policy_logprobs_T,
                reference_logprobs_T=self._reference_logprobs(batch),
                entropy_T=entropy_T.detach(),
            )
            output = policy_loss(algorithm, inputs)
            metrics.extend(output.metrics)
            name = f"micro-batch {start + index + 1} of {len(plans)} in {step_dir}"
            return LossPart(loss=output.loss, name=name, worst=worst_sequences(packed.ids, output.trajectory_loss_N))

        result = self.trainer.train_step(
            micro_batches, loss_of, num_leaves=len(plans), temperature=self._settings.temperature
        )
        return (*merge_metrics(metrics), *step_metrics(result))

    @torch.no_grad()
    def _reference_logprobs(self, batch: ScoringBatch) -> Tensor | None:
        if self._reference is None:
            return None
        # The reference is its own function: what the policy's router chose is nothing to it. Kept sets are: both sides
        # of the ratio must be distributions over the same tokens.
        batch = replace(batch, routes_TLK=None)
        temperature = self._settings.temperature
        return target_logprobs(self._reference.transformer, self._reference.weights, batch, temperature=temperature)[0]


def step_metrics(result: StepResult) -> tuple[Metric, ...]:
    """Return what the trainer measured of a step, whatever the loss."""
    return (
        Metric(name="actor/grad_norm", numerator=result.grad_norm, denominator=1, per="step"),
        Metric(name="actor/lr", numerator=result.learning_rate, denominator=1, per="step"),
        *result.metrics,
    )


class MicroBatches(Sequence[ScoringBatch]):
    """A rank's micro-batches of a step, each read from the samples when it is asked for; the one before is let go."""

    def __init__(self, samples: StepSamples, plans: Sequence[MicroBatchPlan], *, keep_routing: bool) -> None:
        self._samples, self._plans, self._keep_routing = samples, plans, keep_routing
        self._held: tuple[int, PackedBatch, ScoringBatch] | None = None

    def read(self, index: int) -> tuple[PackedBatch, ScoringBatch]:
        """Return a micro-batch as the loss and as the trainer sees it."""
        if self._held is None or self._held[0] != index:
            self._held = None
            packed = self._samples.micro_batch(self._plans[index])
            self._held = (index, packed, scoring_batch(packed, keep_routing=self._keep_routing))
        return self._held[1], self._held[2]

    def __len__(self) -> int:
        return len(self._plans)

    @overload
    def __getitem__(self, index: int) -> ScoringBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScoringBatch]: ...
    def __getitem__(self, index: int | slice) -> ScoringBatch | Sequence[ScoringBatch]:
        if isinstance(index, slice):
            return MicroBatches(self._samples, self._plans[index], keep_routing=self._keep_routing)
        return self.read(index)[1]


def scoring_batch(packed: PackedBatch | PackedConversations, *, keep_routing: bool = True) -> ScoringBatch:
    """Return what the trainer scores of a packed micro-batch: the trained targets, over the sets they were drawn from.

    Args:
        packed: the micro-batch.
        keep_routing: visit the recorded experts again, where there are any; otherwise all are chosen live.
    """
    routes_TLK = kept_counts_T = kept_ids = None
    if isinstance(packed, PackedBatch):
        routes_TLK = packed.routes_TLK if keep_routing else None
        kept_counts_T, kept_ids = packed.kept_counts_T, packed.kept_ids
    return ScoringBatch(
        token_ids_T=torch.tensor(packed.token_ids_T, dtype=torch.int64),
        sequence_lengths=tuple(packed.sequence_lengths_B.tolist()),
        target_ids_T=torch.tensor(packed.target_ids_T, dtype=torch.int64),
        scored_mask_T=torch.tensor(packed.trained_mask_T),
        routes_TLK=None if routes_TLK is None else torch.tensor(routes_TLK),
        kept_counts_T=None if kept_counts_T is None else torch.tensor(kept_counts_T, dtype=torch.int64),
        kept_ids=None if kept_ids is None else torch.tensor(kept_ids, dtype=torch.int64),
        sequence_weights=_sequence_weights(packed),
    )


def worst_sequences(ids: Sequence[object], loss_N: Tensor) -> tuple[str, ...]:
    """Name the sequences with the largest (or a non-finite) part of the loss, three at most, the worst first.

    Args:
        ids: of each of the N sequences.
        loss_N: [N], their parts of the loss.
    """
    size_N = torch.nan_to_num(loss_N.abs(), nan=torch.inf)
    order = size_N.argsort(descending=True, stable=True)[:_NUM_WORST].tolist()
    return tuple(f"{ids[index]} ({float(loss_N[index]):.4g})" for index in order)


def _sequence_weights(packed: PackedBatch | PackedConversations) -> tuple[float, ...]:
    """Share of each sequence in the step's loss: the weights of its trained tokens."""
    weights_T = np.where(packed.trained_mask_T, packed.token_weight_T, 0).astype(np.float64)
    starts_B = np.cumsum(packed.sequence_lengths_B) - packed.sequence_lengths_B
    return tuple(np.add.reduceat(weights_T, starts_B).tolist())
