"""`mxfp4` on a GPU: the bytes of its tile form are those of the reference, whatever the weights hold."""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different, same_bits
from rollforward.kernels.errors import DtypeError, NonFiniteError, ScaleRangeError, ShapeError
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.kernels.quant.formats import pack_nibbles
from rollforward.kernels.quant.mxfp4 import (
    fake_quant_mxfp4,
    mxfp4_canonicalise,
    mxfp4_clamped_groups,
    mxfp4_dequantise,
    mxfp4_quantise,
    mxfp4_quantise_counted,
    mxfp4_quantise_fp8,
    mxfp4_to_fp8,
    mxfp4_to_fp8_turned,
)
from rollforward.kernels.quant.mxfp4_ref import (
    fake_quant_mxfp4_ref,
    mxfp4_dequantise_ref,
    mxfp4_quantise_ref,
    mxfp4_to_fp8_ref,
)
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


def packed_weights(kind: str, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any codes under scales of a kind: all bytes that are numbers, or such as one block of FP8 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, R, K), generator=generator).to(torch.uint8)
    if kind == "zeros":
        codes[0] = 0
        codes[1, :128, :128] = 8  # -0
        codes[2, 5, :64] = 0
    low, high = {"any": (0, 255), "small": (0, 9), "large": (250, 255), "near": (115, 140)}.get(kind, (120, 130))
    return pack_nibbles(codes), torch.randint(low, high, (3, R, K // 32), generator=generator).to(torch.uint8)


def same_numbers(mine: Tensor, expected: Tensor) -> bool:
    """Whether two tensors hold the same bits but for what a NaN holds."""
    assert mine.dtype == expected.dtype
    assert torch.equal(mine.isnan(), expected.isnan())
    return same_bits(mine.nan_to_num(nan=7.0, posinf=1e30, neginf=-1e30), expected.nan_to_num(7.0, 1e30, -1e30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["any", "small", "large", "zeros"])
def test_values_are_the_references(kind, dtype):
    packed, scale = packed_weights(kind)
    scale[1, 3, 2] = 255
    expected = mxfp4_dequantise_ref(packed, scale).to(dtype)
    mine = mxfp4_dequantise(packed.cuda(), scale.cuda(), dtype=dtype)
    assert same_numbers(mine.cpu(), expected)
    assert mine[1, 3, 64:96].isnan().all()


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (257, 32), (2, 3, 7, 160), (0, 64)])
def test_values_of_any_number_of_groups(shape):
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed, scale = pack_nibbles(codes), codes[..., ::32] + 100
    for dtype in (torch.float32, torch.bfloat16):
        mine = mxfp4_dequantise(packed.cuda(), scale.cuda(), dtype=dtype)
        assert same_bits(mine.cpu(), mxfp4_dequantise_ref(packed, scale).to(dtype))


@pytest.mark.parametrize("kind", ["any", "small", "large", "near", "zeros", "published"])
def test_fp8_from_fp4_is_the_references(kind):
    if kind == "published":
        packed, scale, _ = mxfp4_quantise_ref(weights("spread"))
    else:
        packed, scale = packed_weights(kind)
    payload, block_scale, lossy = mxfp4_to_fp8_ref(packed, scale)
    assert (lossy > 0) == (kind in ("any", "near"))
    on_device = packed.cuda(), scale.cuda()
    for mine in (mxfp4_to_fp8(*on_device), mxfp4_to_fp8_turned(*on_device)):
        assert same_bits(mine[0].cpu(), payload)
        assert same_bits(mine[-2].cpu(), block_scale)
        assert mine[-1] == lossy
    turned = mxfp4_to_fp8_turned(*on_device)[1].cpu()
    assert same_bits(turned, payload.view(torch.uint8).mT.contiguous().view(payload.dtype))
    if lossy:
        with pytest.raises(ScaleRangeError, match=f"{lossy} groups of 32"):
            mxfp4_to_fp8(*on_device, strict=True)
    on_device[1][2, 200, 7] = 255
    with pytest.raises(ScaleRangeError, match="holds byte 255"):
        mxfp4_to_fp8(*on_device)


@pytest.mark.parametrize("kind", ["normal", "spread", "grid", "small", "zeros"])
def test_fake_quantised_values_are_the_references(kind):
    w = weights(kind)
    leaf = w.cuda().requires_grad_()
    mine = fake_quant_mxfp4(leaf)
    assert same_bits(mine.detach().cpu(), fake_quant_mxfp4_ref(w))
    upstream = torch.randn(w.shape, device="cuda")
    assert same_bits(torch.autograd.grad(mine, leaf, upstream)[0], upstream)
    packed, scale, clamped = mxfp4_quantise_ref(w)
    assert mxfp4_clamped_groups(leaf) == clamped
    if clamped:
        with pytest.raises(ScaleRangeError, match=f"{clamped} groups of 32"):
            mxfp4_quantise(leaf, strict=True)
    expected = mxfp4_quantise_ref(mxfp4_dequantise_ref(packed, scale))[:2]
    for one, other in zip(mxfp4_canonicalise(packed.cuda(), scale.cuda()), expected, strict=True):
        assert same_bits(one.cpu(), other)


def test_operands_on_the_cpu_come_back():
    w = weights("normal")
    packed, scale = mxfp4_quantise(w)
    results = [packed, scale, *mxfp4_quantise_fp8(w, turned=True)[:5], mxfp4_dequantise(packed, scale)]
    results += [*mxfp4_to_fp8_turned(packed, scale)[:3], fake_quant_mxfp4(w)]
    assert all(one is not None and one.device.type == "cpu" for one in results)
    assert same_bits(packed, mxfp4_quantise_ref(w)[0])


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_has_it_whole():
    packed, scale = (one.cuda() for one in packed_weights("near"))

    def half(packed: Tensor, scale: Tensor) -> Tensor:
        return mxfp4_dequantise(packed, scale, dtype=torch.bfloat16) * 0.5

    assert same_bits(torch.compile(half, fullgraph=True)(packed, scale), half(packed, scale))
    for op, arguments in [
        (mxfp4_sweep.dequantise, (packed, scale, torch.float32)),
        (mxfp4_sweep.to_fp8, (packed, scale, True)),
        (mxfp4_sweep.quantise, (weights("normal").cuda(), True, False)),
    ]:
        torch.library.opcheck(op, arguments)


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
