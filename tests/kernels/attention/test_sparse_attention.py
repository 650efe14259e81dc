"""Sparse attention with a sink: values, masks, gradients, bits.

Not proven here: which keys the model lets a query see (model/test_segments.py, parity/).
"""

import math

import pytest
import torch

from rollforward.kernels.attention.sparse_attention import sparse_attention
from rollforward.kernels.errors import ShapeError
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_attention(q_GQNd, kv_GSd, visible_GQS, sink_N, scale):
    """Write the formula out with an explicit sink column."""
    logits = torch.einsum("gqnd,gsd->gqns", q_GQNd, kv_GSd) * scale
    logits = logits.masked_fill(~visible_GQS.unsqueeze(2), -torch.inf)
    sink = sink_N.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
    weights = torch.softmax(torch.cat((logits, sink), -1), dim=-1)[..., :-1]
    return torch.einsum("gqns,gsd->gqnd", weights, kv_GSd)


def random_case(groups=2, queries=5, heads=3, width=16, keys=128, dtype=torch.float32):
    visible = torch.rand((groups, queries, keys), generator=torch.Generator().manual_seed(9)) < 0.3
    return (
        normal(groups, queries, heads, width, dtype=dtype),
        normal(groups, keys, width, seed=1, dtype=dtype),
        visible,
        normal(heads, seed=2, dtype=dtype),
    )


def test_values_by_hand():
    # Logits ln 2 and 0, sink 0: weights 2/4, 1/4 and 1/4 for the sink, which carries nothing.
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    kv = torch.zeros(1, 64, 2)
    kv[0, 0], kv[0, 5] = torch.tensor([math.log(2), 4.0]), torch.tensor([0.0, 8.0])
    visible = torch.zeros(1, 1, 64, dtype=torch.bool)
    visible[0, 0, [0, 5]] = True
    output = sparse_attention(q, kv, visible, torch.zeros(1), scale=1.0)
    torch.testing.assert_close(output.flatten(), torch.tensor([0.5 * math.log(2), 4.0]))
    halved = sparse_attention(2 * q, kv, visible, torch.zeros(1), scale=0.5)
    torch.testing.assert_close(halved, output)


def test_every_head_has_its_own_sink():
    q, kv, visible, _ = random_case(groups=1, queries=1, heads=2)
    output = sparse_attention(q[:, :, :1].expand(-1, -1, 2, -1), kv, visible, torch.tensor([-50.0, 50.0]), scale=0.25)
    no_sink = torch.softmax((kv[0] @ q[0, 0, 0] * 0.25).masked_fill(~visible[0, 0], -torch.inf), 0) @ kv[0]
    torch.testing.assert_close(output[0, 0, 0], no_sink)
    assert output[0, 0, 1].abs().max() < 1e-15


def test_equals_the_written_out_form():
    q, kv, visible, sink = random_case()
    expected = plain_attention(q.double(), kv.double(), visible, sink.double(), 0.25)
    torch.testing.assert_close(
        sparse_attention(q, kv, visible, sink, scale=0.25).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_queries_without_keys_give_zeros_and_no_nan():
    q, kv, visible, sink = random_case()
    visible[0, 2], visible[1] = False, False
    q, kv, sink = q.requires_grad_(True), kv.requires_grad_(True), sink.requires_grad_(True)
    output = sparse_attention(q, kv, visible, sink, scale=0.25)
    assert torch.equal(output[0, 2], torch.zeros_like(output[0, 2]))
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    gradients = torch.autograd.grad(output.square().sum() + output.sum(), (q, kv, sink))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert torch.equal(gradients[0][1], torch.zeros_like(q[1]))
    assert torch.equal(gradients[1][1], torch.zeros_like(kv[1]))


@pytest.mark.parametrize("sink_value", [-1e30, -1e4, 1e4, 1e30])
def test_extreme_sinks_and_logits_do_not_overflow(sink_value):
    q, kv, visible, sink = random_case()
    visible[0, 0] = False
    q = (q * 1e4).requires_grad_(True)
    sink = torch.full_like(sink, sink_value).requires_grad_(True)
    output = sparse_attention(q, kv, visible, sink, scale=1.0)
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(part).all() for part in torch.autograd.grad(output.sum(), (q, sink)))
    if sink_value == 1e30:
        assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("garbage", [1e30, -1e30, 1e-40])
