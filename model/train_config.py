"""Schema of training: the optimizer and the number formats of the forward. Read by `model/trainer.py` and
`model/numerics.py`; assembled in the roots of `rl/config.py`."""

from typing import Annotated, Literal

import msgspec

Precision = Literal["fp32", "native"]
"""Number formats of a forward: plain float32 everywhere, or the released model's formats."""

Beta = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
"""Decay of a running average, per step."""


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with decoupled decay, linear warm-up, a rate that stays or falls linearly, clipping by the global norm."""

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
    decay_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Steps of linear fall after the warm-up; step i of them (from 0) has lr x (1 - i / decay_steps), and the run must
    end with the last. 0: the rate stays.
    """
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """A gradient with a larger L2 norm is scaled down to it. 1e30 never scales."""

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, from 0.

        Example: lr 8, warmup_steps 2, decay_steps 4 gives 4, 8, 8, 6, 4, 2.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return self.lr
        return self.lr * max(0.0, 1.0 - (step - self.warmup_steps) / self.decay_steps)
