"""GSPO's loss: the clipped surrogate of one ratio for a whole sequence."""

import torch

from rollforward.rl.algorithms import GSPO
from rollforward.rl.losses.base import LossInputs, LossOutput, log_ratio_means, mean_metric, without_garbage
from rollforward.rl.losses.terms import MAX_LOG_RATIO, behavior_ratio, clipped_surrogate, policy_output, unit_ratio


def gspo_loss(algorithm: GSPO, inputs: LossInputs) -> LossOutput:
    """Return sum_t w_t (pg_i + beta D_t) over the trained tokens t of every sequence i.

    pg_i = -min(s_i A, clip(s_i, 1 - low, 1 + high) A), s_i = exp(mean over the sequence of log(policy / behavior)). D_t
    is the KL of a token, with the token's own ratio.

    The value of s_i comes from the fixed-point mean, so it is the same bit for every packing, and its gradient is put
    on straight through, as in the paper's GSPO-token: token t takes sg(s_i) policy_t / sg(policy_t). Its gradient,
    s_i grad log policy_t, adds up over equal weights w and one advantage to w n s_i times the mean of the gradients,
    which is w n grad s_i: that of the sequence's own term, n tokens of weight w.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs, or part of a trajectory is missing.

    Source: arXiv 2507.18071, equations 5, 7 and 14.
    """
    inputs = without_garbage(inputs)
    log_ratio_N = (-log_ratio_means(inputs)).clamp(max=MAX_LOG_RATIO)
    sequence_ratio_N = torch.exp(log_ratio_N).to(inputs.policy_logprobs_T.dtype)
    sequence_ratio_T = sequence_ratio_N[inputs.trajectory_T] * unit_ratio(inputs)
    pg_T, is_clipped_T = clipped_surrogate(sequence_ratio_T, inputs.advantages_T, algorithm)
    clipped = mean_metric("actor/pg_clipfrac", is_clipped_T, inputs.trained_mask_T)
    return policy_output(algorithm, inputs, pg_T, ratio_T=behavior_ratio(inputs), metrics=[clipped])
