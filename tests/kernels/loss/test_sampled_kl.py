"""Policy gradient on the sampled token's log-ratio: worked values, the surrogate in float64, what it is on average by
enumeration, bits, memory.

Not proven here: that tokens are drawn at temperature 1 (distill/config.py refuses others).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.reverse_kl import reverse_kl
from rollforward.kernels.loss.sampled_kl import sampled_kl
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.live_memory import peak_bytes
from tests.helpers.vocabulary_losses import value_and_gradients


def problem(num_tokens: int, vocab: int = 37, width: int = 8, *, scale: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + 1000 * num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, head = normal(num_tokens, width) * scale, normal(vocab, width)
    token = torch.randint(0, vocab, (num_tokens,), generator=generator)
    weight = torch.rand(num_tokens, generator=generator, dtype=torch.float64) + 0.1
    return hidden, head, token, -normal(num_tokens).abs() * 3, weight, normal(num_tokens)


def dense(hidden, head, token, teacher_logprob, weight, *, baseline_T=None):
    """Autograd of -sum w A log p, and the log-ratios."""
    logprob = torch.log_softmax(hidden @ head.t(), -1).gather(1, token.unsqueeze(1)).squeeze(1)
    ratio = (logprob - teacher_logprob).detach()
    advantage = -ratio if baseline_T is None else baseline_T - ratio
    return -(weight * advantage * logprob).sum(), ratio


def test_by_hand():
    # p = (1/2, 1/2), y = 1, log q = ln 1/4: r = ln 2, dz = -r (p - onehot) = (-ln 2 / 2, ln 2 / 2).
    head = torch.zeros(2, 1, requires_grad=True)
    one, token, teacher = torch.ones(1, 1), torch.tensor([1]), torch.tensor([math.log(0.25)])
    loss, ratio = sampled_kl(one, head, token, teacher, torch.tensor([2.0]))
    assert ratio.item() == pytest.approx(math.log(2), rel=1e-6)
    assert loss.item() == pytest.approx(2 * math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(3 * loss, head)
    torch.testing.assert_close(gradient, 6 * torch.tensor([[-math.log(2) / 2], [math.log(2) / 2]]))
    # The baseline is subtracted from r, and only the gradient has it.
    loss, _ = sampled_kl(one, head, token, teacher, torch.tensor([2.0]), baseline_T=torch.tensor([math.log(4)]))
    assert loss.item() == pytest.approx(2 * math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(3 * loss, head)
    torch.testing.assert_close(gradient, 6 * torch.tensor([[math.log(2) / 2], [-math.log(2) / 2]]))


@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 300),
    vocab=st.sampled_from([1, 2, 37, 64, 129]),
    chunk_tokens=st.sampled_from([1, 16, 17, 48, 1000]),
    with_baseline=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gradient_is_the_surrogates_in_float64(num_tokens, vocab, chunk_tokens, with_baseline, seed):
    *arguments, baseline = problem(num_tokens, vocab, seed=seed)
    options = {"baseline_T": baseline} if with_baseline else {}
    loss, *ours = value_and_gradients(sampled_kl, arguments, chunk_tokens=chunk_tokens, **options)
    _, *theirs = value_and_gradients(dense, arguments, **options)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, (arguments[4] * theirs[0]).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab", [2, 7, 40])
@pytest.mark.parametrize("baseline", ["none", "kl", "any"])
def test_on_average_it_is_the_reverse_kl_and_its_gradient(vocab, baseline):
    hidden, head, _, _, weight, anything = problem(5, vocab)
    teacher_hidden, teacher_head, *_ = problem(5, vocab, 3, seed=1)
    loss, kl, *exact = value_and_gradients(reverse_kl, (hidden, head, teacher_hidden, teacher_head, weight))
    probs = torch.softmax(hidden @ head.t(), -1)
    options = {"none": {}, "kl": {"baseline_T": kl}, "any": {"baseline_T": anything}}[baseline]
    mean = [torch.zeros_like(one) for one in (loss, kl, *exact)]
    for drawn in range(vocab):
        token = torch.full((5,), drawn)
        teacher_logprob, _ = linear_logprob(teacher_hidden, teacher_head, token, temperature=1.0)
        # The probability of the draw as a weight: each row has its own.
        draw = (hidden, head, token, teacher_logprob, weight * probs[:, drawn])
        loss_part, ratio, grad_hidden, grad_head = value_and_gradients(sampled_kl, draw, **options)
        parts = (loss_part, ratio * probs[:, drawn], grad_hidden, grad_head)
        mean = [total + part for total, part in zip(mean, parts, strict=True)]
    for ours, theirs in zip(mean, (loss, kl, *exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_teacher_that_is_the_student():
    hidden, head, token, _, weight, _ = (one.float() if one.is_floating_point() else one for one in problem(40))
    teacher_logprob, _ = linear_logprob(hidden, head, token, temperature=1.0)
    for one in value_and_gradients(sampled_kl, (hidden, head, token, teacher_logprob, weight)):
        assert not one.any()


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_teacher_shifted_by_one_is_another(num_tokens):
    hidden, head, token, _, weight, _ = problem(num_tokens + 1)
    teacher_logprob, _ = linear_logprob(hidden, head, token, temperature=1.0)
    _, ratio = sampled_kl(hidden[1:], head, token[1:], teacher_logprob[:-1], weight[1:])
    assert bool((ratio.abs() > 1e-3).all())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_rows_of_weight_zero_are_inert(garbage):
    *arguments, baseline = (one.float() if one.is_floating_point() else one for one in problem(30))
    arguments[4][4] = 0
    clean = value_and_gradients(sampled_kl, arguments, baseline_T=baseline)
    arguments[0][4], arguments[2][4], arguments[3][4], baseline[4] = garbage, -7, garbage, garbage
    for one, other in zip(clean, value_and_gradients(sampled_kl, arguments, baseline_T=baseline), strict=True):
        assert not different_bits(one, other)


@pytest.mark.parametrize("scale", [1e4, 1e36])
def test_extreme_logits_stay_finite(scale):
    *arguments, _ = (one.float() if one.is_floating_point() else one for one in problem(50, seed=9))
    arguments[0], arguments[3][3] = arguments[0] * scale, -math.inf
    _, ratio, grad_hidden, _ = value_and_gradients(sampled_kl, arguments)
    assert torch.isfinite(ratio).all()
    assert not torch.isnan(grad_hidden).any()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_keep_their_bits(threads):
    hidden, head, *rest = (one.float() if one.is_floating_point() else one for one in problem(100, 300, 48))
    with torch_threads(threads):
        _, ratio, grad_hidden, _ = value_and_gradients(sampled_kl, (hidden, head, *rest[:3]), baseline_T=rest[3])
        order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
        for rows, chunk in ((order, 16), (order[:7], 256), (order[:1], 1), (torch.arange(100), 32)):
            token, teacher, weight, baseline = (one[rows] for one in rest)
            part = (hidden[rows], head, token, teacher, weight)
            _, ratios, grads, _ = value_and_gradients(sampled_kl, part, baseline_T=baseline, chunk_tokens=chunk)
            assert not different_bits(ratios, ratio[rows])
            assert not different_bits(grads, grad_hidden[rows])


def test_memory_does_not_grow_with_the_tokens():
    vocab, chunk = 1000, 32
    block = 4 * chunk * vocab
    peaks = {}
    for num_tokens in (chunk, 20 * chunk):
        arguments = [one.float() if one.is_floating_point() else one for one in problem(num_tokens, vocab, 4)][:5]
        peaks[num_tokens] = peak_bytes(lambda: value_and_gradients(sampled_kl, arguments, chunk_tokens=chunk))  # noqa: B023
    assert block <= peaks[chunk] <= 6 * block
    assert peaks[20 * chunk] < peaks[chunk] + block // 2


def test_nothing_to_learn_from():
    hidden, head, *rest = problem(1)
    loss, ratio, grad_hidden, grad_head = value_and_gradients(
        sampled_kl, (hidden[:0], head, *(one[:0] for one in rest[:3]))
    )
    assert loss == 0
    assert (ratio.shape, grad_hidden.shape) == ((0,), (0, 8))
    assert not grad_head.any()


def test_wrong_arguments_are_named():
    hidden, head, token, teacher, weight, baseline = problem(5)
    with pytest.raises(ShapeError, match="token_T"):
        sampled_kl(hidden, head, token[1:], teacher, weight)
    with pytest.raises(ShapeError, match="baseline_T"):
        sampled_kl(hidden, head, token, teacher, weight, baseline_T=baseline[1:])
    with pytest.raises(DtypeError, match="token_T"):
        sampled_kl(hidden, head, token.int(), teacher, weight)
    with pytest.raises(DtypeError, match="teacher_logprob_T"):
        sampled_kl(hidden, head, token, teacher.float(), weight)
