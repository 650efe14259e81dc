"""CISPO's loss: the log-prob weighted by the clipped ratio, which has no gradient of its own."""

from rollforward.rl.algorithms import CISPO
from rollforward.rl.losses.base import LossInputs, LossOutput, mean_metric, without_garbage
from rollforward.rl.losses.terms import behavior_ratio, policy_output


def cispo_loss(algorithm: CISPO, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens, beta being 0 in the paper.

    pg_t = -sg(clip(r, 1 - low, 1 + high)) A log policy, r the policy over the behavior probability of the token. No
    token loses its gradient; `actor/pg_clipfrac` is the share whose weight was clipped.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs.

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    inputs = without_garbage(inputs)
    ratio_T = behavior_ratio(inputs)
    weight_T = ratio_T.detach().clamp(1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high)
    pg_T = -weight_T * inputs.advantages_T * inputs.policy_logprobs_T
    clipped = mean_metric("actor/pg_clipfrac", weight_T != ratio_T.detach(), inputs.trained_mask_T)
    return policy_output(algorithm, inputs, pg_T, ratio_T=ratio_T, metrics=[clipped])
