"""Cases of `mix` for `kernels/bench.py`: V4-Flash's four streams of 4096, many tokens and few, in CUDA graphs."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Case, Outputs
from rollforward.kernels.mhc import mix_grad_sweep, mix_sweep

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
        self.site = mix_sweep.Site(mix_sweep.halves(fn), normal(24), normal(3).abs(), ITERS, EPS, EPS)
        self.x, self.g = normal(tokens, M * D).bfloat16(), normal(tokens, M * D).bfloat16()
        self.f, self.dy = normal(tokens, D).bfloat16(), normal(tokens, D).bfloat16()
        self.norm = normal(D)
        self.weights = torch.zeros(tokens, 32, device="cuda")
        self.weights[:, :24] = torch.rand(tokens, 24, device="cuda")
        self.spaces: dict[int, tuple[Tensor, ...]] = {}

    def space(self, tokens: int) -> tuple[Tensor, ...]:
        """Sums, weights, row of width D, streams, a second row, a second streams, gradients of weights."""
        if tokens not in self.spaces:
            x = self.x[:tokens]
            rows, wide = (torch.empty_like(self.f[:tokens]) for _ in range(2)), torch.empty_like(x)
            first, second = rows
            weights = torch.zeros(2, tokens, 32, device="cuda")
            self.spaces[tokens] = mix_sweep.slices(x), weights[0], first, wide, second, torch.empty_like(x), weights[1]
        return self.spaces[tokens]

    def enter(self, span: slice) -> Outputs:
        """The way in."""
        sums, weights, y, *_ = self.space(span.stop - span.start)
        mix_sweep.enter_into(self.x[span], self.site, sums, weights, y)
        return {"weights": weights, "y": y}

    def leave(self, span: slice) -> Outputs:
        """The way out."""
        streams = self.space(span.stop - span.start)[3]
        mix_sweep.leave_into(self.f[span], self.x[span], self.weights[span], streams)
        return {"streams": streams}

    def across(self, span: slice) -> Outputs:
        """Out of one sublayer and into the next, its norm included."""
        sums, weights, y, streams, *_ = self.space(span.stop - span.start)
        mix_sweep.leave_into(self.f[span], self.x[span], self.weights[span], streams)
        mix_sweep.enter_into(streams, self.site, sums, weights, y, self.norm)
        return {"streams": streams, "weights": weights, "y": y}

    def leave_backward(self, span: slice) -> Outputs:
        """Gradients of the way out."""
        _, _, grad_f, grad_x, _, _, grad_weights = self.space(span.stop - span.start)
        operands = self.g[span], self.f[span], self.x[span], self.weights[span]
        mix_grad_sweep.leave_backward_into(*operands, grad_f, grad_x, grad_weights)
        return {"grad_f": grad_f, "grad_x": grad_x, "grad_weights": grad_weights[:, 4:24]}

    def backward(self, span: slice) -> Outputs:
        """Gradients of a whole site: of the way out, then of the way in, added to the streams'."""
        sums, weights, y, grad_x, grad_f, _, grad_weights = self.space(span.stop - span.start)
        x = self.x[span]
        mix_grad_sweep.leave_backward_into(self.g[span], self.f[span], x, weights, grad_f, grad_x, grad_weights)
        mix_grad_sweep.enter_backward_into(x, self.dy[span], self.site, sums.sum(0), weights, grad_weights, grad_x)
        del y
        return {"grad_f": grad_f, "grad_x": grad_x}


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
            problem.enter(whole)  # what the backward pass reads
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
    _case("across", _MANY, 2 * STREAM + 2 * ROW),
    _case("backward", _MANY, 5 * STREAM + 3 * ROW),
    *(_case(kind, 64, 0) for kind in ("leave", "enter", "across")),
    _case("across", 1, 0),
]
