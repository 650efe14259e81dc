"""Hyper-connection mixing: values by hand, which index of comb is summed, gradients, bits.

Not proven here: Sinkhorn itself (test_sinkhorn.py), the block that uses it (parity/test_oracle.py).
"""

import math

import pytest
import torch

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter, mhc_head, mhc_mix, mhc_post, mhc_pre
from rollforward.kernels.norm.rms_norm import rms_norm
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameters(num_streams: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    outputs = 2 * num_streams + num_streams**2
    return (
        normal(outputs, num_streams * width, seed=1, dtype=dtype) / math.sqrt(num_streams * width),
        normal(outputs, seed=2, dtype=dtype),
        torch.tensor([0.7, 1.1, 1.6], dtype=dtype),
    )


def plain_mix(streams_TMD, fn, base, scale, iters, eps, norm_eps):
    """Write section 2.2 of the specification token by token, with library functions."""
    tokens, num_streams, _ = streams_TMD.shape
    pres, posts, combs = [], [], []
    for token in range(tokens):
        v = streams_TMD[token].reshape(-1)
        mix = (fn @ v) / torch.sqrt((v * v).mean() + norm_eps)
        pres.append(torch.sigmoid(mix[:num_streams] * scale[0] + base[:num_streams]) + eps)
        second = slice(num_streams, 2 * num_streams)
        posts.append(2 * torch.sigmoid(mix[second] * scale[1] + base[second]))
        m = (mix[2 * num_streams :] * scale[2] + base[2 * num_streams :]).reshape(num_streams, num_streams)
        m = torch.softmax(m, dim=1) + eps
        m = m / (m.sum(0, keepdim=True) + eps)
        for _ in range(iters - 1):
            m = m / (m.sum(1, keepdim=True) + eps)
            m = m / (m.sum(0, keepdim=True) + eps)
        combs.append(m)
    return torch.stack(pres), torch.stack(posts), torch.stack(combs)


def test_mix_equals_the_written_out_form():
    streams = normal(5, 4, 6, dtype=torch.float64)
    fn, base, scale = parameters(4, 6, torch.float64)
    ours = mhc_mix(streams, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6)
    for got, expected in zip(ours, plain_mix(streams, fn, base, scale, 20, 1e-6, 1e-6), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


SETTINGS = {"iters": 20, "eps": 1e-4, "norm_eps": 1e-6}


def test_the_way_in_is_the_mix_its_sum_and_the_norm():
    streams, site, norm = normal(5, 4, 6), parameters(4, 6), normal(6, seed=3)
    entered, post, comb = mhc_enter(streams, *site, norm, **SETTINGS)
    pre, *others = mhc_mix(streams, *site, **SETTINGS)
    assert different_bits(entered, rms_norm(mhc_pre(streams, pre), norm, eps=1e-6)) == 0
    assert [different_bits(post, others[0]), different_bits(comb, others[1])] == [0, 0]


def test_the_way_across_is_the_way_out_and_the_next_way_in():
    f_TD, streams = normal(5, 6, seed=4), normal(5, 4, 6)
    post, comb = normal(5, 4, seed=5), normal(5, 4, 4, seed=6)
    site, norm = parameters(4, 6), normal(6, seed=3)
    between, *entered = mhc_across(f_TD, streams, post, comb, *site, norm, **SETTINGS)
    assert different_bits(between, mhc_post(f_TD, streams, post, comb)) == 0
    for got, expected in zip(entered, mhc_enter(between, *site, norm, **SETTINGS), strict=True):
        assert different_bits(got, expected) == 0


def test_the_way_in_by_hand():
    # fn = 0 and equal bases: the input is the direction of the streams' sum, whose mean square is one, times the norm.
    streams = torch.tensor([[[3.0, 0], [0, 1], [0, 1], [0, 2]]])
    site = torch.zeros(24, 8), torch.zeros(24), torch.ones(3)
    entered, post, comb = mhc_enter(streams, *site, torch.tensor([1.0, 10.0]), iters=20, eps=1e-9, norm_eps=1e-12)
    rms = math.sqrt((9 + 16) / 2)
    torch.testing.assert_close(entered, torch.tensor([[3 / rms, 40 / rms]]))
    torch.testing.assert_close(post, torch.ones(1, 4))
    torch.testing.assert_close(comb, torch.full((1, 4, 4), 0.25))


def test_mix_uses_one_statistic_over_all_streams():
    # One large stream shrinks the mix of all: scaling every stream by one factor changes nothing (up to norm_eps).
    streams = normal(3, 4, 6)
    fn, base, scale = parameters(4, 6)
    pre, post, comb = mhc_mix(streams, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-12)
    scaled = mhc_mix(streams * 8, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-12)
    for got, expected in zip(scaled, (pre, post, comb), strict=True):
        torch.testing.assert_close(got, expected)
    one_stream = mhc_mix(
        streams * torch.tensor([8.0, 1, 1, 1]).view(1, 4, 1), fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-12
    )
    assert (one_stream[0] - pre).abs().max() > 1e-2


def test_zero_mix_by_hand():
    # With fn = 0 the outputs are those of the base alone: pre = 1/2 + eps, post = 2 * 1/2 without eps.
    pre, post, comb = mhc_mix(
        normal(2, 4, 6), torch.zeros(24, 24), torch.zeros(24), torch.ones(3), iters=20, eps=1e-3, norm_eps=1e-6
    )
    torch.testing.assert_close(pre, torch.full((2, 4), 0.501))
    torch.testing.assert_close(post, torch.ones(2, 4))
    torch.testing.assert_close(comb, torch.full((2, 4, 4), 0.25), rtol=2e-3, atol=0)


def test_pre_by_hand():
    streams = torch.tensor([[[1.0, 2], [10, 20]]])
    assert torch.equal(mhc_pre(streams, torch.tensor([[0.5, 2.0]])), torch.tensor([[20.5, 41.0]]))


def test_post_sums_over_the_first_index_of_comb():
    # comb sends stream 0 to stream 1 and nothing back: X'_1 = post_1 f + X_0, X'_0 = post_0 f.
    streams = torch.tensor([[[1.0, 2], [10, 20]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    mixed = mhc_post(torch.tensor([[100.0, 200.0]]), streams, torch.tensor([[1.0, 3.0]]), comb)
    assert torch.equal(mixed, torch.tensor([[[100.0, 200], [301, 602]]]))


def test_post_equals_the_written_out_form():
    f_TD, streams, post, comb = normal(3, 5), normal(3, 4, 5, seed=1), normal(3, 4, seed=2), normal(3, 4, 4, seed=3)
    expected = post.unsqueeze(2) * f_TD.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", comb, streams)
    torch.testing.assert_close(mhc_post(f_TD, streams, post, comb), expected)
    assert (mhc_post(f_TD, streams, post, comb.transpose(1, 2)) - expected).abs().max() > 0.1


def test_head_by_hand():
    # fn = 0: every stream weighs sigmoid(base) + eps, no Sinkhorn, no factor 2.
    streams = torch.tensor([[[1.0, 2], [10, 20]]])
    merged = mhc_head(
        streams, torch.zeros(2, 4), torch.tensor([0.0, math.log(3)]), torch.ones(1), eps=0.25, norm_eps=1e-6
    )
    torch.testing.assert_close(merged, torch.tensor([[0.75 * 1 + 10, 0.75 * 2 + 20]]))


def test_head_equals_the_written_out_form():
    streams, fn, base = normal(4, 4, 6), normal(4, 24, seed=1), normal(4, seed=2)
    v = streams.reshape(4, 24)
    mix = v @ fn.t() / torch.sqrt((v * v).mean(1, keepdim=True) + 1e-6)
    pre = torch.sigmoid(mix * 1.3 + base) + 1e-6
    expected = (pre.unsqueeze(2) * streams).sum(1)
    torch.testing.assert_close(
        mhc_head(streams, fn, base, torch.tensor([1.3]), eps=1e-6, norm_eps=1e-6), expected, rtol=2e-5, atol=2e-6
    )


def test_gradients_in_float64():
    streams = normal(2, 4, 3, dtype=torch.float64).requires_grad_(True)
    parts = tuple(part.requires_grad_(True) for part in parameters(4, 3, torch.float64))
    assert torch.autograd.gradcheck(
        lambda x, fn, base, scale: mhc_mix(x, fn, base, scale, iters=3, eps=1e-3, norm_eps=1e-3), (streams, *parts)
    )
    f_TD = normal(2, 3, seed=5, dtype=torch.float64).requires_grad_(True)
    post = normal(2, 4, seed=6, dtype=torch.float64).requires_grad_(True)
    comb = normal(2, 4, 4, seed=7, dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(mhc_post, (f_TD, streams, post, comb))
    assert torch.autograd.gradcheck(mhc_pre, (streams, post))
    norm = normal(3, seed=8, dtype=torch.float64).requires_grad_(True)
    settings = {"iters": 3, "eps": 1e-3, "norm_eps": 1e-3}
    assert torch.autograd.gradcheck(
        lambda *leaves: mhc_across(*leaves, **settings), (f_TD, streams, post, comb, *parts, norm)
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [6, 128])
def test_bits_belong_to_the_token(threads, width):
    streams = normal(67, 4, width)
    fn, base, scale = parameters(4, width)
    head, norm = normal(4, 4 * width, seed=8), normal(width, seed=10)

    def everything(x: torch.Tensor) -> torch.Tensor:
        pre, post, comb = mhc_mix(x, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6)
        mixed = mhc_post(mhc_pre(x, pre), x, post, comb)
        merged = mhc_head(x, head, base[:4], scale[:1], eps=1e-6, norm_eps=1e-6)
        across = mhc_across(x[:, 0], x, post, comb, fn, base, scale, norm, **SETTINGS)
        parts = pre, post, comb, mixed, merged, *across
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    with torch_threads(threads):
        whole = everything(streams)
        for tokens in (slice(0, 1), slice(1, 3), slice(13, 30), slice(66, 67)):
            assert different_bits(everything(streams[tokens].clone()), whole[tokens]) == 0
        first_block = normal(30, width, seed=9).unsqueeze(1).expand(-1, 4, -1)  # streams after the embedding
        assert different_bits(everything(first_block)[3:4], everything(first_block[3:4].contiguous())) == 0


def test_no_tokens():
    fn, base, scale = parameters(4, 6)
    pre, post, comb = mhc_mix(torch.zeros(0, 4, 6), fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-6)
    assert (pre.shape, post.shape, comb.shape) == ((0, 4), (0, 4), (0, 4, 4))
    sides = torch.zeros(0, 6), torch.zeros(0, 4, 6), post, comb
    across = mhc_across(*sides, fn, base, scale, torch.ones(6), **SETTINGS)
    assert [part.shape for part in across] == [(0, 4, 6), (0, 6), (0, 4), (0, 4, 4)]


def test_shapes_that_disagree_are_an_error():
    with pytest.raises(ShapeError, match="mhc_post"):
        mhc_post(normal(2, 5), normal(2, 4, 6), normal(2, 4), normal(2, 4, 4))
    fn, base, scale = parameters(4, 6)
    with pytest.raises(ShapeError, match="mhc_mix"):
        mhc_mix(normal(2, 4, 6), fn, base[:-1], scale, iters=20, eps=1e-6, norm_eps=1e-6)
    with pytest.raises(ShapeError, match="mhc_enter: norm_D"):
        mhc_enter(normal(2, 4, 6), fn, base, scale, normal(5), **SETTINGS)
    with pytest.raises(ShapeError, match="mhc_post: post_TM"):
        mhc_across(normal(2, 6), normal(2, 4, 6), normal(3, 4), normal(2, 4, 4), fn, base, scale, normal(6), **SETTINGS)
