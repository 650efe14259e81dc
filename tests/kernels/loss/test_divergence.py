"""Divergences over the whole vocabulary from hidden states: worked values, the dense form in float64, directions, bits,
memory.

The reverse KL's own file is test_reverse_kl.py; it is here where all three must agree. Not proven here: which tokens
and teachers a run gives them.
"""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.loss.divergence import forward_kl, jensen_shannon
from rollforward.kernels.loss.reverse_kl import reverse_kl
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.live_memory import peak_bytes
from tests.helpers.vocabulary_losses import problem, value_and_gradients


def dense_of(divergence):
    """The same from all logits at once, by autograd."""

    def dense(hidden, head, teacher_hidden, teacher_head, weight):
        log_p = torch.log_softmax(hidden @ head.t(), -1)
        log_q = torch.log_softmax(teacher_hidden @ teacher_head.t(), -1)
        value = divergence(log_p, log_q).sum(-1)
        return (weight * value).sum(), value

    return dense


def dense_jensen_shannon(log_p, log_q, *, beta):
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)


BETAS = (0.5, 0.1, 0.97)
EVERY = {
    "reverse": (reverse_kl, dense_of(lambda log_p, log_q: log_p.exp() * (log_p - log_q))),
    "forward": (forward_kl, dense_of(lambda log_p, log_q: log_q.exp() * (log_q - log_p))),
    **{
        f"jensen_shannon_{beta}": (
            functools.partial(jensen_shannon, beta=beta),
            dense_of(functools.partial(dense_jensen_shannon, beta=beta)),
        )
        for beta in BETAS
    },
}
every = pytest.mark.parametrize(("ours", "dense"), EVERY.values(), ids=EVERY)


def half_and_quarters(function):
    """Student (1/2, 1/2), teacher (1/4, 3/4), weight 2: the value, and the gradient of 3 x loss by the logits."""
    one = torch.ones(1, 1)
    head = torch.zeros(2, 1, requires_grad=True)
    loss, value = function(one, head, one, torch.log(torch.tensor([[1.0], [3.0]])), torch.tensor([2.0]))
    assert loss.item() == pytest.approx(2 * value.item(), rel=1e-6)
    return value.item(), torch.autograd.grad(3 * loss, head)[0].squeeze(1).tolist()


def test_forward_kl_by_hand():
    # 1/4 ln 1/2 + 3/4 ln 3/2 = 3/4 ln 3 - ln 2; dz = p - q = (1/4, -1/4).
    value, gradient = half_and_quarters(forward_kl)
    assert value == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-5)
    assert gradient == pytest.approx([6 * 0.25, -6 * 0.25], rel=1e-6)


def test_jensen_shannon_by_hand():
    # m = (3/8, 5/8): q / m = (2/3, 6/5), p / m = (4/3, 4/5).
    value, gradient = half_and_quarters(functools.partial(jensen_shannon, beta=0.5))
    teacher = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    student = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    assert value == pytest.approx(0.5 * teacher + 0.5 * student, rel=1e-5)
    # g = 1/2 (ln 4/3, ln 4/5), dz = 1/2 (g - mean g) = (1/8 ln 5/3, -1/8 ln 5/3).
    assert gradient == pytest.approx([6 / 8 * math.log(5 / 3), -6 / 8 * math.log(5 / 3)], rel=1e-5)
    # beta is the teacher's share: m = 1/4 q + 3/4 p = (7/16, 9/16).
    value, _ = half_and_quarters(functools.partial(jensen_shannon, beta=0.25))
    teacher = 0.25 * math.log(4 / 7) + 0.75 * math.log(4 / 3)
    student = 0.5 * math.log(8 / 7) + 0.5 * math.log(8 / 9)
    assert value == pytest.approx(0.25 * teacher + 0.75 * student, rel=1e-5)


