"""Proves BF16 rounding (nearest even) and its straight-through gradient."""

import torch

from rollforward.kernels.quant.bf16 import fake_quant_bf16


def test_ties_go_to_even_and_dtype_stays() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8])
    got = fake_quant_bf16(x)
    assert got.dtype == torch.float32
    assert got.tolist() == [1.0, 1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0]
    bf16 = x.to(torch.bfloat16)
    assert torch.equal(fake_quant_bf16(bf16), bf16)


def test_gradient_is_the_identity() -> None:
    x = torch.randn(7, requires_grad=True)
    upstream = torch.randn(7)
    fake_quant_bf16(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)
