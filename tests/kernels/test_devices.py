"""Tile forms work where their tensors are, also when that is not the current GPU, which stays the current one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.errors import DeviceError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.reverse_kl import reverse_kl
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.kernels.quant.mxfp4 import mxfp4_dequantise, mxfp4_quantise
from tests.helpers.bits import different_bits

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices of compute capability 9.0"),
]

V, D, COUNT = 1000, 512, 70


@pytest.fixture(autouse=True, scope="module")
def tile_forms():
    programs = vocab_sweep.programs(V, D, D), mix_sweep.programs(D, 20), mxfp4_sweep.programs(128, 256)
    dispatch.warm([one for some in programs for one in some], jobs=16)
    dispatch.choose(dict.fromkeys(dispatch.TILE_OPS, dispatch.TILE))
    yield
    dispatch.choose({})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def losses(put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    hidden, head, token = normal(COUNT, D), normal(V, D, seed=1), torch.arange(COUNT)
    hidden, head, token = put(hidden).requires_grad_(), put(head).requires_grad_(), put(token)
    logprob, entropy = linear_logprob(hidden, head, token, temperature=0.7)
    teacher = put(normal(COUNT, D, seed=2)), put(normal(V, D, seed=3))
    loss, kl = reverse_kl(hidden, head, *teacher, put(torch.ones(COUNT)))
    grads = torch.autograd.grad(loss + (logprob + entropy).sum(), (hidden, head))
    return [logprob, entropy, kl, *grads]


def streams(put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    site = [put(one) for one in (normal(24, 4 * D) * D**-0.5, normal(24), torch.ones(3), normal(D))]
    leaf = put(normal(COUNT, 4, D).bfloat16()).requires_grad_()
    settings = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    entered = mhc_enter(leaf, *site, **settings)
    across = mhc_across(entered[0], leaf, *entered[1:], *site, **settings)
    (grad,) = torch.autograd.grad(across[0].float().sum() + across[1].float().sum(), leaf)
    return [*entered, *across, grad]


def weights(put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    packed, scale = mxfp4_quantise(put(normal(2, 128, 256)))
    return [packed, scale, mxfp4_dequantise(packed, scale)]


@pytest.mark.parametrize("op", [losses, streams, weights])
def test_a_form_runs_where_its_tensors_are(op):
    expected = op(lambda one: one.to("cuda:0"))
    assert torch.cuda.current_device() == 0
    ours = op(lambda one: one.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert {one.device for one in ours} == {torch.device("cuda", 1)}
    assert [different_bits(one.cpu(), other.cpu()) for one, other in zip(ours, expected, strict=True)] == [0] * len(
        ours
    )
    with torch.cuda.device(1):
        again = op(lambda one: one.to("cuda:0"))
        assert torch.cuda.current_device() == 1
    assert [different_bits(one, other) for one, other in zip(again, expected, strict=True)] == [0] * len(ours)


def test_what_lies_on_the_cpu_follows_the_others():
    hidden, head, token = normal(COUNT, D), normal(V, D, seed=1), torch.arange(COUNT)
    ours = linear_logprob(hidden.to("cuda:1"), head, token, temperature=1.0)[0]
    assert ours.device == torch.device("cuda", 1)
    expected = linear_logprob(hidden, head.to("cuda:1"), token, temperature=1.0)[0]
    assert not expected.is_cuda
    assert different_bits(ours.cpu(), expected) == 0


def test_two_gpus_in_one_call_are_refused():
    one, other = normal(COUNT, D).to("cuda:0"), normal(V, D).to("cuda:1")
    with pytest.raises(DeviceError, match="operands lie on cuda:0 and cuda:1"):
        linear_logprob(one, other, torch.arange(COUNT), temperature=1.0)
    site = normal(24, 4 * D).to("cuda:0"), normal(24).to("cuda:0"), torch.ones(3).to("cuda:1"), normal(D).to("cuda:0")
    with pytest.raises(DeviceError, match="scale_3 is on cuda:1 and streams_TMD on cuda:0"):
        mhc_enter(normal(COUNT, 4, D).to("cuda:0").bfloat16(), *site, iters=20, eps=1e-6, norm_eps=1e-6)
