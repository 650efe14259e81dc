"""`mix` on a GPU: its tile form against float64 and the reference, and against itself.

Sizes cross the tiles (128 and 64 tokens), the 2048 tokens of a part of the projection's gradient, and the 2048 columns
that a block takes at once. Not proven here: speed.
"""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different
from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.mhc.mix import mhc_enter, mhc_head, mhc_post
from rollforward.kernels.mhc.mix_ref import mhc_head_ref, mhc_mix_ref, mhc_post_ref, mhc_pre_ref
from rollforward.kernels.norm.rms_norm_ref import rms_norm_ref
from tests.helpers.kernel_kit import near, repeats, rows_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

WIDTHS = (512, 2304)
SETTINGS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    dispatch.warm([one for D in WIDTHS for one in mix_sweep.programs(D, 20)], jobs=8)
    dispatch.choose({"mix": "tile"})
    yield
    dispatch.choose({})


@functools.cache
def problem(D: int, count: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    return {
        "streams": (normal(count, 4, D) * scale).bfloat16(),
        "f": normal(count, D).bfloat16(),
        "fn": normal(24, 4 * D) * (4 * D) ** -0.5,
        "base": normal(24),
        "scale": torch.tensor([0.7, 1.1, 1.6], device="cuda"),
        "norm": normal(D),
        "grad": normal(count, 4, D).bfloat16(),
    }


def site(given: dict[str, Tensor], rows: Tensor, ours: bool = True) -> Outputs:
    """Into a sublayer whose output adds to its input, and out again; outputs and all gradients."""
    dtype = torch.bfloat16 if ours else torch.float64
    rows = rows.to(given["f"].device)
    wide = torch.float32 if ours else torch.float64
    leaves = {name: given[name].to(dtype)[rows].requires_grad_() for name in ("streams", "f")}
    leaves |= {name: given[name].to(wide).clone().requires_grad_() for name in ("fn", "base", "scale", "norm")}
    numbers = leaves["fn"], leaves["base"], leaves["scale"]
    if ours:
        entered, post, comb = mhc_enter(leaves["streams"], *numbers, leaves["norm"], **SETTINGS)
        out = mhc_post(leaves["f"] + entered, leaves["streams"], post, comb)
    else:
        pre, post, comb = mhc_mix_ref(leaves["streams"], *numbers, **SETTINGS)
        entered = rms_norm_ref(mhc_pre_ref(leaves["streams"], pre), leaves["norm"], 1e-6)
        out = mhc_post_ref(leaves["f"] + entered, leaves["streams"], post, comb)
    grads = torch.autograd.grad(out, list(leaves.values()), given["grad"].to(dtype)[rows])
    named = {"entered": entered, "post": post, "comb": comb, "out": out}
    return {name: one.detach() for name, one in named.items()} | {
        f"grad_{name}": one for name, one in zip(leaves, grads, strict=True)
    }


BOUNDS = {"entered": 3e-3, "post": 3e-6, "comb": 3e-6, "out": 4e-3}
"""Rounding to bfloat16 is 2^-9 at most; the gates themselves are float32 to the end."""


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 1025, 2050])
def test_a_site_in_float64(D, count):
    given = problem(D, count)
    mine, exact = site(given, torch.arange(count)), site(given, torch.arange(count), ours=False)
    for name in exact:
        near(mine[name], exact[name], BOUNDS.get(name, 8e-3))  # gradients pass through three roundings to bfloat16


@pytest.mark.parametrize("D", WIDTHS)
def test_a_site_repeats_and_its_rows_are_their_own(D):
    run = functools.partial(site, problem(D, 1100))
    repeats(run, 1100)
    rows_alone(run, 1100, ("entered", "post", "comb", "out", "grad_streams", "grad_f"))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_small_and_large_streams(scale):
    given = problem(512, 70, scale)
    mine, exact = site(given, torch.arange(70)), site(given, torch.arange(70), ours=False)
    for name in ("entered", "post", "comb", "out"):
        near(mine[name], exact[name], BOUNDS[name])
    assert all(torch.isfinite(one).all() for one in mine.values())


def test_columns_of_comb_are_one():
    comb = site(problem(512, 200), torch.arange(200))["comb"]
    near(comb.sum(1), torch.ones(200, 4, device="cuda").double(), 1e-5)


def test_the_head():
    given = problem(2304, 300)
    fn, base, scale = given["fn"][:4].contiguous(), given["base"][:4].contiguous(), given["scale"][:1].contiguous()
    leaves = [given["streams"].clone().requires_grad_(), *(one.clone().requires_grad_() for one in (fn, base, scale))]
    mine = mhc_head(*leaves, eps=1e-6, norm_eps=1e-6)
    exact_leaves = [one.detach().double().requires_grad_() for one in leaves]
    exact = mhc_head_ref(*exact_leaves, eps=1e-6, norm_eps=1e-6)
    near(mine, exact, 3e-3)
    grads = torch.autograd.grad(mine, leaves, given["f"])
    for got, expected in zip(grads, torch.autograd.grad(exact, exact_leaves, given["f"].double()), strict=True):
        near(got, expected, 8e-3)


def test_garbage_beside_the_rows_and_in_memory_is_inert():
    given = problem(512, 65)
    x = given["streams"].flatten(1)
    numbers = mix_sweep.Site(mix_sweep.halves(given["fn"]), given["base"], given["scale"], 20, 1e-6, 1e-6)
    results = []
    for filler in (0.0, float("nan")):
        sums, weights = mix_sweep.slices(x).fill_(filler), torch.full((65, 32), filler, device="cuda")
        y = torch.full((65, 512), filler, device="cuda").bfloat16()
        mix_sweep.enter_into(x, numbers, sums, weights, y, given["f"][0].float())
        results.append({"weights": weights[:, :25].clone(), "y": y})
    assert different(*results) == []
    normed = results[0]["y"].double() / given["f"][0].double()
    near((normed * normed).mean(1), torch.ones(65, device="cuda").double(), 1e-2)


def test_no_tokens():
    mine = site(problem(512, 5), torch.arange(0))
    assert mine["out"].shape == (0, 4, 512)
    assert not mine["grad_fn"].any()


def test_what_the_tile_form_does_not_take_is_named():
    given = problem(512, 5)
    numbers = given["fn"], given["base"], given["scale"], given["norm"]
    with pytest.raises(DtypeError, match="streams_TMD is float32"):
        mhc_enter(given["streams"].float(), *numbers, **SETTINGS)
    with pytest.raises(ShapeError, match="must be a multiple of 256, at least 512"):
        mhc_enter(given["streams"][..., :100], given["fn"][:, :400], *numbers[1:3], given["norm"][:100], **SETTINGS)
