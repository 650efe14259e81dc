"""The trainer: the model's own forward over published weights, and one optimizer step over all ranks. It knows no
algorithm.

    micro-batches of this rank --forward over published values--> log-probs --loss given by the caller--> backward
        --> gradients --> sums over all micro-batches in one fixed tree --> AdamW and Muon on FP32 masters
        --> published bytes --> values of the next forward

The forward that backward goes through is the engine's own (``transformer.py``), so its log-probs equal the engine's bit
for bit on the same weights; its values are unpacked from the very bytes that are published (docs/design.md, P3 and P4).
A step has the same bits on any power of two of ranks.

Here: one process of a data-parallel group, without Ray. Not here: masters and sums (``optim_hybrid.py``), bytes and
values (``published.py``), losses (rl/losses), batches (rl/batch.py), actors.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollforward.conf.errors import way_out
from rollforward.model.balance import updated_bias
from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, NonFiniteLossError, TrainerError
from rollforward.model.metrics import Metric
from rollforward.model.optim_hybrid import HybridOptimizer
from rollforward.model.precision import PackedTensor
from rollforward.model.published import PublishedWeights
from rollforward.model.routing import Routing
from rollforward.model.scoring import ScoringBatch, target_hidden, target_logprobs
from rollforward.model.shapes import TensorFormat
from rollforward.model.train_config import BalanceConfig, OptimConfig, Precision
from rollforward.model.trainer_state import read_tensors, write_tensors
from rollforward.model.transformer import Transformer
from rollforward.model.weights import build_weights

_STATE_NAME = "trainer.json"
_BIASES_NAME = "gate_biases.safetensors"
_NO_BALANCE = BalanceConfig()


@dataclass(frozen=True, kw_only=True)
class LossPart:
    """What a caller's loss returns for one micro-batch."""

    loss: Tensor
    """Scalar with grad: this micro-batch's part of the step's loss; parts are added, never averaged."""
    name: str
    """Names the micro-batch in an error."""
    worst: tuple[str, ...] = ()
    """The sequences that contribute most, for an error."""


LossFunction = Callable[[int, Tensor, Tensor], LossPart]
"""(index of the micro-batch, policy_logprobs_T with grad, entropy_T) -> part; rows that are not scored hold 0."""

HiddenLossFunction = Callable[[int, Tensor, Tensor], LossPart]
"""(index of the micro-batch, hidden_RD of its scored rows, head_VD), both with grad -> part."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Sum of the parts of this rank."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """Rate of the step."""
    metrics: tuple[Metric, ...]
    """Quantisation and balance of experts. Of the whole step, the same on every rank; of the balance loss this rank's
    part, a sum."""


class _SavedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What trainer.json holds."""

    num_steps: Annotated[int, msgspec.Meta(ge=0)]


