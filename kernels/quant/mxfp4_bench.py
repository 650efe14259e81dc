"""Cases of `mxfp4` for `kernels/bench.py`: 16 expert matrices of V4-Flash, 134 million weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.bench import Case, Outputs, peer
from rollforward.kernels.quant import mxfp4_sweep

E, R, K = 16, 2048, 4096

TIMES = 10
"""How often a case does it, so that the host is ahead of the device."""


def _peers(w: Tensor, *, fp8: bool) -> dict[str, Callable[[], object]]:
    """tile-kernels' cast to FP4, where it is installed; it makes no FP8 in the same pass."""
    theirs = None if fp8 else peer("tile_kernels.quant.per_token_cast_kernel")
    if theirs is None:
        return {}
    flat = w.view(-1, K)

    def run() -> None:
        for _ in range(TIMES):
            theirs.per_token_cast(flat, "e2m1", num_per_channels=32, round_sf=True)

    return {"tile-kernels": run}


def _case(dtype: torch.dtype, *, fp8: bool, turned: bool) -> Case:
    w = torch.randn(E, R, K, device="cuda").mul_(0.02).to(dtype)

    whole = mxfp4_sweep.outputs(E, R, K, w.device, fp8=fp8, turned=turned)

    def run() -> Outputs:
        for _ in range(TIMES):
            mxfp4_sweep.quantise_into(w, whole, fp8=fp8, turned=turned)
        return {"packed": whole.packed[0], "scale": whole.scale[0]}

    def of_first(span: slice) -> Outputs:  # a matrix computed alone; a block's rows have no meaning alone
        out = mxfp4_sweep.outputs(1, R, K, w.device, fp8=fp8, turned=turned)
        mxfp4_sweep.quantise_into(w[:1], out, fp8=fp8, turned=turned)
        return {"packed": out.packed[0, span], "scale": out.scale[0, span]}

    written = w.numel() * (1 / 2 + 1 / 32 + (1 if fp8 else 0) + (1 if turned else 0))
    name = f"mxfp4 {str(dtype).removeprefix('torch.')} to FP4{' and FP8' * fp8}{', also turned' * turned}, {E}x{R}x{K}"
    return Case(name, 0, w.nbytes + written, run, of_first, _peers(w, fp8=fp8), mxfp4_sweep.programs(R, K), TIMES)


def fp32_fp4_fp8() -> Case:
    """The master weights to both formats."""
    return _case(torch.float32, fp8=True, turned=False)


def fp32_fp4_fp8_turned() -> Case:
    """The same, and FP8 for the products of the backward pass."""
    return _case(torch.float32, fp8=True, turned=True)


def fp32_fp4() -> Case:
    """The master weights to FP4."""
    return _case(torch.float32, fp8=False, turned=False)


def bf16_fp4() -> Case:
    """BF16 to FP4, which tile-kernels makes too."""
    return _case(torch.bfloat16, fp8=False, turned=False)


def _packed() -> tuple[Tensor, Tensor]:
    codes = torch.randint(-128, 128, (E, R, K // 2), device="cuda", dtype=torch.int8)
    return codes, torch.randint(115, 128, (E, R, K // 32), device="cuda", dtype=torch.uint8)


def _unpack(dtype: torch.dtype) -> Case:
    packed, scale = _packed()
    numbers = torch.empty(E, R, K, device="cuda", dtype=dtype)

    def run() -> Outputs:
        for _ in range(TIMES):
            mxfp4_sweep.dequantise_into(packed, scale, numbers)
        return {"numbers": numbers[0]}

    def of_first(span: slice) -> Outputs:
        out = torch.empty_like(numbers[0, span])
        mxfp4_sweep.dequantise_into(packed[0, span], scale[0, span], out)
        return {"numbers": out}

    def fill_output() -> object:
        return [numbers.fill_(1.0) for _ in range(TIMES)]

    read = packed.nbytes + scale.nbytes
    name = f"mxfp4 FP4 to {str(dtype).removeprefix('torch.')}, {E}x{R}x{K}"
    fill = {"fill of the output": fill_output}
    return Case(name, 0, read + numbers.nbytes, run, of_first, fill, mxfp4_sweep.programs(R, K), TIMES)


def _convert(*, turned: bool) -> Case:
    packed, scale = _packed()
    whole = mxfp4_sweep.converted(E, R, K, packed.device, turned=turned)

    def run() -> Outputs:
        for _ in range(TIMES):
            mxfp4_sweep.to_fp8_into(packed, scale, whole, turned=turned)
        return {"payload": whole.payload[0]}

    def of_first(span: slice) -> Outputs:
        out = mxfp4_sweep.converted(1, R, K, packed.device, turned=turned)
        mxfp4_sweep.to_fp8_into(packed[:1], scale[:1], out, turned=turned)
        return {"payload": out.payload[0, span]}

    read = packed.nbytes + scale.nbytes
    name = f"mxfp4 FP4 to FP8{', also turned' * turned}, {E}x{R}x{K}"
    written = whole.payload.nbytes * (2 if turned else 1)
    return Case(name, 0, read + written, run, of_first, {}, mxfp4_sweep.programs(R, K), TIMES)


def fp4_fp32() -> Case:
    """FP4 to the numbers that a trainer's product reads."""
    return _unpack(torch.float32)


def fp4_bf16() -> Case:
    """FP4 to BF16."""
    return _unpack(torch.bfloat16)


def fp4_fp8() -> Case:
    """Published weights to block FP8."""
    return _convert(turned=False)


def fp4_fp8_turned() -> Case:
    """The same, and FP8 for the products of the backward pass."""
    return _convert(turned=True)


cases = [
    *(fp32_fp4_fp8, fp32_fp4_fp8_turned, fp32_fp4, bf16_fp4),
    *(fp4_fp32, fp4_bf16, fp4_fp8, fp4_fp8_turned),
]
