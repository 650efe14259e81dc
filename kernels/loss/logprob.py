"""Log-probability of the drawn token: the one function that sampler and trainer both call (docs/design.md, P3)."""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_shapes
from rollforward.kernels.loss.logprob_ref import token_logprob_backward_ref, token_logprob_ref


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, token_T, temperature):
        ctx.save_for_backward(logits_TV, token_T)
        ctx.temperature = temperature
        return token_logprob_ref(logits_TV, token_T, temperature)

    @staticmethod
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        logits_TV, token_T = ctx.saved_tensors
        grad = token_logprob_backward_ref(logits_TV, token_T, ctx.temperature, grad_logprob_T, grad_entropy_T)
        return grad, None, None


def token_logprob(logits_TV: Tensor, token_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's token and the row's entropy.

    log p = z/T at the token - max(z/T) - log(sum exp(z/T - max)), summed in token-id order

    Args:
        logits_TV: [T, V] float32; -inf marks tokens outside a kept set.
        token_T: int64 [T], the drawn or target token, inside the kept set.
        temperature: > 0.

    Returns:
        logprob_T (<= 0) and entropy_T (nats, >= 0 up to rounding), float32.

    Invariants: row-invariant forward; padding the vocabulary with -inf changes no bit.
    Source: docs/design.md, P3.
    """
    check_shapes("token_logprob", logits_TV=logits_TV, token_T=token_T)
    return _TokenLogprob.apply(logits_TV, token_T, temperature)
