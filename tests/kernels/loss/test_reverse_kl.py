"""Reverse KL from hidden states: worked values, the dense form in float64, FP32 bounds, bits, memory.

Not proven here: which tokens and teachers a run gives it.
"""

import math

import pytest
import torch

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.loss.reverse_kl import reverse_kl
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.vocabulary_losses import problem, value_and_gradients


def dense(hidden, head, teacher_hidden, teacher_head, weight):
    log_p = torch.log_softmax(hidden @ head.t(), -1)
    log_q = torch.log_softmax(teacher_hidden @ teacher_head.t(), -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return (weight * kl).sum(), kl


def test_values_by_hand():
    # student (1/2, 1/2), teacher (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3 = ln 2 - 1/2 ln 3.
    one = torch.ones(1, 1)
    loss, kl = reverse_kl(one, torch.zeros(2, 1), one, torch.log(torch.tensor([[1.0], [3.0]])), torch.tensor([2.0]))
    expected = math.log(2) - 0.5 * math.log(3)
    assert kl.item() == pytest.approx(expected, rel=1e-6)
    assert loss.item() == pytest.approx(2 * expected, rel=1e-6)


def test_gradient_by_hand():
    # p = (1/2, 1/2), r = (ln 2, ln 2/3), K = their mean: dz = p (r - K) = (ln 3 / 4, -ln 3 / 4).
    one = torch.ones(1, 1)
    head = torch.zeros(2, 1, requires_grad=True)
    loss, _ = reverse_kl(one, head, one, torch.log(torch.tensor([[1.0], [3.0]])), torch.tensor([2.0]))
    (gradient,) = torch.autograd.grad(3 * loss, head)
    torch.testing.assert_close(gradient, 6 * torch.tensor([[math.log(3) / 4], [-math.log(3) / 4]]))


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 48, 1000])
def test_equals_the_dense_form_in_float64(num_tokens, chunk_tokens):
    arguments = problem(num_tokens)
    ours = value_and_gradients(reverse_kl, arguments, chunk_tokens=chunk_tokens)
    for mine, theirs in zip(ours, value_and_gradients(dense, arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 129, 1000])
