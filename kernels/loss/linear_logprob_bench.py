"""Cases of `linear_logprob` for `kernels/bench.py`: V4-Flash's head."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.bench import Case, Outputs, peer
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob_ref import KeptSets

V, D, TOKENS, KEPT = 129280, 4096, 8192, 1000


def compiled(hidden: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The plain form, whose logits are BF16."""
    log_p = torch.log_softmax((hidden @ head.t()).float(), -1)
    return log_p.gather(1, token.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def _liger(hidden: Tensor, head: Tensor, token: Tensor) -> dict[str, Callable[[], object]]:
    """Liger's cross entropy from hidden states, where it is installed: the sum of the log-probs and its gradients in
    one sweep, without the entropy. Its Triton form; the one for Hopper alone needs CUTLASS's compiler."""
    theirs = peer("liger_kernel.ops.fused_linear_cross_entropy")
    if theirs is None:
        return {}
    leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    target = token.long()

    def run() -> object:
        options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
        loss = theirs.LigerFusedLinearCrossEntropyFunction.apply(*leaves, target, *options)[0]
        return torch.autograd.grad(loss, leaves)

    return {"Liger, no entropy": run}


def _case(kind: str, *, kept: int = 0, tokens: int = TOKENS) -> Case:
    hidden = torch.randn(tokens, D, device="cuda").bfloat16()
    head = torch.randn(V, D, device="cuda").mul_(0.02).bfloat16()
    token = torch.randint(V, (tokens,), device="cuda", dtype=torch.int32)
    weights = torch.randn(2, tokens, device="cuda")
    lists = torch.cat([token.long().unsqueeze(1), torch.randint(V, (tokens, kept), device="cuda")], 1) if kept else None
    values, grad_hidden = torch.empty(2, tokens, device="cuda"), torch.empty(tokens, D, device="cuda")
    grad_head = torch.empty(V, D, device="cuda")

    def into(span: slice, values: Tensor, grad_hidden: Tensor, grad_head: Tensor | None) -> None:
        space = vocab_sweep.workspace(V, D, hidden.device, gradient=kind != "forward", kept=lists is not None)
        out = values[0], values[1]
        rows = hidden[span], head, token[span], 1.0
        sets = None
        if lists is not None:
            counts = torch.full((len(rows[2]),), kept + 1, device="cuda")
            sets = KeptSets(counts, lists[span].flatten())
        if kind != "sweep":
            vocab_sweep.logprob_into(*rows, *out, space, kept=sets)
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
                kept=sets,
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
    name = f"linear_logprob {kind}{f' over sets of {kept}' * bool(kept)}, T={tokens} V={V} D={D}"
    peers = {} if kept else {"torch.compile": by_compile}
    if kind == "sweep" and not kept:
        peers |= _liger(hidden, head, token)
    programs = vocab_sweep.programs(V, D)
    return Case(name, products * 2 * tokens * V * D, read + written, run, rows, peers, programs)


def forward() -> Case:
    """Values alone."""
    return _case("forward")


def sweep() -> Case:
    """Values and gradients of known weights in one sweep."""
    return _case("sweep")


def recompute() -> Case:
    """Values, then gradients from logits made anew."""
    return _case("recompute")


def forward_kept() -> Case:
    """Values over kept sets."""
    return _case("forward", kept=KEPT)


def sweep_kept() -> Case:
    """Values and gradients over kept sets in one sweep."""
    return _case("sweep", kept=KEPT)


cases = [forward, sweep, recompute, forward_kept, sweep_kept]
