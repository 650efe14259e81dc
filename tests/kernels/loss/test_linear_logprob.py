"""Log-probability from hidden states, in plain torch: values by hand, the dense form in float64, gradients, kept sets,
the bits of the form with all logits at once, memory. The tile form is proven in test_vocab_tile.py.

Not proven here: `token_logprob` itself (test_logprob.py).
"""

import math

import pytest
import torch
from torch import Tensor

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.logprob import token_logprob
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.live_memory import peak_bytes
from tests.helpers.vocabulary_losses import kept_sets, outside

QUARTERS = torch.tensor([[1.0], [1], [2], [4]]).log()
"""A head that gives the hidden state 1 the probabilities 1/8, 1/8, 1/4, 1/2."""


def problem(count: int, vocab: int = 37, width: int = 8, *, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(vocab + 1000 * count)
    hidden = torch.randn(count, width, generator=generator, dtype=dtype)
    head = torch.randn(vocab, width, generator=generator, dtype=dtype)
    return hidden, head, torch.randint(vocab, (count,), generator=generator)


def test_values_by_hand():
    logprob, entropy = linear_logprob(torch.ones(4, 1), QUARTERS, torch.arange(4), temperature=1.0)
    torch.testing.assert_close(logprob, -math.log(2) * torch.tensor([3.0, 3, 2, 1]))
    torch.testing.assert_close(entropy, torch.full((4,), 1.75 * math.log(2)))


def test_kept_sets_by_hand():
    """Of 1/8, 1/8, 1/4, 1/2: all; the last alone; the second and third, 1/3 and 2/3; the first two, a half each."""
    counts, ids = torch.tensor([0, 1, 2, 2]), torch.tensor([3, 2, 1, 0, 1])
    logprob, entropy = linear_logprob(
        *(torch.ones(4, 1), QUARTERS, torch.tensor([3, 3, 1, 0])),
        temperature=1.0,
        kept_counts_T=counts,
        kept_ids=ids,
    )
    assert logprob[1].item() == 0.0
    assert entropy[1].item() == 0.0
    torch.testing.assert_close(logprob, torch.tensor([0.5, 1, 1 / 3, 0.5]).log())
    third = -(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3
    torch.testing.assert_close(entropy, torch.tensor([1.75 * math.log(2), 0, third, math.log(2)]))


def test_gradients_of_a_kept_set_by_hand():
    """p = (1/3, 2/3) of tokens 1 and 2, the token is 1: dz = 1 - 1/3 and -2/3, and nothing elsewhere; a set of one
    token has no gradient."""
    hidden, head = torch.ones(2, 1, requires_grad=True), QUARTERS.clone().requires_grad_()
    logprob, _ = linear_logprob(
        *(hidden, head, torch.tensor([1, 3])),
        temperature=1.0,
        kept_counts_T=torch.tensor([2, 1]),
        kept_ids=torch.tensor([1, 2, 3]),
    )
    of_hidden, of_head = torch.autograd.grad(logprob.sum(), (hidden, head))
    torch.testing.assert_close(of_head, torch.tensor([[0.0], [2 / 3], [-2 / 3], [0.0]]))
    torch.testing.assert_close(of_hidden, torch.tensor([[-2 / 3 * math.log(2)], [0.0]]))
    assert of_head[[0, 3]].eq(0).all()
    assert of_hidden[1].item() == 0.0


def dense(hidden: Tensor, head: Tensor, token: Tensor, temperature: float, kept: tuple[Tensor, ...]):
    logits = hidden @ head.t() / temperature
    if kept:
        logits = logits.masked_fill(outside(*kept, len(head)), -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    finite = torch.where(log_p > -torch.inf, log_p, 0.0)
    return log_p.gather(1, token.unsqueeze(1)).squeeze(1), -(log_p.exp() * finite).sum(-1)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 300])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("with_kept", [False, True])
def test_equals_the_dense_form_in_float64(count, temperature, with_kept):
    hidden, head, token = problem(count, dtype=torch.float64)
    kept = kept_sets(token, 37) if with_kept else ()
    leaves = hidden.requires_grad_(), head.requires_grad_()
    ours = linear_logprob(*leaves, token, temperature=temperature, **named(kept))
    theirs = dense(*leaves, token, temperature, kept)
    weights = torch.linspace(-1, 1, count, dtype=torch.float64), torch.linspace(2, 0, count, dtype=torch.float64)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, weights), torch.autograd.grad(theirs, leaves, weights), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def named(kept: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("kept_counts_T", "kept_ids"), kept, strict=False))


