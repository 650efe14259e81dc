"""Log-probability of a token and entropy from hidden states, in plain torch: one chunk of logits at a time, dropped
before the next is made.

Letters: T tokens, N tokens of a chunk, V vocabulary, D width.
"""

import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear_ref import ROW_TILE, row_linear_ref
from rollforward.kernels.loss.logprob_ref import token_logprob_ref


def linear_token_logprob_ref(
    hidden_TD: Tensor, head_VD: Tensor, token_T: Tensor, temperature: float, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return `token_logprob_ref` of the logits hidden @ head.T, [T] each.

    A chunk has `chunk_tokens` tokens, rounded up to a tile of 16.
    """
    chunk = -(-chunk_tokens // ROW_TILE) * ROW_TILE
    logprob_T, entropy_T = hidden_TD.new_empty((2, len(token_T)))
    for rows_N in torch.arange(len(token_T), device=token_T.device).split(chunk):
        logprob_T[rows_N], entropy_T[rows_N] = token_logprob_ref(
            row_linear_ref(hidden_TD[rows_N], head_VD), token_T[rows_N], temperature
        )
    return logprob_T, entropy_T
