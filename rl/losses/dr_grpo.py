"""Dr.GRPO's loss: the clipped surrogate of GRPO without a length or a deviation in it.

Both are left out in `rl/batch.py`: the weights of tokens are constant, advantages are not divided.
"""

from rollforward.rl.algorithms import DrGRPO
from rollforward.rl.losses.base import LossInputs, LossOutput, without_garbage
from rollforward.rl.losses.terms import clipped_output


def dr_grpo_loss(algorithm: DrGRPO, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens, beta being 0 in the paper.

    pg_t = -min(r A, clip(r, 1 - low, 1 + high) A), r the policy over the behavior probability of the token.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs.

    Source: arXiv 2503.20783, section 3.2.
    """
    return clipped_output(algorithm, without_garbage(inputs))
