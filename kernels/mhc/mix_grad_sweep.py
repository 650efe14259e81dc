"""Gradients of hyper-connections on a GPU: which programs they are, and in which memory.

Here: launches and memory. Not here: the programs (`mix_grad_tile`, `mix_streams_grad_tile`), autograd (`mix_sweep`).
Streams are bfloat16; the mixing numbers, their weights and their gradients float32. Nothing here waits for the device.
Gradients of rows have the bits of the row alone; those of parameters are summed over tokens in an order that their
number gives.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.mhc.mix_site import HEAD_ITERS, PLACES, STREAMS, Site

BACK_TOKENS, BACK_N, BACK_D, GATE_TOKENS = 2048, 64, 64, 8
"""As in the programs: tokens whose part of the projection's gradient is summed apart, tokens and columns of a tile,
and tokens whose part of base's and scale's gradients is."""

_MODULE, _STREAMS = "mhc.mix_grad_tile", "mhc.mix_streams_grad_tile"


def _streams(D: int, head: bool, across: bool) -> Program:
    return program(_STREAMS, "streams_backward", D=D, head=head, across=across)


def _gates(D: int, iters: int, head: bool) -> Program:
    return program(_MODULE, "gates_backward", D=D, iters=iters, head=head)


def _sums(D: int, head: bool) -> Program:
    return program(_MODULE, "parameter_sums", D=D, head=head)


def programs(D: int, iters: int) -> list[Program]:
    """Return what the gradients of a model of this width run, its head included."""
    return [
        program(_MODULE, "leave_backward", D=D),
        program(_MODULE, "weight_sums", D=D),
        *(_streams(D, head, across) for head, across in ((False, False), (False, True), (True, False))),
        *(_gates(D, HEAD_ITERS if head else iters, head) for head in (False, True)),
        *(_sums(D, head) for head in (False, True)),
    ]


class _Launch(NamedTuple):
    gates_backward: Callable[..., None]
    streams_backward: Callable[..., None]
    parameter_sums: Callable[..., None]


@functools.cache
def _launch(D: int, iters: int, head: bool, across: bool) -> _Launch:
    wanted = _gates(D, iters, head), _streams(D, head, across), _sums(D, head)
    return _Launch(*map(bind, wanted))


@functools.cache
def _of_width(name: str, D: int) -> Callable[..., None]:
    return bind(program(_MODULE, name, D=D))


class Grads(NamedTuple):
    """Gradients of a site's parameters, float32; None where none of them is asked for."""

    fn: Tensor | None
    """[X, J]."""
    base: Tensor | None
    """[X]."""
    scale: Tensor | None
    """[3], or [1] of the head."""
    norm: Tensor | None
    """[D], or None where there is no norm."""


class Out(NamedTuple):
    """A way out of a sublayer that lies before a way in: what it had, and where its gradients go."""

    f: Tensor
    """[N, D] bfloat16, the sublayer's output."""
    x: Tensor
    """[N, J] bfloat16, the streams before it."""
    weights: Tensor
    """[N, 32] float32, as `mix_sweep.leave_into` takes them."""
    grad_f: Tensor
    """[N, D] bfloat16, written."""
    grad_x: Tensor
    """[N, J] bfloat16, written."""
    grad_weights: Tensor | None
    """[N, 32] float32, written: the gradients of post and comb at their places, 0 elsewhere; None: not asked for."""


