"""Walks over tokens of the losses over the vocabulary, on a GPU: which program runs on which rows, in which memory.

A wave is the tokens whose logits, or what is made of them, exist at one time. Memory is that of one wave, whatever T:
for reverse KL one word for each element, which holds the teacher's logit, then what the gradient is made of, then, in
its first half, the gradient. Every program looks at rows one by one, so a wave's size does not change a bit of a
row; the head's gradient sums over tokens wave by wave, in cuBLAS.

Here: launches and memory. Not here: the programs (`vocab_tile`, `vocab_rows_tile`, `kept_tile`), the public ops
(`reverse_kl`, `linear_logprob`). Nothing here waits for the device.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rollforward.kernels.checks import check_dtype, check_multiple
from rollforward.kernels.dispatch import Program, bind, program
from rollforward.kernels.loss.linear_logprob_ref import KeptSets

TILE_V, TILE_D = 256, 256
"""Columns of a tile of the vocabulary, which has partial sums of its own, and of the hidden states' gradient."""

PART = 64
"""Columns of a tile with a centre of their own, as in `vocab_tile`."""

PAD = 64
"""Numbers between rows of a gradient of the logits, which makes cuBLAS faster."""

WAVE = 2048
"""1.03 GiB for reverse KL and 0.53 GiB for log-probabilities at V = 129280: both heads and the head's gradient are
read once for each wave."""

ROW = 8
"""Rows of hidden states, heads and gradients of logits are 16 whole bytes each: so many numbers, or a multiple."""

WEIGHTS, LOGITS = 1, 2
"""What `vocab_tile.logits` may write beside its stats: exp(z - top) as bfloat16, or the logits."""

_PRODUCTS, _ROWS = "loss.vocab_tile", "loss.vocab_rows_tile"


def takes(V: int, D: int) -> bool:
    """Whether there are programs for a vocabulary of this size and hidden states of this width."""
    return V % ROW == 0 and D % ROW == 0


def programs(V: int, D: int, teacher_width: int | None = None) -> list[Program]:
    """Return what `linear_logprob` over this head runs and, with a teacher of this width, `reverse_kl`."""

    def logits(width: int, *, token: bool, keep: int, masked: bool = False) -> Program:
        pitch = {0: 1, WEIGHTS: V + PAD, LOGITS: V}[keep]
        sizes = {"V": V, "D": width, "tile_v": TILE_V, "pitch": pitch}
        return program(_PRODUCTS, "logits", token=token, keep=keep, masked=masked, **sizes)

    wanted = [
        logits(D, token=True, keep=0),
        logits(D, token=True, keep=0, masked=True),
        logits(D, token=True, keep=WEIGHTS),
        logits(D, token=True, keep=WEIGHTS, masked=True),
        program("loss.kept_tile", "kept_mask", V=V, tile_v=TILE_V),
        program(_ROWS, "logprob_rows", V=V, tile_v=TILE_V),
        program(_ROWS, "logprob_grad_rows", V=V, tile_v=TILE_V, pitch=V + PAD),
        program(_PRODUCTS, "hidden_grad", V=V, D=D, tile_d=TILE_D, pitch=V + PAD),
    ]
    if teacher_width is not None:
        wanted += [
            logits(teacher_width, token=False, keep=LOGITS),
            program(_PRODUCTS, "student_logits", V=V, D=D, tile_v=TILE_V),
            program(_ROWS, "reverse_kl_rows", V=V, tile_v=TILE_V),
            program(_PRODUCTS, "hidden_grad", V=V, D=D, tile_d=TILE_D, pitch=2 * V),
        ]
    return wanted


class _Launchers(NamedTuple):
    value: Callable[..., None]
    value_masked: Callable[..., None]
    weights: Callable[..., None]
    weights_masked: Callable[..., None]
    kept_mask: Callable[..., None]
    logprob_rows: Callable[..., None]
    logprob_grad_rows: Callable[..., None]
    hidden_grad: Callable[..., None]


