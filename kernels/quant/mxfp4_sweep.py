"""MXFP4 weights on a GPU: the one launch that reads them, and the memory of what it writes.

Here: launches and memory. Not here: the program (`mxfp4_tile`), the public ops (`mxfp4`). Nothing here waits for the
device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.dispatch import Program, bind, program

BLOCK, GROUP = 128, 32
"""As in `mxfp4_tile`: a block's side, and the elements of one scale."""


class Quantised(NamedTuple):
    """Weights [E, R, K] in MXFP4 and, where asked for, the same values in block FP8."""

    packed: Tensor
    """[E, R, K/2] uint8: the low half of a byte is the even column."""
    scale: Tensor
    """[E, R, K/32] uint8."""
    raised: Tensor
    """[E, R/128, K/128] int32: groups of the block whose scale was raised; -1: a weight is not finite."""
    payload: Tensor
    """[E, R, K] float8_e4m3fn, or [1, 1, 4]."""
    turned: Tensor
    """[E, K, R] float8_e4m3fn, or [1, 1, 4]."""
    block_scale: Tensor
    """[E, R/128, K/128] uint8, or [1, 1, 1]."""


def takes(R: int, K: int) -> bool:
    """Whether there are programs for weights of this shape: whole blocks."""
    return R % BLOCK == 0 and K % BLOCK == 0


def programs(R: int, K: int) -> list[Program]:
    """Return what weights of this shape run: from either dtype, to FP4 alone, with FP8, and with FP8 turned."""
    return [
        _program(R, K, bf16=bf16, fp8=fp8, turned=turned)
        for bf16 in (False, True)
        for fp8, turned in ((False, False), (True, False), (True, True))
    ]


def _program(R: int, K: int, *, bf16: bool, fp8: bool, turned: bool) -> Program:
    return program("quant.mxfp4_tile", "quantise", R=R, K=K, bf16=bf16, fp8=fp8, turned=turned)


@functools.cache
def _launcher(R: int, K: int, bf16: bool, fp8: bool, turned: bool) -> Callable[..., None]:
    return bind(_program(R, K, bf16=bf16, fp8=fp8, turned=turned))


def outputs(E: int, R: int, K: int, device: torch.device, *, fp8: bool, turned: bool) -> Quantised:
    """Allocate what `quantise_into` writes."""
    make = functools.partial(torch.empty, device=device)
    none = (1, 1, 4)
    return Quantised(
        packed=make((E, R, K // 2), dtype=torch.uint8),
        scale=make((E, R, K // GROUP), dtype=torch.uint8),
        raised=make((E, R // BLOCK, K // BLOCK), dtype=torch.int32),
        payload=make((E, R, K) if fp8 else none, dtype=torch.float8_e4m3fn),
        turned=make((E, K, R) if turned else none, dtype=torch.float8_e4m3fn),
        block_scale=make((E, R // BLOCK, K // BLOCK) if fp8 else (1, 1, 1), dtype=torch.uint8),
    )


def quantise_into(w_ERK: Tensor, out: Quantised, *, fp8: bool, turned: bool) -> None:
    """Write what `outputs` with the same settings allocated.

    Args:
        w_ERK: [E, R, K] float32 or bfloat16, contiguous, R and K multiples of 128.
        out: what is written.
        fp8: also payload and block_scale.
        turned: also turned; only with fp8.

    Invariants: bytes as of `mxfp4_quantise_ref` and `mxfp4_to_fp8_ref`; may be captured in a CUDA graph.
    """
    launch = _launcher(*w_ERK.shape[1:], w_ERK.dtype == torch.bfloat16, fp8, turned)
    packed, payload, back = (one.view(torch.uint32) for one in (out.packed, out.payload, out.turned))
    launch(w_ERK, packed, out.scale, out.raised, payload, back, out.block_scale)
