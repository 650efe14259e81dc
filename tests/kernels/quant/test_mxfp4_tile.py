"""`mxfp4` on a GPU: the bytes of its tile form are those of the reference, whatever the weights hold."""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different, same_bits
from rollforward.kernels.errors import DtypeError, NonFiniteError, ShapeError
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.kernels.quant.mxfp4 import mxfp4_quantise, mxfp4_quantise_counted, mxfp4_quantise_fp8
from rollforward.kernels.quant.mxfp4_ref import mxfp4_quantise_ref, mxfp4_to_fp8_ref
from tests.helpers.kernel_kit import repeats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

R, K = 256, 384


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    dispatch.warm(mxfp4_sweep.programs(R, K), jobs=8)
    dispatch.choose({"mxfp4": "tile"})
    yield
    dispatch.choose({})


def weights(kind: str, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn((3, R, K), generator=generator)
    if kind == "spread":  # groups far below their block's largest, some of which come out as zeros
        w = w * torch.exp2(torch.randint(-40, 1, (3, R, K // 32, 1), generator=generator).float()).expand(
            3, R, K // 32, 32
        ).flatten(2)
    elif kind == "grid":  # ties and exact values of the grid
        steps = torch.randint(-26, 27, (3, R, K), generator=generator).float() / 4
        w = steps * torch.exp2(torch.randint(-5, 5, (3, R, 1), generator=generator).float())
    elif kind == "small":  # subnormal floats and those near them
        w = w * torch.exp2(torch.randint(-149, -120, (3, R, K), generator=generator).float())
    elif kind == "large":
        w = w.clamp(-1, 1) * 2.0**127
        w = w.clamp(-6 * 2.0**125, 6 * 2.0**125)
    elif kind == "zeros":
        w[0] = 0
        w[1, :128, :128] = -0.0
        w[2, 5] = 0
    return w


@pytest.mark.parametrize("kind", ["normal", "spread", "grid", "small", "large", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_bytes_are_the_references(kind, dtype, turned):
    w = weights(kind).to(dtype)
    packed, scale, clamped = mxfp4_quantise_ref(w.float())
    payload, block_scale, lossy = mxfp4_to_fp8_ref(packed, scale)
    assert lossy == 0
    mine = mxfp4_quantise_fp8(w.cuda(), turned=turned)
    assert same_bits(mine.packed.cpu(), packed)
    assert same_bits(mine.scale.cpu(), scale)
    assert same_bits(mine.payload.cpu(), payload)
    assert same_bits(mine.block_scale.cpu(), block_scale)
    assert mine.clamped_groups == clamped
    assert (mine.payload_turned is None) == (not turned)
    if mine.payload_turned is not None:
        assert same_bits(mine.payload_turned.cpu(), payload.view(torch.uint8).mT.contiguous().view(payload.dtype))
    assert same_bits(mxfp4_quantise(w.cuda())[0].cpu(), packed)
    assert mxfp4_quantise_counted(w.cuda())[2] == clamped


def test_repeats_and_matrices_alone():
    w = weights("spread").cuda()

    def run(rows: Tensor) -> Outputs:
        out = mxfp4_sweep.outputs(len(rows), R, K, w.device, fp8=True, turned=True)
        mxfp4_sweep.quantise_into(w[rows.to(w.device)], out, fp8=True, turned=True)
        return {name: one.view(torch.uint8) for name, one in out._asdict().items()}

    repeats(run, 3)
    whole = run(torch.arange(3))
    for one in range(3):
        assert different({name: part[one : one + 1] for name, part in whole.items()}, run(torch.tensor([one]))) == []


def test_memory_is_written_whole():
    w = weights("normal").cuda()
    results = []
    for garbage in (0, 255):
        out = mxfp4_sweep.outputs(3, R, K, w.device, fp8=True, turned=True)
        for one in out:
            one.view(torch.uint8).fill_(garbage)
        mxfp4_sweep.quantise_into(w, out, fp8=True, turned=True)
        results.append({name: one.view(torch.uint8) for name, one in out._asdict().items()})
    assert different(*results) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38])
def test_a_weight_that_is_not_finite_is_named(bad):
    w = weights("normal").cuda()
    w[1, 77, 200] = bad
    with pytest.raises(NonFiniteError, match=r"at \[1, 77, 200\]"):
        mxfp4_quantise(w)


def test_what_the_tile_form_does_not_take_is_named():
    with pytest.raises(DtypeError, match="w is float16"):
        mxfp4_quantise(torch.zeros(128, 128, device="cuda", dtype=torch.float16))
    with pytest.raises(ShapeError, match="R of w, in the tile form, is 100"):
        mxfp4_quantise(torch.zeros(100, 128, device="cuda"))
    assert functools.reduce(int.__mul__, mxfp4_quantise(torch.zeros(0, R, K, device="cuda"))[0].shape) == 0
