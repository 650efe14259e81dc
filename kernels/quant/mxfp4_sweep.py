"""MXFP4 weights on a GPU: the one launch that reads them, the memory of what it writes, and the operators of torch.

Here: launches, memory, operators. Not here: the programs (`mxfp4_tile`), the public ops (`mxfp4`). Nothing here waits
for the device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.operators import operator

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
    """[E, R, K] float8_e4m3fn, or [0]."""
    turned: Tensor
    """[E, K, R] float8_e4m3fn, or [0]."""
    block_scale: Tensor
    """[E, R/128, K/128] uint8, or [0]."""


def takes(R: int, K: int) -> bool:
    """Whether there are programs for weights of this shape: whole blocks."""
    return R % BLOCK == 0 and K % BLOCK == 0


def programs(R: int, K: int) -> list[Program]:
    """Return what weights of this shape run: from either dtype, to FP4 alone, with FP8, and with FP8 turned; and from
    FP4 to either dtype, and to FP8 and with FP8 turned."""
    return [
        *(
            _program(R, K, bf16=bf16, fp8=fp8, turned=turned)
            for bf16 in (False, True)
            for fp8, turned in ((False, False), (True, False), (True, True))
        ),
        *(_dequantise_program(bf16=bf16) for bf16 in (False, True)),
        *(_to_fp8_program(R, K, turned=turned) for turned in (False, True)),
    ]


def _program(R: int, K: int, *, bf16: bool, fp8: bool, turned: bool) -> Program:
    return program("quant.mxfp4_tile", "quantise", R=R, K=K, bf16=bf16, fp8=fp8, turned=turned)


def _dequantise_program(*, bf16: bool) -> Program:
    return program("quant.mxfp4_tile", "dequantise", bf16=bf16)


def _to_fp8_program(R: int, K: int, *, turned: bool) -> Program:
    return program("quant.mxfp4_tile", "to_fp8", R=R, K=K, turned=turned)


@functools.cache
def _dequantise_launcher(bf16: bool) -> Callable[..., None]:
    return bind(_dequantise_program(bf16=bf16))


@functools.cache
def _to_fp8_launcher(R: int, K: int, turned: bool) -> Callable[..., None]:
    return bind(_to_fp8_program(R, K, turned=turned))


@functools.cache
def _launcher(R: int, K: int, bf16: bool, fp8: bool, turned: bool) -> Callable[..., None]:
    return bind(_program(R, K, bf16=bf16, fp8=fp8, turned=turned))


def outputs(E: int, R: int, K: int, device: torch.device, *, fp8: bool, turned: bool) -> Quantised:
    """Allocate what `quantise_into` writes."""
    make = functools.partial(torch.empty, device=device)
    return Quantised(
        packed=make((E, R, K // 2), dtype=torch.uint8),
        scale=make((E, R, K // GROUP), dtype=torch.uint8),
        raised=make((E, R // BLOCK, K // BLOCK), dtype=torch.int32),
        payload=make((E, R, K) if fp8 else 0, dtype=torch.float8_e4m3fn),
        turned=make((E, K, R) if turned else 0, dtype=torch.float8_e4m3fn),
        block_scale=make((E, R // BLOCK, K // BLOCK) if fp8 else 0, dtype=torch.uint8),
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
    if not len(w_ERK):
        return
    launch = _launcher(*w_ERK.shape[1:], w_ERK.dtype == torch.bfloat16, fp8, turned)
    packed, scale = out.packed.view(torch.uint32), out.scale
    payload = out.payload.view(torch.uint32) if fp8 else _one(packed)
    back = out.turned.view(torch.uint32) if turned else _one(packed)
    launch(w_ERK, packed, scale, out.raised, payload, back, out.block_scale if fp8 else _one(scale))


def _one(some: Tensor) -> Tensor:
    """What stands for an argument that a program does not look at: [1, 1, 1] of what is there."""
    return some.view(-1)[:1].view(1, 1, 1)


def dequantise_into(packed: Tensor, scale: Tensor, numbers: Tensor) -> None:
    """Write the values of packed weights.

    Args:
        packed: [..., K/2] int8, contiguous, K a multiple of 32.
        scale: [..., K/32] uint8, contiguous.
        numbers: [..., K] float32 or bfloat16, contiguous, written.

    Invariants: as `mxfp4_dequantise_ref`; may be captured in a CUDA graph.
    """
    groups, bf16 = scale.numel(), numbers.dtype == torch.bfloat16
    if groups:
        words = packed.view(torch.uint32 if bf16 else torch.uint16).view(groups, -1)
        _dequantise_launcher(bf16)(words, scale.view(-1), numbers.view(groups, GROUP))


class Converted(NamedTuple):
    """MXFP4 weights [E, R, K] as block FP8."""

    payload: Tensor
    """[E, R, K] float8_e4m3fn."""
    turned: Tensor
    """[E, K, R] float8_e4m3fn, or [0]."""
    block_scale: Tensor
    """[E, R/128, K/128] uint8."""
    lost: Tensor
    """[E, R/128, K/128] int32: groups of the block that are not reproduced exactly; -1: a scale is NaN."""


def converted(E: int, R: int, K: int, device: torch.device, *, turned: bool) -> Converted:
    """Allocate what `to_fp8_into` writes."""
    make = functools.partial(torch.empty, device=device)
    return Converted(
        payload=make((E, R, K), dtype=torch.float8_e4m3fn),
        turned=make((E, K, R) if turned else 0, dtype=torch.float8_e4m3fn),
        block_scale=make((E, R // BLOCK, K // BLOCK), dtype=torch.uint8),
        lost=make((E, R // BLOCK, K // BLOCK), dtype=torch.int32),
    )


def to_fp8_into(packed_ERH: Tensor, scale_ERJ: Tensor, out: Converted, *, turned: bool) -> None:
    """Write what `converted` with the same setting allocated.

    Args:
        packed_ERH: [E, R, K/2] int8, contiguous, R and K multiples of 128.
        scale_ERJ: [E, R, K/32] uint8, contiguous.
        out: what is written.
        turned: also turned.

    Invariants: bytes as of `mxfp4_to_fp8_ref`; may be captured in a CUDA graph.
    """
    if len(packed_ERH):
        payload = out.payload.view(torch.uint32)
        back = out.turned.view(torch.uint32) if turned else _one(payload)
        launch = _to_fp8_launcher(packed_ERH.shape[1], 2 * packed_ERH.shape[2], turned)
        launch(packed_ERH.view(torch.uint32), scale_ERJ, payload, back, out.block_scale, out.lost)


def _run_quantise(w, fp8, turned):
    out = outputs(*w.shape, w.device, fp8=fp8, turned=turned)
    quantise_into(w, out, fp8=fp8, turned=turned)
    return tuple(out)


def _run_dequantise(packed, scale, dtype):
    numbers = _shape_dequantise(packed, scale, dtype)
    dequantise_into(packed, scale, numbers)
    return numbers


def _shape_dequantise(packed, scale, dtype):
    del scale
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


def _run_to_fp8(packed, scale, turned):
    out = converted(packed.shape[0], packed.shape[1], 2 * packed.shape[2], packed.device, turned=turned)
    to_fp8_into(packed, scale, out, turned=turned)
    return tuple(out)


quantise = operator(
    "mxfp4_quantise(Tensor w, bool fp8, bool turned) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_quantise,
    lambda w, fp8, turned: tuple(outputs(*w.shape, w.device, fp8=fp8, turned=turned)),
)
"""`quantise_into` what it allocates: the fields of `Quantised`."""

dequantise = operator(
    "mxfp4_dequantise(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor", _run_dequantise, _shape_dequantise
)
"""`dequantise_into` what it allocates."""

to_fp8 = operator(
    "mxfp4_to_fp8(Tensor packed, Tensor scale, bool turned) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_to_fp8,
    lambda packed, scale, turned: tuple(
        converted(packed.shape[0], packed.shape[1], 2 * packed.shape[2], packed.device, turned=turned)
    ),
)
"""`to_fp8_into` what it allocates: the fields of `Converted`."""
