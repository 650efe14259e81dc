"""Gradients of hyper-connections on a GPU: which programs they are, and in which memory.

Here: launches and memory. Not here: the programs (`mix_grad_tile`), autograd (`mix_sweep`). Streams are bfloat16; the
mixing numbers, their weights and their gradients float32. Nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.mhc.mix_site import COMB, HEAD_ITERS, PLACES, POST, PRE, Site

BACK_TOKENS = 2048
"""Tokens whose part of the projection's gradient is summed apart."""

_MODULE = "mhc.mix_grad_tile"


class _Width(NamedTuple):
    leave_backward: Callable[..., None]
    enter_dots: Callable[..., None]
    streams_backward: Callable[..., None]


def _of_width(D: int) -> list[Program]:
    return [program(_MODULE, name, D=D) for name in _Width._fields]


def _gates(D: int, iters: int, head: bool) -> Program:
    return program(_MODULE, "gates_backward", D=D, iters=iters, head=head)


def programs(D: int, iters: int) -> list[Program]:
    """Return what the gradients of a model of this width run, its head included."""
    return [*_of_width(D), _gates(D, iters, False), _gates(D, HEAD_ITERS, True)]


@functools.cache
def _width(D: int) -> _Width:
    return _Width(*map(bind, _of_width(D)))


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
    bind(_gates(D, site.iters, site.head))(
        sums, site.base, site.scale, weights, grad_weights, site.eps, logit_grads, raw, mix_grads, factor
    )
    launch.streams_backward(x, dy, weights, mix_grads, factor, site.fn, grad_x, parts)
    count = len(site.base)
    grad_fn = parts.unflatten(1, (2, PLACES)).sum((0, 1))[:count]
    grad_base, by_place = logit_grads.sum(0)[:count], (logit_grads * raw).sum(0)
    places = (PRE,) if site.head else (PRE, POST, COMB)
    return grad_fn, grad_base, torch.stack([by_place[place].sum() for place in places])


def leave_backward_into(
    g: Tensor, f: Tensor, x: Tensor, weights: Tensor, grad_f: Tensor, grad_x: Tensor, grad_weights: Tensor
) -> None:
    """Write, from the gradient g of what `leave_into` wrote, those of f, of the streams, and of post and comb at their
    places of [N, 32] float32."""
    _width(f.shape[1]).leave_backward(g, f, x, weights, grad_f, grad_x, grad_weights)