def enter_backward_into(
    x: Tensor,
    dy: Tensor,
    site: Site,
    raw: Tensor,
    weights: Tensor,
    grad_weights: Tensor,
    grad_x: Tensor,
    norm: Tensor | None = None,
    *,
    out: Out | None = None,
    sums: bool = True,
) -> Grads:
    """Add the gradient of the streams of a way in to grad_x, and return those of its parameters.

    Args:
        x: [N, J] bfloat16, the streams.
        dy: [N, D] bfloat16, the gradient of the input.
        site: the site's numbers.
        raw: [N, 32] float32, the projection of the streams before 1 / rms.
        weights: [N, 32] float32, what `mix_sweep.enter_into` left.
        grad_weights: [N, 32] float32, the gradients of post and comb at their places; the others are not read.
        grad_x: [N, J] bfloat16, the gradient of the streams by other ways; added to, or with `out` only read.
        norm: [D] float32: the input was normalised, times this; None of the head, whose input was not.
        out: see `across_backward_into`.
        sums: whether those of the parameters are asked for; else all four are None.

    Invariants: rows have the bits of the row alone; sums over tokens go by 2048 and repeat bit for bit; may be captured
        in a CUDA graph.
    """
    N, D = dy.shape
    tiles, chunks, absent = -(-N // BACK_N), -(-N // BACK_TOKENS), x[:1, :1]
    launch = _launch(D, site.iters, site.head, out is not None)
    norm = site.base[:1] if norm is None else norm
    mix_grads = x.new_empty((N, 2 * PLACES))
    numbers = weights.new_empty((tiles, PLACES, BACK_N))
    by_place = weights.new_empty((tiles * BACK_N // GATE_TOKENS, PLACES))
    parts = weights.new_empty((chunks, 2 * PLACES, STREAMS * D)), weights.new_empty((chunks, len(norm)))
    out_weights = weights if out is None else out.weights
    operands = x, dy, norm, raw, site.base, site.scale, weights, grad_weights, out_weights
    launch.gates_backward(*operands, site.eps, site.norm_eps, mix_grads, numbers, by_place)
    operands = x, dy, grad_x, norm, numbers, mix_grads, site.fn
    if out is None:
        launch.streams_backward(*operands, absent, absent, absent, grad_x, numbers[:1, :1, :1], *parts)
    else:
        dots = weights.new_empty((D // BACK_D, STREAMS + STREAMS**2, N))
        launch.streams_backward(*operands, out.f, out.x, out.grad_f, out.grad_x, dots, *parts)
        if out.grad_weights is not None:
            _of_width("weight_sums", D)(dots, out.grad_weights)
    if not sums:
        return Grads(None, None, None, None)
    X = len(site.base)
    grad_fn, numbers, grad_norm = (weights.new_empty(size) for size in ((X, STREAMS * D), (PLACES,), len(norm)))
    launch.parameter_sums(*parts, by_place, grad_fn, grad_norm, numbers)
    return Grads(grad_fn, numbers[:X], numbers[24 : 24 + len(site.scale)], None if site.head else grad_norm)


def across_backward_into(
    g: Tensor,
    out: Out,
    x: Tensor,
    dy: Tensor,
    site: Site,
    raw: Tensor,
    weights: Tensor,
    grad_weights: Tensor,
    norm: Tensor | None = None,
    *,
    sums: bool = True,
) -> Grads:
    """Write the gradients of a way out and of the way in that reads its streams x, in one pass.

    The gradient of x is not rounded and not written: it is the sum of g [N, J] bfloat16, that by other ways, and of
    what the way in gives.

    Args:
        g: see above.
        out: the way out; its gradients are written.
        x, dy, site, raw, weights, grad_weights, norm, sums: of the way in, as for `enter_backward_into`.

    Returns:
        the gradients of the way in's parameters.

    Invariants: as for `enter_backward_into`.
    """
    return enter_backward_into(x, dy, site, raw, weights, grad_weights, g, norm, out=out, sums=sums)


def leave_backward_into(
    g: Tensor, f: Tensor, x: Tensor, weights: Tensor, grad_f: Tensor, grad_x: Tensor, grad_weights: Tensor
) -> None:
    """Write, from the gradient g of what `leave_into` wrote, those of f, of the streams, and of post and comb at their
    places of [N, 32] float32."""
    _of_width("leave_backward", f.shape[1])(g, f, x, weights, grad_f, grad_x, grad_weights)