class _KLLaunchers(NamedTuple):
    teacher: Callable[..., None]
    student: Callable[..., None]
    rows: Callable[..., None]
    hidden_grad: Callable[..., None]


@functools.cache
def _launchers(V: int, D: int) -> _Launchers:
    return _Launchers(*map(bind, programs(V, D)))


@functools.cache
def _kl_launchers(V: int, D: int, teacher_width: int) -> _KLLaunchers:
    return _KLLaunchers(*map(bind, programs(V, D, teacher_width)[-4:]))


class Workspace(NamedTuple):
    """Memory of a walk, which holds nothing between calls; one walk at a time uses it."""

    hidden: Tensor
    """[wave, D] bfloat16: the hidden states, rows without a gradient zero. With a gradient."""
    logits: Tensor
    """[wave, V]: words of 32 bits for a walk with a teacher, else bfloat16; at the end the gradient of the logits. With
    a gradient."""
    stats: Tensor
    """float32: three numbers of each row's tiles, with a teacher ten."""
    token_logit: Tensor
    """[wave] float32."""
    mask: Tensor
    """[wave, words] int32: a bit for each token. With kept sets."""
    nothing: Tensor
    """[1, 1] bfloat16, for an argument that a program does not look at."""
    no_token: Tensor
    """[1] int32, likewise."""


