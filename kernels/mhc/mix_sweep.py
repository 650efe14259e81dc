"""Hyper-connections on a GPU: which programs a site's way in and out and their gradients are, and in which memory.

Here: launches, memory, autograd. Not here: the programs (`mix_tile`, `mix_grad_tile`), the public ops (`mix`). Streams
are bfloat16; the mixing numbers, their weights and their gradients float32. Nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.checks import check_dtype
from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.errors import ShapeError

STREAMS, PLACES, SPLITS = 4, 32, 16
"""As in `mix_tile`: a token's streams, the places of its mixing numbers, and the slices of a projection."""

PRE, POST, COMB = slice(0, 4), slice(4, 8), slice(8, 24)
"""Places of the mixing numbers and of the weights made of them."""

HEAD_ITERS = 1
"""Of the head, whose programs have no Sinkhorn."""

BACK_TOKENS = 2048
"""Tokens whose part of the projection's gradient is summed apart."""

_FORWARD, _BACKWARD = "mhc.mix_tile", "mhc.mix_grad_tile"


def _of_width(D: int) -> list[Program]:
    return [
        *(program(_FORWARD, name, D=D) for name in ("project", "leave")),
        *(program(_BACKWARD, name, D=D) for name in ("leave_backward", "enter_dots", "streams_backward")),
    ]


def _of_site(D: int, iters: int, *, head: bool) -> list[Program]:
    site = {"D": D, "iters": iters, "head": head}
    enters = [program(_FORWARD, "enter", **site, normed=normed) for normed in (False, True)]
    return [*enters, program(_BACKWARD, "gates_backward", **site)]


def programs(D: int, iters: int) -> list[Program]:
    """Return what a model of this width runs, its head included."""
    return [*_of_width(D), *_of_site(D, iters, head=False), *_of_site(D, HEAD_ITERS, head=True)]


class _Width(NamedTuple):
    project: Callable[..., None]
    leave: Callable[..., None]
    leave_backward: Callable[..., None]
    enter_dots: Callable[..., None]
    streams_backward: Callable[..., None]


class _Site(NamedTuple):
    enter: Callable[..., None]
    enter_normed: Callable[..., None]
    gates_backward: Callable[..., None]


@functools.cache
def _width(D: int) -> _Width:
    return _Width(*map(bind, _of_width(D)))


@functools.cache
def _site(D: int, iters: int, head: bool) -> _Site:
    return _Site(*map(bind, _of_site(D, iters, head=head)))


def takes(D: int) -> bool:
    """Whether there are programs for streams of this width: a projection has 16 slices of two steps of 64 or more."""
    return D % 256 == 0 and D >= 512


def check_streams(op: str, streams_TMD: Tensor) -> None:
    """Raise unless the programs take these streams: bfloat16, of a width that divides into tiles."""
    check_dtype(op, "streams_TMD", streams_TMD, torch.bfloat16)
    width = streams_TMD.shape[2]
    if not takes(width):
        raise ShapeError(
            f"{op}: D, the width of streams_TMD, is {width}; in the tile form it must be a multiple of 256, at least"
            " 512. Use the reference."
        )


def halves(fn_XJ: Tensor) -> Tensor:
    """Return a projection [X, J] float32 as two bfloat16 whose sum it is to 16 bits, each in 32 places: [2, 32, J]."""
    parts = fn_XJ.new_zeros((2, PLACES, fn_XJ.shape[1]), dtype=torch.bfloat16)
    rest = fn_XJ.detach()
    for part in parts:
        part[: len(rest)] = rest
        rest = rest - part[: len(rest)].float()
    return parts


class Site(NamedTuple):
    """The numbers of one site, as the programs take them."""

    fn: Tensor
    """[2, 32, J] bfloat16, from `halves`."""
    base: Tensor
    """[24] float32, or [4] of the head."""
    scale: Tensor
    """[3] float32, or [1] of the head."""
    iters: int
    eps: float
    norm_eps: float

    @property
    def head(self) -> bool:
        """Whether it has pre alone."""
        return len(self.scale) == 1


def slices(x: Tensor) -> Tensor:
    """Allocate what `enter_into` leaves of the projection of streams [N, J] for its gradient: [16, N, 32] float32."""
    return x.new_empty((SPLITS, len(x), PLACES), dtype=torch.float32)


def enter_into(x: Tensor, site: Site, sums: Tensor, weights: Tensor, y: Tensor, norm: Tensor | None = None) -> None:
    """Write the token's weights [N, 32] and the sublayer's input [N, D] bfloat16 of streams [N, J].

    Args:
        x: [N, J] bfloat16.
        site: the site's numbers.
        sums: from `slices`, written.
        weights: [N, 32] float32, written: pre, post, comb, and 1 / rms of the streams.
        y: [N, D] bfloat16, written.
        norm: [D] float32: the input is normalised to unit mean square and multiplied by it.

    Invariants: row-invariant; may be captured in a CUDA graph.
    """
    _width(y.shape[1]).project(x, site.fn, sums)
    launch = _site(y.shape[1], site.iters, site.head)
    enter = launch.enter if norm is None else launch.enter_normed
    enter(x, sums, site.base, site.scale, site.base[:1] if norm is None else norm, site.eps, site.norm_eps, weights, y)


