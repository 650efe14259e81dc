"""Cases of `mxfp4` for `kernels/bench.py`: 16 expert matrices of V4-Flash, 134 million weights."""

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.bench import Case, Outputs
from rollforward.kernels.quant import mxfp4_sweep

E, R, K = 16, 2048, 4096


def _peers(w: Tensor, *, fp8: bool) -> dict[str, Callable[[], object]]:
    """tile-kernels' cast to FP4, where it is installed; it makes no FP8 in the same pass."""
    if fp8 or importlib.util.find_spec("tile_kernels") is None:
        return {}
    cast = importlib.import_module("tile_kernels.quant.per_token_cast_kernel").per_token_cast
    flat = w.view(-1, K)
    return {"tile-kernels": lambda: cast(flat, "e2m1", num_per_channels=32, round_sf=True)}


def _case(dtype: torch.dtype, *, fp8: bool, turned: bool) -> Case:
    w = torch.randn(E, R, K, device="cuda").mul_(0.02).to(dtype)

    whole = mxfp4_sweep.outputs(E, R, K, w.device, fp8=fp8, turned=turned)

    def run() -> Outputs:
        mxfp4_sweep.quantise_into(w, whole, fp8=fp8, turned=turned)
        return {"packed": whole.packed[0], "scale": whole.scale[0]}

    def of_first(span: slice) -> Outputs:  # a matrix computed alone; a block's rows have no meaning alone
        out = mxfp4_sweep.outputs(1, R, K, w.device, fp8=fp8, turned=turned)
        mxfp4_sweep.quantise_into(w[:1], out, fp8=fp8, turned=turned)
        return {"packed": out.packed[0, span], "scale": out.scale[0, span]}

    written = w.numel() * (1 / 2 + 1 / 32 + (1 if fp8 else 0) + (1 if turned else 0))
    name = f"mxfp4 {str(dtype).removeprefix('torch.')} to FP4{' and FP8' * fp8}{', also turned' * turned}, {E}x{R}x{K}"
    return Case(name, 0, w.nbytes + written, run, of_first, _peers(w, fp8=fp8), mxfp4_sweep.programs(R, K))


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


cases = [fp32_fp4_fp8, fp32_fp4_fp8_turned, fp32_fp4, bf16_fp4]
