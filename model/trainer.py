"""The trainer: FP32 masters, the model's own forward, DeepSpeed's optimizer. It knows no algorithm.

    masters --published value, straight-through--> weights --forward--> log-probs of the targets --loss given by the
    caller--> backward --> gradients of the masters --DeepSpeed: sum over ranks, clip, AdamW--> masters

The forward that backward goes through is the engine's own (``transformer.py``), so its log-probs equal the engine's
bit for bit on the same weights, and its weights are the published ones (docs/design.md, P3 and P4).

Here: one process of a data-parallel group, without Ray. Not here: losses (rl/losses), batches (rl/batch.py), actors.
"""

import contextlib
import io
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, NonFiniteLossError, TrainerError
from rollforward.model.precision import PackedTensor, pack_published
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import OptimConfig, Precision
from rollforward.model.transformer import Transformer
from rollforward.model.weights import build_weights, published_tensors

_STATE_TAG = "state"


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


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Sum of the parts of this rank."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """Rate of the step."""


class _Masters(nn.Module):
    """FP32 masters as DeepSpeed wants them, and the forward through their published values."""

    def __init__(self, config: ModelConfig, named: Mapping[str, Tensor], precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config, precision)
        self.trained = nn.ParameterDict()
        self.frozen: dict[str, Tensor] = {}
        for spec in param_specs(config):
            tensor = named[spec.name].detach().clone()
            if spec.trained:
                self.trained[_key(spec.name)] = nn.Parameter(tensor)
            else:
                self.frozen[spec.name] = tensor

    def named(self) -> dict[str, Tensor]:
        """Canonical names to masters, with gradients where they are trained."""
        return {
            spec.name: self.trained[_key(spec.name)] if spec.trained else self.frozen[spec.name]
            for spec in param_specs(self.config)
        }

    def forward(self, batch: ScoringBatch, temperature: float) -> tuple[Tensor, Tensor]:
        named = self.named()
        native = self.transformer.numerics.precision == "native"
        weights = build_weights(self.config, published_tensors(self.config, named) if native else named)
        return target_logprobs(self.transformer, weights, batch, temperature=temperature)


def _key(name: str) -> str:
    """A parameter's name for torch, which reserves the dot."""
    return name.replace(".", "/")


class Trainer:
    """Owns masters and optimizer state of one rank.

    States: ready; a failed ``train_step`` (non-finite loss) leaves masters and optimizer as they were before it.
    Needs an initialised process group (``torch.distributed``), of one rank too.
    """

    def __init__(
        self,
        config: ModelConfig,
        named: Mapping[str, Tensor],
        *,
        precision: Precision,
        optim: OptimConfig,
    ) -> None:
        """Copy the masters and hand them to DeepSpeed.

        Args:
            config: the model.
            named: canonical names -> float32 masters (int64 tables).
            precision: number formats of the forward.
            optim: AdamW and its schedule.
        """
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints that it loaded its extension
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self._optim = optim
        self._masters = _Masters(config, named, precision)
        self._specs = {spec.name: spec for spec in param_specs(config)}
        self._num_steps = 0
        adamw = torch.optim.AdamW(
            _parameter_groups(self._masters.trained, optim.weight_decay), lr=optim.lr, betas=optim.betas, eps=optim.eps
        )
        self._engine: Any = deepspeed.initialize(model=self._masters, optimizer=adamw, config=_deepspeed_config(optim))[
            0
        ]

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far, over restarts."""
        return self._num_steps

    def train_step(
        self, batches: Sequence[ScoringBatch], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        """Add the gradients of all micro-batches and take one optimizer step.

        Args:
            batches: this rank's micro-batches, at least one and as many as on every other rank.
            loss_function: called once per micro-batch with the log-probs of its targets.
            temperature: divides the logits, as when the tokens were drawn.

        Raises:
            NonFiniteLossError: a loss, or only the gradient, is not finite; names step, micro-batch and worst
                sequences where it is the loss. Nothing was updated.
            TrainerError: no micro-batch was given.
        """
        if not batches:
            raise TrainerError("train_step got no micro-batch; a step trains at least one. Skip the step instead")
        world_size = torch.distributed.get_world_size()
        total = 0.0
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            policy_logprobs_T, entropy_T = self._engine(batch, temperature)
            part = loss_function(index, policy_logprobs_T, entropy_T)
            value = float(part.loss.detach())
            if not _finite_everywhere(value):
                self._engine.zero_grad()
                raise NonFiniteLossError(
                    f"step {self._num_steps}, {part.name}: the loss is {value}"
                    f"{' here and not finite on another rank' if math.isfinite(value) else ''}; it must be finite."
                    f" Nothing was updated. Worst sequences: {', '.join(part.worst) or 'unknown'}."
                    " Look at them and lower optim.lr"
                )
            total += value
            # DeepSpeed averages over ranks; parts of a step's loss are to be added.
            self._engine.backward(part.loss * world_size)
        rate = self._optim.rate(self._num_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):  # DeepSpeed has skipped the update without a word
            raise NonFiniteLossError(
                f"step {self._num_steps}: the loss is {total}, its gradient is not finite. Nothing was updated. Look at"
                " the step's sequences and lower optim.lr"
            )
        self._num_steps += 1
        return StepResult(loss=total, grad_norm=grad_norm, learning_rate=rate)

    def masters(self) -> dict[str, Tensor]:
        """Return a copy of every master (and of the frozen tensors), by canonical name."""
        return {name: master.detach().clone() for name, master in self._masters.named().items()}

    def published(self) -> dict[str, PackedTensor]:
        """Return every tensor's published bytes, quantised from the masters (frozen ones too)."""
        return {name: pack_published(self._specs[name], master) for name, master in self._masters.named().items()}

    def save(self, directory: Path) -> None:
        """Write masters, optimizer state and step count into a new directory; the caller makes it atomic.

        Raises:
            CheckpointError: the disk refuses; torch says of a full one only that a position was unexpected.
        """
        client_state = {"num_steps": self._num_steps}
        try:
            self._engine.save_checkpoint(str(directory), tag=_STATE_TAG, client_state=client_state)
        except (OSError, RuntimeError) as error:
            free_bytes = shutil.disk_usage(directory).free
            raise CheckpointError(
                f"{directory} cannot be written ({free_bytes} bytes are free): {error}. Make room; the run goes on from"
                " the checkpoint before"
            ) from error

    def load(self, directory: Path) -> None:
        """Take masters, optimizer state and step count from ``save``'s directory.

        Raises:
            TrainerError: the directory holds no such state.
        """
        path, state = self._engine.load_checkpoint(str(directory), tag=_STATE_TAG)
        if path is None:
            raise TrainerError(f"{directory} holds no trainer state; resume from another checkpoint")
        self._num_steps = int(state["num_steps"])


def _finite_everywhere(value: float) -> bool:
    """Whether the number is finite on every rank: all stop together, or the others would wait for ever."""
    is_finite = torch.tensor(int(math.isfinite(value)))
    torch.distributed.all_reduce(is_finite, op=torch.distributed.ReduceOp.MIN)
    return bool(is_finite)


def _parameter_groups(trained: nn.ParameterDict, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, sinks, biases, mixing terms) do not."""
    matrices = [parameter for parameter in trained.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained.values() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _deepspeed_config(optim: OptimConfig) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.max_grad_norm,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
