"""Cases of `linear_logprob` for `kernels/bench.py`: V4-Flash's head."""

import torch
from torch import Tensor

from rollforward.kernels.bench import Case, Outputs
from rollforward.kernels.loss import vocab_sweep

V, D, TOKENS = 129280, 4096, 8192


def compiled(hidden: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The plain form, whose logits are BF16."""
    log_p = torch.log_softmax((hidden @ head.t()).float(), -1)
    return log_p.gather(1, token.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def _case(kind: str, tokens: int = TOKENS) -> Case:
    hidden = torch.randn(tokens, D, device="cuda").bfloat16()
    head = torch.randn(V, D, device="cuda").mul_(0.02).bfloat16()
    token = torch.randint(V, (tokens,), device="cuda", dtype=torch.int32)
    weights = torch.randn(2, tokens, device="cuda")
    values, grad_hidden = torch.empty(2, tokens, device="cuda"), torch.empty(tokens, D, device="cuda")
    grad_head = torch.empty(V, D, device="cuda")

    def into(span: slice, values: Tensor, grad_hidden: Tensor, grad_head: Tensor | None) -> None:
        space = vocab_sweep.workspace(V, D, hidden.device, teacher=False)
        out = values[0], values[1]
        rows = hidden[span], head, token[span], 1.0
        if kind != "sweep":
            vocab_sweep.logprob_into(*rows, *out, space)
        if kind != "forward":
            vocab_sweep.logprob_gradients_into(
                *rows,
                weights[0, span],
                weights[1, span],
                grad_hidden,
                grad_head,
                space,
                adds=False,
                values=out if kind == "sweep" else None,
            )

    def named(values: Tensor, grad_hidden: Tensor, grad_head: Tensor | None) -> Outputs:
        out = {"logprob": values[0], "entropy": values[1]}
        if kind != "forward":
            out["grad_hidden"] = grad_hidden
            if grad_head is not None:
                out["grad_head"] = grad_head
        return out

    def run() -> Outputs:
        into(slice(0, tokens), values, grad_hidden, grad_head)
        return named(values, grad_hidden, grad_head)

    def rows(span: slice) -> Outputs:
        few = span.stop - span.start
        out = torch.empty(2, few, device="cuda"), torch.empty(few, D, device="cuda"), None
        into(span, *out)
        return named(*out)

    plain = torch.compile(compiled)

    def by_compile() -> object:
        if kind == "forward":
            with torch.no_grad():
                return plain(hidden, head, token.long())
        leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
        return torch.autograd.grad(plain(*leaves, token.long()), leaves, tuple(weights))

    products = {"forward": 1, "sweep": 3, "recompute": 4}[kind]
    read = (tokens + V) * D * 2
    written = 0 if kind == "forward" else (tokens + V) * D * 4
    name = f"linear_logprob {kind}, T={tokens} V={V} D={D}"
    programs = vocab_sweep.programs(V, D)
    return Case(name, products * 2 * tokens * V * D, read + written, run, rows, {"torch.compile": by_compile}, programs)


def forward() -> Case:
    """Values alone."""
    return _case("forward")


def sweep() -> Case:
    """Values and gradients of known weights in one sweep."""
    return _case("sweep")


def recompute() -> Case:
    """Values, then gradients from logits made anew."""
    return _case("recompute")


cases = [forward, sweep, recompute]
