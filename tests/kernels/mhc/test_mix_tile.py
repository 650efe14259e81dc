"""`mix` on a GPU: its tile form against float64 and the reference, and against itself.

Sizes cross the rounds of 16 tokens, more of them than a group has at a time, and the 2048 tokens of a part of the
projection's gradient; a row has the columns of two to 28 blocks. Not proven here: entries one by one
(test_mix_entries.py), speed.
"""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different
from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter, mhc_head, mhc_post
from rollforward.kernels.mhc.mix_ref import mhc_head_ref, mhc_mix_ref, mhc_post_ref, mhc_pre_ref
from rollforward.kernels.norm.rms_norm_ref import rms_norm_ref
from tests.helpers.kernel_kit import near, repeats, rows_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

WIDTHS = (512, 1024, 2304, 4096, 7168)
SETTINGS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    dispatch.warm([one for D in WIDTHS for one in mix_sweep.programs(D, 20)], jobs=16)
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
    """Into a sublayer whose output adds to its input, across, and out of a second; outputs and all gradients."""
    dtype = torch.bfloat16 if ours else torch.float64
    rows = rows.to(given["f"].device)
    wide = torch.float32 if ours else torch.float64
    leaves = {name: given[name].to(dtype)[rows].requires_grad_() for name in ("streams", "f")}
    leaves |= {name: given[name].to(wide).clone().requires_grad_() for name in ("fn", "base", "scale", "norm")}
    numbers = tuple(leaves[name] for name in ("fn", "base", "scale", "norm"))
    enter, across, leave = (mhc_enter, mhc_across, mhc_post) if ours else (_enter, _across, mhc_post_ref)
    entered, post, comb = enter(leaves["streams"], *numbers, **SETTINGS)
    sublayer = leaves["f"] + entered
    streams, again, *weights = across(sublayer, leaves["streams"], post, comb, *numbers, **SETTINGS)
    out = leave(leaves["f"] + again, streams, *weights)
    grads = torch.autograd.grad(out, list(leaves.values()), given["grad"].to(dtype)[rows])
    named = {"entered": entered, "post": post, "comb": comb, "streams": streams, "again": again, "out": out}
    return {name: one.detach() for name, one in named.items()} | {
        f"grad_{name}": one for name, one in zip(leaves, grads, strict=True)
    }


def _enter(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, **settings: float) -> list[Tensor]:
    pre, post, comb = mhc_mix_ref(streams, fn, base, scale, **settings)
    return [rms_norm_ref(mhc_pre_ref(streams, pre), norm, settings["norm_eps"]), post, comb]


def _across(
    f: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *numbers: Tensor, **settings: float
) -> list[Tensor]:
    streams = mhc_post_ref(f, streams, post, comb)
    return [streams, *_enter(streams, *numbers, **settings)]


BOUNDS = {"entered": 3e-3, "post": 3e-6, "comb": 3e-6, "streams": 4e-3, "again": 8e-3, "out": 8e-3, "grad_scale": 1e-1}
"""Rounding to bfloat16 is 2^-9 at most; the gates themselves are float32 to the end, and what is after the first way
out is of streams that were rounded. The gradient of scale is three sums over tokens whose terms cancel: of few tokens
rounding alone moves it by 3 %; test_mix_grad_tile.py bounds it by the terms."""


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 65, 1025, 2050])
def test_a_site_in_float64(D, count):
    given = problem(D, count)
    mine, exact = site(given, torch.arange(count)), site(given, torch.arange(count), ours=False)
    for name in exact:
        near(mine[name], exact[name], BOUNDS.get(name, 2e-2))  # gradients pass through six roundings to bfloat16


@pytest.mark.parametrize("D", WIDTHS)
def test_a_site_repeats_and_its_rows_are_their_own(D):
    run = functools.partial(site, problem(D, 1100))
    repeats(run, 1100)
    rows_alone(run, 1100, ("entered", "post", "comb", "streams", "again", "out", "grad_streams", "grad_f"))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_small_and_large_streams(scale):
    given = problem(512, 70, scale)
    mine, exact = site(given, torch.arange(70)), site(given, torch.arange(70), ours=False)
    for name in ("entered", "post", "comb", "streams", "out"):
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


def _way(given: dict[str, Tensor]) -> mix_sweep.Way:
    return mix_sweep.Way(*(given[name] for name in ("fn", "base", "scale", "norm")), 20, 1e-6, 1e-6)


def test_what_a_way_in_leaves_for_its_gradients():
    given = problem(2304, 65)
    x = given["streams"].flatten(1)
    into = mix_sweep.entered(x)
    mix_sweep.enter_into(x, _way(given), mix_sweep.exchange(65, 2304, x.device), into)
    streams = x.double()
    near(into.raw[:, :24], streams @ given["fn"].double().t(), 5e-6)
    near(into.weights[:, 24], (streams.square().mean(1) + 1e-6).rsqrt(), 1e-6)
    merged = mhc_pre_ref(streams.unflatten(1, (4, -1)), into.weights[:, :4].double())
    near(into.weights[:, 25], (merged.square().mean(1) + 1e-6).rsqrt(), 1e-6)


