"""Gradients of `mix` on a GPU: the programs against float64 autograd, and against themselves.

What a way in leaves for its gradients is made in float64 here, so nothing of the way in's programs is in these tests.
Sizes cross the rounds of 16 tokens, the tiles of 64 and the 2048 tokens of a part of the projection's gradient; widths
are of one and of several steps, those of Flash and Pro among them. Not proven here: speed.
"""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different
from rollforward.kernels.mhc import mix_grad_sweep
from rollforward.kernels.mhc.mix_ref import mhc_mix_ref, mhc_post_ref, mhc_pre_ref, mix_logits_ref
from rollforward.kernels.mhc.mix_site import COMB, HEAD_ITERS, POST, Site, halves
from rollforward.kernels.rowwise import sigmoid
from tests.helpers.kernel_kit import near_entries, repeats, rows_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

WIDTHS, COUNTS, ITERS, EPS = (512, 1024, 2304, 4096, 7168), (1, 15, 16, 17, 64, 65, 2051), 20, 1e-6
OF_ROWS = "grad_x", "grad_f", "grad_before", "grad_out_weights"


@pytest.fixture(autouse=True, scope="module")
def warm_programs():
    dispatch.warm([one for D in WIDTHS for one in mix_grad_sweep.programs(D, ITERS)], jobs=16)


@functools.cache
def problem(D: int, count: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(count)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    def weights() -> Tensor:
        made = normal(count, 32)
        made[:, POST], made[:, COMB] = made[:, POST].sigmoid() * 2, made[:, COMB].softmax(1) * 4
        return made

    given = {
        "before": normal(count, 4 * D).bfloat16(),
        "f": normal(count, D).bfloat16(),
        "out_weights": weights(),
        "fn": normal(24, 4 * D) * (4 * D) ** -0.5,
        "base": normal(24),
        "scale": torch.tensor([0.7, 1.1, 1.6], device="cuda"),
        "norm": normal(D),
        "g": normal(count, 4 * D).bfloat16(),
        "dy": normal(count, D).bfloat16(),
        "grad_weights": normal(count, 32) * D**0.5,
    }
    given["x"] = _leave(given, given["f"].double(), given["before"].double(), given["out_weights"].double()).bfloat16()
    return given


def _leave(given: dict[str, Tensor], f: Tensor, before: Tensor, weights: Tensor) -> Tensor:
    comb = weights[:, COMB].unflatten(1, (4, 4))
    return mhc_post_ref(f, before.unflatten(1, (4, -1)), weights[:, POST], comb).flatten(1)


def _site(given: dict[str, Tensor], head: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        (given["fn"][:4], given["base"][:4], given["scale"][:1])
        if head
        else (*map(given.get, ("fn", "base", "scale")),)
    )


def _weights(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """The weights of a way in: [N, 24], or pre alone [N, 4] of the head."""
    streams = x.unflatten(1, (4, -1))
    if len(base) == 4:
        return sigmoid(mix_logits_ref(streams, fn, EPS) * scale[0] + base[:, None]).t() + EPS
    pre, post, comb = mhc_mix_ref(streams, fn, base, scale, iters=ITERS, eps=EPS, norm_eps=EPS)
    return torch.cat([pre, post, comb.flatten(1)], 1)


def exact(given: dict[str, Tensor], head: bool) -> Outputs:
    """Gradients by float64 autograd: of the way in at the streams as they are, then of the way out."""
    names = ("x", "fn", "base", "scale", "norm")
    x, fn, base, scale, norm = leaves = [
        one.double().requires_grad_() for one in (given["x"], *_site(given, head), given["norm"])
    ]
    weights = _weights(x, fn, base, scale)
    y = mhc_pre_ref(x.unflatten(1, (4, -1)), weights[:, :4])
    y = y / (y.square().mean(1, keepdim=True) + EPS).sqrt() * norm if not head else y + 0 * norm
    mixing = (weights * given["grad_weights"][:, : weights.shape[1]].double())[:, 4:]
    loss = (y * given["dy"].double()).sum() + mixing.sum() + (x * given["g"].double()).sum()
    grads = dict(zip([f"grad_{name}" for name in names], torch.autograd.grad(loss, leaves), strict=True))
    outs = [given[name].double().requires_grad_() for name in ("f", "before", "out_weights")]
    of_outs = torch.autograd.grad(_leave(given, *outs), outs, grads["grad_x"])
    return grads | dict(zip(("grad_f", "grad_before", "grad_out_weights"), of_outs, strict=True))


@functools.cache
def kept(D: int, count: int, head: bool) -> tuple[Tensor, Tensor]:
    """What the way in leaves, of all rows at once: raw and weights [N, 32], NaN where nothing is to be read."""
    given = problem(D, count)
    x, (fn, base, scale) = given["x"].double(), _site(given, head)
    raw, weights = (torch.full((count, 32), float("nan"), device="cuda") for _ in range(2))
    raw[:, : len(fn)] = x @ fn.double().t()
    weights[:, : len(fn)] = _weights(x, fn.double(), base.double(), scale.double())
    weights[:, 24] = (x.square().mean(1) + EPS).rsqrt()
    return raw, weights


def ours(D: int, count: int, rows: Tensor, *, head: bool, across: bool, sums: bool = True) -> Outputs:
    given = problem(D, count)
    rows = rows.to("cuda")
    fn, base, scale = _site(given, head)
    site = Site(halves(fn), base.contiguous(), scale.contiguous(), HEAD_ITERS if head else ITERS, EPS, EPS)
    raw, weights = (one[rows] for one in kept(D, count, head))
    x, dy, g, grad_weights = (given[name][rows] for name in ("x", "dy", "g", "grad_weights"))
    norm = None if head else given["norm"]
    if not across:
        grads = mix_grad_sweep.enter_backward_into(x, dy, site, raw, weights, grad_weights, g, norm, sums=sums)
        made = {"grad_x": g}
    else:
        f, before, out_weights = (given[name][rows] for name in ("f", "before", "out_weights"))
        spaces = [torch.full_like(one, float("nan")) for one in (f, before, out_weights)]
        out = mix_grad_sweep.Out(f, before, out_weights, *spaces)
        grads = mix_grad_sweep.across_backward_into(g, out, x, dy, site, raw, weights, grad_weights, norm, sums=sums)
        made = dict(zip(OF_ROWS[1:], spaces, strict=True))
    return made | {f"grad_{name}": one for name, one in grads._asdict().items() if one is not None}


FORMS = [{"head": False, "across": False}, {"head": False, "across": True}, {"head": True, "across": False}]
OF_STREAMS, OF_SUMS = (4e-3, 5e-4), (0.0, 5e-4)
"""Bounds of an entry's error, of the entry and of its row's root mean square. What is written in bfloat16 is rounded
once, by 2^-8 at most; what is multiplied, the gradients of the raw mixing numbers and the projection, has 16 bits. The
projection's gradient is one row: those of a token's numbers are as exact as the largest of them."""


def check(mine: Outputs, expected: Outputs) -> None:
    for name, one in mine.items():
        part = {"grad_out_weights": slice(4, 24)}.get(name, slice(None))  # the gradients of pre are 0
        pair = (one[..., part], expected[name][..., part])
        pair = [both.flatten() for both in pair] if name == "grad_fn" else pair
        near_entries(*pair, *(OF_STREAMS if one.dtype == torch.bfloat16 else OF_SUMS))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(name for name in form if form[name]) or "plain")
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_gradients_in_float64(D, count, form):
    mine = ours(D, count, torch.arange(count), **form)
    check(mine, exact(problem(D, count), form["head"]))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(name for name in form if form[name]) or "plain")
