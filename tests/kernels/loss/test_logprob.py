"""Log-probability and entropy: values, gradients, kept sets, bits under padding and batching.

Not proven here: that sampler and trainer call it with the same logits (parity/test_bit_contract.py).
"""

import math

import pytest
import torch

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.loss.logprob import token_logprob
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_values_by_hand():
    # probabilities 1/8, 1/8, 1/4, 1/2: entropy = 1.75 ln 2.
    logits = torch.log(torch.tensor([[1.0, 1, 2, 4]])).expand(4, 4)
    logprob, entropy = token_logprob(logits, torch.tensor([0, 1, 2, 3]), temperature=1.0)
    torch.testing.assert_close(logprob, -math.log(2) * torch.tensor([3.0, 3, 2, 1]))
    torch.testing.assert_close(entropy, torch.full((4,), 1.75 * math.log(2)))


def test_temperature_divides_the_logits():
    logits = 2 * torch.log(torch.tensor([[1.0, 3.0]]))
    logprob, _ = token_logprob(logits, torch.tensor([1]), temperature=2.0)
    torch.testing.assert_close(logprob, torch.tensor([math.log(0.75)]))


def test_kept_set():
    inside = torch.tensor([[-math.inf, 0.5, -math.inf, 1.5]], requires_grad=True)
    logprob, entropy = token_logprob(inside, torch.tensor([3]), temperature=1.0)
    plain_logprob, plain_entropy = token_logprob(inside.detach()[:, [1, 3]], torch.tensor([1]), temperature=1.0)
    torch.testing.assert_close(logprob, plain_logprob)
    torch.testing.assert_close(entropy, plain_entropy)
    (gradient,) = torch.autograd.grad((logprob + entropy).sum(), inside)
    assert torch.isfinite(gradient).all()
    assert torch.equal(gradient[0, [0, 2]], torch.zeros(2))


def test_one_kept_token_is_certain():
    logits = torch.tensor([[-math.inf, 7.0]])
    logprob, entropy = token_logprob(logits, torch.tensor([1]), temperature=0.5)
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_gradients_in_float64(temperature):
    logits = normal(3, 7, dtype=torch.float64).requires_grad_(True)
    token = torch.tensor([6, 0, 3])
    assert torch.autograd.gradcheck(lambda z: token_logprob(z, token, temperature=temperature), (logits,))
    ours = torch.autograd.grad(token_logprob(logits, token, temperature=temperature)[0].sum(), logits)[0]
    log_probs = torch.log_softmax(logits / temperature, -1)
    plain = torch.autograd.grad(log_probs.gather(1, token.unsqueeze(1)).sum(), logits)[0]
    torch.testing.assert_close(ours, plain)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-1e30, -1e30, -1e30]])
    logprob, entropy = token_logprob(logits, torch.tensor([0, 1]), temperature=1.0)
    torch.testing.assert_close(logprob, torch.tensor([0.0, -math.log(3)]))
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocabulary", [512, 500, 67])
def test_bits_belong_to_the_row(threads, vocabulary):
    logits, token = normal(90, vocabulary) * 4, torch.arange(90) % vocabulary
    with torch_threads(threads):
        whole = torch.stack(token_logprob(logits, token, temperature=0.7), 1)
        for rows in (slice(0, 1), slice(4, 7), slice(50, 67), slice(89, 90)):
            part = torch.stack(token_logprob(logits[rows].clone(), token[rows], temperature=0.7), 1)
            assert different_bits(part, whole[rows]) == 0
        with_grad = torch.stack(token_logprob(logits.clone().requires_grad_(True), token, temperature=0.7), 1)
        assert different_bits(with_grad, whole) == 0
        for padding in (1, 13, 64, 300):
            padded = torch.nn.functional.pad(logits, (0, padding), value=-math.inf)
            assert different_bits(torch.stack(token_logprob(padded, token, temperature=0.7), 1), whole) == 0


def test_one_flipped_bit_of_a_logit_shows():
    logits = normal(1, 512)
    changed = logits.clone()
    changed.view(torch.int32)[0, 5] ^= 1 << 12
    before, _ = token_logprob(logits, torch.tensor([5]), temperature=1.0)
    after, _ = token_logprob(changed, torch.tensor([5]), temperature=1.0)
    assert different_bits(before, after) == 1


def test_no_rows_and_wrong_shapes():
    logprob, entropy = token_logprob(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), temperature=1.0)
    assert logprob.shape == entropy.shape == (0,)
    with pytest.raises(ShapeError, match="token_T"):
        token_logprob(torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64), temperature=1.0)