class Trainer:
    """Trains a model on one rank of an initialised process group (``torch.distributed``), of one rank too.

    States: ready; a failed ``train_step`` (non-finite loss) leaves masters and optimizer as they were before it.
    Constructor, ``train_step``, ``masters``, ``save`` and ``load`` are collective: every rank calls them.
    """

    def __init__(
        self,
        config: ModelConfig,
        named: Mapping[str, Tensor],
        *,
        precision: Precision,
        optim: OptimConfig,
        balance: BalanceConfig = _NO_BALANCE,
        recompute: bool = False,
        seed: int = 0,
    ) -> None:
        """Copy this rank's masters and publish them to the forward.

        Args:
            config: the model.
            named: canonical names -> float32 masters (int64 tables), the same on every rank.
            precision: number formats of the forward.
            optim: the optimizer and its schedule.
            balance: balancing of experts.
            recompute: keep only the layers' inputs for the backward pass.
            seed: keys stochastic rounding.

        Raises:
            ConfigError: Muon's matrices cannot be distributed over the ranks as configured.
        """
        self._config, self._optim, self._balance = config, optim, balance
        self._transformer = Transformer(config, precision, recompute=recompute)
        self._optimizer = HybridOptimizer(config, named, optim, seed=seed)
        self._published = PublishedWeights(config, named, precision)
        self._weights = build_weights(config, self._published.values)
        self._num_steps = 0

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self._config

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far, over restarts."""
        return self._num_steps

    @property
    def quantised(self) -> dict[str, int]:
        """Official tensors whose value in the forward passed through each format that loses digits."""
        return self._published.quantised

    def train_step(
        self,
        batches: Sequence[ScoringBatch],
        loss_function: LossFunction,
        *,
        num_leaves: int | None = None,
        temperature: float = 1.0,
    ) -> StepResult:
        """Add the gradients of all micro-batches of all ranks and take one optimizer step.

        Args:
            batches: this rank's micro-batches, consecutive ones of the step as ``gradient_tree.subtree_bounds`` says;
                may be none. Each is read once, in order, when its turn comes.
            loss_function: called once per micro-batch with the log-probs of its targets.
            num_leaves: micro-batches of the whole step, at least 1; None where this is the only rank.
            temperature: divides the logits, as when the tokens were drawn.

        Raises:
            NonFiniteLossError: a loss, or only the gradient, is not finite; names step, micro-batch and worst
                sequences where it is the loss. Nothing was updated.
            TrainerError: no micro-batch was given, or not this rank's.
        """

        def part_of(index: int, batch: ScoringBatch, routing: Routing) -> LossPart:
            scored = target_logprobs(self._transformer, self._weights, batch, temperature=temperature, routing=routing)
            return loss_function(index, *scored)

        return self._step(batches, part_of, num_leaves)

    def hidden_step(
        self, batches: Sequence[ScoringBatch], loss_function: HiddenLossFunction, *, num_leaves: int | None = None
    ) -> StepResult:
        """Take a step as ``train_step`` does, for a loss that multiplies by the head itself, a chunk of tokens at a
        time.

        Args:
            batches, num_leaves: as there.
            loss_function: called once per micro-batch with the vectors before the head and with the head.

        Raises:
            NonFiniteLossError, TrainerError: as there.
        """

        def part_of(index: int, batch: ScoringBatch, routing: Routing) -> LossPart:
            hidden_RD = target_hidden(self._transformer, self._weights, batch, routing=routing)
            return loss_function(index, hidden_RD, self._weights.head)

        return self._step(batches, part_of, num_leaves)

    def _step(
        self,
        batches: Sequence[ScoringBatch],
        part_of: Callable[[int, ScoringBatch, Routing], LossPart],
        num_leaves: int | None,
    ) -> StepResult:
        """Add the gradients of all parts of all ranks and take one optimizer step; see ``train_step``."""
        num_leaves = len(batches) if num_leaves is None else num_leaves
        if num_leaves == 0:
            raise TrainerError("train_step got no micro-batch; a step trains at least one. Skip the step instead")
        groups = self._optimizer.groups
        gradients = self._optimizer.begin(self._num_steps, num_leaves)
        start, stop = gradients.bounds[groups.rank]
        if len(batches) != stop - start:
            raise TrainerError(
                f"rank {groups.rank} of {groups.num_ranks} got {len(batches)} micro-batches; of {num_leaves} it has"
                f" {start} to {stop - 1}. Divide them by gradient_tree.subtree_bounds"
            )
        total = balance_loss = 0.0
        load_LE = torch.zeros(self._config.num_hidden_layers, self._config.n_routed_experts, dtype=torch.int64)
        for index in range(gradients.num_passes):
            if index >= len(batches):
                self._require_finite(None)
                gradients.add(None)
                continue
            routing = self._routing(batches[index])
            part = self._backward(part_of(index, batches[index], routing), routing)
            total += float(part.loss.detach())
            balance_loss += float(routing.balance_loss().detach())
            load_LE += routing.load_LE()
            gradients.add(self._published.take_gradients())
        rate = self._optim.rate(self._num_steps)
        grad_norm = self._optimizer.update(gradients, lr=rate)
        if not math.isfinite(grad_norm):
            raise NonFiniteLossError(
                f"step {self._num_steps}: the loss is {total}, its gradient is not finite. Nothing was updated. Look at"
                " the step's sequences and lower optim.lr"
            )
        self._num_steps += 1
        load_LE = groups.exact_sum(load_LE)
        self._move_biases(load_LE)
        clamped = self._optimizer.publish_into(self._published)
        metrics = self._step_metrics(clamped, load_LE, balance_loss)
        return StepResult(loss=total, grad_norm=grad_norm, learning_rate=rate, metrics=metrics)

    def masters(self) -> dict[str, Tensor]:
        """Return a copy of every master, and the published value of every frozen tensor, by canonical name.
        Collective."""
        values = self._published.values
        frozen = {name: value.clone() for name, value in values.items() if not value.requires_grad}
        return {**frozen, **self._optimizer.masters()}

    def published(self) -> dict[str, PackedTensor]:
        """Return every tensor's published bytes, frozen ones too: those that the next forward reads.

        Raises:
            TrainerError: the forward's values are not those of the bytes.
        """
        return self._published.published()

    @property
    def formats(self) -> dict[str, TensorFormat]:
        """The format in which each canonical tensor is published."""
        return self._published.formats

    def proven_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the next forward reads of each canonical tensor; see ``PublishedWeights.proven``."""
        return self._published.proven()

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-probs of all tokens but the first under the current weights, float32 [T - 1]. Of this rank
        alone."""
        token_ids_T = torch.tensor(token_ids)
        scored_mask_T = torch.ones(len(token_ids), dtype=torch.bool)
        scored_mask_T[-1] = False
        batch = ScoringBatch(
            token_ids_T=token_ids_T,
            sequence_lengths=(len(token_ids),),
            target_ids_T=token_ids_T.roll(-1),
            scored_mask_T=scored_mask_T,
        )
        return target_logprobs(self._transformer, self._weights, batch, temperature=1.0)[0][:-1]

    @torch.no_grad()
    def head_inputs(self, batch: ScoringBatch) -> tuple[Tensor, Tensor]:
        """Return the vectors that the head reads at the scored rows, [R, D], and the head, [V, D], of the next forward.
        Of this rank alone."""
        return target_hidden(self._transformer, self._weights, batch), self._weights.head

    def save(self, directory: Path) -> None:
        """Write masters, optimizer state, gate biases and step count into a directory that all ranks see; the caller
        makes it atomic. Collective.

        Raises:
            CheckpointError: the disk refuses.
        """
        try:
            self._optimizer.save(directory, num_steps=self._num_steps)
            if self._optimizer.groups.rank == 0:
                write_tensors(directory / _BIASES_NAME, self._gate_biases(), num_steps=self._num_steps)
                state = _SavedState(num_steps=self._num_steps)
                (directory / _STATE_NAME).write_bytes(msgspec.json.encode(state))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory} cannot be written ({_free_text(directory)}): {error}. {way_out(error, room='Make room')};"
                " the run goes on from the checkpoint before"
            ) from error

    def load(self, directory: Path) -> None:
        """Take masters, optimizer state, gate biases and step count from ``save``'s directory, whatever the number of
        ranks that wrote it. Collective.

        Raises:
            TrainerError: the directory holds no such state, that of another model or optimizer, or files of two saves.
        """
        try:
            state = msgspec.json.decode((directory / _STATE_NAME).read_bytes(), type=_SavedState)
            self._optimizer.load(directory, num_steps=state.num_steps)
            shapes = {name: value.shape for name, value in self._gate_biases().items()}
            biases = read_tensors(directory / _BIASES_NAME, shapes, num_steps=state.num_steps)
        except (OSError, msgspec.MsgspecError, SafetensorError) as error:
            raise TrainerError(
                f"{directory} holds no trainer state that can be read: {error}. Resume from another checkpoint"
            ) from error
        self._num_steps = state.num_steps
        for name, bias_E in biases.items():
            self._published.replace(name, self._published.pack(name, bias_E))
        self._optimizer.publish_into(self._published)
        self._published.take_flips()

    def _routing(self, batch: ScoringBatch) -> Routing:
        """Routes of one micro-batch: recorded ones replayed, and the balance loss collected where it counts."""
        if self._balance.loss_weight == 0:
            return Routing(self._config, replay_TLK=batch.routes_TLK)
        if batch.sequence_weights is None:
            raise TrainerError("balance.loss_weight is not 0 and a batch has no sequence_weights; give each sequence's")
        return Routing(
            self._config,
            replay_TLK=batch.routes_TLK,
            sequence_lengths=batch.sequence_lengths,
            sequence_weights=batch.sequence_weights,
        )

    def _backward(self, part: LossPart, routing: Routing) -> LossPart:
        """Backward of one micro-batch; its gradients are left with the published values."""
        loss = part.loss
        if self._balance.loss_weight > 0:
            loss = loss + self._balance.loss_weight * routing.balance_loss()
        self._require_finite(part)
        loss.backward()
        return part

    def _require_finite(self, part: LossPart | None) -> None:
        """Stop on every rank, or the others would wait for ever, where a loss is not finite on any. Collective.

        Raises:
            NonFiniteLossError: the same on every rank: what the ranks say whose loss it is.
        """
        value = 0.0 if part is None else float(part.loss.detach())
        if self._optimizer.groups.all_true(math.isfinite(value)):
            return
        self._published.take_gradients()
        found = ""
        if part is not None and not math.isfinite(value):
            worst = ", ".join(part.worst) or "unknown"
            found = f"{part.name}: the loss is {value}; it must be finite. Worst sequences: {worst}"
        told = self._optimizer.groups.all_texts(found)
        raise NonFiniteLossError(
            f"step {self._num_steps}, {'. And '.join(filter(None, told))}. Nothing was updated. Look at them and lower"
            " optim.lr"
        )

    def _gate_biases(self) -> dict[str, Tensor]:
        return {
            name: value.detach() for name, value in self._published.values.items() if name.endswith(".ffn.gate.bias")
        }

    def _score_routed_layers(self) -> list[int]:
        config = self._config
        return [layer for layer in range(config.num_hidden_layers) if not config.is_hash_layer(layer)]

    def _move_biases(self, load_LE: Tensor) -> None:
        speed = self._balance.bias_update_speed
        if speed == 0:
            return
        for layer in self._score_routed_layers():
            name = f"layers.{layer}.ffn.gate.bias"
            bias_E = updated_bias(self._published.values[name].detach(), load_LE[layer], speed=speed)
            self._published.replace(name, self._published.pack(name, bias_E))

    def _step_metrics(self, clamped: int, load_LE: Tensor, balance_loss: float) -> tuple[Metric, ...]:
        flipped, codes = self._published.take_flips()
        busiest = [
            float(load_LE[layer].max()) / float(load_LE[layer].float().mean()) for layer in self._score_routed_layers()
        ]
        metrics = [
            Metric(name="quant/clamped_groups", numerator=clamped, denominator=1, per="step"),
            Metric(name="quant/fp4_flip_rate", numerator=flipped, denominator=codes, per="code"),
        ]
        if busiest:
            most = max(busiest)
            metrics.append(Metric(name="actor/expert_load_max", numerator=most, denominator=1, per="step"))
        if self._balance.loss_weight > 0:
            metrics.append(
                Metric(name="actor/balance_loss", numerator=balance_loss, denominator=1, per="step", reduction="sum")
            )
        return tuple(metrics)


def _free_text(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free} bytes are free"
    except OSError:
        return "its room is unknown"
