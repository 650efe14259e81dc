"""Log-probability from hidden states, in plain torch: the dense form in float64, gradients, bits. The tile form is
proven in test_vocab_tile.py."""

import pytest
import torch

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.logprob import token_logprob
from tests.helpers.bits import different_bits


def problem(count: int, vocab: int = 37, width: int = 8):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    return hidden, head, torch.randint(vocab, (count,), generator=generator)


def test_values_by_hand():
    # Logits (0, ln 3) at temperature 1: p = (1/4, 3/4).
    head = torch.tensor([[1.0], [3.0]]).log()
    logprob, entropy = linear_logprob(torch.ones(1, 1), head, torch.tensor([1]), temperature=1.0)
    quarter = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(logprob, quarter[1:].log())
    torch.testing.assert_close(entropy, -(quarter * quarter.log()).sum()[None])


@pytest.mark.parametrize("count", [0, 1, 16, 17, 300])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_equals_the_dense_form_in_float64(count, temperature):
    hidden, head, token = problem(count)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    ours = linear_logprob(*leaves, token, temperature=temperature)
    log_p = torch.log_softmax(hidden @ head.t() / temperature, -1)
    dense = log_p.gather(1, token.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    weights = torch.linspace(-1, 1, count, dtype=torch.float64), torch.linspace(2, 0, count, dtype=torch.float64)
    for mine, theirs in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, weights), torch.autograd.grad(dense, leaves, weights), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_its_value_is_that_of_the_logits():
    hidden, head, token = problem(40)
    logits = torch.nn.functional.pad(hidden.float(), (0, 0, 0, 8)).reshape(3, 16, 8) @ head.float().t()
    expected = token_logprob(logits.reshape(48, -1)[:40], token, temperature=0.7)
    for mine, theirs in zip(
        linear_logprob(hidden.float(), head.float(), token, temperature=0.7), expected, strict=True
    ):
        assert not different_bits(mine, theirs)


def test_rows_keep_their_bits():
    hidden, head, token = problem(300, 100, 24)
    hidden, head = hidden.float(), head.float()
    whole = linear_logprob(hidden, head, token, temperature=1.0)
    for rows in (torch.tensor([7]), torch.randperm(300), torch.arange(40, 57)):
        part = linear_logprob(hidden[rows], head, token[rows], temperature=1.0)
        assert not any(different_bits(mine, full[rows]) for mine, full in zip(part, whole, strict=True))


def test_rows_without_a_gradient_are_not_looked_at():
    hidden, head, token = problem(20)
    leaves = hidden.float().requires_grad_(), head.float().requires_grad_()
    weight = (torch.arange(20) % 3 == 0).float()
    clean = torch.autograd.grad((weight * linear_logprob(*leaves, token, temperature=1.0)[0]).sum(), leaves)
    with torch.no_grad():
        leaves[0][1] = float("nan")
    logprob, _ = linear_logprob(*leaves, token, temperature=1.0)
    dirty = torch.autograd.grad(logprob, leaves, weight)
    assert not any(different_bits(one, other) for one, other in zip(clean, dirty, strict=True))


def test_wrong_arguments_are_named():
    hidden, head, token = problem(5)
    with pytest.raises(ShapeError, match="head_VD"):
        linear_logprob(hidden, head[:, :-1], token, temperature=1.0)
    with pytest.raises(DtypeError, match="head_VD is float32"):
        linear_logprob(hidden, head.float(), token, temperature=1.0)
