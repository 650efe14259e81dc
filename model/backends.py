"""The forms of ops that this process runs: taken from the configuration once, before anything is allocated.

Not here: the forms' names and rules (`kernels/config.py`), the choice itself (`kernels/dispatch.py`).
"""

import socket

import msgspec

from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends, check_sizes
from rollforward.kernels.errors import BackendError
from rollforward.model.config import ModelConfig


def choose_kernels(kernels: KernelBackends, process: str) -> None:
    """Take the forms for this process; what it has chosen before is forgotten.

    Args:
        kernels: of the run.
        process: names this process in an error: "engine-0".

    Raises:
        BackendError: this machine cannot run one of them; names key, process and machine.
    """
    for name in kernels.tiles:
        try:
            dispatch.check_device(name)
        except BackendError as error:
            raise BackendError(
                f"kernels.{name} is tile, which {process} on {socket.gethostname()} cannot run. {error} In a run that"
                f" is kernels.{name}=reference"
            ) from error
    dispatch.choose(msgspec.structs.asdict(kernels))


def check_model(kernels: KernelBackends, config: ModelConfig, what: str) -> None:
    """Refuse tile forms that have no program for a model, which ``what`` names; see ``check_sizes``."""
    check_sizes(
        kernels,
        what,
        hidden_size=config.hidden_size,
        expert_width=config.moe_intermediate_size,
        num_streams=config.hc_mult,
    )
