"""Cases of `reverse_kl` for `kernels/bench.py`: V4-Flash's head, student and teacher of one width."""

from collections.abc import Callable

import torch
from torch import Tensor

from rollforward.kernels.bench import Case, Outputs, peer
from rollforward.kernels.loss import vocab_sweep

V, D = 129280, 4096


def compiled(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, weight: Tensor) -> Tensor:
    """The plain form, whose logits are BF16 where torch.compile decides so."""
    log_p = torch.log_softmax((hidden @ head.t()).float(), -1)
    log_q = torch.log_softmax((teacher_hidden @ teacher_head.t()).float(), -1)
    return ((log_p.exp() * (log_p - log_q)).sum(-1) * weight).sum()


def _liger(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor
) -> dict[str, Callable[[], object]]:
    """Liger's Jensen-Shannon divergence from hidden states at beta 1, the reverse KL, where it is installed; a mean
    over tokens, with gradients in BF16."""
    theirs = peer("liger_kernel.chunked_loss.jsd_loss")
    if theirs is None:
        return {}
    leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    target = torch.zeros(len(hidden), device="cuda", dtype=torch.int64)

    def run() -> object:
        options = (target, None, None, 0.0, 1.0, 1.0, -100, 1.0, True, 1024)
        loss = theirs.LigerFusedLinearJSDFunction.apply(*leaves, teacher_hidden, teacher_head, *options)
        return torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, leaves)

    return {"Liger": run}


def _case(tokens: int, *, with_peers: bool) -> Case:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    hidden, teacher_hidden = normal(tokens, D), normal(tokens, D)
    head, teacher_head = (torch.randn(V, D, device="cuda").mul_(0.02).bfloat16() for _ in range(2))
    weight = torch.full((tokens,), 1 / tokens, device="cuda")
    kl, grad_hidden = torch.empty(tokens, device="cuda"), torch.empty(tokens, D, device="cuda")
    grad_head = torch.empty(V, D, device="cuda")

    def into(rows: slice, kl: Tensor, grad_hidden: Tensor, grad_head: Tensor | None) -> None:
        space = vocab_sweep.workspace(V, D, hidden.device, teacher=True)
        vocab_sweep.reverse_kl_into(
            hidden[rows],
            head,
            teacher_hidden[rows],
            teacher_head,
            weight[rows],
            kl,
            grad_hidden,
            grad_head,
            space,
            adds=False,
        )

    def run() -> Outputs:
        into(slice(0, tokens), kl, grad_hidden, grad_head)
        return {"kl": kl, "grad_hidden": grad_hidden, "grad_head": grad_head}

    def rows(span: slice) -> Outputs:
        few = span.stop - span.start
        out = torch.empty(few, device="cuda"), torch.empty(few, D, device="cuda")
        into(span, *out, None)
        return {"kl": out[0], "grad_hidden": out[1]}

    plain = torch.compile(compiled)

    def by_compile() -> object:
        leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
        return torch.autograd.grad(plain(*leaves, teacher_hidden, teacher_head, weight), leaves)

    peers = {"torch.compile": by_compile} | _liger(hidden, head, teacher_hidden, teacher_head) if with_peers else {}
    read = 2 * (tokens + V) * D * 2
    written = (tokens + V) * D * 4
    programs = vocab_sweep.programs(V, D, D)
    name = f"reverse_kl forward + backward with dW, T={tokens} V={V} D={D}"
    return Case(name, 4 * 2 * tokens * V * D, read + written, run, rows, peers, programs)


def tokens_2048() -> Case:
    """The bar's size."""
    return _case(2048, with_peers=True)


def tokens_32768() -> Case:
    """Memory that does not grow."""
    return _case(32768, with_peers=False)


cases = [tokens_2048, tokens_32768]
