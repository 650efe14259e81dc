"""Log-probability of the drawn token and entropy, in plain torch, vocabulary in tiles of 64 from left to right."""

import torch
from torch import Tensor

from rollforward.kernels.rowwise import row_sum


def log_normaliser_ref(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row maximum and log(sum exp(z - max)), both [T, 1] float32."""
    top_T1 = logits_TV.amax(-1, keepdim=True)
    return top_T1, torch.log(row_sum(torch.exp(logits_TV - top_T1)))


def token_logprob_ref(logits_TV: Tensor, token_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-softmax(logits / temperature) at the token and the entropy in nats, [T] float32 each."""
    scaled_TV = logits_TV / temperature
    top_T1, log_sum_T1 = log_normaliser_ref(scaled_TV)
    shifted_TV = scaled_TV - top_T1
    logprob_T1 = shifted_TV.gather(1, token_T.unsqueeze(1)) - log_sum_T1
    probs_TV = torch.exp(shifted_TV - log_sum_T1)
    mean_T1 = row_sum(torch.where(probs_TV > 0, probs_TV * shifted_TV, 0.0))
    return logprob_T1.squeeze(1), (log_sum_T1 - mean_T1).squeeze(1)


def token_logprob_backward_ref(
    logits_TV: Tensor, token_T: Tensor, temperature: float, grad_logprob_T: Tensor, grad_entropy_T: Tensor
) -> Tensor:
    """Return the gradient of the logits: (g (onehot - p) - h p (log p + entropy)) / temperature."""
    log_probs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    probs_TV = torch.exp(log_probs_TV)
    grad_TV = probs_TV * -grad_logprob_T.unsqueeze(1)
    grad_TV.scatter_add_(1, token_T.unsqueeze(1), grad_logprob_T.unsqueeze(1))
    if bool((grad_entropy_T != 0).any()):
        finite_log = torch.where(probs_TV > 0, log_probs_TV, 0.0)
        entropy_T1 = -(probs_TV * finite_log).sum(-1, keepdim=True)
        grad_TV -= grad_entropy_T.unsqueeze(1) * probs_TV * (finite_log + entropy_T1)
    return grad_TV / temperature
