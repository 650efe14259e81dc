"""The forms of ops that this process runs: taken from the configuration once, before anything is allocated; and what
they ask of a machine and of a model.

Not here: the forms' names and rules (`kernels/config.py`), the choice itself (`kernels/dispatch.py`).
"""

import importlib.util
import socket
from collections.abc import Sequence

import msgspec

from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends, check_sizes
from rollforward.kernels.errors import BackendError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.model.config import ModelConfig


def choose_kernels(kernels: KernelBackends, process: str) -> None:
    """Take the forms for this process; what it has chosen before is forgotten.

    Args:
        kernels: of the run.
        process: names this process in an error: "engine-0".

    Raises:
        BackendError: see ``check_machine``.
    """
    check_machine(kernels, process)
    dispatch.choose(msgspec.structs.asdict(kernels))


def check_machine(kernels: KernelBackends, process: str) -> None:
    """Refuse forms that this machine cannot run; nothing is chosen. Arguments as in ``choose_kernels``.

    Raises:
        BackendError: names key, process and machine.
    """
    for name in kernels.tiles:
        told = f"kernels.{name} is tile, which {process} on {socket.gethostname()} cannot run."
        try:
            dispatch.check_device(name)
        except BackendError as error:
            raise BackendError(f"{told} {error} In a run that is kernels.{name}=reference") from error
        if importlib.util.find_spec("tilelang") is None or importlib.util.find_spec("tvm_ffi") is None:
            raise BackendError(
                f"{told} TileLang is not installed for {process}: it is in the extra `tile` of this project. Install it"
                f" there, or set kernels.{name}=reference"
            )


def check_model(kernels: KernelBackends, config: ModelConfig, what: str) -> None:
    """Refuse tile forms that have no program for a model, which ``what`` names; see ``check_sizes``."""
    check_sizes(
        kernels,
        what,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        expert_width=config.moe_intermediate_size,
        num_streams=config.hc_mult,
    )


def programs_of(config: ModelConfig, teachers: Sequence[ModelConfig]) -> dict[str, list[dispatch.Program]]:
    """Return what each op's tile form runs for a model and those that teach it; none where its sizes allow none.

    Args:
        config: the model.
        teachers: whose vectors its reverse KL takes.
    """
    width, inner, vocabulary = config.hidden_size, config.moe_intermediate_size, config.vocab_size
    has_head, of_experts = vocab_sweep.takes(vocabulary, width), [(inner, width), (width, inner)]
    teaching = [one.hidden_size for one in teachers if has_head and vocab_sweep.takes(vocabulary, one.hidden_size)]
    return {
        "linear_logprob": vocab_sweep.programs(vocabulary, width) if has_head else [],
        "mix": mix_sweep.programs(width, config.hc_sinkhorn_iters) if mix_sweep.takes(width) else [],
        "mxfp4": [one for sizes in of_experts if mxfp4_sweep.takes(*sizes) for one in mxfp4_sweep.programs(*sizes)],
        "reverse_kl": [one for other in teaching for one in vocab_sweep.programs(vocabulary, width, other)],
    }


def check_programs(
    kernels: KernelBackends, config: ModelConfig, what: str, *, teachers: Sequence[ModelConfig] = ()
) -> None:
    """Refuse tile forms whose programs for a model are not compiled on this machine.

    Args:
        kernels: of the run.
        config: the model. what: names it in an error.
        teachers: whose vectors its reverse KL takes.

    Raises:
        BackendError: names the key, the model and what compiles them.
    """
    width, inner, vocabulary = config.hidden_size, config.moe_intermediate_size, config.vocab_size
    wanted = programs_of(config, teachers)
    for name in kernels.tiles:
        programs = set(wanted[name])
        missing = [one for one in programs if not dispatch.path_of(one).is_file()]
        if missing:
            raise BackendError(
                f"kernels.{name} is tile, and {len(missing)} of its {len(programs)} programs for {what} (vocab_size"
                f" {vocabulary}, hidden_size {width}, moe_intermediate_size {inner}) are not in"
                f" {dispatch.cache_directory()}; a run compiles none. Compile them once with `rollforward kernels"
                f" warm`, or set kernels.{name}=reference"
            )