def test_gradients_of_differences():
    hidden, head, token = problem(5, 7, 3, dtype=torch.float64)
    kept = named(kept_sets(token, 7))

    def values(*leaves: Tensor) -> tuple[Tensor, ...]:
        return linear_logprob(*leaves, token, temperature=0.8, **kept)

    assert torch.autograd.gradcheck(values, (hidden.requires_grad_(), head.requires_grad_()))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 64, 300])
@pytest.mark.parametrize(("temperature", "with_kept"), [(1.0, False), (0.7, False), (0.7, True)])
def test_bits_are_those_of_all_logits_at_once(threads, count, temperature, with_kept):
    hidden, head, token = problem(count, 300, 48)
    kept = kept_sets(token, 300) if with_kept else ()
    with torch_threads(threads):
        logits = row_linear(hidden, head)
        if kept:
            logits = logits.masked_fill(outside(*kept, 300), -torch.inf)
        whole = token_logprob(logits, token, temperature=temperature)
        for chunk_tokens in (1, 16, 48, 1000):
            for leaf in (hidden, hidden.clone().requires_grad_()):
                ours = linear_logprob(
                    leaf, head, token, temperature=temperature, chunk_tokens=chunk_tokens, **named(kept)
                )
                for one, other in zip(ours, whole, strict=True):
                    assert not different_bits(one.detach(), other)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2))[: 1 + count // 2]
        part = linear_logprob(
            hidden[order],
            head,
            token[order],
            temperature=temperature,
            **named(kept_sets(token, 300, order) if kept else ()),
        )
        for one, other in zip(part, whole, strict=True):
            assert not different_bits(one, other[order])


def test_a_set_of_all_tokens_is_the_whole_vocabulary():
    hidden, head, token = problem(20)
    counts, ids = torch.full((20,), 37), torch.arange(37).flip(0).repeat(20)
    results = []
    for kept in ({}, {"kept_counts_T": counts, "kept_ids": ids}):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprob, entropy = linear_logprob(*leaves, token, temperature=1.0, **kept)
        results.append((logprob.detach(), entropy.detach(), *torch.autograd.grad((logprob + entropy).sum(), leaves)))
    assert not any(different_bits(one, other) for one, other in zip(*results, strict=True))


def test_rows_without_a_gradient_are_not_looked_at():
    hidden, head, token = problem(20)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    weight = (torch.arange(20) % 3 == 0).float()
    kept = named(kept_sets(token, 37))
    clean = torch.autograd.grad((weight * linear_logprob(*leaves, token, temperature=1.0, **kept)[0]).sum(), leaves)
    with torch.no_grad():
        leaves[0][1] = float("nan")
    logprob, _ = linear_logprob(*leaves, token, temperature=1.0, **kept)
    dirty = torch.autograd.grad(logprob, leaves, weight)
    assert not any(different_bits(one, other) for one, other in zip(clean, dirty, strict=True))


def test_memory_does_not_grow_with_the_tokens():
    vocab, chunk = 1000, 32
    peaks = {}
    for count in (chunk, 20 * chunk):
        hidden, head, token = problem(count, vocab, 4)
        peaks[count] = peak_bytes(
            lambda: linear_logprob(hidden, head, token, temperature=1.0, chunk_tokens=chunk)  # noqa: B023
        )
    assert peaks[chunk] >= 4 * chunk * vocab
    assert peaks[20 * chunk] < peaks[chunk] + 4 * chunk * vocab // 2


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, head, token = problem(3)
    with torch.no_grad():
        values = linear_logprob(hidden.requires_grad_(), head.requires_grad_(), token, temperature=1.0)
    assert not any(one.requires_grad for one in values)


def test_wrong_arguments_are_named():
    hidden, head, token = problem(5)
    counts, ids = kept_sets(token, 37)
    for error, match, arguments, kept in [
        (ShapeError, "head_VD", (hidden, head[:, 1:], token), ()),
        (ShapeError, "token_T", (hidden, head, token[1:]), ()),
        (DtypeError, "hidden_TD is bfloat16", (hidden.bfloat16(), head, token), ()),
        (DtypeError, "head_VD is float64", (hidden, head.double(), token), ()),
        (DtypeError, "token_T is int32", (hidden, head, token.int()), ()),
        (ShapeError, "Give both, or neither", (hidden, head, token), (counts,)),
        (ShapeError, "kept_counts_T", (hidden, head, token), (counts[1:], ids)),
        (DtypeError, "kept_ids is int32", (hidden, head, token), (counts, ids.int())),
        (ShapeError, f"kept_counts_T sums to {int(counts.sum())}", (hidden, head, token), (counts, ids[1:])),
        (ShapeError, "the head has 37 tokens", (hidden, head, token), (counts, ids + 37)),
    ]:
        with pytest.raises(error, match=match):
            linear_logprob(*arguments, temperature=1.0, **named(kept))