def test_gradients_repeat_and_rows_are_their_own(form):
    run = functools.partial(ours, 1024, 1100, **form)
    repeats(run, 1100)
    rows_alone(run, 1100, [name for name in OF_ROWS if name in run(torch.arange(5))])


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_way_out_alone(D, count):
    given = problem(D, count)
    outs = [given[name].double().requires_grad_() for name in ("f", "before", "out_weights")]
    expected = torch.autograd.grad(_leave(given, *outs), outs, given["g"].double())
    spaces = [torch.full_like(given[name], float("nan")) for name in ("f", "before", "out_weights")]
    mix_grad_sweep.leave_backward_into(given["g"], given["f"], given["before"], given["out_weights"], *spaces)
    names = OF_ROWS[1:]
    check(dict(zip(names, spaces, strict=True)), dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(name for name in form if form[name]) or "plain")
def test_gradients_of_parameters_that_nobody_asks_for_are_not_made(form):
    """And those of rows have the same bits without them."""
    rows = torch.arange(65)
    whole, alone = ours(512, 65, rows, **form), ours(512, 65, rows, **form, sums=False)
    assert set(alone) == set(whole) & set(OF_ROWS)
    assert different({name: whole[name] for name in alone}, alone) == []


def test_what_lies_in_memory_is_inert(monkeypatch):
    form = {"head": False, "across": True}
    plain = ours(512, 65, torch.arange(65), **form)

    def full_of_nan(self: Tensor, *size: object, **named: object) -> Tensor:
        return new_empty(self, *size, **named).fill_(float("nan"))

    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", full_of_nan)
    assert different(plain, ours(512, 65, torch.arange(65), **form)) == []


def test_a_graph_gives_the_same_bits():
    form = {"head": False, "across": True}
    plain = ours(512, 200, torch.arange(200), **form)
    graph = torch.cuda.CUDAGraph()
    rows = torch.arange(200, device="cuda")
    with torch.cuda.graph(graph):
        made = ours(512, 200, rows, **form)
    for one in made.values():
        one.zero_()
    graph.replay()
    assert different(plain, made) == []
