"""Cases of `mix` for `kernels/bench.py`: V4-Flash's four streams of 4096, many tokens and few, in CUDA graphs."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Case, Outputs
from rollforward.kernels.mhc import mix_grad_sweep, mix_sweep
from rollforward.kernels.mhc.mix_site import HEAD_ITERS

M, D, ITERS, EPS = 4, 4096, 20, 1e-6
TIMES = 10
"""Of one graph, so that starting it does not count."""

STREAM, ROW = M * D * 2, D * 2
"""Bytes of a token's streams, and of one row of width D."""


class _Problem:
    """Tensors of one size, and the launches over a span of them."""

    def __init__(self, tokens: int) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda")

        fn = normal(24, M * D) * (M * D) ** -0.5
        self.way = mix_sweep.Way(fn, normal(24), normal(3).abs(), normal(D), ITERS, EPS, EPS)
        self.head = mix_sweep.Way(fn[:4].contiguous(), normal(4), normal(1).abs(), None, HEAD_ITERS, EPS, EPS)
        self.site = self.way.site
        self.x, self.g = normal(tokens, M * D).bfloat16(), normal(tokens, M * D).bfloat16()
        self.f, self.dy = normal(tokens, D).bfloat16(), normal(tokens, D).bfloat16()
        self.weights = torch.zeros(tokens, 32, device="cuda")
        self.weights[:, :24] = torch.rand(tokens, 24, device="cuda")
        self.spaces: dict[int, _Space] = {}

    def space(self, span: slice) -> "_Space":
        """What a span's launches write."""
        count = span.stop - span.start
        if count not in self.spaces:
            x, f = self.x[:count], self.f[:count]
            self.spaces[count] = _Space(
                *(mix_sweep.exchange(count, D, x.device), mix_sweep.entered(x), torch.empty_like(x)),
                *(torch.empty_like(f), torch.empty_like(x), torch.zeros(count, 32, device="cuda")),
            )
        return self.spaces[count]

    def enter(self, span: slice) -> Outputs:
        """The way in, its norm included."""
        space = self.space(span)
        mix_sweep.enter_into(self.x[span], self.way, space.between, space.into)
        return {"weights": space.into.weights[:, :26], "y": space.into.y}

    def merge(self, span: slice) -> Outputs:
        """The head."""
        space = self.space(span)
        mix_sweep.enter_into(self.x[span], self.head, space.between, space.into)
        return {"y": space.into.y}

    def leave(self, span: slice) -> Outputs:
        """The way out."""
        streams = self.space(span).streams
        mix_sweep.leave_into(self.f[span], self.x[span], self.weights[span], streams)
        return {"streams": streams}

    def across(self, span: slice) -> Outputs:
        """Out of one sublayer and into the next, its norm included."""
        space = self.space(span)
        operands = self.f[span], self.x[span], self.weights[span], self.way, space.between
        mix_sweep.across_into(*operands, space.streams, space.into)
        return {"streams": space.streams, "weights": space.into.weights[:, :26], "y": space.into.y}

    def leave_backward(self, span: slice) -> Outputs:
        """Gradients of the way out."""
        space = self.space(span)
        operands = self.g[span], self.f[span], self.x[span], self.weights[span]
        mix_grad_sweep.leave_backward_into(*operands, space.grad_f, space.grad_x, space.grad_weights)
        return {"grad_f": space.grad_f, "grad_x": space.grad_x, "grad_weights": space.grad_weights[:, 4:24]}

    def backward(self, span: slice) -> Outputs:
        """Gradients of a whole site in one pass: of the way in, and of the way out before it."""
        space = self.space(span)
        out = mix_grad_sweep.Out(
            *(self.f[span], self.x[span], self.weights[span]), *(space.grad_f, space.grad_x, space.grad_weights)
        )
        way_in = space.streams, self.dy[span], self.site, space.into.raw, space.into.weights, self.weights[span]
        mix_grad_sweep.across_backward_into(self.g[span], out, *way_in, self.way.norm)
        return {"grad_f": space.grad_f, "grad_x": space.grad_x}


class _Space(NamedTuple):
    between: mix_sweep.Exchange
    into: mix_sweep.Entered
    streams: Tensor
    grad_f: Tensor
    grad_x: Tensor
    grad_weights: Tensor


def _graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same launches `TIMES` times as one CUDA graph."""
    outputs = run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            run()

    def replay() -> Any:
        assert run  # its memory is the graph's
        graph.replay()
        return outputs

    return replay


def _nothing(_: slice) -> Outputs:
    """What a case leaves to another: rows alone are looked at in `leave_backward` and the tests."""
    return {}


def _peers(problem: _Problem, kind: str, tokens: int) -> dict[str, Callable[[], object]]:
    if kind not in ("leave", "leave_backward") or importlib.util.find_spec("tile_kernels") is None:
        return {}
    post = importlib.import_module("tile_kernels.mhc.post_kernel")
    x, f = problem.x.view(1, tokens, M, D), problem.f.view(1, tokens, D)
    post_mix = problem.weights[:, 4:8].contiguous().view(1, tokens, M, 1)
    mixes = post_mix, problem.weights[:, 8:24].contiguous().view(1, tokens, M, M)
    if kind == "leave":
        return {"tile-kernels": _graphed(lambda: post.mhc_post_fwd(f, x, *mixes))}
    return {"tile-kernels": _graphed(lambda: post.mhc_post_bwd(f, x, *mixes, problem.g.view(1, tokens, M, D)))}


def _case(kind: str, tokens: int, row_bytes: int) -> Callable[[], Case]:
    def make() -> Case:
        problem = _Problem(tokens)
        programs = mix_sweep.programs(D, ITERS)
        dispatch.warm(programs, jobs=8)
        whole = slice(0, tokens)
        one = getattr(problem, kind)
        if kind == "backward":
            problem.across(whole)  # what the backward pass reads
        run = _graphed(lambda: one(whole))
        alone = one if kind != "backward" else _nothing
        peers = _peers(problem, kind, tokens)
        return Case(f"mix {kind}, T={tokens} M={M} D={D}", 0, row_bytes * tokens, run, alone, peers, programs, TIMES)

    make.__name__ = f"{kind}_{tokens}"
    return make


_MANY = 8192
cases = [
    _case("leave", _MANY, 2 * STREAM + ROW),
    _case("leave_backward", _MANY, 3 * STREAM + 2 * ROW),
    _case("enter", _MANY, STREAM + ROW),
    _case("merge", _MANY, STREAM + ROW),
    _case("across", _MANY, 2 * STREAM + 2 * ROW),
    _case("backward", _MANY, 4 * STREAM + 3 * ROW),
    *(_case(kind, 64, 0) for kind in ("leave", "enter", "merge", "across")),
    _case("across", 1, 0),
]
