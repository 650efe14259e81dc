"""Which form the ops run in that have two: schema, and the rules that need no GPU to be checked.

No torch: a wrong key must cost milliseconds. Assembled in the roots of `rl/config.py`; a process takes the forms in
`model/backends.py`.
"""

from typing import Literal

import msgspec

from rollforward.kernels.errors import BackendError

Form = Literal["reference", "tile"]
"""Plain torch, on any machine; or TileLang's, for one GPU of compute capability 9.0 (docs/kernels.md)."""


class KernelBackends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forms of the ops that have two, in learner, engines and teachers alike. `tile` needs `precision: native`, and a
    GPU that every process of the run sees; a process that has none ends the run, and nothing falls back. Bits depend on
    the form, so a run keeps the one that it was begun with."""

    linear_logprob: Form = "reference"
    """Log-probs of tokens from hidden vectors and head: those that engines log and those that the learner trains on.
    `tile` makes no logits but for the engine's draw."""
    mix: Form = "reference"
    """Hyper-connections: the ways into and out of every sublayer. `tile` keeps the residual streams on the GPU, in BF16
    where the reference has FP32; needs hc_mult 4 and a hidden_size of 512 or more that is a multiple of 256."""
    mxfp4: Form = "reference"
    """Quantising the experts' weights: the same bytes in both. `tile` needs widths of experts, and a hidden_size, that
    are multiples of 128."""
    reverse_kl: Form = "reference"
    """(`distill`) The reverse KL and its gradient from both sides' hidden vectors and heads. This `tile`, and that of
    `linear_logprob`, needs a vocab_size and a hidden_size that are multiples of 8."""

    @property
    def tiles(self) -> tuple[str, ...]:
        """Ops that run as `tile`."""
        return tuple(name for name, form in msgspec.structs.asdict(self).items() if form == "tile")


def check_precision(kernels: KernelBackends, precision: str, whose: str = "") -> None:
    """Refuse tile forms without the formats that they compute in.

    Args:
        kernels: of the run.
        precision: of the run, or of one of its models.
        whose: names that model in an error; empty: the run.

    Raises:
        BackendError: names the key.
    """
    for name in kernels.tiles:
        if precision != "native":
            raise BackendError(
                f"kernels.{name} is tile and precision{whose and f' of {whose}'} is {precision}; tile forms take the"
                f" BF16 numbers of native precision. Set {'its ' if whose else ''}precision=native, or"
                f" kernels.{name}=reference"
            )


def check_no_teachers(kernels: KernelBackends, verb: str) -> None:
    """Refuse a form of an op that a run without teachers never computes.

    Raises:
        BackendError: names the key and the verb.
    """
    if kernels.reverse_kl == "tile":
        raise BackendError(
            f"kernels.reverse_kl is tile, and {verb} has no teachers, without whom nothing computes a reverse KL. Leave"
            " kernels.reverse_kl out; it is a setting of `rollforward distill`"
        )


def check_sizes(
    kernels: KernelBackends, what: str, *, vocab_size: int, hidden_size: int, expert_width: int, num_streams: int = 4
) -> None:
    """Refuse tile forms that have no program for a model.

    Args:
        kernels: of the run.
        what: names the model in an error.
        vocab_size, hidden_size, expert_width, num_streams: its vocab_size, hidden_size, moe_intermediate_size and
            hc_mult.

    Raises:
        BackendError: names key, size and rule.
    """
    if kernels.mix == "tile" and (hidden_size < 512 or hidden_size % 256 or num_streams != 4):
        raise BackendError(
            f"kernels.mix is tile, and {what} has hidden_size {hidden_size} and hc_mult {num_streams}; its programs are"
            " for 4 streams whose width is a multiple of 256, 512 at least. Set kernels.mix=reference"
        )
    if kernels.mxfp4 == "tile" and (hidden_size % 128 or expert_width % 128):
        raise BackendError(
            f"kernels.mxfp4 is tile, and the experts of {what} have hidden_size {hidden_size} and moe_intermediate_size"
            f" {expert_width}; its programs are for multiples of 128. Set kernels.mxfp4=reference"
        )
    for name in ("linear_logprob", "reverse_kl"):
        if name in kernels.tiles and (vocab_size % 8 or hidden_size % 8):
            raise BackendError(
                f"kernels.{name} is tile, and {what} has vocab_size {vocab_size} and hidden_size {hidden_size}; its"
                f" programs are for multiples of 8. Set kernels.{name}=reference"
            )
