"""Hyper-connections on a GPU: which programs a site's way in and out are, and in which memory.

Here: launches, memory, autograd. Not here: the programs (`mix_tile`), gradients (`mix_grad_sweep`), the public ops
(`mix`). Streams are bfloat16; the mixing numbers and their weights float32. Nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.checks import check_dtype
from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.mhc import mix_grad_sweep
from rollforward.kernels.mhc.mix_site import COMB, HEAD_ITERS, PLACES, POST, SPLITS, STREAMS, Site, halves

_MODULE = "mhc.mix_tile"


def _of_width(D: int) -> list[Program]:
    return [program(_MODULE, name, D=D) for name in ("project", "leave")]


def _of_site(D: int, iters: int, *, head: bool) -> list[Program]:
    return [program(_MODULE, "enter", D=D, iters=iters, head=head, normed=normed) for normed in (False, True)]


def programs(D: int, iters: int) -> list[Program]:
    """Return what a model of this width runs, its head and its gradients included."""
    of_sites = [*_of_site(D, iters, head=False), *_of_site(D, HEAD_ITERS, head=True)]
    return [*_of_width(D), *of_sites, *mix_grad_sweep.programs(D, iters)]


class _Width(NamedTuple):
    project: Callable[..., None]
    leave: Callable[..., None]


class _Site(NamedTuple):
    enter: Callable[..., None]
    enter_normed: Callable[..., None]


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


def leave_into(f: Tensor, x: Tensor, weights: Tensor, streams: Tensor) -> None:
    """Write the streams after a sublayer with output f [N, D] bfloat16: [N, J] bfloat16; weights as `enter_into`'s."""
    _width(f.shape[1]).leave(f, x, weights, streams)


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
        grads = mix_grad_sweep.enter_backward_into(
            x, dy.contiguous(), site, sums.sum(0), weights, grad_weights.contiguous(), grad_x
        )
        return grad_x.view(ctx.shape), *grads[:3], None


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
            mix_grad_sweep.leave_backward_into(
                grad.flatten(1).contiguous(), f_TD, x, weights, grad_f, grad_x, grad_weights
            )
        post, comb = grad_weights[:, POST], grad_weights[:, COMB].unflatten(1, (STREAMS, STREAMS))
        return grad_f, grad_x.unflatten(1, (STREAMS, -1)), post, comb
