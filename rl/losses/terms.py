"""The terms that policy losses are made of: elementwise functions of clean tensors, and one decision per sequence.

Inputs are those of `without_garbage`. How terms are combined is in each algorithm's own file.

Letters: T packed tokens, N trajectories.
"""

import torch
from torch import Tensor

from rollforward.rl.losses.base import LossInputs, log_ratio_means, sum_by_trajectory


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_eps_low: float, clip_eps_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective as a loss, and where clipping took the gradient away.

    -min(r A, clip(r, 1 - low, 1 + high) A)

    Args:
        ratio_T: [T] float. Policy over behavior probability, with grad.
        advantages_T: [T] float.
        clip_eps_low: in (0, 1).
        clip_eps_high: > 0.

    Returns:
        [T] loss, and [T] bool, True where the clipped branch is strictly the smaller one.

    Example: r 1.5, A 1, high 0.2 gives -1.2 and True; r 1.5, A -1 gives 1.5 and False.
    """
    plain_T = ratio_T * advantages_T
    bounded_T = ratio_T.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages_T
    return -torch.minimum(plain_T, bounded_T), bounded_T < plain_T


def unbiased_kl(ratio_T: Tensor, policy_logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) per token whose value and gradient are both unbiased.

    r (x - log x - 1) with x = reference / policy and r = policy / behavior, r differentiable. Under the behavior policy
    the expectation is the KL itself, and so is that of the gradient, r log(policy / reference) grad log policy. Without
    the differentiable r (plain k3) the gradient is that of another divergence.

    Args:
        ratio_T: [T] float, r, with grad.
        policy_logprobs_T: [T] float, with grad.
        reference_logprobs_T: [T] float.

    Returns:
        [T] float, >= 0; exactly 0 where policy and reference agree.

    Source: DeepSeek-V3.2 section 3.1.
    """
    log_x_T = reference_logprobs_T - policy_logprobs_T
    return ratio_T * (torch.expm1(log_x_T) - log_x_T)


def off_policy_keep(inputs: LossInputs, delta: float) -> Tensor:
    """Return [N] bool: False for the trajectories whose policy term off-policy sequence masking removes.

    Removed iff the advantage is negative and the mean over the trajectory's trained tokens of
    log(behavior / policy) is above `delta`: a bad answer that the policy would hardly give any more.

    Args:
        inputs: Clean inputs. The sign of the advantage is that of its sum over the tokens in this call.
        delta: nats per token, > 0.

    Raises:
        LossInputError: part of a trajectory is missing (see `log_ratio_means`).

    Invariants: the same bit for every packing, order, rank and micro-batch of the same log-probs.
    """
    advantage_N = sum_by_trajectory(inputs, inputs.advantages_T.double())
    return ~((advantage_N < 0) & (log_ratio_means(inputs) > delta))
