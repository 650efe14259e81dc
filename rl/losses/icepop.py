"""IcePop's loss: a policy gradient that drops tokens on which trainer and engine disagree too much."""

import torch

from rollforward.rl.algorithms import IcePop
from rollforward.rl.losses.base import LossInputs, LossOutput, mean_metric, without_garbage
from rollforward.rl.losses.terms import behavior_ratio, policy_output, unit_ratio


def icepop_loss(algorithm: IcePop, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens.

    pg_t = -M(sg(policy / behavior)) A policy / sg(policy), M(k) = k for ratio_min <= k <= ratio_max and 0 elsewhere. As
    in `tis_loss`, the trainer's log-probs are the detached ones of this forward pass, so there is nothing to clip.
    Dropped tokens keep their weight in the step and their KL.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs.

    Source: Ring-1T, arXiv 2510.18855.
    """
    inputs = without_garbage(inputs)
    ratio_T = behavior_ratio(inputs)
    correction_T = ratio_T.detach()
    keep_T = (correction_T >= algorithm.ratio_min) & (correction_T <= algorithm.ratio_max)
    # A NaN of the policy drops the token, and stays visible through unit_ratio.
    weight_T = torch.where(keep_T, correction_T, 0)
    pg_T = -weight_T * inputs.advantages_T * unit_ratio(inputs)
    metrics = [
        mean_metric("rollout_corr/rollout_is_mean", weight_T, inputs.trained_mask_T),
        mean_metric("rollout_corr/rollout_rs_masked_fraction", ~keep_T, inputs.trained_mask_T),
    ]
    return policy_output(algorithm, inputs, pg_T, ratio_T=ratio_T, metrics=metrics)
