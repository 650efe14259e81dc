"""Public op: unbiased rounding to BF16, the same bits wherever and in whatever pieces a step is computed."""

import torch
from torch import Tensor

from rollforward.kernels.checks import check_dtype
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.optim.stochastic_round_ref import MAX_ELEMENTS, key_words, stochastic_round_bf16_ref


@torch.no_grad()
def stochastic_round_bf16(x: Tensor, *, key: tuple[int, ...]) -> Tensor:
    """Round each element to one of the two BF16 neighbours, with probabilities that make the mean exact.

    Args:
        x: any shape, float32: one logical matrix, the unit that is never cut. Element i in row-major order takes the
            i-th random number of the key, so strides do not matter.
        key: numbers that name this rounding, as run seed, step, micro-batch, matrix. Other numbers, or the same in
            another order, give independent roundings.

    Returns:
        bfloat16, x's shape. Exact values, both zeros and infinities are unchanged, NaN stays NaN. A finite value
        beyond the largest BF16 (3.39e38) becomes that one, never infinity: the only rounding with a bias.

    Raises:
        DtypeError: x is not float32.
        ShapeError: x has more than 2^33 elements, where the counter would repeat.

    Invariants: deterministic, the same on every machine and for every thread count. Needs 1 MB beyond the result (and a
    copy of x where it is not contiguous). No gradient.
    Example: 1 + 2^-9 lies a quarter of the way from 1 to its neighbour 1 + 2^-7: so comes out in 3 of 4 keys as 1.
    """
    check_dtype("stochastic_round_bf16", "x", x, torch.float32)
    if x.numel() > MAX_ELEMENTS:
        raise ShapeError(
            f"stochastic_round_bf16: x has {x.numel()} elements; random numbers repeat after {MAX_ELEMENTS}. "
            "Round its parts under keys of their own."
        )
    return stochastic_round_bf16_ref(x.contiguous().view(-1), key_words(key)).view(x.shape)
