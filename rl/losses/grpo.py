"""GRPO as DeepSeek uses it: clipped surrogate under off-policy sequence masking, plus the unbiased KL.

Advantages without division by the standard deviation and the weights of tokens come from `rl/batch.py`.
"""

import torch

from rollforward.rl.algorithms import GRPO
from rollforward.rl.errors import LossInputError
from rollforward.rl.losses.base import (
    LossInputs,
    LossOutput,
    mean_metric,
    shared_metrics,
    sum_by_trajectory,
    without_garbage,
)
from rollforward.rl.losses.terms import clipped_surrogate, off_policy_keep, unbiased_kl


def grpo_loss(algorithm: GRPO, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (M_i pg_t + beta D_t) over the trained tokens.

    pg_t = -min(r A, clip(r, 1 - low, 1 + high) A), D_t the unbiased KL to the reference, M_i 0 for sequences that
    off-policy sequence masking removes and 1 for the rest, w_t the weight of the token in the step.

    Args:
        algorithm: The constants.
        inputs: One micro-batch.

    Returns:
        The loss (0 and connected to the graph where nothing is trained), metrics, and the loss of each trajectory.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs, or part of a trajectory is missing.

    Source: DeepSeek-V3.2 section 3.1.
    """
    inputs = without_garbage(inputs)
    weight_T = inputs.token_weight_T
    ratio_T = torch.exp(inputs.policy_logprobs_T - inputs.behavior_logprobs_T)
    pg_T, is_clipped_T = clipped_surrogate(
        ratio_T,
        inputs.advantages_T,
        clip_eps_low=algorithm.clip_eps_low,
        clip_eps_high=algorithm.clip_eps_high,
    )
    metrics = [mean_metric("actor/pg_clipfrac", is_clipped_T, inputs.trained_mask_T)]
    if algorithm.opsm_delta is not None:
        keep_T = off_policy_keep(inputs, algorithm.opsm_delta)[inputs.trajectory_T]
        # Multiplied, not selected: a NaN of the policy stays visible.
        pg_T = pg_T * keep_T
        share_T = inputs.trained_mask_T.double() / inputs.trajectory_tokens_N.clamp(min=1)[inputs.trajectory_T]
        metrics.append(mean_metric("actor/opsm_frac", ~keep_T, share_T, per="trajectory"))
    metrics.append(mean_metric("actor/pg_loss", pg_T, weight_T, per="token_weight"))
    term_T = pg_T
    if inputs.reference_logprobs_T is not None:
        kl_T = unbiased_kl(ratio_T, inputs.policy_logprobs_T, inputs.reference_logprobs_T)
        metrics.append(mean_metric("actor/kl_loss", kl_T, weight_T, per="token_weight"))
        term_T = pg_T + algorithm.kl_beta * kl_T
    elif algorithm.kl_beta != 0:
        raise LossInputError(
            f"algo.kl_beta is {algorithm.kl_beta} and there are no reference log-probs; the KL term needs them."
            " Compute them in the step or set algo.kl_beta=0"
        )
    metrics.append(mean_metric("actor/loss", term_T, weight_T, per="token_weight"))
    # float64, because advantages of a group cancel in the sum.
    loss_T = (weight_T * term_T).double()
    return LossOutput(
        loss=loss_T.sum().to(term_T.dtype),
        metrics=(*metrics, *shared_metrics(inputs)),
        trajectory_loss_N=sum_by_trajectory(inputs, loss_T.detach()),
    )
