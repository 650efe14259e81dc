"""What every policy loss takes and returns, and the two rules that all of them share.

1. Positions that are not trained may hold anything, NaN and infinity too, in every input: `without_garbage` replaces
   them before any arithmetic, so neither value nor gradient can see them.
2. A loss is the sum over tokens of weight x term. The weights come from `rl/batch.py`, one set for the whole step.

The terms are in `terms.py`, one algorithm a file beside it, and `registry.py` finds an algorithm's loss.

Letters: T packed tokens, N trajectories.
"""

import msgspec
import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes
from rollforward.model.metrics import Metric
from rollforward.rl.batch import PackedBatch
from rollforward.rl.errors import LossInputError

FIXED_POINT = 2.0**32
LOG_RATIO_LIMIT = 1024.0
"""Log-ratios are summed as multiples of 2^-32 and at most 1024 in size: 2^20 tokens of them fit into 62 bits."""


class LossInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything a policy loss sees of one micro-batch; row t of each [T] tensor speaks of the same target token.

    Example: see `PackedBatch`, whose alignment this is; `loss_inputs` makes one from it.
    """

    policy_logprobs_T: Tensor
    """[T] float32 with grad. Log-prob of the target by the forward pass that backward goes through."""
    behavior_logprobs_T: Tensor
    """[T] float32. Log-prob that the engine logged when it drew the target."""
    reference_logprobs_T: Tensor | None = None
    """[T] float32. Log-prob by the frozen reference; None where the algorithm has no KL term."""
    entropy_T: Tensor | None = None
    """[T] float32, nats. Entropy of the policy's distribution, for the log only."""
    advantages_T: Tensor
    """[T] float32. Advantage of the target."""
    trained_mask_T: Tensor
    """[T] bool. True where the target is trained; elsewhere every other tensor may hold anything."""
    token_weight_T: Tensor
    """[T] float32. Share of the target in the step's loss, made for the whole step in `rl/batch.py`."""
    trajectory_T: Tensor
    """[T] int64. Index in [0, N) of the trajectory that the target belongs to."""
    trajectory_tokens_N: Tensor
    """[N] int64. Trained tokens of each whole trajectory, wherever they are."""
    log_ratio_mean_N: Tensor | None = None
    """[N] float64. Mean of behavior minus policy log-prob over the whole trajectory. Only needed where a trajectory's
    tokens lie in several calls: then add up `log_ratio_sums` of all of them first. None computes it from this call."""


class LossOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The value to go backward from, and what to log."""

    loss: Tensor
    """Scalar of the policy's dtype. This micro-batch's part of the step's loss: parts are added, never averaged."""
    metrics: tuple[Metric, ...]
    """Detached numbers with their denominators."""
    trajectory_loss_N: Tensor
    """[N] float64, detached. Each trajectory's part of the loss, to name the worst ones."""


def loss_inputs(
    packed: PackedBatch,
    *,
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> LossInputs:
    """Join a packed micro-batch with what the forward passes computed for it, on the policy tensor's device.

    Args:
        packed: The micro-batch.
        policy_logprobs_T: [T] with grad, row t being the log-prob of `packed.target_ids_T[t]`.
        reference_logprobs_T: [T] likewise, without grad.
        entropy_T: [T], nats.

    Returns:
        The record that `registry.policy_loss` takes.
    """
    device = policy_logprobs_T.device
    return LossInputs(
        policy_logprobs_T=policy_logprobs_T,
        behavior_logprobs_T=torch.tensor(packed.behavior_logprobs_T, device=device),
        reference_logprobs_T=reference_logprobs_T,
        entropy_T=entropy_T,
        advantages_T=torch.tensor(packed.advantages_T, device=device),
        trained_mask_T=torch.tensor(packed.trained_mask_T, device=device),
        token_weight_T=torch.tensor(packed.token_weight_T, device=device),
        trajectory_T=torch.tensor(packed.trajectory_T, dtype=torch.int64, device=device),
        trajectory_tokens_N=torch.tensor(packed.trajectory_tokens_N, dtype=torch.int64, device=device),
    )


def without_garbage(inputs: LossInputs) -> LossInputs:
    """Return the inputs with 0 in every position that is not trained, and everything but the policy detached.

    Raises:
        ShapeError: lengths differ.
        LossInputError: the mask is not boolean.
    """
    named = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    present = {name: tensor for name, tensor in named.items() if tensor is not None}
    bind_shapes("policy_loss", **{name: (tensor, name.rsplit("_", 1)[1]) for name, tensor in present.items()})
    mask_T = inputs.trained_mask_T
    if mask_T.dtype != torch.bool:
        raise LossInputError(f"trained_mask_T is {mask_T.dtype}; it must be bool, because NaN times 0 is NaN")
    cleaned = {
        name: torch.where(mask_T, tensor if name == "policy_logprobs_T" else tensor.detach(), 0)
        for name, tensor in present.items()
        if name.endswith("_T") and name != "trained_mask_T"
    }
    return msgspec.structs.replace(inputs, **cleaned)


def sum_by_trajectory(inputs: LossInputs, values_T: Tensor) -> Tensor:
    """Return [N]: the sum of `values_T` over each trajectory's trained tokens in this call, in the dtype of the
    values."""
    sums_N = torch.zeros(inputs.trajectory_tokens_N.shape, dtype=values_T.dtype, device=values_T.device)
    return sums_N.index_add(0, inputs.trajectory_T, torch.where(inputs.trained_mask_T, values_T, 0))


def log_ratio_sums(inputs: LossInputs) -> Tensor:
    """Return [N] float64, detached: sum of behavior minus policy log-prob over each trajectory's tokens in this call.

    Summed in fixed point, so that a decision made from it is the same bit for every packing, order and device.
    """
    inputs = without_garbage(inputs)
    log_ratio_T = (inputs.behavior_logprobs_T - inputs.policy_logprobs_T.detach()).double()
    fixed_T = (log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) * FIXED_POINT).round().to(torch.int64)
    return sum_by_trajectory(inputs, fixed_T).double() / FIXED_POINT


