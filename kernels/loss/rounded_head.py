"""Heads as the programs take them, kept on the device for as long as nobody writes to them.

A head of V4-Flash is 2 GiB of float32 that every call would read, and copy where the model is on the CPU, for the same
bfloat16. A kept copy belongs to the head's storage: it goes when that goes, and is made anew where torch's count of
writes, which views and detached tensors share, is another. Fused optimizers write past that count, so no copy outlasts
a step of an optimizer of torch's. What else is written past it, through `.data`, NumPy or a broadcast, is not seen
here, as autograd does not see it.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Kept(NamedTuple):
    key: tuple[object, ...]
    """Of which part of the storage, after which writes, for which device and stream."""
    rounded_VD: Tensor


_kept: WeakKeyDictionary[UntypedStorage, _Kept] = WeakKeyDictionary()
register_optimizer_step_post_hook(lambda *_: _kept.clear())


def rounded_head(head_VD: Tensor, device: torch.device) -> Tensor:
    """Return a head in bfloat16 on a device, rows one after another, without a gradient.

    Args:
        head_VD: [V, D] float32 or bfloat16, on any device.
        device: with its number, where it has one.

    Returns:
        [V, D]: the head itself where it is so already, else a copy, to be read only; the last one of this storage where
        it is still the head's. A copy is of the current stream alone, and what is captured in a CUDA graph or compiled
        makes its own: it must follow the head's later writes.
    """
    head_VD = head_VD.detach()
    if torch.compiler.is_compiling() or not _may_keep(head_VD, device):
        return head_VD.to(device, torch.bfloat16).contiguous()
    storage = head_VD.untyped_storage()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    place = head_VD.data_ptr(), head_VD.shape, head_VD.stride(), head_VD.dtype
    key = (*place, head_VD._version, device, stream)
    found = _kept.get(storage)
    if found is None or found.key != key:
        found = None
        _kept.pop(storage, None)  # before there is another
        found = _Kept(key, head_VD.to(device, torch.bfloat16).contiguous())
        _kept[storage] = found
    return found.rounded_VD


def _may_keep(head_VD: Tensor, device: torch.device) -> bool:
    if head_VD.dtype == torch.bfloat16 and head_VD.device == device and head_VD.is_contiguous():
        return False  # nothing is made
    if head_VD.is_inference():
        return False  # whose writes torch does not count
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