@every
@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 300),
    vocab=st.sampled_from([1, 2, 37, 64, 129]),
    chunk_tokens=st.sampled_from([1, 16, 17, 48, 1000]),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 30.0, 1e3, 1e6]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_equals_the_dense_form_in_float64(ours, dense, num_tokens, vocab, chunk_tokens, scale, seed, data):
    arguments = problem(num_tokens, vocab, scale=scale, seed=seed)
    order = torch.tensor(data.draw(st.permutations(range(num_tokens))))
    shuffled = [one[order] if one.shape[0] == num_tokens and i in (0, 2, 4) else one for i, one in enumerate(arguments)]
    loss, value, grad_hidden, grad_head = value_and_gradients(ours, shuffled, chunk_tokens=chunk_tokens)
    expected = value_and_gradients(dense, arguments)
    mine = loss, value.new_empty(num_tokens), torch.empty_like(grad_hidden), grad_head
    mine[1][order], mine[2][order] = value, grad_hidden
    # Logits of size z are known to z eps, and so is what comes of them; the head's gradient has hidden states in it.
    logits = 1 + max(float((arguments[i] @ arguments[i + 1].t()).abs().max()) for i in (0, 2))
    for one, other, size in zip(mine, expected, (logits, logits, logits, logits * (1 + scale)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * (1 if scale <= 1 else size))
    assert bool((value >= 0).all())


@every
def test_gradcheck(ours, dense):
    hidden, head, *rest = problem(3, 5, 2, 4)
    inputs = (hidden.requires_grad_(True), head.requires_grad_(True))
    assert torch.autograd.gradcheck(lambda h, w: ours(h, w, *rest)[0], inputs)


@every
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_bounds_in_float32(ours, dense, scale):
    exact = problem(64, 500, 32, 24, scale=scale, seed=3)
    rounded = [one.float() for one in exact]
    _, value, grad_hidden, _ = value_and_gradients(ours, rounded)
    _, exact_value, exact_hidden, _ = value_and_gradients(dense, [one.double() for one in rounded])
    logits = torch.cat(((exact[0] @ exact[1].t()), (exact[2] @ exact[3].t())), 1).abs().amax(1)
    assert bool(((value - exact_value).abs() <= 1e-7 * (1 + logits) * (1 + exact_value)).all())
    norm = (grad_hidden - exact_hidden).norm(dim=1)
    assert bool((norm <= 1e-6 * exact[4] * (1 + logits) * (1 + exact_value) * exact[1].norm(dim=1).max()).all())


@every
def test_small_divergences_are_not_negative(ours, dense):
    hidden, head, *_, weight = (one.float() for one in problem(200, 5000, 16, 16, seed=5))
    for distance in (1e-1, 1e-2, 1e-3, 1e-4):
        near = head + distance * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        _, value = ours(hidden, head, hidden, near, weight)
        _, exact = dense(hidden.double(), head.double(), hidden.double(), near.double(), weight.double())
        assert bool((value >= 0).all())
        if distance >= 1e-2:
            torch.testing.assert_close(value.double(), exact, rtol=2e-2, atol=1e-7)


@every
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_teacher_that_is_the_student(ours, dense, scale):
    hidden, head, *_, weight = (one.float() for one in problem(40, 200, 16, 16, scale=scale))
    for one in value_and_gradients(ours, (hidden, head, hidden, head, weight)):
        assert not one.any()


@every
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_teacher_shifted_by_one_is_another(ours, dense, num_tokens):
    hidden, head, *_, weight = problem(num_tokens + 1, 200, 16, 16)
    _, value = ours(hidden[1:], head, hidden[:-1], head, weight[1:])
    assert bool((value > 1e-2).all())


def test_jensen_shannon_goes_to_both_divergences():
    arguments = problem(40, scale=0.3)
    for beta, limit in ((1e-9, forward_kl), (1 - 1e-9, reverse_kl)):
        _, value, *gradients = value_and_gradients(functools.partial(jensen_shannon, beta=beta), arguments)
        _, expected, *expected_gradients = value_and_gradients(limit, arguments)
        share = min(beta, 1 - beta)
        torch.testing.assert_close(value / share, expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(one / share, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [1e-300, 1e-30, 1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_jensen_shannon_is_bounded(beta, scale):
    arguments = [one.float() for one in problem(50, seed=9)]
    arguments[0], arguments[2] = arguments[0] * scale, arguments[2] * scale
    _, value, grad_hidden, _ = value_and_gradients(functools.partial(jensen_shannon, beta=beta), arguments)
    entropy = -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta))
    assert bool(((value >= 0) & (value <= entropy * (1 + 1e-5) + 1e-7)).all())
    assert torch.isfinite(grad_hidden).all()


def fitted(function) -> torch.Tensor:
    """Probabilities of a student with one peak (logits a v - b v^2) that learned from two peaks, at tokens 8 and 32."""
    token = torch.linspace(-1, 1, 41, dtype=torch.float64)
    head = torch.stack((token, -(token**2)), 1) * 10
    peaks = torch.logaddexp(-(((token + 0.6) / 0.1) ** 2), -(((token - 0.6) / 0.1) ** 2)).unsqueeze(1)
    hidden = torch.tensor([[-0.5, 1.0]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    optimizer = torch.optim.Adam([hidden], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        function(hidden, head, one, peaks, one[0])[0].backward()
        optimizer.step()
    return torch.softmax(hidden.detach() @ head.t(), -1)[0]


def test_forward_covers_and_reverse_seeks():
    covering, seeking = fitted(forward_kl), fitted(reverse_kl)
    # Forward: p has the moments of q, whose peaks are as likely, and the valley between them too.
    assert covering[:20].sum() == pytest.approx(0.5, abs=0.03)
    assert covering[15:26].sum() > 0.2
    # Reverse: one peak, next to nothing elsewhere.
    assert seeking[:20].sum() > 0.999
    assert seeking[15:26].sum() < 0.01


@every
def test_tokens_of_other_teachers_change_nothing(ours, dense):
    hidden, head, teacher_hidden, teacher_head, weight = problem(33)
    mine = torch.arange(33) % 3 == 1
    loss, value = ours(hidden, head, teacher_hidden, teacher_head, weight * mine)
    alone, value_alone = ours(hidden[mine], head, teacher_hidden[mine], teacher_head, weight[mine])
    torch.testing.assert_close(loss, alone, rtol=1e-14, atol=0)
    assert torch.equal(value[mine], value_alone)
    assert not value[~mine].any()


@every
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_rows_of_weight_zero_are_inert(ours, dense, garbage):
    arguments = [one.float() for one in problem(30)]
    clean = value_and_gradients(ours, [*arguments[:4], arguments[4].clone().index_fill_(0, torch.tensor([4]), 0)])
    arguments[0][4], arguments[2][4], arguments[4][4] = garbage, garbage, 0
    for one, other in zip(clean, value_and_gradients(ours, arguments), strict=True):
        assert not different_bits(one, other)


@every
@pytest.mark.parametrize("scale", [1e4, 1e18, 1e36])
def test_extreme_logits_stay_finite(ours, dense, scale):
    arguments = [one.float() for one in problem(50, scale=1.0, seed=9)]
    arguments[0], arguments[2] = arguments[0] * scale, arguments[2] * scale
    loss, value, grad_hidden, grad_head = value_and_gradients(ours, arguments)
    assert bool((value >= 0).all())
    assert torch.isfinite(value).all()
    if scale == 1e4:
        for one in (loss, grad_hidden, grad_head):
            assert torch.isfinite(one).all()


@every
def test_certain_of_opposite_tokens(ours, dense):
    # Log-probs of 0 and -infinity, the difference of logits being beyond float32.
    largest, both = torch.tensor([[3e38]]), torch.tensor([[1.0], [-1.0]])
    loss, value, grad_hidden, _ = value_and_gradients(ours, (largest, both, largest, -both, torch.ones(1)))
    assert value > 0.1
    for one in (loss, value, grad_hidden):
        assert torch.isfinite(one).all()


@every
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_keep_their_bits(ours, dense, threads):
    hidden, head, teacher_hidden, teacher_head, weight = [one.float() for one in problem(100, 300, 48, 40)]
    with torch_threads(threads):
        _, value, grad_hidden, _ = value_and_gradients(ours, (hidden, head, teacher_hidden, teacher_head, weight))
        order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
        for rows, chunk in ((order, 16), (order[:7], 256), (order[:1], 1), (torch.arange(100), 32)):
            part = (hidden[rows], head, teacher_hidden[rows], teacher_head, weight[rows])
            _, part_value, part_grad, _ = value_and_gradients(ours, part, chunk_tokens=chunk)
            assert not different_bits(part_value, value[rows])
            assert not different_bits(part_grad, grad_hidden[rows])


@every
def test_repeats_have_the_same_bits(ours, dense):
    arguments = [one.float() for one in problem(100, 300, 48, 40)]
    first = value_and_gradients(ours, arguments)
    for _ in range(3):
        for one, other in zip(first, value_and_gradients(ours, arguments), strict=True):
            assert not different_bits(one, other)


@every
def test_memory_does_not_grow_with_the_tokens(ours, dense):
    vocab, chunk = 1000, 32
    block = 4 * chunk * vocab
    peaks = {}
    for num_tokens in (chunk, 20 * chunk):
        arguments = [one.float() for one in problem(num_tokens, vocab, 4, 3)]
        peaks[num_tokens] = peak_bytes(lambda: value_and_gradients(ours, arguments, chunk_tokens=chunk))  # noqa: B023
    assert 2 * block <= peaks[chunk] <= 11 * block
    assert peaks[20 * chunk] < peaks[chunk] + block // 2
    assert peak_bytes(lambda: value_and_gradients(dense, arguments)) > 60 * block


@every
def test_bfloat16_teachers_are_widened_not_rounded_to(ours, dense):
    hidden, head, teacher_hidden, teacher_head, weight = [one.float() for one in problem(20)]
    small = teacher_hidden.bfloat16(), teacher_head.bfloat16()
    wide = small[0].float(), small[1].float()
    assert torch.equal(ours(hidden, head, *small, weight)[1], ours(hidden, head, *wide, weight)[1])


@every
def test_nothing_to_learn_from(ours, dense):
    hidden, head, teacher_hidden, teacher_head, weight = problem(1)
    empty = (hidden[:0], head, teacher_hidden[:0], teacher_head, weight[:0])
    loss, value, grad_hidden, grad_head = value_and_gradients(ours, empty)
    assert loss == 0
    assert (value.shape, grad_hidden.shape) == ((0,), (0, 8))
    assert not grad_head.any()


@every
def test_no_gradient_is_made_where_none_is_wanted(ours, dense):
    hidden, head, teacher_hidden, teacher_head, weight = problem(5)
    teacher_head.requires_grad_(True)
    loss, value = ours(hidden, head.requires_grad_(True), teacher_hidden, teacher_head, weight)
    assert not value.requires_grad
    gradient, for_teacher = torch.autograd.grad(loss, (head, teacher_head), allow_unused=True)
    assert gradient.any()
    assert for_teacher is None
    with torch.no_grad():
        assert not ours(hidden, head, teacher_hidden, teacher_head, weight)[0].requires_grad


@every
def test_wrong_arguments_are_named(ours, dense):
    hidden, head, teacher_hidden, teacher_head, weight = problem(5)
    with pytest.raises(ShapeError, match="teacher_head_VE"):
        ours(hidden, head, teacher_hidden, teacher_head[:-1], weight)
    with pytest.raises(ShapeError, match="row_weight_T"):
        ours(hidden, head, teacher_hidden, teacher_head, weight[1:])
    with pytest.raises(DtypeError, match="student_head_VD"):
        ours(hidden, head.float(), teacher_hidden, teacher_head, weight)
    with pytest.raises(DtypeError, match="row_weight_T"):
        ours(hidden, head, teacher_hidden, teacher_head, weight.float())