def log_ratio_means(inputs: LossInputs) -> Tensor:
    """Return [N] float64, detached: mean of behavior minus policy log-prob over each *whole* trajectory.

    Raises:
        LossInputError: part of a trajectory is missing and no mean was handed in.
    """
    if inputs.log_ratio_mean_N is not None:
        return inputs.log_ratio_mean_N.detach().double()
    present_N = sum_by_trajectory(inputs, torch.ones_like(inputs.trajectory_T))
    if not torch.equal(present_N, inputs.trajectory_tokens_N):
        index = int((present_N != inputs.trajectory_tokens_N).nonzero()[0])
        raise LossInputError(
            f"trajectory {index} has {int(inputs.trajectory_tokens_N[index])} trained tokens, of which this call sees"
            f" {int(present_N[index])}; a decision per sequence needs them all. Keep trajectories whole"
            " (rl.packing does), or hand in log_ratio_mean_N from the sums of every part"
        )
    return log_ratio_sums(inputs) / inputs.trajectory_tokens_N.clamp(min=1)


def shared_metrics(inputs: LossInputs) -> tuple[Metric, ...]:
    """Return what is logged for every algorithm: KL to the sampler, entropy, difference to the engine's
    probabilities."""
    policy_T = inputs.policy_logprobs_T.detach()
    tokens_T = inputs.trained_mask_T.double()
    difference_T = probability_difference(policy_T, inputs.behavior_logprobs_T)
    metrics = [
        mean_metric("actor/ppo_kl", inputs.behavior_logprobs_T - policy_T, tokens_T),
        mean_metric("training/rollout_probs_diff_mean", difference_T, tokens_T),
    ]
    if difference_T.numel():
        largest = float(difference_T.max())
        metrics.append(
            Metric(
                name="training/rollout_probs_diff_max",
                numerator=largest,
                denominator=float(tokens_T.sum()),
                per="token",
                reduction="max",
            )
        )
    if inputs.entropy_T is not None:
        metrics.append(mean_metric("actor/entropy", inputs.entropy_T, tokens_T))
    return tuple(metrics)


def probability_difference(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """Return [T] float64: |exp(a) - exp(b)|, 0 only where the log-probs are equal, however close they are and however
    unlikely the tokens."""
    a_T, b_T = logprobs_T.double(), others_T.double()
    # exp(a) and exp(b) themselves round to one number where both are near 1, in float64 too.
    difference_T = torch.maximum(a_T, b_T).exp() * -torch.expm1(-(a_T - b_T).abs())
    smallest = torch.finfo(torch.float64).tiny
    return torch.where(a_T == b_T, 0.0, difference_T.clamp(min=smallest))


def loss_metric(name: str, values_T: Tensor, weights_T: Tensor) -> Metric:
    """Return this call's part of sum_t w_t `values_T`: parts add up to what the step optimises, whatever the weights
    sum to."""
    return msgspec.structs.replace(mean_metric(name, values_T, weights_T, per="token_weight"), reduction="sum")


def mean_metric(name: str, values_T: Tensor, weights_T: Tensor, *, per: str = "token") -> Metric:
    """Return the mean of `values_T` under `weights_T`, both summed in float64; the denominator is the weights' sum."""
    weights_T = weights_T.detach().double()
    numerator = float((values_T.detach().double() * weights_T).sum())
    return Metric(name=name, numerator=numerator, denominator=float(weights_T.sum()), per=per)
