"""`reverse_kl` and `linear_logprob` on a GPU: their tile form against float64, the reference, and themselves.

Sizes cross the tiles (128 rows, 256 columns, steps of 2048 columns) and the waves. Not proven here: speed.
"""

import functools

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.bench import Outputs, different
from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.linear_logprob_ref import KeptSets
from rollforward.kernels.loss.reverse_kl import reverse_kl
from tests.helpers.kernel_kit import near, near_entries, repeats, rows_alone
from tests.helpers.vocabulary_losses import kept_sets, outside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

SHAPES = [(1000, 520, 264), (2304, 256, 512)]
"""Vocabulary, width of the student, width of the teacher."""


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    for V, D, E in [*SHAPES, (1000, 520, 520)]:
        dispatch.warm(vocab_sweep.programs(V, D, E), jobs=8)
    dispatch.choose({"reverse_kl": "tile", "linear_logprob": "tile"})
    yield
    dispatch.choose({})


@functools.cache
def problem(shape: tuple[int, int, int], count: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    V, D, E = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    weight = torch.rand(count, generator=generator, device="cuda") + 0.1
    weight[1::7] = 0
    return (
        (normal(count, D) * scale).bfloat16(),
        (normal(V, D) * D**-0.5).bfloat16(),
        (normal(count, E) * scale).bfloat16(),
        (normal(V, E) * E**-0.5).bfloat16(),
        weight,
    )


def kl_outputs(arguments: tuple[Tensor, ...], rows: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Outputs:
    rows = rows.to(arguments[0].device)
    hidden, head = arguments[0][rows].to(dtype).requires_grad_(), arguments[1].clone().requires_grad_()
    loss, kl = reverse_kl(hidden, head, arguments[2][rows], arguments[3], arguments[4][rows])
    grads = torch.autograd.grad(3 * loss, (hidden, head))
    return {"loss": loss.detach()[None], "kl": kl, "grad_hidden": grads[0], "grad_head": grads[1]}


def into(arguments: tuple[Tensor, ...], rows: Tensor, *, garbage: float = 0.0, adds: bool = False) -> Outputs:
    hidden, head, teacher_hidden, teacher_head, weight = arguments
    rows = rows.to(hidden.device)
    space = vocab_sweep.workspace(*head.shape, hidden.device, teacher=True)
    out = [torch.empty(len(rows), device="cuda"), torch.empty(len(rows), head.shape[1], device="cuda")]
    out.append(torch.empty(head.shape, device="cuda"))
    for one in (*space, *out):
        if one.is_floating_point():
            one.fill_(garbage)
    space.logits.view(torch.int32).fill_(0x7FC07FC0)  # NaN, as one number and as two
    vocab_sweep.reverse_kl_into(
        hidden[rows], head, teacher_hidden[rows], teacher_head, weight[rows], *out, space, adds=adds
    )
    return dict(zip(("kl", "grad_hidden", "grad_head"), out, strict=True))


def exact_kl(arguments: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """KL of each row, and the gradients, in float64; rows of weight 0 left out."""
    hidden, head, teacher_hidden, teacher_head, weight = (one.double() for one in arguments)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t(), -1)
    log_q = torch.log_softmax(teacher_hidden @ teacher_head.t(), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) * (weight != 0)
    grads = torch.autograd.grad((weight * kl).sum(), leaves)
    return kl.detach(), *grads


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 127, 128, 129, 2049, 3000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_reverse_kl_in_float64(shape, count, scale):
    arguments = problem(shape, count, scale)
    mine = into(arguments, torch.arange(count), garbage=float("nan"))
    kl, grad_hidden, grad_head = exact_kl(arguments)
    logits = (arguments[0].float() @ arguments[1].float().t()).abs().max()
    assert bool(((mine["kl"] - kl).abs() <= 3e-7 * (1 + logits) * (1 + kl)).all())
    near(mine["grad_hidden"], grad_hidden, 4e-3)  # gradients of logits are rounded to bfloat16: 2^-9 each
    near(mine["grad_head"], grad_head, 4e-3)
    near_each(mine, grad_hidden, grad_head, scale)
    assert bool((mine["kl"] >= 0).all())


def near_each(mine: Outputs, grad_hidden: Tensor, grad_head: Tensor, scale: float) -> None:
    """Entries by those of their row: a sum over the vocabulary or over tokens of gradients that are each rounded to
    2^-8. Where one token has all the mass, or few tokens make a row of the head's, what is left of a row is less than
    what its parts were rounded by."""
    if scale <= 1.0:
        near_entries(mine["grad_hidden"], grad_hidden, 2e-2, 3e-2)
    if scale <= 1.0 and len(grad_hidden) >= 1500:
        near_entries(mine["grad_head"], grad_head, 3e-2, 5e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_reverse_kl_repeats(shape):
    repeats(functools.partial(into, problem(shape, 3000)), 3000)


@pytest.mark.parametrize("shape", SHAPES)
def test_reverse_kl_rows_alone(shape):
    rows_alone(functools.partial(into, problem(shape, 3000)), 3000, ("kl", "grad_hidden"))


def test_reverse_kl_is_the_reference():
    arguments = tuple(one.cpu() for one in problem(SHAPES[0], 300))
    dispatch.choose({})
    rows = torch.arange(300)
    expected = kl_outputs(tuple(one.float() for one in arguments), rows, dtype=torch.float32)
    dispatch.choose({"reverse_kl": "tile", "linear_logprob": "tile"})
    mine = kl_outputs(problem(SHAPES[0], 300), rows, dtype=torch.float32)
    for name, bound in {"loss": 1e-5, "kl": 1e-5, "grad_hidden": 4e-3, "grad_head": 6e-3}.items():
        near(mine[name].cpu(), expected[name].double(), bound)


def test_a_teacher_that_is_the_student():
    hidden, head, _, _, weight = problem(SHAPES[0], 300)
    mine = into((hidden, head, hidden, head, weight), torch.arange(300), garbage=1.0)
    for one in mine.values():
        assert not one.any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
def test_rows_of_weight_zero_are_inert(garbage):
    clean = problem(SHAPES[0], 300)
    idle = clean[4] == 0
    dirty = (clean[0].clone(), clean[1], clean[2].clone(), *clean[3:])
    dirty[0][idle], dirty[2][idle] = garbage, garbage
    rows = torch.arange(300)
    assert different(into(clean, rows), into(dirty, rows, garbage=garbage)) == []
    assert not into(dirty, rows)["kl"][idle].any()


def test_the_heads_gradient_is_added_to():
    arguments = problem(SHAPES[0], 300)
    once = into(arguments, torch.arange(300))["grad_head"]
    twice = into(arguments, torch.arange(300), garbage=1.0, adds=True)["grad_head"]
    near(twice, once.double() + 1.0, 1e-6)


@pytest.mark.parametrize("scale", [100.0, 1e4, 1e18])
def test_extreme_logits_stay_finite(scale):
    mine = into(problem(SHAPES[1], 200, scale), torch.arange(200))
    assert torch.isfinite(mine["kl"]).all()
    assert bool((mine["kl"] >= 0).all())
    if scale < 1e5:
        assert all(torch.isfinite(one).all() for one in mine.values())


def test_nothing_to_learn_from():
    mine = kl_outputs(problem(SHAPES[0], 5), torch.arange(0))
    assert not mine["loss"].any()
    assert not mine["grad_head"].any()


def test_a_graph_gives_the_same():
    arguments = problem(SHAPES[0], 900)
    hidden, head, teacher_hidden, teacher_head, weight = arguments
    space = vocab_sweep.workspace(*head.shape, hidden.device, teacher=True)
    out = [torch.empty(900, device="cuda"), torch.empty_like(hidden).float(), torch.empty_like(head).float()]

    def launch() -> None:
        vocab_sweep.reverse_kl_into(hidden, head, teacher_hidden, teacher_head, weight, *out, space, adds=False)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for one in out:
        one.fill_(float("nan"))
    graph.replay()
    got = dict(zip(("kl", "grad_hidden", "grad_head"), out, strict=True))
    assert different(into(arguments, torch.arange(900)), got) == []


def test_what_the_tile_form_does_not_take_is_named():
    hidden, head, teacher_hidden, teacher_head, weight = problem(SHAPES[0], 10)
    with pytest.raises(DtypeError, match="teacher_head_VE is float64"):
        reverse_kl(hidden, head, teacher_hidden, teacher_head.double(), weight)
    with pytest.raises(DtypeError, match="row_weight_T is bfloat16"):
        reverse_kl(hidden, head, teacher_hidden, teacher_head, weight.bfloat16())
    with pytest.raises(ShapeError, match="must be a multiple of 8"):
        linear_logprob(hidden[:, :7], head[:, :7], torch.zeros(10, dtype=torch.int64, device="cuda"), temperature=1.0)


def logprob_outputs(
    arguments: tuple[Tensor, ...], rows: Tensor, *, temperature: float = 0.7, with_kept: bool = False
) -> Outputs:
    hidden, head, _, _, weight = arguments
    every = tokens(len(head), len(hidden), torch.device("cpu"))
    kept = kept_of(every, len(head), rows, hidden.device) if with_kept else {}
    rows = rows.to(hidden.device)
    token = every.to(hidden.device)[rows]
    leaves = hidden[rows].requires_grad_(), head.clone().requires_grad_()
    logprob, entropy = linear_logprob(*leaves, token, temperature=temperature, **kept)
    grads = torch.autograd.grad((weight[rows] * (logprob + 0.3 * entropy)).sum(), leaves)
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "grad_hidden": grads[0], "grad_head": grads[1]}


def kept_of(token: Tensor, V: int, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    counts, ids = kept_sets(token, V, rows.cpu())
    return {"kept_counts_T": counts.to(device), "kept_ids": ids.to(device)}


def tokens(V: int, count: int, device: torch.device) -> Tensor:
    return ((torch.arange(count) * 7919 + V - 1) % V).to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 128, 129, 1500, 5000])
@pytest.mark.parametrize("scale", [0.1, 8.0])
@pytest.mark.parametrize("with_kept", [False, True])
def test_linear_logprob_in_float64(shape, count, scale, with_kept):
    arguments = problem(shape, count, scale)
    mine = logprob_outputs(arguments, torch.arange(count), with_kept=with_kept)
    hidden, head, _, _, weight = (one.double() for one in arguments)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    token = tokens(len(head), count, torch.device("cpu"))
    logits = leaves[0] @ leaves[1].t() / 0.7
    if with_kept:
        logits = logits.masked_fill(outside(*kept_sets(token, len(head)), len(head)).cuda(), -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    logprob = log_p.gather(1, token.cuda().unsqueeze(1)).squeeze(1)
    entropy = -(log_p.exp() * torch.where(log_p > -torch.inf, log_p, 0.0)).sum(-1)
    grads = torch.autograd.grad((weight * (logprob + 0.3 * entropy)).sum(), leaves)
    near(mine["logprob"] - 1, logprob.detach() - 1, 1e-6)  # of values near 0 the error is absolute
    near(mine["entropy"] + 1, entropy.detach() + 1, 2e-6)
    near(mine["grad_hidden"], grads[0], 6e-3)  # the gradient is also rounded to the hidden states' bfloat16
    near(mine["grad_head"], grads[1], 6e-3)
    if not with_kept:
        near_each(mine, *grads, scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_kept", [False, True])
def test_linear_logprob_repeats_and_rows_alone(shape, with_kept):
    run = functools.partial(logprob_outputs, problem(shape, 1500), with_kept=with_kept)
    repeats(run, 1500)
    rows_alone(run, 1500, ("logprob", "entropy", "grad_hidden"))


@pytest.mark.parametrize("with_kept", [False, True])
def test_linear_logprob_is_the_reference(with_kept):
    mine = logprob_outputs(problem(SHAPES[0], 300), torch.arange(300), with_kept=with_kept)
    dispatch.choose({})
    arguments = tuple(one.cpu().float() for one in problem(SHAPES[0], 300))
    expected = logprob_outputs(arguments, torch.arange(300), with_kept=with_kept)
    dispatch.choose({"reverse_kl": "tile", "linear_logprob": "tile"})
    for name, bound in {"logprob": 1e-6, "entropy": 2e-6, "grad_hidden": 6e-3, "grad_head": 6e-3}.items():
        near(mine[name].cpu(), expected[name].double(), bound)


def test_value_and_gradient_in_one_sweep_are_those_of_two():
    hidden, head, _, _, weight = problem(SHAPES[0], 1500)
    token = tokens(len(head), 1500, hidden.device).int()
    space = vocab_sweep.workspace(*head.shape, hidden.device, gradient=True)
    results = []
    for one_sweep in (False, True):
        values = tuple(torch.full((2, 1500), float("nan"), device="cuda"))
        grads = torch.empty_like(hidden).float(), torch.empty_like(head).float()
        weight = weight.clamp(min=0.1)  # a row without a gradient has no values in the sweep
        vocab_sweep.logprob_gradients_into(
            hidden, head, token, 0.5, weight, -weight, *grads, space, adds=False, values=values if one_sweep else None
        )
        if not one_sweep:
            vocab_sweep.logprob_into(hidden, head, token, 0.5, *values, space)
        results.append(dict(zip("abcd", (*values, *grads), strict=True)))
    assert different(*results) == []


def kept_logprob(arguments: tuple[Tensor, ...], token: Tensor, counts: Tensor, ids: Tensor) -> Outputs:
    leaves = arguments[0].clone().requires_grad_(), arguments[1].clone().requires_grad_()
    values = linear_logprob(*leaves, token, temperature=0.7, kept_counts_T=counts, kept_ids=ids)
    grads = torch.autograd.grad((arguments[4] * (values[0] + 0.3 * values[1])).sum(), leaves)
    names = ("logprob", "entropy", "grad_hidden", "grad_head")
    return dict(zip(names, (*(one.detach() for one in values), *grads), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_set_of_one_token_is_certain(shape):
    """All other tiles of the vocabulary have no token of the set."""
    arguments = problem(shape, 300)
    token = tokens(shape[0], 300, torch.device("cuda"))
    mine = kept_logprob(arguments, token, torch.ones_like(token), token)
    assert not any(mine[name].any() for name in mine)


@pytest.mark.parametrize("shape", SHAPES)
def test_sets_of_all_tokens_are_no_sets(shape):
    arguments = problem(shape, 300)
    V, token = shape[0], tokens(shape[0], 300, torch.device("cuda"))
    every = torch.arange(V, device="cuda").flip(0).repeat(300)
    whole = kept_logprob(arguments, token, torch.full_like(token, V), every)
    assert different(kept_logprob(arguments, token, torch.zeros_like(token), every[:0]), whole) == []
    some = torch.where(torch.arange(300, device="cuda") % 2 == 0, V, 0)
    assert different(kept_logprob(arguments, token, some, every[: int(some.sum())]), whole) == []


def test_lists_need_neither_order_nor_be_of_different_tokens():
    arguments = problem(SHAPES[0], 40)
    token = tokens(1000, 40, torch.device("cuda"))
    near_it = torch.stack([token, (token + 300) % 1000, (token + 700) % 1000], 1)
    counts = torch.full_like(token, 3)
    once = kept_logprob(arguments, token, counts, near_it.flatten())
    assert different(once, kept_logprob(arguments, token, counts, near_it.flip(1).flatten())) == []
    twice = torch.cat([near_it, near_it[:, 1:2]], 1).flatten()
    assert different(once, kept_logprob(arguments, token, counts + 1, twice)) == []
    logits = arguments[0].double() @ arguments[1].double().t() / 0.7
    chosen = logits.gather(1, near_it)
    near(once["logprob"] - 1, torch.log_softmax(chosen, -1)[:, 0] - 1, 1e-6)


def test_rows_without_a_gradient_are_inert_under_sets():
    arguments = problem(SHAPES[0], 300)
    token = tokens(1000, 300, torch.device("cpu"))
    counts, ids = kept_sets(token, 1000)
    hidden = arguments[0].clone()
    hidden[arguments[4] == 0] = float("nan")
    on = token.cuda(), counts.cuda(), ids.cuda()
    clean, dirty = kept_logprob(arguments, *on), kept_logprob((hidden, *arguments[1:]), *on)
    grads = ("grad_hidden", "grad_head")
    assert different({name: clean[name] for name in grads}, {name: dirty[name] for name in grads}) == []


@pytest.mark.parametrize("with_kept", [False, True])
def test_value_and_gradient_in_one_sweep_with_sets(with_kept):
    hidden, head, _, _, weight = problem(SHAPES[0], 2100)
    weight = weight.clamp(min=0.1)
    token = tokens(1000, 2100, torch.device("cpu"))
    kept = KeptSets(*(one.cuda() for one in kept_sets(token, 1000))) if with_kept else None
    space = vocab_sweep.workspace(*head.shape, hidden.device, gradient=True, kept=with_kept)
    values, expected = torch.full((2, 2, 2100), float("nan"), device="cuda")
    grads = torch.empty_like(hidden).float(), torch.empty_like(head).float()
    token = token.int().cuda()
    vocab_sweep.logprob_gradients_into(
        *(hidden, head, token, 0.5, weight, -weight, *grads, space), adds=False, values=tuple(values), kept=kept
    )
    vocab_sweep.logprob_into(hidden, head, token, 0.5, *expected, space, kept=kept)
    assert different({"values": expected}, {"values": values}) == []


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_operands_stay_where_they_are_and_are_rounded(on):
    """float32 that is not of bfloat16's numbers gives the bits of the rounded ones, and float32 gradients."""
    arguments = [one.float() for one in problem(SHAPES[0], 200)]
    for one in arguments[:4]:
        one.mul_(1 + 2.0**-12)
    rounded = [one.bfloat16() for one in arguments[:4]]
    token = tokens(1000, 200, torch.device("cuda"))
    counts, ids = (one.cuda() for one in kept_sets(token.cpu(), 1000))
    results = []
    for hidden, head, teacher_hidden, teacher_head in (rounded, [one.to(on) for one in arguments[:4]]):
        place = hidden.device
        leaves = hidden.requires_grad_(), head.requires_grad_()
        weight = arguments[4].to(place)
        loss, kl = reverse_kl(*leaves, teacher_hidden, teacher_head, weight)
        lists = {"kept_counts_T": counts.to(place), "kept_ids": ids.to(place)}
        logprob, entropy = linear_logprob(*leaves, token.to(place), temperature=0.9, **lists)
        grads = torch.autograd.grad(loss + (weight * (logprob - entropy)).sum(), leaves)
        outputs = (loss.detach()[None], kl, logprob.detach(), entropy.detach(), *grads)
        assert all(one.device == place for one in outputs)
        results.append(dict(zip(("loss", "kl", "logprob", "entropy", "hidden", "head"), outputs, strict=True)))
    first, second = results
    assert second["hidden"].dtype == second["head"].dtype == torch.float32
    values = ("loss", "kl", "logprob", "entropy")
    assert different({name: first[name] for name in values}, {name: second[name].cuda() for name in values}) == []
    for name in ("hidden", "head"):
        near(first[name].cpu(), second[name].double().cpu(), 6e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_has_them_whole():
    hidden, head, teacher_hidden, teacher_head, weight = problem(SHAPES[0], 200)
    token = tokens(1000, 200, torch.device("cuda"))
    counts, ids = (one.cuda() for one in kept_sets(token.cpu(), 1000))

    def both(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        logprob, entropy = linear_logprob(2 * hidden, head, token, temperature=0.7, kept_counts_T=counts, kept_ids=ids)
        loss, kl = reverse_kl(2 * hidden, head, teacher_hidden, teacher_head, weight)
        return loss + (weight * (logprob + 0.3 * entropy)).sum(), kl

    results = []
    for run in (both, torch.compile(both, fullgraph=True)):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss, kl = run(*leaves)
        grads = torch.autograd.grad(loss, leaves)
        results.append({"loss": loss.detach(), "kl": kl, "hidden": grads[0], "head": grads[1]})
    assert different({"kl": results[0]["kl"]}, {"kl": results[1]["kl"]}) == []
    for name in ("loss", "hidden", "head"):
        near(results[1][name], results[0][name].double(), 8e-3)  # a sum of bfloat16 gradients is rounded once or twice


@pytest.mark.filterwarnings("ignore")
def test_operators_keep_torchs_rules():
    """Schema, shapes without values, and autograd, as torch looks at them."""
    hidden, head, teacher_hidden, teacher_head, weight = problem(SHAPES[0], 20)
    token = tokens(1000, 20, torch.device("cuda"))
    counts, ids = (one.cuda() for one in kept_sets(token.cpu(), 1000))
    leaves = hidden.float().requires_grad_(), head.float().requires_grad_()
    with_head, without = (*leaves, head), (hidden, head, head.clone())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for op, arguments in [
        (torch.ops.rollforward.linear_logprob, (*with_head, token, 0.7, counts, ids)),
        (torch.ops.rollforward.linear_logprob, (*with_head, token, 0.7, None, None)),
        (
            torch.ops.rollforward.linear_logprob_backward,
            (hidden, head, token, 0.7, counts, ids, weight, weight, True, False),
        ),
        (torch.ops.rollforward.reverse_kl, (*with_head, teacher_hidden, teacher_head, weight, True, True)),
        (torch.ops.rollforward.reverse_kl, (*without, teacher_hidden, teacher_head, weight, False, False)),
    ]:
        torch.library.opcheck(op, arguments, test_utils=tests)
