"""DAPO's loss: the clipped surrogate with more room above than below.

What else makes DAPO is elsewhere: the mean over tokens in `rl/batch.py`, dynamic sampling in the loop, the punishment
of long answers in the task (`length_penalty`).
"""

from rollforward.rl.algorithms import DAPO
from rollforward.rl.losses.base import LossInputs, LossOutput, without_garbage
from rollforward.rl.losses.terms import clipped_output


def dapo_loss(algorithm: DAPO, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens, beta being 0 in the paper.

    pg_t = -min(r A, clip(r, 1 - low, 1 + high) A), r the policy over the behavior probability of the token.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs.

    Source: arXiv 2503.14476, equation 8.
    """
    return clipped_output(algorithm, without_garbage(inputs))