def test_any_vocabulary(vocab):
    arguments = problem(20, vocab)
    ours = value_and_gradients(reverse_kl, arguments)
    for mine, theirs in zip(ours, value_and_gradients(dense, arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    hidden, head, *rest = problem(3, 5, 2, 4)
    inputs = (hidden.requires_grad_(True), head.requires_grad_(True))
    assert torch.autograd.gradcheck(lambda h, w: reverse_kl(h, w, *rest)[0], inputs)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_bounds_in_float32(scale):
    exact = problem(64, 500, 32, 24, scale=scale, seed=3)
    rounded = [one.float() for one in exact]
    _, kl, grad_hidden, _ = value_and_gradients(reverse_kl, rounded)
    _, exact_kl, exact_hidden, _ = value_and_gradients(dense, [one.double() for one in rounded])
    logits = torch.cat(((exact[0] @ exact[1].t()), (exact[2] @ exact[3].t())), 1).abs().amax(1)
    assert bool(((kl - exact_kl).abs() <= 1e-7 * (1 + logits) * (1 + exact_kl)).all())
    norm = (grad_hidden - exact_hidden).norm(dim=1)
    assert bool((norm <= 1e-6 * exact[4] * (1 + logits) * (1 + exact_kl) * exact[1].norm(dim=1).max()).all())


def test_small_divergences_are_not_negative():
    hidden, head, *_, weight = (one.float() for one in problem(200, 5000, 16, 16, seed=5))
    for distance in (1e-1, 1e-2, 1e-3, 1e-4):
        near = head + distance * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        _, kl = reverse_kl(hidden, head, hidden, near, weight)
        _, exact = dense(hidden.double(), head.double(), hidden.double(), near.double(), weight.double())
        assert bool((kl >= 0).all())
        if distance >= 1e-2:
            torch.testing.assert_close(kl.double(), exact, rtol=2e-2, atol=1e-7)


def test_a_teacher_that_is_the_student():
    hidden, head, *_, weight = (one.float() for one in problem(40, 200, 16, 16))
    loss, kl, grad_hidden, grad_head = value_and_gradients(reverse_kl, (hidden, head, hidden, head, weight))
    for one in (loss, kl, grad_hidden, grad_head):
        assert not one.any()


def test_a_teacher_shifted_by_one_is_another():
    hidden, head, *_, weight = problem(40, 200, 16, 16)
    _, kl = reverse_kl(hidden, head, hidden.roll(1, 0), head, weight)
    assert bool((kl > 1e-3).all())


def test_tokens_of_other_teachers_change_nothing():
    hidden, head, teacher_hidden, teacher_head, weight = problem(33)
    mine = torch.arange(33) % 3 == 1
    loss, kl = reverse_kl(hidden, head, teacher_hidden, teacher_head, weight * mine)
    alone, kl_alone = reverse_kl(hidden[mine], head, teacher_hidden[mine], teacher_head, weight[mine])
    torch.testing.assert_close(loss, alone, rtol=1e-14, atol=0)
    assert torch.equal(kl[mine], kl_alone)
    assert not kl[~mine].any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_rows_of_weight_zero_are_inert(garbage):
    arguments = [one.float() for one in problem(30)]
    clean = value_and_gradients(reverse_kl, [*arguments[:4], arguments[4].clone().index_fill_(0, torch.tensor([4]), 0)])
    arguments[0][4], arguments[2][4], arguments[4][4] = garbage, garbage, 0
    for one, other in zip(clean, value_and_gradients(reverse_kl, arguments), strict=True):
        assert not different_bits(one, other)


@pytest.mark.parametrize("scale", [1e4, 1e18, 1e36])
def test_extreme_logits_stay_finite(scale):
    arguments = [one.float() for one in problem(50, scale=1.0, seed=9)]
    arguments[0], arguments[2] = arguments[0] * scale, arguments[2] * scale
    loss, kl, grad_hidden, grad_head = value_and_gradients(reverse_kl, arguments)
    assert bool((kl >= 0).all())
    assert torch.isfinite(kl).all()
    if scale == 1e4:
        for one in (loss, grad_hidden, grad_head):
            assert torch.isfinite(one).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_keep_their_bits(threads):
    hidden, head, teacher_hidden, teacher_head, weight = [one.float() for one in problem(100, 300, 48, 40)]
    with torch_threads(threads):
        _, kl, grad_hidden, _ = value_and_gradients(reverse_kl, (hidden, head, teacher_hidden, teacher_head, weight))
        order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
        for rows, chunk in ((order, 16), (order[:7], 256), (order[:1], 1), (torch.arange(100), 32)):
            part = (hidden[rows], head, teacher_hidden[rows], teacher_head, weight[rows])
            _, part_kl, part_grad, _ = value_and_gradients(reverse_kl, part, chunk_tokens=chunk)
            assert not different_bits(part_kl, kl[rows])
            assert not different_bits(part_grad, grad_hidden[rows])


def test_repeats_have_the_same_bits():
    arguments = [one.float() for one in problem(100, 300, 48, 40)]
    first = value_and_gradients(reverse_kl, arguments)
    for _ in range(3):
        for one, other in zip(first, value_and_gradients(reverse_kl, arguments), strict=True):
            assert not different_bits(one, other)


def test_bfloat16_teachers_are_widened_not_rounded_to():
    hidden, head, teacher_hidden, teacher_head, weight = [one.float() for one in problem(20)]
    small = teacher_hidden.bfloat16(), teacher_head.bfloat16()
    assert torch.equal(
        reverse_kl(hidden, head, *small, weight)[1],
        reverse_kl(hidden, head, small[0].float(), small[1].float(), weight)[1],
    )


def test_nothing_to_learn_from():
    hidden, head, teacher_hidden, teacher_head, weight = problem(1)
    empty = (hidden[:0], head, teacher_hidden[:0], teacher_head, weight[:0])
    loss, kl, grad_hidden, grad_head = value_and_gradients(reverse_kl, empty)
    assert loss == 0
    assert (kl.shape, grad_hidden.shape) == ((0,), (0, 8))
    assert not grad_head.any()


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, head, *rest = problem(5)
    loss, _ = reverse_kl(hidden, head.requires_grad_(True), *rest)
    assert torch.autograd.grad(loss, head)[0].any()
    with torch.no_grad():
        assert not reverse_kl(hidden, head, *rest)[0].requires_grad


def test_wrong_arguments_are_named():
    hidden, head, teacher_hidden, teacher_head, weight = problem(5)
    with pytest.raises(ShapeError, match="teacher_head_VE"):
        reverse_kl(hidden, head, teacher_hidden, teacher_head[:-1], weight)
    with pytest.raises(ShapeError, match="row_weight_T"):
        reverse_kl(hidden, head, teacher_hidden, teacher_head, weight[1:])
    with pytest.raises(DtypeError, match="student_head_VD"):
        reverse_kl(hidden, head.float(), teacher_hidden, teacher_head, weight)
