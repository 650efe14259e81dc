"""Expert selection in plain torch: sqrt-softplus scores, bias for the choice only, stable ties."""

import torch
from torch import Tensor

from rollforward.kernels.attention.index_topk_ref import stable_top
from rollforward.kernels.rowwise import sigmoid, softplus


def gate_scores_ref(logits_TE: Tensor) -> Tensor:
    """Return sqrt(softplus(logits)). [T, E] float32."""
    return torch.sqrt(softplus(logits_TE))


def gate_scores_backward_ref(logits_TE: Tensor, scores_TE: Tensor, grad_TE: Tensor) -> Tensor:
    """Return the gradient of the logits: sigmoid(logit) / (2 score), 0 where the score has underflowed to 0."""
    slope_TE = sigmoid(logits_TE) / (2.0 * scores_TE)
    return grad_TE * torch.where(scores_TE > 0, slope_TE, 0.0)


def select_experts_ref(scores_TE: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """Return the k experts with the largest score + bias, larger first, the smaller index on ties. int64 [T, K]."""
    return stable_top(scores_TE.detach() + bias_E, k)


def route_weights_ref(scores_TE: Tensor, experts_TK: Tensor, scale: float) -> Tensor:
    """Return score / (sum of the chosen scores + 1e-20) * scale, summed in slot order. [T, K] float32."""
    chosen = scores_TE.gather(1, experts_TK)
    total = chosen[:, :1]
    for slot in range(1, chosen.shape[1]):
        total = total + chosen[:, slot : slot + 1]
    return chosen / (total + 1e-20) * scale
