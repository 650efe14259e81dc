"""KV compression: public function. Which raw tokens form a window is decided by model/segments.py."""

from torch import Tensor

from rollforward.kernels.attention.compress_ref import pool_window_ref
from rollforward.kernels.checks import check_shapes


def pool_window(kv_ELe: Tensor, score_ELe: Tensor) -> Tensor:
    """Pool every window into one entry by a softmax per channel.

    Local letters: E entries, L slots of a window (8 for CSA with ratio 4: previous and current window; m for HCA),
    e entry width.

    Args:
        kv_ELe: [E, L, e] float32, 0 in absent slots.
        score_ELe: [E, L, e] float32 with the position bias added, -inf in absent slots; one slot at least is present.

    Returns:
        [E, e] float32, before norm and RoPE.

    Invariants: an entry's bits depend on its own window alone; slots are summed by a fixed binary tree.
    Source: DeepSeek-V4 reference Compressor; report equations 9-12 and 20-23.
    """
    check_shapes("pool_window", kv_ELe=kv_ELe, score_ELe=score_ELe)
    return pool_window_ref(kv_ELe, score_ELe)
