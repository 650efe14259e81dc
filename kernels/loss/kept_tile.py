"""Kept sets of a loss over the vocabulary, for sm_90a: from lists of tokens to a bit for each token.

Letters: N tokens of a chunk, V vocabulary, I numbers in all lists. Caller: `vocab_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

THREADS = 256

SET_BIT = """
__device__ __forceinline__ int set_bit(int* words, long long at) {
  return atomicOr(words + (at >> 5), 1 << (at & 31));
}
"""
"""Bits are joined, so that a token that a list has twice is one, and no order shows."""


def kept_mask(V: int, tile_v: int) -> PrimFunc:
    """Of each row [N] a bit for each token, the first lowest, in words for whole tiles of the vocabulary: 1 where its
    list has the token; where its list is empty, 1 for every token of the vocabulary.

    A row's list has `counts` numbers and ends before number `ends` of all. What lies beyond the lists or is no token of
    the vocabulary is not looked at.
    """
    words = -(-V // tile_v) * tile_v // 32
    N, numbers = T.dynamic("N"), T.dynamic("I")

    @T.prim_func
    def kept_mask_kernel(
        counts: T.Tensor((N,), T.int64),
        ends: T.Tensor((N,), T.int64),
        ids: T.Tensor((numbers,), T.int64),
        mask: T.Tensor((N, words), T.int32),
    ):
        with T.Kernel(N, threads=THREADS, prelude=SET_BIT) as row:
            bits = T.alloc_shared((words,), T.int32)
            thread = T.get_thread_binding()
            for step in T.serial(T.ceildiv(words, THREADS)):
                at = step * THREADS + thread
                if at < words:
                    left = T.max(T.min(V - at * 32, 32), 0)
                    whole = T.if_then_else(left == 32, -1, (1 << (left % 32)) - 1)
                    bits[at] = T.if_then_else(counts[row] == 0, whole, 0)
            T.sync_threads()
            for step in T.serial(T.ceildiv(T.Cast(T.int32, counts[row]), THREADS)):
                at = step * THREADS + thread
                place = ends[row] - counts[row] + at
                there = (at < counts[row]) and (place >= 0) and (place < numbers)
                if there and (ids[place] >= 0) and (ids[place] < V):
                    T.evaluate(T.call_extern("int32", "set_bit", T.address_of(bits[0]), ids[place]))
            T.sync_threads()
            for step in T.serial(T.ceildiv(words, THREADS)):
                at = step * THREADS + thread
                if at < words:
                    mask[row, at] = bits[at]

    return kept_mask_kernel
