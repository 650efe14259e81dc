"""Hyper-connections on a GPU: which programs a site's way in, out and across are, and in which memory.

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
from rollforward.kernels.errors import DeviceError, ShapeError
from rollforward.kernels.mhc import mix_grad_sweep
from rollforward.kernels.mhc.mix_site import COMB, HEAD_ITERS, PLACES, POST, STREAMS, Site, halves
from rollforward.kernels.operators import once

_MODULE = "mhc.mix_tile"

COLUMNS, TOKENS, SLOTS, PACKS = 256, 16, 8, 12
"""As in `mix_tile`: a block's columns, the tokens of a round, and the size of what blocks tell each other."""


def _across(D: int, iters: int, leaves: bool, head: bool) -> Program:
    return program(_MODULE, "across", D=D, iters=iters, leaves=leaves, head=head)


def programs(D: int, iters: int) -> list[Program]:
    """Return what a model of this width runs, its head and its gradients included."""
    ways = [_across(D, iters, leaves, False) for leaves in (False, True)]
    head = _across(D, HEAD_ITERS, False, True)
    return [*ways, head, program(_MODULE, "leave", D=D), *mix_grad_sweep.programs(D, iters)]


@functools.cache
def _bound(D: int, iters: int, leaves: bool, head: bool) -> Callable[..., None]:
    return bind(_across(D, iters, leaves, head))


@functools.cache
def _leave(D: int) -> Callable[..., None]:
    return bind(program(_MODULE, "leave", D=D))


def takes(D: int) -> bool:
    """Whether there are programs for streams of this width."""
    return D % COLUMNS == 0 and D >= 2 * COLUMNS


def check_streams(op: str, streams_TMD: Tensor) -> None:
    """Raise unless the programs take these streams: bfloat16, of a width that divides into tiles."""
    check_dtype(op, "streams_TMD", streams_TMD, torch.bfloat16)
    width = streams_TMD.shape[2]
    if not takes(width):
        raise ShapeError(
            f"{op}: D, the width of streams_TMD, is {width}; in the tile form it must be a multiple of 256, at least"
            " 512. Use the reference."
        )


def check_device(op: str, streams_TMD: Tensor, /, **others: Tensor) -> None:
    """Raise unless streams and others lie on one GPU."""
    for name, one in {"streams_TMD": streams_TMD, **others}.items():
        if not one.is_cuda or one.device != streams_TMD.device:
            raise DeviceError(
                f"{op}: {name} is on {one.device} and streams_TMD on {streams_TMD.device}; the tile form takes all on"
                " one GPU. Move them there."
            )


class Way(NamedTuple):
    """The numbers of a way in, float32, as the model holds them."""

    fn: Tensor
    """[X, J], the projection."""
    base: Tensor
    """[24], or [4] of the head."""
    scale: Tensor
    """[3], or [1] of the head."""
    norm: Tensor | None
    """[D], the weight of the norm of the sublayer's input; None of the head, which has none here."""
    iters: int
    eps: float
    norm_eps: float

    @property
    def site(self) -> Site:
        """The same as the gradients' programs take it."""
        return Site(halves(self.fn), self.base, self.scale, self.iters, self.eps, self.norm_eps)


class Exchange(NamedTuple):
    """What the blocks of a launch tell each other, from `exchange`. Launches that may overlap need one each."""

    rounds: Tensor
    """[G, D / 256] int32."""
    sums: Tensor
    """[G, 8, 16, D / 256 + 1, 12, 4] int32: of a round, a token, a block, and last what the token's own says to all."""