@pytest.mark.parametrize(("rest", "bound"), [(1e-1, 3e-3), (1e-2, 1e-2)])
def test_streams_that_cancel(rest, bound):
    """The mean square of a merged row is summed from products of the streams, of which little may be left."""
    given = problem(4096, 33)
    one = torch.randn(33, 4096, device="cuda")
    streams = torch.stack([one, -one, one, -one], 1) + rest * torch.randn(33, 4, 4096, device="cuda")
    site = {**given, "fn": torch.zeros_like(given["fn"]), "base": torch.zeros_like(given["base"])}
    numbers = tuple(site[name] for name in ("fn", "base", "scale", "norm"))
    mine = mhc_enter(streams.bfloat16(), *numbers, **SETTINGS)[0]
    near(mine, _enter(streams.bfloat16().double(), *(one.double() for one in numbers), **SETTINGS)[0], bound)


def test_garbage_beside_the_rows_and_in_memory_is_inert():
    given = problem(512, 65)
    x, f = given["streams"].flatten(1), given["f"]
    before = torch.full((65, 32), float("nan"), device="cuda")
    before[:, 4:24] = torch.rand(65, 20, device="cuda")
    results = []
    for filler in (0.0, float("nan")):
        into = mix_sweep.Entered(*(torch.full_like(one, filler) for one in mix_sweep.entered(x)))
        streams = torch.full_like(x, filler)
        mix_sweep.across_into(f, x, before, _way(given), mix_sweep.exchange(65, 512, x.device), streams, into)
        results.append({"streams": streams, "raw": into.raw[:, :24], "weights": into.weights[:, :26], "y": into.y})
    assert different(*results) == []
    assert all(torch.isfinite(one).all() for one in results[1].values())


def test_launches_share_what_blocks_tell_each_other():
    """Ways in, across and of the head, of many tokens and few, one after another: nothing is cleared between them."""
    given = problem(1024, 700)
    x, f, way = given["streams"].flatten(1), given["f"], _way(given)
    head = mix_sweep.Way(way.fn[:4].contiguous(), way.base[:4], way.scale[:1], None, 1, 1e-6, 1e-6)
    before = torch.rand(700, 32, device="cuda")
    shared, first = mix_sweep.exchange(700, 1024, x.device), {}
    for turn in range(40):
        count = (700, 1, 33, 16, 555)[turn % 5]
        between = shared if turn >= 5 else mix_sweep.exchange(count, 1024, x.device)
        into, streams, merged = mix_sweep.entered(x[:count]), torch.empty_like(x[:count]), mix_sweep.entered(x[:count])
        mix_sweep.across_into(f[:count], x[:count], before[:count], way, between, streams, into)
        mix_sweep.enter_into(streams, head, between, merged)
        mix_sweep.enter_into(streams, way, between, into)
        found = {"streams": streams, "weights": into.weights[:, :26], "y": into.y, "merged": merged.y}
        assert different(first.setdefault(count, found), found) == []


def test_streams_at_once_and_graphs_beside_them():
    """Ops on two streams, and a graph that is replayed on a third meanwhile: nobody hears what is not for him."""
    given = problem(1024, 700)
    numbers = tuple(given[name] for name in ("fn", "base", "scale", "norm"))

    def run(count: int) -> Outputs:
        entered = mhc_enter(given["streams"][:count], *numbers, **SETTINGS)
        across = mhc_across(given["f"][:count], given["streams"][:count], *entered[1:], *numbers, **SETTINGS)
        return dict(zip("abcdefg", (*entered, *across), strict=True))

    counts = 700, 1, 33, 555
    expected = {count: run(count) for count in counts}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(33)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for one in streams:
        one.wait_stream(torch.cuda.current_stream())
    found: list[tuple[int, Outputs]] = []
    for turn in range(40):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                count = counts[turn % 4]
                found.append((count, run(count)))
        with torch.cuda.stream(streams[2]):
            graph.replay()
    torch.cuda.synchronize()
    assert all(different(expected[count], outputs) == [] for count, outputs in found)
    assert different(expected[33], captured) == []


def test_graphs():
    given = problem(4096, 64)
    x, f, way = given["streams"].flatten(1), given["f"], _way(given)
    before = torch.rand(64, 32, device="cuda")
    between, into, streams = mix_sweep.exchange(64, 4096, x.device), mix_sweep.entered(x), torch.empty_like(x)
    operands = f, x, before, way, between, streams, into
    mix_sweep.across_into(*operands)
    torch.cuda.synchronize()
    expected = {"streams": streams.clone(), "y": into.y.clone()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            mix_sweep.across_into(*operands)
    for _ in range(20):
        streams.fill_(0)
        into.y.fill_(0)
        graph.replay()
    assert different(expected, {"streams": streams, "y": into.y}) == []


def test_weights_are_taken_where_they_lie_or_copied():
    given = problem(512, 40)
    numbers = tuple(given[name] for name in ("fn", "base", "scale", "norm"))
    _, post, comb = mhc_enter(given["streams"], *numbers, **SETTINGS)
    straight = mhc_across(given["f"], given["streams"], post, comb, *numbers, **SETTINGS)
    copied = mhc_across(given["f"], given["streams"], post.clone(), comb.clone(), *numbers, **SETTINGS)
    part = mhc_across(given["f"][5:9], given["streams"][5:9], post[5:9], comb[5:9], *numbers, **SETTINGS)
    wide = mhc_across(given["f"].float(), given["streams"], post, comb, *numbers, **SETTINGS)
    for one, two, three, four in zip(straight, copied, part, wide, strict=True):
        assert different({"": one}, {"": two}) == different({"": one[5:9]}, {"": three}) == []
        assert different({"": one}, {"": four}) == []


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
