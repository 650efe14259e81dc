"""Keeping experts equally busy: the sequence-wise balance loss, and the selection bias that follows the load.

Score-routed layers only: a hash layer has nothing to learn. Not here: which layers and when (``routing.py``,
``trainer.py``), what is added to whose loss (``trainer.py``).

Letters: B sequences, T tokens, E experts, K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollforward.kernels.moe.gate import select_experts
from rollforward.kernels.rowwise import row_sum
from rollforward.model.errors import ModelInputError


def sequence_balance_loss(
    scores_TE: Tensor, *, k: int, sequence_lengths: Sequence[int], sequence_weights: Sequence[float]
) -> Tensor:
    """Return the weighted sum of the sequences' balance losses in one layer.

    f_i = E / (K T) x tokens of the sequence that have expert i among their K largest scores
    P_i = mean over the sequence's tokens of score_i / sum_j score_j
    L = sum_i f_i P_i; the loss is sum_s weight_s L_s

    Both f and P are of the scores before the selection bias: the bias balances the load of whole batches, and the loss
    asks the scores themselves to. f counts and has no gradient.

    Args:
        scores_TE: [T, E] float32 (float64 in tests), >= 0, before the bias.
        k: num_experts_per_tok.
        sequence_lengths: tokens of each sequence, end to end; they sum to T.
        sequence_weights: what each sequence's loss counts.

    Returns:
        Scalar with the gradient of the scores. 1 for a sequence of weight 1 that uses all experts alike, E / K where
        all its tokens agree on K experts and score no other.

    Raises:
        ModelInputError: lengths that do not sum to T.

    Invariants: a sequence's part does not depend on the others; value and gradient repeat bit for bit.
    Source: DeepSeek-V3 report, equations 17-20, with DeepSeek-V4's scores.
    """
    num_tokens, num_experts = scores_TE.shape
    if sum(sequence_lengths) != num_tokens:
        raise ModelInputError(
            f"sequence_lengths {list(sequence_lengths)} sum to {sum(sequence_lengths)}, the batch has {num_tokens}"
            " tokens; give the lengths of this batch"
        )
    device = scores_TE.device
    length_B = torch.tensor(sequence_lengths, device=device)
    sequence_T = torch.repeat_interleave(length_B)
    experts_TK = select_experts(scores_TE.float(), torch.zeros(num_experts, device=device), k=k)
    flat_TK = (sequence_T * num_experts).unsqueeze(1) + experts_TK
    count_BE = torch.bincount(flat_TK.flatten(), minlength=len(length_B) * num_experts).view(-1, num_experts)
    length_B1 = length_B.to(scores_TE.dtype).unsqueeze(1)
    load_BE = count_BE.to(scores_TE.dtype) * num_experts / (k * length_B1)
    # As in the weights of the chosen experts: where all scores have underflowed, 0 / 0 must not reach the loss.
    share_TE = scores_TE / (row_sum(scores_TE) + 1e-20)
    if scores_TE.is_cuda:  # whose index_add adds in an order that changes
        sum_BE = torch.stack([part_NE.sum(0) for part_NE in share_TE.split(list(sequence_lengths))])
    else:
        sum_BE = scores_TE.new_zeros(count_BE.shape).index_add(0, sequence_T, share_TE)
    mean_BE = sum_BE / length_B1
    loss_B = row_sum(load_BE * mean_BE).squeeze(1)
    return (loss_B * torch.tensor(sequence_weights, dtype=scores_TE.dtype, device=device)).sum()


@torch.no_grad()
def updated_bias(bias_E: Tensor, load_E: Tensor, *, speed: float) -> Tensor:
    """Return the selection bias after a step: bias + speed x sign(mean load - load).

    Args:
        bias_E: [E] float32.
        load_E: int64 [E], tokens of the whole step that visited each expert. The comparison with the mean is exact, so
            every rank that knows the total moves its bias alike.
        speed: > 0; DeepSeek-V4 pre-trains with 1e-3.

    Returns:
        [E] float32; an expert with exactly the mean load keeps its bias, and so do all where nothing was routed.

    Raises:
        ModelInputError: counts of another type or number.

    Example: loads 3, 1, 2 have mean 2: the first bias falls, the second rises, the third stays.
    Source: DeepSeek-V3 report, auxiliary-loss-free load balancing.
    """
    if load_E.dtype != torch.int64 or load_E.shape != bias_E.shape:
        raise ModelInputError(
            f"load_E is {load_E.dtype} {list(load_E.shape)} for a bias of {list(bias_E.shape)}; give one int64 count"
            " for each expert"
        )
    direction_E = torch.sign(load_E.sum() - load_E * load_E.numel())
    return bias_E + direction_E.to(bias_E.dtype) * speed
