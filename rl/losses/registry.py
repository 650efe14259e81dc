"""From an algorithm's configuration to its loss: one line for each member of `rl.config.Algorithm`."""

from collections.abc import Callable, Mapping
from typing import Any

from rollforward.rl.algorithms import GRPO, Algorithm
from rollforward.rl.losses.base import LossInputs, LossOutput
from rollforward.rl.losses.grpo import grpo_loss

LOSSES: Mapping[type, Callable[[Any, LossInputs], LossOutput]] = {
    GRPO: grpo_loss,
}
"""Class of the configuration to the loss function that takes it."""


def policy_loss(algorithm: Algorithm, inputs: LossInputs) -> LossOutput:
    """Return the loss of `algorithm` on one micro-batch; see the algorithm's own file."""
    return LOSSES[type(algorithm)](algorithm, inputs)
