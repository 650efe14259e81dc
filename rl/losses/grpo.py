"""GRPO as DeepSeek uses it: clipped surrogate under off-policy sequence masking, plus the unbiased KL.

Advantages without division by the standard deviation and the weights of tokens come from `rl/batch.py`.
"""

from rollforward.rl.algorithms import GRPO
from rollforward.rl.losses.base import LossInputs, LossOutput, mean_metric, without_garbage
from rollforward.rl.losses.terms import behavior_ratio, clipped_surrogate, off_policy_keep, policy_output


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
    ratio_T = behavior_ratio(inputs)
    pg_T, is_clipped_T = clipped_surrogate(ratio_T, inputs.advantages_T, algorithm)
    metrics = [mean_metric("actor/pg_clipfrac", is_clipped_T, inputs.trained_mask_T)]
    if algorithm.opsm_delta is not None:
        keep_T = off_policy_keep(inputs, algorithm.opsm_delta)[inputs.trajectory_T]
        # Multiplied, not selected: a NaN of the policy stays visible.
        pg_T = pg_T * keep_T
        share_T = inputs.trained_mask_T.double() / inputs.trajectory_tokens_N.clamp(min=1)[inputs.trajectory_T]
        metrics.append(mean_metric("actor/opsm_frac", ~keep_T, share_T, per="trajectory"))
    return policy_output(algorithm, inputs, pg_T, ratio_T=ratio_T, metrics=metrics)
