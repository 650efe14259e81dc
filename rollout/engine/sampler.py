"""Drawing tokens: every draw is keyed by the request's seed and the token's position, so it can be made again anywhere.

token = argmax_v (z_v / T + g_v), g_v = -log(-log(u_v)), u_v a hash of (seed, position, v): the Gumbel form of sampling
from softmax(z / T). It needs no sum over the vocabulary, hence no order of summation. Temperature 0 takes the largest
logit. Ties go to the smaller id. Top-k and top-p cut the vocabulary first; the set that is left is recorded, and the
log-prob is that of the distribution over it.

Not here: log-probs (kernels/loss/logprob.py, the function that the trainer calls too).
"""

import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.attention.index_topk_ref import stable_top
from rollforward.rollout.types import KeptSets

_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit integer
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
_UNIFORM_BITS = 23
_MASS_BITS = 40


def signed_seed(seed: int) -> int:
    """Return the two's-complement int64 of a 64-bit seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def keyed_uniform(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """Return uniforms in (0, 1) for every token of the vocabulary.

    Args:
        seed_B: int64 [B], from ``signed_seed``. position_B: int64 [B], position of the token to be drawn.
        vocab_size: V.

    Returns:
        [B, V] float32, multiples of 2^-24 strictly between 0 and 1.

    Invariants: integer arithmetic (SplitMix64); the same on every machine and for every batch.
    """
    state_B1 = _mix(seed_B + _GOLDEN * (position_B + 1)).unsqueeze(1)
    bits_BV = _mix(state_B1 + _GOLDEN * (torch.arange(vocab_size) + 1))
    return (_shift_right(bits_BV, 64 - _UNIFORM_BITS).float() + 0.5) * 2.0**-_UNIFORM_BITS


def scaled_logits(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Return logits / temperature, [B, V] float32; the logits themselves where the temperature is 0 (greedy)."""
    return logits_BV / torch.where(temperature_B == 0, 1.0, temperature_B).unsqueeze(1)


def kept_mask(scaled_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Return which tokens each row may draw: of its top_k most likely ones the fewest that hold top_p of their mass.

    Args:
        scaled_BV: [B, V] float32, from ``scaled_logits``.
        top_p_B: [B] float64, in (0, 1]; 1 keeps all that top_k keeps.
        top_k_B: int64 [B], >= 0; 0 keeps all.

    Returns:
        bool [B, V]; every row keeps at least its most likely token. Of equal tokens the smaller ids are kept first.

    Invariants: row-invariant: masses are summed as integers, multiples of 2^-40 of the largest one.
    """
    vocab_size = scaled_BV.shape[1]
    order_BV = stable_top(scaled_BV, vocab_size)
    rank_V = torch.arange(vocab_size)
    kept_BV = (rank_V < top_k_B.unsqueeze(1)) | (top_k_B == 0).unsqueeze(1)
    weight_BV = torch.exp(scaled_BV - scaled_BV.amax(1, keepdim=True)).nan_to_num(0.0).gather(1, order_BV)
    mass_BV = torch.where(kept_BV, (weight_BV.double() * 2.0**_MASS_BITS).round().long(), 0)
    before_BV = mass_BV.cumsum(1) - mass_BV
    enough_B = top_p_B.double() * mass_BV.sum(1)
    kept_BV &= (before_BV < enough_B.unsqueeze(1)) | (top_p_B == 1).unsqueeze(1)
    kept_BV[:, 0] = True
    return torch.zeros_like(kept_BV).scatter_(1, order_BV, kept_BV)


def kept_sets(mask_BV: Tensor) -> KeptSets:
    """Return the sets of a mask, bool [B, V], one per row; a full row counts as 0, the whole vocabulary."""
    is_whole_B = mask_BV.all(1)
    counts_B = torch.where(is_whole_B, 0, mask_BV.sum(1))
    ids = torch.nonzero(mask_BV & ~is_whole_B.unsqueeze(1))[:, 1]
    return KeptSets(counts_T=counts_B.numpy().astype(np.int32), token_ids=ids.numpy().astype(np.int32))


def cut_vocabulary(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor
) -> tuple[Tensor, KeptSets | None]:
    """Exclude what top-k and top-p leave out; draw from the result and take its log-probs.

    Args:
        logits_BV: [B, V] float32. temperature_B: [B] float32, >= 0; 0 is greedy.
        top_p_B: [B] float64. top_k_B: int64 [B]. See ``kept_mask``.

    Returns:
        Logits with -inf outside each row's set, and the sets; (the logits as they are, None) when no row asks for a
        cut.
    """
    if bool(((top_p_B == 1) & (top_k_B == 0)).all()):
        return logits_BV, None
    mask_BV = kept_mask(scaled_logits(logits_BV, temperature_B), top_p_B, top_k_B)
    return logits_BV.masked_fill(~mask_BV, -torch.inf), kept_sets(mask_BV)


def draw_tokens(logits_BV: Tensor, seed_B: Tensor, position_B: Tensor, temperature_B: Tensor) -> Tensor:
    """Draw one token per row.

    Args:
        logits_BV: [B, V] float32; -inf excludes a token.
        seed_B, position_B: int64 [B], the key of the draw.
        temperature_B: [B] float32, >= 0; 0 is greedy.

    Returns:
        int64 [B].

    Invariants: a row's token depends on its own logits, key and temperature alone.
    """
    greedy_B1 = (temperature_B == 0).unsqueeze(1)
    gumbel_BV = -torch.log(-torch.log(keyed_uniform(seed_B, position_B, logits_BV.shape[1])))
    noisy_BV = scaled_logits(logits_BV, temperature_B) + gumbel_BV
    return stable_top(torch.where(greedy_B1, logits_BV, noisy_BV), 1).squeeze(1)
