"""Proves the law of published weights: the learner's value is bit-equal to the unpacked published bytes."""

import math
import pickle

import pytest
import torch

from rollforward.kernels.errors import NonFiniteError
from rollforward.model.precision import PackedTensor, pack_published, published_value, unpack_published
from rollforward.model.shapes import TensorFormat, TensorSpec


def spec_of(tensor_format: TensorFormat, *shape: int) -> TensorSpec:
    """Return a spec named `w.weight`."""
    return TensorSpec(name="w.weight", shape=shape, format=tensor_format, trained=True)


@pytest.mark.parametrize("tensor_format", ["mxfp4", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(64, 128), (3, 130, 96)])
def test_published_value_is_the_unpacked_bytes(tensor_format: TensorFormat, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(shape, generator=generator) * torch.exp2(6 * torch.randn(*shape[:-1], 1, generator=generator))
    packed = pack_published(spec_of(tensor_format, *shape), master)
    value = published_value(tensor_format, master)
    assert torch.equal(unpack_published(packed), value)
    assert value.dtype == torch.float32
    assert torch.equal(value, master) == (tensor_format == "fp32")
    leaf = master.clone().requires_grad_()
    with_grad = published_value(tensor_format, leaf)
    assert torch.equal(with_grad.detach(), value)
    upstream = torch.randn(shape, generator=generator)
    with_grad.backward(upstream)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, upstream)


def test_packed_dtypes_and_sizes() -> None:
    master = torch.randn(2, 130, 64)
    packed = pack_published(spec_of("mxfp4", 2, 130, 64), master)
    assert packed.data.dtype == torch.int8
    assert packed.scale is not None
    assert packed.scale.dtype == torch.uint8
    assert packed.num_bytes == 2 * 130 * 32 + 2 * 130 * 2
    packed = pack_published(spec_of("fp8", 2, 130, 64), master)
    assert packed.data.dtype == torch.float8_e4m3fn
    assert packed.scale is not None
    assert packed.scale.shape == (2, 2, 1)
    assert pack_published(spec_of("bf16", 2, 130, 64), master).data.dtype == torch.bfloat16


def test_integers_are_never_cast() -> None:
    table = torch.tensor([[383, 0], [257, 1]])
    packed = pack_published(spec_of("int64", 2, 2), table)
    assert packed.data.dtype == torch.int64
    assert torch.equal(unpack_published(packed), table)
    assert published_value("int64", table) is table


@pytest.mark.parametrize("tensor_format", ["mxfp4", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_masters_are_named(tensor_format: TensorFormat, bad: float) -> None:
    master = torch.zeros(4, 32)
    master[3, 7] = bad
    with pytest.raises(NonFiniteError, match=r"^w\.weight: .* at \[3, 7\]"):
        pack_published(spec_of(tensor_format, 4, 32), master)


def test_overflow_in_bf16_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="inf at"):
        pack_published(spec_of("bf16", 1), torch.tensor([torch.finfo(torch.float32).max]))


def test_packed_tensors_pickle() -> None:
    packed = pack_published(spec_of("mxfp4", 4, 32), torch.randn(4, 32))
    again = pickle.loads(pickle.dumps(packed))
    assert isinstance(again, PackedTensor)
    assert torch.equal(again.data, packed.data)
