"""The terms that policy losses are made of: elementwise functions of clean tensors, what is decided per sequence, and
`policy_output`, which adds the KL to an algorithm's policy term and sums.

Inputs are those of `without_garbage`. How terms are combined is in each algorithm's own file.

Letters: T packed tokens, N trajectories.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollforward.model.metrics import Metric
from rollforward.rl.algorithms import ClippedRatio, PolicyGradient
from rollforward.rl.errors import LossInputError
from rollforward.rl.losses.base import (
    LossInputs,
    LossOutput,
    log_ratio_means,
    loss_metric,
    mean_metric,
    shared_metrics,
    sum_by_trajectory,
)

MAX_LOG_RATIO = 20.0
"""Nats. A ratio of policy to behavior probability is at most the exponential of it, 4.9e8: exp overflows float32 beyond
88, and infinity x 0, in a branch that clipping did not take too, is NaN in the gradient. verl has the same bound."""


def behavior_ratio(inputs: LossInputs) -> Tensor:
    """Return [T] policy over behavior probability, with grad; beyond `MAX_LOG_RATIO` the bound, without."""
    return torch.exp((inputs.policy_logprobs_T - inputs.behavior_logprobs_T).clamp(max=MAX_LOG_RATIO))


def unit_ratio(inputs: LossInputs) -> Tensor:
    """Return [T] 1 with the gradient of the log-prob: the policy over itself, detached.

    It is the ratio to the trainer's own log-probs of a batch that is trained once. Not finite where the policy is not.
    """
    return torch.exp(inputs.policy_logprobs_T - inputs.policy_logprobs_T.detach())


def clipped_surrogate(ratio_T: Tensor, advantages_T: Tensor, bounds: ClippedRatio) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped objective as a loss, and where clipping took the gradient away.

    -min(r A, clip(r, 1 - low, 1 + high) A)

    Args:
        ratio_T: [T] float. Policy over behavior probability, with grad.
        advantages_T: [T] float.
        bounds: low and high.

    Returns:
        [T] loss, and [T] bool, True where the clipped branch is strictly the smaller one.

    Example: r 1.5, A 1, high 0.2 gives -1.2 and True; r 1.5, A -1 gives 1.5 and False.
    """
    plain_T = ratio_T * advantages_T
    bounded_T = ratio_T.clamp(1 - bounds.clip_eps_low, 1 + bounds.clip_eps_high) * advantages_T
    return -torch.minimum(plain_T, bounded_T), bounded_T < plain_T


def clipped_output(algorithm: ClippedRatio, inputs: LossInputs) -> LossOutput:
    """Return `policy_output` of the surrogate that is clipped token by token; `actor/pg_clipfrac` is logged."""
    ratio_T = behavior_ratio(inputs)
    pg_T, is_clipped_T = clipped_surrogate(ratio_T, inputs.advantages_T, algorithm)
    clipped = mean_metric("actor/pg_clipfrac", is_clipped_T, inputs.trained_mask_T)
    return policy_output(algorithm, inputs, pg_T, ratio_T=ratio_T, metrics=[clipped])


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


def policy_output(
    algorithm: PolicyGradient, inputs: LossInputs, pg_T: Tensor, *, ratio_T: Tensor, metrics: Sequence[Metric] = ()
) -> LossOutput:
    """Return sum_t w_t (pg_t + beta D_t) over the trained tokens, and what is logged of it.

    Args:
        algorithm: beta is its `kl_beta`.
        inputs: Clean inputs; w_t are their token weights.
        pg_T: [T] float. The algorithm's policy term, with grad.
        ratio_T: [T] float. Policy over behavior probability, with grad. D_t is the unbiased KL under the policy that
            drew the tokens, whatever weight or ratio the policy term has.
        metrics: The algorithm's own.

    Raises:
        LossInputError: kl_beta is not 0 and there are no reference log-probs.
    """
    weight_T = inputs.token_weight_T
    metrics = [*metrics, loss_metric("actor/pg_loss", pg_T, weight_T)]
    term_T = pg_T
    if inputs.reference_logprobs_T is not None:
        kl_T = unbiased_kl(ratio_T, inputs.policy_logprobs_T, inputs.reference_logprobs_T)
        metrics.append(loss_metric("actor/kl_loss", kl_T, weight_T))
        term_T = pg_T + algorithm.kl_beta * kl_T
    elif algorithm.kl_beta != 0:
        raise LossInputError(
            f"algo.kl_beta is {algorithm.kl_beta} and there are no reference log-probs; the KL term needs them."
            " Compute them in the step or set algo.kl_beta=0"
        )
    metrics.append(loss_metric("actor/loss", term_T, weight_T))
    # float64, because advantages of a group cancel in the sum.
    loss_T = (weight_T * term_T).double()
    return LossOutput(
        loss=loss_T.sum().to(term_T.dtype),
        metrics=(*metrics, *shared_metrics(inputs)),
        trajectory_loss_N=sum_by_trajectory(inputs, loss_T.detach()),
    )
