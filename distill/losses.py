"""The losses of distillation: rows of one micro-batch and one teacher in, loss with grad and what is logged out.

The loss is the sum over rows of weight x divergence. The weights come from `rl/batch.py` and the teachers' shares, one
set for the whole step, so micro-batches are added, never averaged. Not here: the divergences (`kernels/loss/`), rows
and teachers (learner.py).

Letters: R trained rows of a micro-batch, N its trajectories, V vocabulary, D width of the student, E of the teacher.
"""

from typing import assert_never

import msgspec
import torch
from torch import Tensor

from rollforward.distill.config import DistillLoss, ForwardKL, JensenShannon, ReverseKL, SampledToken
from rollforward.kernels.checks import check_shapes
from rollforward.kernels.loss.divergence import forward_kl, jensen_shannon
from rollforward.kernels.loss.reverse_kl import reverse_kl
from rollforward.kernels.loss.sampled_kl import sampled_kl
from rollforward.model.metrics import Metric
from rollforward.rl.losses.base import loss_metric, mean_metric


class DistillInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything a loss sees of one micro-batch: row r of each [R] tensor speaks of the same target token.

    A row of weight 0 may hold anything in every other tensor but `trajectory_R`.
    """

    teacher: str
    """Name of the one teacher of all rows."""
    hidden_RD: Tensor
    """[R, D] float32 with grad. The vector that the student's head reads."""
    head_VD: Tensor
    """[V, D] float32 with grad. The student's head."""
    teacher_hidden_RE: Tensor
    """[R, E] any floating dtype. The vector that the teacher's head reads, after the same tokens."""
    teacher_head_VE: Tensor
    """[V, E] any floating dtype. The teacher's head."""
    teacher_logprobs_R: Tensor
    """[R] float32. Log-prob of the target by the teacher, at temperature 1."""
    token_ids_R: Tensor
    """[R] int64. The target: the token that the student sampled."""
    row_weight_R: Tensor
    """[R] float32. Share of the row in the step's loss, the teacher's weight included."""
    trajectory_R: Tensor
    """[R] int64. Index in [0, N) of the trajectory that the row belongs to."""
    num_trajectories: int
    """N."""


class DistillOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The value to go backward from, and what to log."""

    loss: Tensor
    """Scalar with grad. This micro-batch's part of the step's loss: parts are added, never averaged."""
    value_R: Tensor
    """[R] detached, nats. The divergence of each row; of `sampled_token` its estimate k1. 0 where the weight is 0."""
    trajectory_loss_N: Tensor
    """[N] float64, detached. Each trajectory's part of the loss, to name the worst ones."""
    metrics: tuple[Metric, ...]
    """Detached numbers with their denominators."""


def distill_loss(config: DistillLoss, inputs: DistillInputs) -> DistillOutput:
    """Return a micro-batch's part of the loss that the run asks for.

    Logged: `opd/loss`, and for each measure that is at hand its mean over the rows whose weight is not 0, as
    `opd/MEASURE` and, for the one teacher, `opd/MEASURE_by_teacher/NAME`. Measures: `kl`, the exact KL(student ||
    teacher); `forward_kl`, the exact KL(teacher || student); `jensen_shannon`; and `k1`, the sampled estimate of `kl`.

    Args:
        config: the loss. inputs: the rows.

    Raises:
        ShapeError, DtypeError: tensors that do not fit together.

    Invariants: values and the gradient of `hidden_RD` of a row keep their bits whatever the other rows are; never more
    than a chunk of rows has logits at one time.
    """
    fields = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    check_shapes("distill_loss", **{name: one for name, one in fields.items() if isinstance(one, Tensor)})
    loss, measures = _loss_of(config, inputs)
    value_R = next(iter(measures.values()))
    weight_R = inputs.row_weight_R.detach()
    has_weight_R = weight_R != 0
    metrics = [loss_metric("opd/loss", value_R, weight_R)]
    for measure, values_R in measures.items():
        metrics.append(mean_metric(f"opd/{measure}", values_R, has_weight_R))
        metrics.append(mean_metric(f"opd/{measure}_by_teacher/{inputs.teacher}", values_R, has_weight_R))
    part_R = (weight_R * value_R).double()
    by_trajectory_N = part_R.new_zeros(inputs.num_trajectories).index_add(0, inputs.trajectory_R, part_R)
    return DistillOutput(loss=loss, value_R=value_R, trajectory_loss_N=by_trajectory_N, metrics=tuple(metrics))


def _loss_of(config: DistillLoss, inputs: DistillInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and each measure [R], that of the loss first."""
    heads = inputs.hidden_RD, inputs.head_VD, inputs.teacher_hidden_RE, inputs.teacher_head_VE
    match config:
        case ReverseKL():
            loss, value_R = reverse_kl(*heads, inputs.row_weight_R)
            return loss, {"kl": value_R}
        case ForwardKL():
            loss, value_R = forward_kl(*heads, inputs.row_weight_R)
            return loss, {"forward_kl": value_R}
        case JensenShannon(beta=beta):
            loss, value_R = jensen_shannon(*heads, inputs.row_weight_R, beta=beta)
            return loss, {"jensen_shannon": value_R}
        case SampledToken(baseline=baseline):
            return _sampled_token(inputs, with_baseline=baseline)
        case _:
            assert_never(config)


def _sampled_token(inputs: DistillInputs, *, with_baseline: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient on the log-ratio; the baseline is the exact KL of the row, which then is logged too.

    The loss is sum_r w_r k1_r, an unbiased estimate of the reverse KL's, as its gradient is; see `sampled_kl`.
    """
    exact: dict[str, Tensor] = {}
    if with_baseline:
        with torch.no_grad():
            _, exact["kl"] = reverse_kl(
                inputs.hidden_RD, inputs.head_VD, inputs.teacher_hidden_RE, inputs.teacher_head_VE, inputs.row_weight_R
            )
    loss, ratio_R = sampled_kl(
        inputs.hidden_RD,
        inputs.head_VD,
        inputs.token_ids_R,
        inputs.teacher_logprobs_R,
        inputs.row_weight_R,
        baseline_T=exact.get("kl"),
    )
    return loss, {"k1": ratio_R, **exact}