def test_garbage_in_unseen_keys_changes_no_bit(garbage):
    q, kv, visible, sink = random_case()
    unseen = ~visible.any(1)
    dirty = torch.where(unseen.unsqueeze(-1), torch.full_like(kv, garbage), kv)
    assert unseen.any()
    results = []
    for keys in (kv, dirty):
        parts = q.clone().requires_grad_(True), keys.clone().requires_grad_(True), sink.clone().requires_grad_(True)
        output = sparse_attention(parts[0], parts[1], visible, parts[2], scale=0.25)
        results.append((output, *torch.autograd.grad(output.square().sum(), parts)))
    for clean, other in zip(*results, strict=True):
        assert different_bits(clean + 0.0, other + 0.0) == 0
    assert torch.equal(results[1][2][unseen], torch.zeros_like(kv[unseen]))


def test_unseen_tiles_are_neutral_wherever_they_stand():
    q, kv, visible, sink = random_case(queries=8, heads=4, width=80, keys=128)
    alone = sparse_attention(q, kv, visible, sink, scale=0.25)
    tiles = [*kv.split(64, 1), normal(2, 64, 80, seed=5)]
    masks = [*visible.split(64, 2), torch.zeros(2, 8, 64, dtype=torch.bool)]
    # Tiles 0 and 1 are seen, 2 is not; many unseen ones between push the products into other blocks of the library.
    for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1), (2, 0, 2, 2, 2, 2, 2, 2, 1, 2), (0, *[2] * 20, 1)):
        keys, mask = torch.cat([tiles[part] for part in order], 1), torch.cat([masks[part] for part in order], 2)
        assert different_bits(sparse_attention(q, keys, mask, sink, scale=0.25), alone) == 0, order


def test_softmax_adds_tiles_from_left_to_right():
    # Weights 1 in the first tile and 2^-24 in the two others: from left to right the small ones are lost one by one.
    q, kv = torch.ones(1, 1, 1, 1), torch.zeros(1, 192, 1)
    kv[0, [80, 144]] = -24 * math.log(2)
    visible = torch.zeros(1, 1, 192, dtype=torch.bool)
    visible[0, 0, [0, 80, 144]] = True
    kept = sparse_attention(q, kv, visible, torch.tensor([-1e30]), scale=1.0)
    lost = kv[0, 80, 0] * torch.exp(kv[0, 80, 0])
    assert kept.item() == (lost + lost).item()  # divided by a total of exactly 1
    assert (kept / (1 + 2.0**-23)).item() != kept.item()


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_belong_to_the_query(threads):
    q, kv, visible, sink = random_case(groups=4, queries=64, heads=4, width=80, keys=192)
    with torch_threads(threads):
        whole = sparse_attention(q, kv, visible, sink, scale=80**-0.5)
        for group, start, stop in ((0, 0, 1), (3, 63, 64), (1, 10, 27), (2, 0, 64)):
            part = sparse_attention(
                q[group : group + 1, start:stop],
                kv[group : group + 1],
                visible[group : group + 1, start:stop],
                sink,
                scale=80**-0.5,
            )
            assert different_bits(part, whole[group : group + 1, start:stop]) == 0, (group, start, stop)
        graded = sparse_attention(q.clone().requires_grad_(True), kv, visible, sink, scale=80**-0.5)
        assert different_bits(graded, whole) == 0


def test_gradients_in_float64():
    q, kv, visible, sink = random_case(groups=2, queries=2, heads=2, width=3, keys=64, dtype=torch.float64)
    visible[0, 1] = False
    parts = q.requires_grad_(True), kv.requires_grad_(True), sink.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda a, b, c: sparse_attention(a, b, visible, c, scale=0.6), parts)
    weight = normal(2, 2, 2, 3, seed=7, dtype=torch.float64)
    ours = torch.autograd.grad((sparse_attention(q, kv, visible, sink, scale=0.6) * weight).sum(), parts)
    plain = torch.autograd.grad((plain_attention(q, kv, visible, sink, 0.6) * weight).sum(), parts)
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradient_repeats():
    q, kv, visible, sink = random_case(groups=3, queries=64, heads=4, width=32, keys=128)
    parts = q.requires_grad_(True), kv.requires_grad_(True), sink.requires_grad_(True)
    runs = [
        torch.autograd.grad(sparse_attention(q, kv, visible, sink, scale=0.2).square().sum(), parts) for _ in range(10)
    ]
    assert all(different_bits(run[part], runs[0][part]) == 0 for run in runs for part in range(3))


def test_shapes_are_checked():
    q, kv, visible, sink = random_case()
    with pytest.raises(ShapeError, match="N"):
        sparse_attention(q, kv, visible, sink[:-1], scale=1.0)
    with pytest.raises(ShapeError, match="multiple of 64"):
        sparse_attention(q, kv[:, :100], visible[:, :, :100], sink, scale=1.0)
