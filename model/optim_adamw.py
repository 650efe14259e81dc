"""AdamW by DeepSpeed's ZeRO-1: gradients by name in, parameters by name out.

DeepSpeed sums gradients over micro-batches and ranks in an order of its own, which depends on the number of ranks. Here
the caller has summed them already, in an order that does not, and every rank holds the sum. So DeepSpeed is given one
pass a step through a module that is linear in its parameters, `sum(p * g)`: its gradient is `g`, the mean of equal
numbers over a power of two of ranks is exact, and parameters come out with the same bits on any such number.

Here: the engine and its state by name. Not here: sums, norms and clipping (`optim_hybrid.py`).
"""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor, nn

from rollforward.model.distributed import end_in_group
from rollforward.model.train_config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of a parameter NAME, saved as `NAME.exp_avg` and `NAME.exp_avg_sq`."""


class _Linear(nn.Module):
    """Parameters, and a loss whose gradient is what the caller says."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        # A copy each; torch reserves the dot in names.
        self.parameter_list = nn.ParameterList(nn.Parameter(tensor.detach().clone()) for tensor in named.values())

    def forward(self, gradients: list[Tensor]) -> Tensor:
        products = [(p * g).sum() for p, g in zip(self.parameter_list, gradients, strict=True)]
        return torch.stack(products).sum()


class DeepSpeedAdamW:
    """FP32 masters and moments of some tensors, sharded over the ranks. Needs an initialised process group.

    Every method but `parameters` is collective: all ranks call it with equal arguments.
    """

    def __init__(self, named: Mapping[str, Tensor], optim: OptimConfig) -> None:
        """Copy the tensors, at least one, and hand them to DeepSpeed."""
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints that it loaded its extension
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        module = _Linear(named)
        self._parameters = dict(zip(named, module.parameter_list, strict=True))
        adamw = torch.optim.AdamW(
            _parameter_groups(self._parameters, optim.weight_decay), lr=optim.lr, betas=optim.betas, eps=optim.eps
        )
        self._engine: Any = deepspeed.initialize(model=module, optimizer=adamw, config=_DEEPSPEED)[0]
        # DeepSpeed's hooks keep the engine, and with it all state, until it is destroyed.
        end_in_group(self, self._engine.destroy)
        self._begin_moments()

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters themselves, detached; the next step changes them."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Take one step.

        Args:
            gradients: of every parameter, float32, finite, the same on every rank.
            lr: the step's rate.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        loss = self._engine([gradients[name] for name in self._parameters])
        self._engine.backward(loss)
        self._engine.step()

    def moments(self) -> dict[str, Tensor]:
        """Return a copy of both moments of every parameter, `NAME.exp_avg` and `NAME.exp_avg_sq`."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                value = safe_get_full_optimizer_state(parameter, moment)
                assert value is not None, "the state exists from the start"
                found[f"{name}.{moment}"] = value
        return found

    def load(self, named: Mapping[str, Tensor], moments: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Take parameters, moments as of `moments`, and the number of steps behind them."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(named[name])
                safe_set_full_fp32_param(parameter, named[name])
                for moment in MOMENTS:
                    safe_set_full_optimizer_state(parameter, moments[f"{name}.{moment}"], moment)
            for state in self._engine.optimizer.optimizer.state.values():
                state["step"].fill_(float(num_steps))

    def _begin_moments(self) -> None:
        """Make Adam's state before the first step, as torch would in it, and let DeepSpeed see it: otherwise its access
        by name works only after a step."""
        zero = self._engine.optimizer
        for group in zero.optimizer.param_groups:
            for flat in group["params"]:
                zero.optimizer.state[flat] = {
                    "step": torch.tensor(0.0),
                    **{moment: torch.zeros_like(flat) for moment in MOMENTS},
                }
        zero._lazy_init_hp_params_optimizer_state()


def _parameter_groups(named: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, sinks, biases, mixing terms) do not."""
    matrices = [parameter for parameter in named.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in named.values() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


_DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # the caller clips by the norm of all parameters, Muon's too
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000_000,
}
