"""Schema of training: the optimizer and the number formats of the forward. Read by `model/trainer.py` and
`model/numerics.py`; assembled in the roots of `rl/config.py`."""

from typing import Annotated, Literal

import msgspec

Precision = Literal["fp32", "native"]
"""Number formats of a forward: plain float32 everywhere, or the released model's formats."""

Beta = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
"""Decay of a running average, per step."""


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with decoupled decay, linear warm-up to a constant rate, and clipping by the global norm."""

    lr: Annotated[float, msgspec.Meta(gt=0.0)]
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, msgspec.Meta(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Decoupled: each step takes lr x this share of a weight."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps of linear rise to `lr`; step i (from 0) has lr x (i + 1) / warmup_steps."""
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """A gradient with a larger L2 norm is scaled down to it. 1e30 never scales."""
