"""Log-probability from hidden states: the bits of the form with all logits at once, values by hand, memory.

Not proven here: `token_logprob` itself (test_logprob.py).
"""

import math

import pytest
import torch

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.loss.chunked_logprob import linear_token_logprob
from rollforward.kernels.loss.logprob import token_logprob
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.live_memory import peak_bytes


def problem(num_tokens: int, vocab: int = 37, width: int = 8, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocab + 1000 * num_tokens)
    hidden = torch.randn((num_tokens, width), generator=generator, dtype=dtype)
    head = torch.randn((vocab, width), generator=generator, dtype=dtype)
    return hidden, head, torch.randint(0, vocab, (num_tokens,), generator=generator)


def test_values_by_hand():
    # probabilities 1/8, 1/8, 1/4, 1/2: entropy = 1.75 ln 2.
    head = torch.log(torch.tensor([[1.0], [1], [2], [4]]))
    logprob, entropy = linear_token_logprob(torch.ones(4, 1), head, torch.arange(4))
    torch.testing.assert_close(logprob, -math.log(2) * torch.tensor([3.0, 3, 2, 1]))
    torch.testing.assert_close(entropy, torch.full((4,), 1.75 * math.log(2)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bits_are_those_of_all_logits_at_once(threads, num_tokens, temperature):
    hidden, head, token = problem(num_tokens, 300, 48)
    with torch_threads(threads):
        whole = token_logprob(row_linear(hidden, head), token, temperature=temperature)
        for chunk_tokens in (1, 16, 48, 1000):
            ours = linear_token_logprob(hidden, head, token, temperature=temperature, chunk_tokens=chunk_tokens)
            for one, other in zip(ours, whole, strict=True):
                assert not different_bits(one, other)
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(2))[: 1 + num_tokens // 2]
        part = linear_token_logprob(hidden[order], head, token[order], temperature=temperature, chunk_tokens=16)
        for one, other in zip(part, whole, strict=True):
            assert not different_bits(one, other[order])


def test_float64():
    hidden, head, token = problem(40, dtype=torch.float64)
    log_probs = torch.log_softmax(hidden @ head.t(), -1)
    logprob, entropy = linear_token_logprob(hidden, head, token, chunk_tokens=16)
    torch.testing.assert_close(logprob, log_probs.gather(1, token.unsqueeze(1)).squeeze(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(entropy, -(log_probs.exp() * log_probs).sum(-1), rtol=1e-13, atol=1e-13)


def test_memory_does_not_grow_with_the_tokens():
    vocab, chunk = 1000, 32
    peaks = {}
    for num_tokens in (chunk, 20 * chunk):
        hidden, head, token = problem(num_tokens, vocab, 4)
        peaks[num_tokens] = peak_bytes(lambda: linear_token_logprob(hidden, head, token, chunk_tokens=chunk))  # noqa: B023
    assert peaks[chunk] >= 4 * chunk * vocab
    assert peaks[20 * chunk] < peaks[chunk] + 4 * chunk * vocab // 2


def test_no_gradient_is_made():
    hidden, head, token = problem(3)
    logprob, entropy = linear_token_logprob(hidden.requires_grad_(True), head.requires_grad_(True), token)
    assert not logprob.requires_grad
    assert not entropy.requires_grad


def test_no_rows():
    hidden, head, token = problem(1)
    logprob, entropy = linear_token_logprob(hidden[:0], head, token[:0])
    assert logprob.shape == entropy.shape == (0,)


def test_wrong_arguments_are_named():
    hidden, head, token = problem(5)
    with pytest.raises(ShapeError, match="head_VD"):
        linear_token_logprob(hidden, head[:, 1:], token)
    with pytest.raises(ShapeError, match="token_T"):
        linear_token_logprob(hidden, head, token[1:])
    with pytest.raises(DtypeError, match="hidden_TD"):
        linear_token_logprob(hidden.bfloat16(), head, token)
    with pytest.raises(DtypeError, match="head_VD"):
        linear_token_logprob(hidden, head.double(), token)
    with pytest.raises(DtypeError, match="token_T"):
        linear_token_logprob(hidden, head, token.int())
