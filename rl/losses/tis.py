"""Truncated importance sampling: a policy gradient that corrects, up to a cap, for what the engine drew otherwise."""

import torch

from rollforward.rl.algorithms import TIS
from rollforward.rl.losses.base import LossInputs, LossOutput, log_ratio_means, mean_metric, without_garbage
from rollforward.rl.losses.terms import behavior_ratio, policy_output, unit_ratio


def tis_loss(algorithm: TIS, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens.

    pg_t = -min(sg(policy / behavior), cap) A policy / sg(policy). There is one optimizer step a batch, so the trainer's
    log-probs at the weights that sampled are the detached ones of this very forward pass. The ratio to them is 1, and
    clipping it would do nothing; weights that are older than the policy are covered by the same weight.

    At level "sequence" policy / behavior is the product over the whole trajectory, from the fixed-point sum: the same
    bit for every packing.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs, or, at level "sequence", part of a
            trajectory is missing.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    inputs = without_garbage(inputs)
    ratio_T = behavior_ratio(inputs)
    correction_T = ratio_T.detach()
    if algorithm.level == "sequence":
        correction_N = torch.exp(-log_ratio_means(inputs) * inputs.trajectory_tokens_N).to(ratio_T.dtype)
        correction_T = correction_N[inputs.trajectory_T]
    weight_T = correction_T.clamp(max=algorithm.cap)
    pg_T = -weight_T * inputs.advantages_T * unit_ratio(inputs)
    metrics = [
        mean_metric("rollout_corr/rollout_is_mean", weight_T, inputs.trained_mask_T),
        mean_metric("rollout_corr/rollout_is_ratio_fraction_high", correction_T > algorithm.cap, inputs.trained_mask_T),
    ]
    return policy_output(algorithm, inputs, pg_T, ratio_T=ratio_T, metrics=metrics)
