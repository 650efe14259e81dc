"""From an algorithm's configuration to its loss: one line for each member of `rl.algorithms.Algorithm`."""

from collections.abc import Callable, Mapping
from typing import Any

from rollforward.rl.algorithms import CISPO, DAPO, GRPO, GSPO, TIS, Algorithm, DrGRPO, IcePop
from rollforward.rl.losses.base import LossInputs, LossOutput
from rollforward.rl.losses.cispo import cispo_loss
from rollforward.rl.losses.dapo import dapo_loss
from rollforward.rl.losses.dr_grpo import dr_grpo_loss
from rollforward.rl.losses.grpo import grpo_loss
from rollforward.rl.losses.gspo import gspo_loss
from rollforward.rl.losses.icepop import icepop_loss
from rollforward.rl.losses.tis import tis_loss

LOSSES: Mapping[type, Callable[[Any, LossInputs], LossOutput]] = {
    GRPO: grpo_loss,
    DAPO: dapo_loss,
    DrGRPO: dr_grpo_loss,
    GSPO: gspo_loss,
    CISPO: cispo_loss,
    TIS: tis_loss,
    IcePop: icepop_loss,
}
"""Class of the configuration to the loss function that takes it."""


def policy_loss(algorithm: Algorithm, inputs: LossInputs) -> LossOutput:
    """Return the loss of `algorithm` on one micro-batch; see the algorithm's own file."""
    return LOSSES[type(algorithm)](algorithm, inputs)