def enter_backward_into(
    x: Tensor, dy: Tensor, site: Site, sums: Tensor, weights: Tensor, grad_weights: Tensor, grad_x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradient of the streams to grad_x, and return those of fn [X, J], base and scale.

    Args:
        x: [N, J] bfloat16.
        dy: [N, D] bfloat16, the gradient of the input.
        site: the site's numbers.
        sums: what `enter_into` left.
        weights: likewise.
        grad_weights: [N, 32] float32: the gradients of post and comb at their places, those of pre are written.
        grad_x: [N, J] bfloat16, added to.

    Invariants: sums over tokens go by 2048 and repeat bit for bit.
    """
    N, D = dy.shape
    launch = _width(D)
    logit_grads, raw = weights.new_empty((2, N, PLACES))
    mix_grads = weights.new_empty((N, 2 * PLACES), dtype=torch.bfloat16)
    factor = weights.new_empty(N)
    parts = weights.new_empty((-(-N // BACK_TOKENS), 2 * PLACES, x.shape[1]))
    launch.enter_dots(x, dy, grad_weights)
    _site(D, site.iters, site.head).gates_backward(
        sums, site.base, site.scale, weights, grad_weights, site.eps, logit_grads, raw, mix_grads, factor
    )
    launch.streams_backward(x, dy, weights, mix_grads, factor, site.fn, grad_x, parts)
    count = len(site.base)
    grad_fn = parts.unflatten(1, (2, PLACES)).sum((0, 1))[:count]
    grad_base, by_place = logit_grads.sum(0)[:count], (logit_grads * raw).sum(0)
    places = (PRE,) if site.head else (PRE, POST, COMB)
    return grad_fn, grad_base, torch.stack([by_place[place].sum() for place in places])


def leave_into(f: Tensor, x: Tensor, weights: Tensor, streams: Tensor) -> None:
    """Write the streams after a sublayer with output f [N, D] bfloat16: [N, J] bfloat16; weights as `enter_into`'s."""
    _width(f.shape[1]).leave(f, x, weights, streams)


def leave_backward_into(
    g: Tensor, f: Tensor, x: Tensor, weights: Tensor, grad_f: Tensor, grad_x: Tensor, grad_weights: Tensor
) -> None:
    """Write, from the gradient g of what `leave_into` wrote, those of f, of the streams, and of post and comb at their
    places of [N, 32] float32."""
    _width(f.shape[1]).leave_backward(g, f, x, weights, grad_f, grad_x, grad_weights)


class Enter(torch.autograd.Function):
    """Streams -> sublayer's input and all weights; see `enter_into`."""

    @staticmethod
    def forward(
        ctx: Any, streams_TMD: Tensor, fn_XJ: Tensor, base_X: Tensor, scale: Tensor, settings: tuple[int, float, float]
    ) -> tuple[Tensor, Tensor]:
        """Return the input [N, D] and the weights [N, 32]."""
        x = streams_TMD.flatten(1)
        site = Site(halves(fn_XJ), base_X, scale, *settings)
        sums, weights = slices(x), x.new_zeros((len(x), PLACES), dtype=torch.float32)
        y = x.new_empty((len(x), streams_TMD.shape[2]))
        if len(x):
            enter_into(x, site, sums, weights, y)
        ctx.save_for_backward(x, *site[:3], sums, weights)
        ctx.settings, ctx.shape = settings, streams_TMD.shape
        return y, weights

    @staticmethod
    def backward(ctx: Any, dy: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of streams, fn, base and scale."""
        x, fn, base, scale, sums, weights = ctx.saved_tensors
        site = Site(fn, base, scale, *ctx.settings)
        grad_x = torch.zeros_like(x)
        if not len(x):
            return (
                grad_x.view(ctx.shape),
                torch.zeros_like(fn[0, : len(base)], dtype=torch.float32),
                base * 0,
                scale * 0,
                None,
            )
        grads = enter_backward_into(x, dy.contiguous(), site, sums, weights, grad_weights.clone(), grad_x)
        return grad_x.view(ctx.shape), *grads, None


class Leave(torch.autograd.Function):
    """Sublayer's output, streams, post and comb -> the streams after it; see `leave_into`."""

    @staticmethod
    def forward(ctx: Any, f_TD: Tensor, streams_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
        """Return the streams after the sublayer."""
        weights = f_TD.new_zeros((len(f_TD), PLACES), dtype=torch.float32)
        weights[:, POST], weights[:, COMB] = post_TM, comb_TMM.flatten(1)
        x = streams_TMD.flatten(1)
        streams = torch.empty_like(x)
        if len(x):
            leave_into(f_TD, x, weights, streams)
        ctx.save_for_backward(f_TD, x, weights)
        return streams.view_as(streams_TMD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of f, streams, post and comb."""
        f_TD, x, weights = ctx.saved_tensors
        grad_f, grad_x, grad_weights = torch.empty_like(f_TD), torch.empty_like(x), torch.zeros_like(weights)
        if len(x):
            leave_backward_into(grad.flatten(1).contiguous(), f_TD, x, weights, grad_f, grad_x, grad_weights)
        post, comb = grad_weights[:, POST], grad_weights[:, COMB].unflatten(1, (STREAMS, STREAMS))
        return grad_f, grad_x.unflatten(1, (STREAMS, -1)), post, comb
