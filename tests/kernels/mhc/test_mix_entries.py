"""The ops of `mix` in their tile form, entry by entry against float64: every output and every gradient of each op.

Inputs are numbers that the programs read without rounding. What a way across writes between its two halves is rounded
by it, and taken as it is by the exact form too, so that bounds are those of one op. Not proven here: bits and speed
(test_mix_tile.py).
"""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter, mhc_head, mhc_post
from rollforward.kernels.mhc.mix_ref import mhc_head_ref, mhc_mix_ref, mhc_post_ref, mhc_pre_ref
from rollforward.kernels.norm.rms_norm_ref import rms_norm_ref
from tests.helpers.kernel_kit import near_entries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

WIDTHS, COUNTS = (512, 1024, 4096, 7168), (1, 15, 16, 17, 64, 2051)
"""The last two widths are those of Flash and Pro."""

SETTINGS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}

OF_STREAMS, OF_NUMBERS, OF_SUMS = (4e-3, 5e-4), (2e-4, 2e-5), (0.0, 1e-3)
"""Bounds of an entry's error, of the entry and of its row's root mean square: of what is written in bfloat16, rounded
once, by 2^-8 at most; of post and comb; and of the gradients of numbers, from operands of 16 bits. The projection's
gradient is one row: those of a token's numbers are as exact as the largest of them."""


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    dispatch.warm([one for D in WIDTHS for one in mix_sweep.programs(D, 20)], jobs=16)
    dispatch.choose({"mix": "tile"})
    yield
    dispatch.choose({})


@functools.cache
def problem(D: int, count: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(D + count)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    return {
        "f": normal(count, D).bfloat16(),
        "streams": normal(count, 4, D).bfloat16(),
        "post": normal(count, 4).sigmoid() * 2,
        "comb": normal(count, 4, 4).softmax(2),
        "fn": normal(24, 4 * D) * (4 * D) ** -0.5,
        "base": normal(24),
        "scale": torch.tensor([0.7, 1.1, 1.6], device="cuda"),
        "norm": normal(D),
        "grad streams": normal(count, 4, D).bfloat16(),
        "grad y": normal(count, D).bfloat16(),
        "grad post": normal(count, 4) * D**0.5,
        "grad comb": normal(count, 4, 4) * D**0.5,
    }


def _enter(streams: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fn, base, scale, norm = numbers
    pre, post, comb = mhc_mix_ref(streams, fn, base, scale, **SETTINGS)
    return rms_norm_ref(mhc_pre_ref(streams, pre), norm, SETTINGS["norm_eps"]), post, comb


def run(op: str, given: dict[str, Tensor], between: Tensor | None = None) -> tuple[Outputs, Outputs]:
    """Outputs and gradients of an op by its tile form; by float64 with the streams that it wrote between its halves."""
    names = {
        "enter": ("streams", "fn", "base", "scale", "norm"),
        "across": ("f", "streams", "post", "comb", "fn", "base", "scale", "norm"),
        "post": ("f", "streams", "post", "comb"),
        "head": ("streams", "fn", "base", "scale"),
    }[op]
    exact = between is not None
    taken = dict(given)
    if op == "head":
        taken |= {"fn": given["fn"][:4], "base": given["base"][:4], "scale": given["scale"][:1]}
    leaves = {name: (taken[name].double() if exact else taken[name].clone()).requires_grad_() for name in names}
    operands = list(leaves.values())
    if op == "enter":
        named = zip(
            ("y", "post", "comb"), _enter(*operands) if exact else mhc_enter(*operands, **SETTINGS), strict=True
        )
    elif op == "across" and exact:
        streams = mhc_post_ref(*operands[:4])
        entered = _enter(streams + (between.double() - streams).detach(), *operands[4:])
        named = zip(("streams", "y", "post", "comb"), (streams, *entered), strict=True)
    elif op == "across":
        named = zip(("streams", "y", "post", "comb"), mhc_across(*operands, **SETTINGS), strict=True)
    elif op == "post":
        named = [("streams", (mhc_post_ref if exact else mhc_post)(*operands))]
    else:
        named = [("y", (mhc_head_ref if exact else mhc_head)(*operands, eps=1e-6, norm_eps=1e-6))]
    outputs = dict(named)
    into = [given[f"grad {name}"].to(one.dtype) for name, one in outputs.items()]
    grads = torch.autograd.grad(list(outputs.values()), operands, into)
    return {name: one.detach() for name, one in outputs.items()}, dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("op", ["enter", "across", "post", "head"])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_entry_in_float64(op, D, count):
    given = problem(D, count)
    outputs, grads = run(op, given)
    exact_outputs, exact_grads = run(op, given, outputs.get("streams", given["streams"]))
    for name, one in outputs.items():
        near_entries(one, exact_outputs[name], *(OF_STREAMS if one.dtype == torch.bfloat16 else OF_NUMBERS))
    for name, one in grads.items():
        assert one.dtype == given[name].dtype, name
        near_entries(one, exact_grads[name], *(OF_STREAMS if one.dtype == torch.bfloat16 else OF_SUMS))


@pytest.mark.parametrize(
    "frozen", [("fn", "base", "scale", "norm"), ("post", "comb"), ("f", "streams", "post", "comb")]
)
def test_what_needs_no_gradient_changes_no_bit_of_the_others(frozen):
    given = problem(1024, 64)
    names = ("f", "streams", "post", "comb", "fn", "base", "scale", "norm")
    found = []
    for asked in (names, tuple(name for name in names if name not in frozen)):
        leaves = {name: given[name].clone().requires_grad_(name in asked) for name in names}
        outputs = mhc_across(*leaves.values(), **SETTINGS)
        into = [given[f"grad {name}"] for name in ("streams", "y", "post", "comb")]
        grads = torch.autograd.grad(outputs, [leaves[name] for name in asked], into)
        found.append(dict(zip(asked, grads, strict=True)))
    assert all(torch.equal(one, found[0][name]) for name, one in found[1].items())
