"""Log-probability of the drawn token and entropy from hidden states: `token_logprob` of a head's logits, which never
exist for more than a chunk of tokens."""

import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.checks import bind_shapes, check_dtype
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob_ref import KeptSets, linear_logprob_backward_ref, linear_logprob_ref
from rollforward.kernels.loss.rounded_head import rounded_head
from rollforward.kernels.loss.sweep import CHUNK_TOKENS
from rollforward.kernels.operators import device_of, on_device, operator


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, head_VD, token_T, temperature, kept, chunk_tokens):
        ctx.save_for_backward(hidden_TD, head_VD, token_T, *(kept or ()))
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return linear_logprob_ref(hidden_TD, head_VD, token_T, temperature, kept, chunk_tokens=chunk_tokens)

    @staticmethod
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        hidden_TD, head_VD, token_T, *kept = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grads = linear_logprob_backward_ref(
            *(hidden_TD, head_VD, token_T, ctx.temperature, KeptSets(*kept) if kept else None),
            *(grad_logprob_T, grad_entropy_T),
            chunk_tokens=ctx.chunk_tokens,
            needs_hidden=needs_hidden,
            needs_head=needs_head,
        )
        return *grads, None, None, None, None


def _run(hidden_TD, head_VD, rounded_VD, token_T, temperature, kept_counts_T, kept_ids):
    logprob_T, entropy_T = _shapes(hidden_TD, head_VD, rounded_VD, token_T, temperature, kept_counts_T, kept_ids)
    kept = None if kept_counts_T is None else KeptSets(kept_counts_T, kept_ids)
    vocab_sweep.logprob_into(
        *(hidden_TD, rounded_VD, token_T.int(), 1.0 / temperature, logprob_T, entropy_T),
        vocab_sweep.workspace(*rounded_VD.shape, hidden_TD.device, kept=kept is not None),
        kept=kept,
    )
    return logprob_T, entropy_T


def _shapes(hidden_TD, head_VD, rounded_VD, token_T, temperature, kept_counts_T, kept_ids):
    del head_VD, rounded_VD, temperature, kept_counts_T, kept_ids
    logprob_T = hidden_TD.new_empty(token_T.shape, dtype=torch.float32)
    return logprob_T, torch.empty_like(logprob_T)


def _run_backward(
    hidden_TD, rounded_VD, token_T, temperature, kept_counts_T, kept_ids, grad_logprob_T, grad_entropy_T, *needs
):
    grads = vocab_sweep.gradients_of(*zip((hidden_TD, rounded_VD), needs, strict=True))
    kept = None if kept_counts_T is None else KeptSets(kept_counts_T, kept_ids)
    vocab_sweep.logprob_gradients_into(
        *(hidden_TD, rounded_VD, token_T.int(), 1.0 / temperature),
        *(grad_logprob_T.contiguous(), grad_entropy_T.contiguous(), *grads),
        vocab_sweep.workspace(*rounded_VD.shape, hidden_TD.device, gradient=True, kept=kept is not None),
        adds=False,
        kept=kept,
    )
    return tuple(grad_logprob_T.new_empty(0) if grad is None else grad for grad in grads)


def _shapes_backward(
    hidden_TD, rounded_VD, token_T, temperature, kept_counts_T, kept_ids, grad_logprob_T, grad_entropy_T, *needs
):
    del token_T, temperature, kept_counts_T, kept_ids, grad_entropy_T
    asked = zip((hidden_TD, rounded_VD), needs, strict=True)
    return tuple(grad_logprob_T.new_empty(one.shape if need else (0,)) for one, need in asked)


def _save(ctx, inputs, output):
    del output
    hidden_TD, head_VD, rounded_VD, token_T, ctx.temperature, *kept = inputs
    ctx.save_for_backward(hidden_TD, rounded_VD, token_T, *kept)
    ctx.kinds = [(one.device, one.dtype) for one in (hidden_TD, head_VD)]


def _gradients(ctx, grad_logprob_T, grad_entropy_T):
    hidden_TD, rounded_VD, token_T, *kept = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    operands = hidden_TD, rounded_VD, token_T, ctx.temperature, *kept
    grads = zip(_TILE_BACKWARD(*operands, grad_logprob_T, grad_entropy_T, *needs), ctx.kinds, needs, strict=True)
    return *(grad.to(*kind) if need else None for grad, kind, need in grads), *[None] * 5


_SETS = "Tensor token, float temperature, Tensor? kept_counts, Tensor? kept_ids"

_TILE = operator(
    f"linear_logprob(Tensor hidden, Tensor head, Tensor rounded_head, {_SETS}) -> (Tensor, Tensor)",
    _run,
    _shapes,
    save=_save,
    gradients=_gradients,
)
"""Log-probability and entropy of each row, float32. The head gets the gradient, and its rounded copy is read."""

