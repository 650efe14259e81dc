"""Log-probability of the drawn token and entropy from hidden states: `token_logprob` of a head's logits, which never
exist for more than a chunk of tokens."""

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob_ref import linear_logprob_backward_ref, linear_logprob_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, token_T, temperature):
        ctx.save_for_backward(hidden_TD, head_VD, token_T)
        ctx.temperature = temperature
        return linear_logprob_ref(hidden_TD, head_VD, token_T, temperature, chunk_tokens=CHUNK_TOKENS)

    @staticmethod
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        hidden, head = linear_logprob_backward_ref(
            *ctx.saved_tensors,
            ctx.temperature,
            grad_logprob_T,
            grad_entropy_T,
            chunk_tokens=CHUNK_TOKENS,
            needs_hidden=needs_hidden,
            needs_head=needs_head,
        )
        return hidden, head, None, None


class _LinearLogprobTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, token_T, temperature):
        logprob_T, entropy_T = hidden_TD.new_empty((2, len(token_T)), dtype=torch.float32)
        space = vocab_sweep.workspace(*head_VD.shape, hidden_TD.device, teacher=False)
        vocab_sweep.logprob_into(hidden_TD, head_VD, token_T, 1.0 / temperature, logprob_T, entropy_T, space)
        ctx.save_for_backward(hidden_TD, head_VD, token_T)
        ctx.temperature = temperature
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        hidden_TD, head_VD, token_T = ctx.saved_tensors
        space = vocab_sweep.workspace(*head_VD.shape, hidden_TD.device, teacher=False)
        grads = [
            torch.zeros(one.shape, dtype=torch.float32, device=one.device) if need else None
            for one, need in zip((hidden_TD, head_VD), ctx.needs_input_grad, strict=False)
        ]
        vocab_sweep.logprob_gradients_into(
            hidden_TD,
            head_VD,
            token_T,
            1.0 / ctx.temperature,
            grad_logprob_T,
            grad_entropy_T,
            *grads,
            space,
            adds=False,
        )
        return *grads, None, None


def linear_logprob(hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's token and the row's entropy, from hidden states and a head.

        z = h W / temperature;  log p = z at the token - log sum exp z;  entropy = -sum p log p
        dz = a (onehot - p) - b p (log p + entropy), a and b being the gradients of the two

    Args:
        hidden_TD: [T, D] float32 or float64; the tile form: bfloat16. Gets a gradient.
        head_VD: [V, D] of the same dtype. Gets a gradient.
        token_T: int64 [T], the drawn or target token.
        temperature: > 0.

    Returns:
        logprob_T (<= 0) and entropy_T (nats, >= 0 up to rounding), float32 in the tile form.

    Raises:
        ShapeError: letters disagree. DtypeError: a dtype is none of these.

    Invariants: logits are made twice, for the value and for the gradient, a chunk of tokens at a time, and are float32
    in both forms. A row's values and its gradient of the hidden state are row-invariant; the head's gradient sums over
    tokens in a fixed order. Rows whose two gradients are 0 are not looked at by the gradient, whatever they hold.
    Source: docs/design.md, P3.
    """
    bind_shapes("linear_logprob", hidden_TD=(hidden_TD, "T D"), head_VD=(head_VD, "V D"), token_T=(token_T, "T"))
    if dispatch.is_tile("linear_logprob"):
        vocab_sweep.check_operands("linear_logprob", hidden_TD=hidden_TD, head_VD=head_VD)
        return _LinearLogprobTile.apply(hidden_TD, head_VD, token_T.int(), temperature)
    check_dtype("linear_logprob", "hidden_TD", hidden_TD, torch.float32, torch.float64)
    check_dtype("linear_logprob", "head_VD", head_VD, hidden_TD.dtype)
    return _LinearLogprob.apply(hidden_TD, head_VD, token_T, temperature)
