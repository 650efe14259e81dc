"""How much memory the tensors that a block makes take at one time, counted operator by operator, on any device."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveMemory(TorchDispatchMode):
    """Context in which every storage that an operator returns is counted while a tensor looks at it.

    Not seen: what an operator makes and frees inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """Most bytes alive at once; those from before the block are not in it."""
        self._live_bytes = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_flatten(result)[0]:
            if isinstance(one, Tensor):
                self._watch(one, given)
        return result

    def _watch(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in given and self._holders[key] == 0:
            return  # a view of something older than the block
        if self._holders[key] == 0:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._holders[key] += 1
        weakref.finalize(tensor, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            self._live_bytes -= num_bytes


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that tensors made by the call take at one time."""
    with LiveMemory() as memory:
        function()
    return memory.peak_bytes
