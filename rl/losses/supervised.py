"""The loss of supervised fine-tuning: the negative log-likelihood of right answers.

Targets and weights come from `rl/conversations.py`; policies that learn from scores have their losses beside this file.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes
from rollforward.rl.losses.base import LossOutput, mean_metric


def supervised_loss(
    policy_logprobs_T: Tensor, trained_mask_T: Tensor, token_weight_T: Tensor, sequence_lengths: Sequence[int]
) -> LossOutput:
    """Return -sum_t w_t log p_t over the trained tokens of one micro-batch.

    Args:
        policy_logprobs_T: [T] float, with grad. Log-prob of each target.
        trained_mask_T: [T] bool. True where the target is learnt; elsewhere the other two may hold anything.
        token_weight_T: [T] float. Share of the target in the step's loss; over the whole step they sum to 1.
        sequence_lengths: of the N conversations, which lie end to end; they sum to T.

    Returns:
        The loss in the policy's dtype: 0 and connected to the graph where nothing is trained. Metrics: `train/loss` per
        token weight and `train/nll` per token. Each conversation's part of the loss.

    Raises:
        ShapeError: lengths differ.
    """
    bind_shapes(
        "supervised_loss",
        policy_logprobs_T=(policy_logprobs_T, "T"),
        trained_mask_T=(trained_mask_T, "T"),
        token_weight_T=(token_weight_T, "T"),
    )
    nll_T = -torch.where(trained_mask_T, policy_logprobs_T, 0)
    weight_T = torch.where(trained_mask_T, token_weight_T.detach(), 0)
    metrics = (
        mean_metric("train/loss", nll_T, weight_T, per="token_weight"),
        mean_metric("train/nll", nll_T, trained_mask_T),
    )
    weighted_T = (weight_T * nll_T).double()
    sequence_N = torch.stack([part.sum() for part in weighted_T.detach().split(list(sequence_lengths))])
    return LossOutput(loss=weighted_T.sum().to(nll_T.dtype), metrics=metrics, trajectory_loss_N=sequence_N)
