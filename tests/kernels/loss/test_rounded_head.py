"""A head's rounded copy: made once for what it holds, anew after every kind of write, and gone with the head.

Not proven here: a copy on a GPU, its stream and graphs (test_rounded_head_on_gpu.py).
"""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from rollforward.kernels.loss.rounded_head import rounded_head
from tests.helpers.bits import different_bits

CPU = torch.device("cpu")


def head() -> Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


def test_it_is_the_head_in_bfloat16_without_a_gradient():
    one = head().requires_grad_()
    rounded = rounded_head(one, CPU)
    assert different_bits(rounded, one.detach().bfloat16()) == 0
    assert not rounded.requires_grad
    turned = head().view(16, 24).t()
    assert rounded_head(turned, CPU).is_contiguous()
    assert torch.equal(rounded_head(turned, CPU), turned.bfloat16())


def test_a_head_that_nobody_writes_to_is_rounded_once():
    one = head().requires_grad_()
    first = rounded_head(one, CPU)
    assert rounded_head(one, CPU) is first
    assert rounded_head(one.detach(), CPU) is first
    with torch.no_grad():
        assert rounded_head(one[:], CPU) is first


def test_one_that_is_rounded_already_is_not_copied():
    one = head().bfloat16()
    assert rounded_head(one, CPU).data_ptr() == one.data_ptr()


@pytest.mark.parametrize(
    "write",
    [
        lambda one: one.copy_(one * 2),
        lambda one: one[3:4].add_(1),
        lambda one: one.view(torch.int32)[0, 0].bitwise_xor_(1 << 20),
        lambda one: one.detach().mul_(2),
        lambda one: torch.mul(one.clone(), 2, out=one),
    ],
)
def test_a_write_makes_it_anew(write):
    one = head().requires_grad_()
    first = rounded_head(one, CPU).clone()
    with torch.no_grad():
        write(one)
    again = rounded_head(one, CPU)
    assert different_bits(again, one.detach().bfloat16()) == 0
    assert different_bits(again, first) > 0


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_an_optimizer_makes_it_anew(optimizer, how):
    """Torch does not count what fused ones write."""
    one = torch.nn.Parameter(head())
    steps = optimizer([one], lr=0.5, **how)
    for _ in range(2):
        first = rounded_head(one, CPU).clone()
        one.grad = torch.ones_like(one)
        steps.step()
        assert different_bits(rounded_head(one, CPU), one.detach().bfloat16()) == 0
        assert different_bits(rounded_head(one, CPU), first) > 0


def test_parts_and_dtypes_of_one_storage_are_told_apart():
    both = torch.stack([head(), head() + 1])
    for _ in range(2):
        for one in (*both, both[0].t(), both[0].view(torch.int32).view(torch.float32)):
            assert torch.equal(rounded_head(one, CPU), one.bfloat16())


def test_a_tensor_in_the_place_of_another_is_another():
    """As a gathered head replaces the one before: the allocator gives the same memory, and no write was counted."""
    for value in range(20):
        one = torch.full((24, 16), float(value))
        assert one._version == 0
        assert bool((rounded_head(one, CPU) == value).all())
        del one


def test_a_parameter_whose_data_is_replaced_is_another():
    one = torch.nn.Parameter(head())
    rounded_head(one, CPU)
    one.data = head() * 3
    assert torch.equal(rounded_head(one, CPU), one.detach().bfloat16())


def test_it_goes_with_the_head():
    one = head()
    view = one[2:]
    gone = weakref.ref(rounded_head(one, CPU))
    del one
    gc.collect()
    assert gone() is not None  # a part of the storage is still looked at
    del view
    gc.collect()
    assert gone() is None


def test_a_new_one_takes_the_place_of_the_old():
    one = head()
    gone = weakref.ref(rounded_head(one, CPU))
    one.zero_()
    rounded_head(one, CPU)
    assert gone() is None


def test_what_torch_does_not_count_is_not_kept():
    with torch.inference_mode():
        one = head()
        rounded_head(one, CPU)
        one.fill_(3)
        assert bool((rounded_head(one, CPU) == 3).all())


def test_a_compiled_function_rounds_by_itself():
    compiled = torch.compile(lambda one: rounded_head(one, CPU) + 0, fullgraph=True, backend="eager")
    one = head()
    rounded_head(one, CPU)
    one.data.fill_(3)  # unseen by the count
    assert bool((compiled(one) == 3).all())
