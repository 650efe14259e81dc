"""Log-probability of a token and entropy from hidden states: `token_logprob` of a head's logits, of which no more than
a chunk of tokens exist at one time."""

import torch
from torch import Tensor

from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.loss.linear_logprob_ref import linear_logprob_ref
from rollforward.kernels.loss.sweep import CHUNK_TOKENS


def linear_token_logprob(
    hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor, *, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's token and the row's entropy, without gradient.

    Args:
        hidden_TD: [T, D] float32 or float64, the vector that the head multiplies.
        head_VD: [V, D] of the same dtype.
        token_T: int64 [T], the drawn or target token.
        temperature: divides the logits, > 0.
        chunk_tokens: >= 1. Memory is chunk_tokens * V numbers and a few temporaries of that size, whatever T.

    Returns:
        logprob_T (<= 0) and entropy_T (nats, >= 0 up to rounding), of the dtype of the hidden states.

    Raises:
        ShapeError: letters disagree. DtypeError: a dtype is none of these.

    Invariants: bit-equal to `token_logprob(row_linear(hidden_TD, head_VD), token_T)`; chunk, order and the other rows
    have no say.
    Source: docs/design.md, P3.
    """
    bind_shapes("linear_token_logprob", hidden_TD=(hidden_TD, "T D"), head_VD=(head_VD, "V D"), token_T=(token_T, "T"))
    check_dtype("linear_token_logprob", "hidden_TD", hidden_TD, torch.float32, torch.float64)
    check_dtype("linear_token_logprob", "head_VD", head_VD, hidden_TD.dtype)
    check_dtype("linear_token_logprob", "token_T", token_T, torch.int64)
    with torch.no_grad():
        return linear_logprob_ref(hidden_TD, head_VD, token_T, temperature, chunk_tokens=chunk_tokens)