_TILE_BACKWARD = operator(
    f"linear_logprob_backward(Tensor hidden, Tensor rounded_head, {_SETS}, Tensor grad_logprob, Tensor grad_entropy,"
    " bool needs_hidden, bool needs_head) -> (Tensor, Tensor)",
    _run_backward,
    _shapes_backward,
)
"""Gradients of the hidden states and of the head, float32; of what needs none it is empty."""


def _checked_kept(op: str, token_T: Tensor, counts_T: Tensor | None, ids: Tensor | None, vocab: int) -> KeptSets | None:
    if counts_T is None or ids is None:
        if counts_T is not ids:
            raise ShapeError(f"{op}: one of kept_counts_T and kept_ids is None. Give both, or neither.")
        return None
    bind_shapes(op, token_T=(token_T, "T"), kept_counts_T=(counts_T, "T"), kept_ids=(ids, "S"))
    check_dtype(op, "kept_counts_T", counts_T, torch.int64)
    check_dtype(op, "kept_ids", ids, torch.int64)
    if not counts_T.is_cuda and not ids.is_cuda:  # else it would wait for the device
        if int(counts_T.sum()) != len(ids):
            raise ShapeError(f"{op}: kept_ids has {len(ids)} tokens; kept_counts_T sums to {int(counts_T.sum())}.")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ShapeError(f"{op}: kept_ids holds {int(ids.min())} to {int(ids.max())}; the head has {vocab} tokens.")
    return KeptSets(counts_T, ids)


def linear_logprob(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    *,
    temperature: float,
    kept_counts_T: Tensor | None = None,
    kept_ids: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's token and the row's entropy, from hidden states and a head, over the
    whole vocabulary or over the row's kept set.

        z = h W / temperature, -inf outside the kept set
        log p = z at the token - log sum exp z;  entropy = -sum p log p
        dz = a (onehot - p) - b p (log p + entropy), a and b being the gradients of the two

    Args:
        hidden_TD: [T, D] float32 or float64, the vector that the head multiplies. Gets a gradient.
        head_VD: [V, D] of the same dtype. Gets a gradient.
        token_T: int64 [T], the drawn or target token, inside the kept set.
        temperature: > 0.
        kept_counts_T: int64 [T], size of the set that the row's distribution is over; 0, and None for all, is the whole
            vocabulary.
        kept_ids: int64 [sum of kept_counts_T], the sets one after another, in [0, V); None as kept_counts_T.
        chunk_tokens: >= 1. Memory is chunk_tokens * V numbers and a few temporaries of that size, whatever T. The tile
            form has its own (`vocab_sweep`).

    The tile form takes hidden states and a head that are each float32, which is rounded to bfloat16, or bfloat16, on
    the CPU or one device; results come to where the hidden states are, gradients to where their tensor is. A float32
    head is rounded once, until it is written to (`rounded_head`).

    Returns:
        logprob_T (<= 0) and entropy_T (nats, >= 0 up to rounding), of the dtype of the hidden states; float32 in the
        tile form.

    Raises:
        ShapeError: letters disagree, or kept sets that lie on the CPU are not what they say. DtypeError: a dtype is
        none of these.

    Invariants: bit-equal, in the reference form and with autograd on or off, to `token_logprob` of `row_linear(hidden,
    head)` with -inf outside the kept set; chunk, order and the other rows have no say. Logits are made twice, for the
    value and for the gradient, a chunk of tokens at a time, and are float32 in both forms. The gradient of a row's
    hidden state is row-invariant; the head's sums over tokens in a fixed order. A token outside a kept set gets no
    gradient from its row. Rows whose two gradients are 0 are not looked at by the gradient, whatever they hold.
    Source: docs/design.md, P3.
    """
    op = "linear_logprob"
    bind_shapes(op, hidden_TD=(hidden_TD, "T D"), head_VD=(head_VD, "V D"), token_T=(token_T, "T"))
    check_dtype(op, "token_T", token_T, torch.int64)
    kept = _checked_kept(op, token_T, kept_counts_T, kept_ids, len(head_VD))
    if dispatch.is_tile("linear_logprob"):
        vocab_sweep.check_operands(op, hidden_TD=hidden_TD, head_VD=head_VD)
        lists = kept if kept is not None and len(kept.ids) else (None, None)  # without a number all sets are the whole
        device = device_of(hidden_TD, head_VD, token_T, *lists)
        taken_TD, token_T, *lists = on_device(hidden_TD, token_T, *lists, device=device)
        values = _TILE(taken_TD, head_VD, rounded_head(head_VD, device), token_T, temperature, *lists)
        logprob_T, entropy_T = (one.to(hidden_TD.device) for one in values)
        return logprob_T, entropy_T
    check_dtype(op, "hidden_TD", hidden_TD, torch.float32, torch.float64)
    check_dtype(op, "head_VD", head_VD, hidden_TD.dtype)
    return _LinearLogprob.apply(hidden_TD, head_VD, token_T, temperature, kept, chunk_tokens)
