"""Proves: what torch is told of the operators (schema, shapes, dtypes, who gets a gradient) is what the ops rely on.

Tensors here have no values, so that it runs without a GPU. Not proven here: that the launches give such tensors, and
torch.compile (test_vocab_tile.py and test_mxfp4_tile.py, on a GPU).
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rollforward.kernels.errors import BackendError
from rollforward.kernels.loss import linear_logprob, reverse_kl  # noqa: F401  # makes the operators
from rollforward.kernels.operators import on_device
from rollforward.kernels.quant import mxfp4_sweep

OPS = torch.ops.rollforward
T, V, D, E = 5, 100, 16, 8
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_values():
    with FakeTensorMode():
        yield


def floats(*shape: int, dtype: torch.dtype = torch.float32, leaf: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=leaf)


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def looks(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [(), (T, 9)])
def test_linear_logprob(dtype, kept):
    lists = [integers(size) for size in kept] or [None, None]
    hidden, head, rounded = floats(T, D, dtype=dtype, leaf=True), floats(V, D, dtype=dtype), floats(V, D, dtype=BF16)
    logprob, entropy = OPS.linear_logprob(hidden, head, rounded, integers(T), 0.7, *lists)
    assert looks(logprob) == looks(entropy) == (torch.float32, (T,))
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    assert looks(grad) == (dtype, (T, D))
    head.requires_grad_()
    _, entropy = OPS.linear_logprob(hidden.detach(), head, rounded, integers(T), 0.7, *lists)
    assert looks(torch.autograd.grad(entropy.sum(), head)[0]) == (dtype, (V, D))
    with torch.no_grad():
        assert not OPS.linear_logprob(hidden, head, rounded, integers(T), 0.7, *lists)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_may_lie_on_the_cpu_and_gets_its_gradient_there(dtype):
    """As beside a GPU, whose place the device of tensors without values has here."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("meta"):
        hidden, rounded, token = floats(T, D), floats(V, D, dtype=BF16), integers(T)
        head = torch.zeros(V, D, dtype=dtype, device="cpu", requires_grad=True)
        logprob, _ = OPS.linear_logprob(hidden, head, rounded, token, 0.7, None, None)
        others = floats(T, E), floats(V, E, dtype=BF16), floats(T)
        loss, *_ = OPS.reverse_kl(hidden, head, rounded, *others, False, True)
        for value in (logprob.sum(), loss):
            assert value.is_meta
            graph = value.grad_fn if value is loss else value.grad_fn.next_functions[0][0]
            assert [one is not None for one, _ in graph.next_functions[:2]] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_reverse_kl(dtype, needs):
    leaves = [floats(*size, dtype=dtype, leaf=need) for size, need in zip(((T, D), (V, D)), needs, strict=True)]
    heads = floats(V, D, dtype=BF16), floats(V, E, dtype=BF16)
    loss, kl, *grads = OPS.reverse_kl(*leaves, heads[0], floats(T, E), heads[1], floats(T), *needs)
    assert looks(loss) == (torch.float32, ())
    assert looks(kl) == (torch.float32, (T,))
    assert not kl.requires_grad
    for one, grad, need in zip(leaves, grads, needs, strict=True):
        assert looks(grad) == (torch.float32, tuple(one.shape) if need else (0,))
        assert not grad.requires_grad
    wanted = [one for one, need in zip(leaves, needs, strict=True) if need]
    for one, grad in zip(wanted, torch.autograd.grad(loss, wanted), strict=True):
        assert looks(grad) == looks(one)


def test_gradients_are_not_differentiated_again():
    """Also where what comes into the backward pass is a constant, so that they would seem to be constants."""
    hidden, head, rounded = floats(T, D, leaf=True), floats(V, D), floats(V, D, dtype=BF16)
    values = OPS.linear_logprob(hidden, head, rounded, integers(T), 0.7, None, None)
    others = floats(T, E), floats(V, E, dtype=BF16), floats(T)
    loss, *_ = OPS.reverse_kl(hidden, head, rounded, *others, True, False)
    for name, value in {"linear_logprob": values[0].sum(), "reverse_kl": loss}.items():
        with pytest.raises(BackendError, match=f"{name} runs as tile, which has no gradients of gradients"):
            torch.autograd.grad(value, hidden, create_graph=True, retain_graph=True)
        (grad,) = torch.autograd.grad(value, hidden)
        assert not grad.requires_grad


def test_a_compiled_backward_pass_is_none_that_is_differentiated():
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("meta"):
        hidden, head, rounded = floats(T, D, leaf=True), floats(V, D), floats(V, D, dtype=BF16)
        token = integers(T)
        compiled = torch.compile(
            lambda one: OPS.linear_logprob(2 * one, head, rounded, token, 0.7, None, None)[0].sum(),
            fullgraph=True,
            backend="aot_eager",
        )
        (grad,) = torch.autograd.grad(compiled(hidden), hidden)
        assert looks(grad) == looks(hidden)


def test_mxfp4():
    packed, scale = integers(2, 128, 128, dtype=torch.int8), integers(2, 128, 8, dtype=torch.uint8)
    assert looks(mxfp4_sweep.dequantise(packed, scale, torch.bfloat16)) == (torch.bfloat16, (2, 128, 256))
    fp8 = torch.float8_e4m3fn
    payload, turned, block_scale, lost = mxfp4_sweep.to_fp8(packed, scale, True)
    assert (looks(payload), looks(turned)) == ((fp8, (2, 128, 256)), (fp8, (2, 256, 128)))
    assert (looks(block_scale), looks(lost)) == ((torch.uint8, (2, 1, 2)), (torch.int32, (2, 1, 2)))
    out = mxfp4_sweep.Quantised(*mxfp4_sweep.quantise(floats(2, 128, 256), True, False))
    assert (looks(out.packed), looks(out.scale)) == ((torch.uint8, (2, 128, 128)), (torch.uint8, (2, 128, 8)))
    assert (looks(out.payload), looks(out.turned)) == ((fp8, (2, 128, 256)), (fp8, (0,)))


def test_an_operator_runs_on_a_gpu_alone():
    with (
        pytest.raises(NotImplementedError, match="rollforward::mxfp4_dequantise"),
        torch._subclasses.fake_tensor.unset_fake_temporarily(),
    ):
        mxfp4_sweep.dequantise(
            torch.zeros(1, 16, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.uint8), torch.float32
        )


def test_operands_that_are_not_given_stay_so():
    assert on_device(None, None) == [None, None]