def workspace(
    V: int, D: int, device: torch.device, *, teacher: bool = False, gradient: bool = False, kept: bool = False
) -> Workspace:
    """Allocate the memory of `reverse_kl_into` (teacher), of `logprob_gradients_into` (gradient) or of `logprob_into`;
    the latter two with kept sets where they are given some (kept)."""
    make = functools.partial(torch.empty, device=device)
    rows, tiles = WAVE if teacher or gradient else 0, -(-V // TILE_V)
    return Workspace(
        hidden=make((rows, D), dtype=torch.bfloat16),
        logits=make((rows, V), dtype=torch.float32) if teacher else make((rows, V + PAD), dtype=torch.bfloat16)[:, :V],
        stats=make((10 if teacher else 3) * tiles * WAVE, dtype=torch.float32),
        token_logit=make(WAVE, dtype=torch.float32),
        mask=make((WAVE if kept else 0, tiles * TILE_V // 32), dtype=torch.int32),
        nothing=make((1, 1), dtype=torch.bfloat16),
        no_token=make(1, dtype=torch.int32),
    )


def gradients_of(*asked: tuple[Tensor, bool]) -> list[Tensor | None]:
    """Allocate a float32 gradient of each of these tensors that needs one; zeros where no row will write them."""
    make = torch.empty if len(asked[0][0]) else torch.zeros
    return [make(one.shape, dtype=torch.float32, device=one.device) if need else None for one, need in asked]


def rounded(operand: Tensor) -> Tensor:
    """Return a matrix as the programs take it: bfloat16, rows one after another."""
    return operand.to(torch.bfloat16).contiguous()


def _spans(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


def _stats(space: Workspace, V: int, tokens: int, kinds: int = 3, *, behind: int = 0) -> Tensor:
    """Stats [kinds, tiles, tokens] of a launch, behind as many of another."""
    size = -(-V // TILE_V) * tokens
    return space.stats[behind * size : (behind + kinds) * size].view(kinds, -1, tokens)


def check_operands(op: str, /, **operands: Tensor) -> None:
    """Raise unless the programs take these matrices, rounded: float32 or bfloat16, rows of 16 whole bytes, of hidden
    states and of logits (the heads' names begin their suffix with V)."""
    for name, one in operands.items():
        check_dtype(op, name, one, torch.float32, torch.bfloat16)
        check_multiple(op, f"{name}.shape[1]", one.shape[1], ROW)
        if name.rpartition("_")[2].startswith("V"):
            check_multiple(op, f"{name}.shape[0]", one.shape[0], ROW)


def _take_hidden(space: Workspace, hidden_TD: Tensor, wave: slice, idle: Tensor) -> Tensor:
    """Copy a wave's hidden states, rows without a gradient as zeros: what they hold must not reach the head's."""
    taken = space.hidden[: wave.stop - wave.start]
    taken.copy_(hidden_TD[wave])
    return taken.masked_fill_(idle.unsqueeze(1), 0)


def _give(
    hidden_grad: Callable[..., None],
    head_VD: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    grad_hidden_TD: Tensor | None,
    grad_head_VD: Tensor | None,
    adds: bool,
) -> None:
    """From a wave's gradient of the logits to those of the hidden states and the head."""
    if grad_hidden_TD is not None:
        hidden_grad(logits_grad, head_VD, grad_hidden_TD)
    if grad_head_VD is None:
        return
    if adds:
        torch.addmm(grad_head_VD, logits_grad.t(), hidden, out_dtype=torch.float32, out=grad_head_VD)
    else:
        torch.mm(logits_grad.t(), hidden, out_dtype=torch.float32, out=grad_head_VD)


def reverse_kl_into(
    hidden_TD: Tensor,
    head_VD: Tensor,
    teacher_hidden_TE: Tensor,
    teacher_head_VE: Tensor,
    row_weight_T: Tensor,
    kl_T: Tensor,
    grad_hidden_TD: Tensor | None,
    grad_head_VD: Tensor | None,
    space: Workspace,
    *,
    adds: bool,
) -> None:
    """Write KL(student || teacher) of each row and the gradients of its weighted sum.

    Args:
        hidden_TD: [T, D] bfloat16 or float32 that is rounded to it.
        head_VD: [V, D] bfloat16.
        teacher_hidden_TE: [T, E] bfloat16 or float32 that is rounded to it.
        teacher_head_VE: [V, E] bfloat16.
        row_weight_T: [T] float32; rows of weight 0 may hold anything.
        kl_T: [T] float32, written.
        grad_hidden_TD: [T, D] float32, written; None: not asked for.
        grad_head_VD: [V, D] float32, written or, with `adds`, added to; None: not asked for.
        space: what `workspace(..., teacher=True)` made.
        adds: whether the head's gradient is added to.

    Invariants: as `reverse_kl`; may be captured in a CUDA graph.
    """
    V, D = head_VD.shape
    launch = _kl_launchers(V, D, teacher_head_VE.shape[1])
    for wave in _spans(0, len(kl_T), WAVE):
        hidden = _take_hidden(space, hidden_TD, wave, row_weight_T[wave] == 0)
        logits, words = space.logits[: len(hidden)], space.logits[: len(hidden)].view(torch.uint32)
        teacher_stats, stats = _stats(space, V, len(hidden)), _stats(space, V, len(hidden), behind=3)
        centres = _stats(space, V, len(hidden), TILE_V // PART, behind=6).flatten(0, 1)
        nothing = space.no_token, space.no_token.view(1, 1), space.token_logit[:1]
        of_teacher = rounded(teacher_hidden_TE[wave])
        launch.teacher(of_teacher, teacher_head_VE, 1.0, *nothing[:2], logits, teacher_stats, nothing[2])
        launch.student(hidden, head_VD, logits, words, stats, centres)
        launch.rows(words.view(torch.uint16), stats, centres, teacher_stats, row_weight_T[wave], kl_T[wave])
        logits_grad = words.view(torch.bfloat16)[:, :V]
        grad_hidden = None if grad_hidden_TD is None else grad_hidden_TD[wave]
        _give(launch.hidden_grad, head_VD, logits_grad, hidden, grad_hidden, grad_head_VD, adds or wave.start > 0)


def _masks(space: Workspace, kept: KeptSets | None, kept_mask: Callable[..., None]) -> Callable[[slice], Tensor]:
    """What makes the mask of a wave's rows, or the argument that says nothing."""
    if kept is None:
        return lambda _: space.no_token.view(1, 1)
    ends_T = kept.counts_T.cumsum(0)

    def mask_of(wave: slice) -> Tensor:
        mask = space.mask[: wave.stop - wave.start]
        kept_mask(kept.counts_T[wave], ends_T[wave], kept.ids, mask)
        return mask

    return mask_of


def logprob_into(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    scale: float,
    logprob_T: Tensor,
    entropy_T: Tensor,
    space: Workspace,
    *,
    kept: KeptSets | None = None,
) -> None:
    """Write log-probability and entropy of softmax(scale * hidden @ head.T), over the row's kept set where it has one,
    at each row's token; no logits are kept.

    hidden_TD is bfloat16, or float32 that is rounded to it wave by wave; head_VD bfloat16, token_T int32. May be
    captured in a CUDA graph.
    """
    launch = _launchers(*head_VD.shape)
    mask_of = _masks(space, kept, launch.kept_mask)
    value = launch.value if kept is None else launch.value_masked
    for rows in _spans(0, len(token_T), WAVE):
        tokens = rows.stop - rows.start
        stats, token_logit = _stats(space, head_VD.shape[0], tokens), space.token_logit[:tokens]
        hidden = rounded(hidden_TD[rows])
        value(hidden, head_VD, scale, token_T[rows], mask_of(rows), space.nothing, stats, token_logit)
        launch.logprob_rows(stats, token_logit, logprob_T[rows], entropy_T[rows])


def logprob_gradients_into(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    scale: float,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
    grad_hidden_TD: Tensor | None,
    grad_head_VD: Tensor | None,
    space: Workspace,
    *,
    adds: bool,
    values: tuple[Tensor, Tensor] | None = None,
    kept: KeptSets | None = None,
) -> None:
    """Write the gradients of the weighted sums of log-probabilities and entropies, from logits made here.

    Args:
        hidden_TD: [T, D] bfloat16 or float32 that is rounded to it.
        head_VD: [V, D] bfloat16.
        token_T: [T] int32.
        scale: the logits' factor, 1 / temperature.
        grad_logprob_T: [T] float32.
        grad_entropy_T: [T] float32. Rows where both are 0 may hold anything.
        grad_hidden_TD: [T, D] float32, written; None: not asked for.
        grad_head_VD: [V, D] float32, written or, with `adds`, added to; None: not asked for.
        space: what `workspace(..., gradient=True)` made.
        adds: whether the head's gradient is added to.
        values: log-probability and entropy, [T] float32 each, written, for whoever knows the weights before them;
            rows without a gradient then count as hidden states of 0.
        kept: sets that the rows' distributions are over; None: the whole vocabulary.

    Invariants: may be captured in a CUDA graph.
    """
    V, D = head_VD.shape
    launch = _launchers(V, D)
    mask_of = _masks(space, kept, launch.kept_mask)
    weights = launch.weights if kept is None else launch.weights_masked
    for wave in _spans(0, len(token_T), WAVE):
        idle = (grad_logprob_T[wave] == 0) & (grad_entropy_T[wave] == 0)
        hidden = _take_hidden(space, hidden_TD, wave, idle)
        tokens = len(hidden)
        logits_grad, token_logit = space.logits[:tokens], space.token_logit[:tokens]
        stats = _stats(space, V, tokens)
        weights(hidden, head_VD, scale, token_T[wave], mask_of(wave), logits_grad, stats, token_logit)
        if values is not None:
            launch.logprob_rows(stats, token_logit, values[0][wave], values[1][wave])
        launch.logprob_grad_rows(logits_grad, stats, token_T[wave], grad_logprob_T[wave], grad_entropy_T[wave], scale)
        grad_hidden = None if grad_hidden_TD is None else grad_hidden_TD[wave]
        _give(launch.hidden_grad, head_VD, logits_grad, hidden, grad_hidden, grad_head_VD, adds or wave.start > 0)