class Entered(NamedTuple):
    """What a way in leaves of streams [N, J]; written."""

    raw: Tensor
    """[N, 32] float32: the projection of the streams before 1 / rms."""
    weights: Tensor
    """[N, 32] float32: pre, post, comb, then 1 / rms of the streams and of the merged input."""
    y: Tensor
    """[N, D] bfloat16: the sublayer's input."""


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def exchange(N: int, D: int, device: torch.device) -> Exchange:
    """Allocate what launches on at most about N tokens of width D need, one after another; more tokens take longer.

    Raises:
        ShapeError: a row does not fit on the device at once.
    """
    parts = D // COLUMNS
    groups = _multiprocessors(device) // parts
    if not groups:
        raise ShapeError(
            f"exchange: D is {D}: {parts} blocks hold a row, and this device has room for {_multiprocessors(device)}."
            " Use the reference."
        )
    groups = max(1, min(groups, -(-N // TOKENS)))
    one = SLOTS * TOKENS * (parts + 1) * PACKS * 4
    memory = torch.zeros(groups * (one + parts), dtype=torch.int32, device=device)
    sums, rounds = memory.split([groups * one, groups * parts])
    return Exchange(rounds.view(groups, parts), sums.view(groups, SLOTS, TOKENS, parts + 1, PACKS, 4))


def shared_exchange(N: int, D: int, device: torch.device) -> Exchange:
    """Return what a launch on N tokens needs: a part of what launches on the current stream share, one after another,
    so that nothing is allocated or cleared. In a CUDA graph, which may be replayed beside them, one of its own.

    Raises:
        ShapeError: as `exchange`.
    """
    if torch.cuda.is_current_stream_capturing():
        return exchange(N, D, device)
    whole = _exchange_of_stream(D, device, torch.cuda.current_stream(device).cuda_stream)
    # A group counts its own rounds, so launches may have different numbers of groups.
    return Exchange(*(one[: -(-N // TOKENS)] for one in whole))


@functools.cache
def _exchange_of_stream(D: int, device: torch.device, stream: int) -> Exchange:
    del stream  # one each, on which it is also cleared
    return exchange(TOKENS * _multiprocessors(device), D, device)


def entered(x: Tensor) -> Entered:
    """Allocate what `enter_into` and `across_into` write of streams [N, J]."""
    raw, weights = x.new_empty((2, len(x), PLACES), dtype=torch.float32)
    return Entered(raw, weights, x.new_empty((len(x), x.shape[1] // STREAMS)))


def enter_into(x: Tensor, way: Way, between: Exchange, into: Entered) -> None:
    """Write what a way in leaves of streams x [N, J] bfloat16.

    Invariants: row-invariant; may be captured in a CUDA graph.
    """
    _launch(way, between, into, (into.y, x, into.raw, x))


def across_into(
    f: Tensor, x: Tensor, before: Tensor, way: Way, between: Exchange, streams: Tensor, into: Entered
) -> None:
    """Write the streams after a sublayer [N, J], as `leave_into`, and what the way into the next leaves of them.

    Args:
        f: [N, D] bfloat16, the sublayer's output.
        x: [N, J] bfloat16, the streams before it.
        before: [N, 32] float32, their weights, of which post and comb are read.
        way: the next sublayer's.
        between: see there.
        streams: [N, J] bfloat16, written.
        into: written.

    Invariants: row-invariant; may be captured in a CUDA graph.
    """
    _launch(way, between, into, (f, x, before, streams), leaves=True)


def _launch(way: Way, between: Exchange, into: Entered, streams: tuple[Tensor, ...], *, leaves: bool = False) -> None:
    f, x, before, after = streams
    if not leaves:
        f, before, after = f[:1], before[:1], after[:1]
    norm = way.base[:1] if way.norm is None else way.norm
    launch = _bound(into.y.shape[1], way.iters, leaves, way.norm is None)
    numbers = way.fn, way.base, way.scale, norm, way.eps, way.norm_eps
    launch(f, x, before, *numbers, *between, after, *into)


def leave_into(f: Tensor, x: Tensor, weights: Tensor, streams: Tensor) -> None:
    """Write the streams after a sublayer with output f [N, D] bfloat16: [N, J] bfloat16; weights: `Entered`'s."""
    _leave(f.shape[1])(f, x, weights, streams)


def _weights_of(post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
    """Return post and comb at their places of [N, 32] float32: where they come from, if they lie so, or a copy."""
    first = post_TM.storage_offset() - POST.start
    if (
        first >= 0
        and (post_TM.stride(), comb_TMM.stride()) == ((PLACES, 1), (PLACES, STREAMS, 1))
        and comb_TMM.storage_offset() == first + COMB.start
        and comb_TMM.untyped_storage().data_ptr() == post_TM.untyped_storage().data_ptr()
        and first + len(post_TM) * PLACES <= post_TM.untyped_storage().nbytes() // 4
    ):
        return post_TM.as_strided((len(post_TM), PLACES), (PLACES, 1), first)
    weights = post_TM.new_zeros((len(post_TM), PLACES))
    weights[:, POST], weights[:, COMB] = post_TM, comb_TMM.flatten(1)
    return weights


_Settings = tuple[int, float, float]
"""Sinkhorn passes, hc_eps, rms_norm_eps."""


_once = functools.partial(once, "mix")


class Enter(torch.autograd.Function):
    """Streams -> sublayer's input and all weights; see `enter_into`."""

    @staticmethod
    def forward(
        ctx: Any,
        streams_TMD: Tensor,
        fn_XJ: Tensor,
        base_X: Tensor,
        scale: Tensor,
        norm_D: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        """Return the input [N, D] and the weights [N, 32]."""
        x = streams_TMD.flatten(1).contiguous()
        way = Way(fn_XJ.contiguous(), base_X, scale, norm_D, *settings)
        into = entered(x)
        if len(x):
            enter_into(x, way, shared_exchange(len(x), into.y.shape[1], x.device), into)
        ctx.save_for_backward(x, *way[:4], into.raw, into.weights)
        ctx.settings = settings
        return into.y, into.weights

    @staticmethod
    @_once
    def backward(ctx: Any, dy: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of streams, fn, base, scale and norm."""
        x, fn, base, scale, norm, raw, weights = ctx.saved_tensors
        way = Way(fn, base, scale, norm, *ctx.settings)
        grad_x = torch.zeros_like(x)
        grads = _no_grads(way)
        if len(x):
            operands = x, dy.contiguous(), way.site, raw, weights, grad_weights.contiguous(), grad_x, norm
            grads = mix_grad_sweep.enter_backward_into(*operands, sums=any(ctx.needs_input_grad[1:5]))
        return grad_x.unflatten(1, (STREAMS, -1)), *grads, None


class Across(torch.autograd.Function):
    """Sublayer's output, streams, post and comb -> the streams after it, the next input and its weights; see
    `across_into`."""

    @staticmethod
    def forward(
        ctx: Any,
        f_TD: Tensor,
        streams_TMD: Tensor,
        post_TM: Tensor,
        comb_TMM: Tensor,
        fn_XJ: Tensor,
        base_X: Tensor,
        scale: Tensor,
        norm_D: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams [N, M, D], the input [N, D] and the weights [N, 32]."""
        f, x, before = f_TD.contiguous(), streams_TMD.flatten(1).contiguous(), _weights_of(post_TM, comb_TMM)
        way = Way(fn_XJ.contiguous(), base_X, scale, norm_D, *settings)
        streams, into = torch.empty_like(x), entered(x)
        if len(x):
            across_into(f, x, before, way, shared_exchange(len(x), f.shape[1], x.device), streams, into)
        ctx.save_for_backward(f, x, before, streams, *way[:4], into.raw, into.weights)
        ctx.settings = settings
        return streams.view_as(streams_TMD), into.y, into.weights

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor, dy: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of f, streams, post, comb, fn, base, scale and norm."""
        f, x, before, streams, fn, base, scale, norm, raw, weights = ctx.saved_tensors
        way = Way(fn, base, scale, norm, *ctx.settings)
        grads = _no_grads(way)
        of_before = torch.zeros_like(before) if any(ctx.needs_input_grad[2:4]) else None
        out = mix_grad_sweep.Out(f, x, before, torch.empty_like(f), torch.empty_like(x), of_before)
        if len(x):
            g = grad.flatten(1).contiguous()
            operands = streams, dy.contiguous(), way.site, raw, weights, grad_weights.contiguous(), norm
            sums = any(ctx.needs_input_grad[4:8])
            grads = mix_grad_sweep.across_backward_into(g, out, *operands, sums=sums)
        return out.grad_f, out.grad_x.unflatten(1, (STREAMS, -1)), *_post_and_comb(of_before), *grads, None


def _post_and_comb(grad_weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of post and comb, None where they are not asked for."""
    if grad_weights is None:
        return None, None
    return grad_weights[:, POST], grad_weights[:, COMB].unflatten(1, (STREAMS, STREAMS))


def _no_grads(way: Way) -> mix_grad_sweep.Grads:
    """The gradients of a way's numbers by no tokens."""
    fn, base, scale = (torch.zeros_like(one) for one in way[:3])
    return mix_grad_sweep.Grads(fn, base, scale, None if way.norm is None else torch.zeros_like(way.norm))


class Leave(torch.autograd.Function):
    """Sublayer's output, streams, post and comb -> the streams after it; see `leave_into`."""

    @staticmethod
    def forward(ctx: Any, f_TD: Tensor, streams_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
        """Return the streams after the sublayer."""
        f_TD, x, weights = f_TD.contiguous(), streams_TMD.flatten(1).contiguous(), _weights_of(post_TM, comb_TMM)
        streams = torch.empty_like(x)
        if len(x):
            leave_into(f_TD, x, weights, streams)
        ctx.save_for_backward(f_TD, x, weights)
        return streams.view_as(streams_TMD)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of f, streams, post and comb."""
        f_TD, x, weights = ctx.saved_tensors
        grad_f, grad_x, grad_weights = torch.empty_like(f_TD), torch.empty_like(x), torch.zeros_like(weights)
        if len(x):
            mix_grad_sweep.leave_backward_into(
                grad.flatten(1).contiguous(), f_TD, x, weights, grad_f, grad_x, grad_weights
            )
        return grad_f, grad_x.unflatten(1, (STREAMS, -1)), *_post_and_comb(grad_weights)
