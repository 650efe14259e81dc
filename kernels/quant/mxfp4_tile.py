"""MXFP4 weights for sm_90a: a 128x128 block is read once and leaves as packed E2M1 with its scales and, where asked
for, as E4M3 with one scale, as it lies and transposed.

Letters: E matrices, the only size that changes at run time; R rows, K columns. Integer arithmetic on the floats' bits
throughout, so bytes are those of `mxfp4_ref` and no rounding can move an exponent. Caller: `mxfp4`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

BLOCK, GROUP, WARPS = 128, 32, 16
"""A block's side, the elements of one scale, and the warps that share a block."""

EACH, TIMES = 8, 4
"""Neighbouring columns of a thread, and the rows that it has one after another: a half-warp has a row at a time."""

SPREAD, HEADROOM, ONE = 14, 6, 127
"""As in `formats`: binades between a block's scales; the FP8 scale below the largest; the byte of 1."""

LARGEST = 0x7F400000
"""Bits of 6 x 2^125, the largest magnitude whose scale gives a finite float back."""

LEAST = 0.75 * 2.0**17
"""What rounds to 2^-7 when it is added and subtracted, half of the 2^-6 that E2M1's 1 is here."""

FOUR_OF_E4M3 = """
__device__ __forceinline__ unsigned int four_of_e4m3(float a, float b, float c, float d) {
  unsigned int four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
"""
"""Four floats to a word of E4M3, the first lowest."""


@T.macro
def _power(byte):
    return T.reinterpret(byte << 23, T.float32)


@T.macro
def _round(scaled):
    """To the nearest of E2M1's values times 2^-6, ties to even, zeros positive; see `formats.round_to_grid`."""
    step = T.reinterpret(T.reinterpret(scaled, T.int32) & 0x7F800000, T.float32) * (0.75 * 2.0**23)
    magic = T.max(step, T.float32(LEAST))
    return T.ieee_sub(T.ieee_add(scaled, magic), magic)  # plain, the compiler cancels it


@T.macro
def _byte(top):
    """The scale's byte of a group whose largest magnitude has these bits, 0 where it comes out as zeros."""
    byte = T.max(((top + 0x3FFFFF) >> 23) - 2, 1)
    return T.if_then_else(T.reinterpret(top, T.float32) <= 0.25 * _power(byte), 0, byte)


def quantise(R: int, K: int, bf16: bool, fp8: bool, turned: bool) -> PrimFunc:
    """Of weights [E, R, K], multiples of 128: codes two to a byte, the low half of even columns [E, R, K / 2]; a scale
    for 32 columns [E, R, K / 32]; of each block the groups whose scale was raised, or minus one where a weight is not
    finite [E, R / 128, K / 128].

    Four or eight elements are one word here.

    Args:
        bf16: the weights are bfloat16 rather than float32.
        fp8: write also the same values as E4M3 [E, R, K], and their scales [E, R / 128, K / 128].
        turned: write also E4M3 [E, K, R].
    """
    E = T.dynamic("E")
    dtype = T.bfloat16 if bf16 else T.float32
    one = (1, 1, 1)

    @T.prim_func
    def quantise_kernel(
        w: T.Tensor((E, R, K), dtype),
        packed: T.Tensor((E, R, K // EACH), T.uint32),
        scale: T.Tensor((E, R, K // GROUP), T.uint8),
        raised: T.Tensor((E, R // BLOCK, K // BLOCK), T.int32),
        payload: T.Tensor((E, R, K // 4) if fp8 else one, T.uint32),
        payload_turned: T.Tensor((E, K, R // 4) if turned else one, T.uint32),
        block_scale: T.Tensor((E, R // BLOCK, K // BLOCK) if fp8 else one, T.uint8),
    ):
        # Long because a program is one function.
        with T.Kernel(K // BLOCK, R // BLOCK, E, threads=32 * WARPS, prelude=FOUR_OF_E4M3) as (column, row, matrix):
            T.annotate_min_blocks_per_sm(2)
            v = T.alloc_local((TIMES, EACH), dtype)
            top = T.alloc_local((TIMES,), T.int32)
            byte = T.alloc_local((1,), T.int32)
            scaled = T.alloc_local((EACH,), T.float32)
            word = T.alloc_local((EACH // 4,), T.uint32)
            words = T.alloc_local((TIMES, EACH // 4), T.uint32)
            largest = T.alloc_local((1,), T.int32)
            count = T.alloc_local((1,), T.int32)
            tops = T.alloc_shared((WARPS,), T.int32)
            counts = T.alloc_shared((WARPS,), T.int32)
            square = T.alloc_shared((BLOCK, BLOCK // 4 + 1), T.uint32)
            thread = T.get_thread_binding()
            warp = thread // 32
            lane = thread % 32
            at = lane % 16 * EACH
            first = row * BLOCK + thread // 16 * TIMES

            for i in T.unroll(TIMES):
                for j in T.vectorized(EACH):
                    v[i, j] = w[matrix, first + i, column * BLOCK + at + j]
            largest[0] = 0
            count[0] = 0
            for i in T.unroll(TIMES):
                top[i] = 0
                for j in T.unroll(EACH):
                    top[i] = T.max(top[i], T.reinterpret(T.Cast(T.float32, v[i, j]), T.int32) & 0x7FFFFFFF)
                for step in (1, 2):
                    top[i] = T.max(top[i], T.shfl_xor(top[i], step))
                if top[i] > LARGEST:
                    count[0] = -(1 << 20)
                largest[0] = T.max(largest[0], _byte(top[i]))
            for step in (4, 8, 16):
                largest[0] = T.max(largest[0], T.shfl_xor(largest[0], step))
            if lane == 0:
                tops[warp] = largest[0]
            T.sync_threads()
            for i in T.unroll(WARPS):
                largest[0] = T.max(largest[0], tops[i])

            filling = T.if_then_else(largest[0] == 0, ONE, largest[0])
            block_byte = T.if_then_else(largest[0] == 0, ONE, T.max(largest[0] - HEADROOM, 0))
            for i in T.unroll(TIMES):
                byte[0] = _byte(top[i])
                if (byte[0] > 0) & (byte[0] < largest[0] - SPREAD):
                    byte[0] = largest[0] - SPREAD
                    count[0] += 1
                    if T.reinterpret(top[i], T.float32) <= 0.25 * _power(byte[0]):
                        byte[0] = 0
                if byte[0] == 0:
                    byte[0] = filling
                for j in T.unroll(EACH):
                    scaled[j] = _round(T.Cast(T.float32, v[i, j]) * _power(254 - byte[0]) * 2.0**-6)
                for q in T.unroll(EACH // 4):  # at 2^-6 of their value E2M1's are E4M3's smallest: the code is its top
                    word[q] = T.call_extern(
                        *("uint32", "four_of_e4m3", scaled[4 * q], scaled[4 * q + 1]),
                        *(scaled[4 * q + 2], scaled[4 * q + 3]),
                    )
                    word[q] = ((word[q] >> 2) & T.uint32(0x07070707)) | ((word[q] >> 4) & T.uint32(0x08080808))
                    word[q] = word[q] | (word[q] >> 4)
                    word[q] = (word[q] & T.uint32(0xFF)) | ((word[q] >> 8) & T.uint32(0xFF00))
                packed[matrix, first + i, column * (BLOCK // EACH) + lane % 16] = word[0] | (word[1] << 16)
                if lane % 4 == 0:
                    scale[matrix, first + i, column * (BLOCK // GROUP) + lane % 16 // 4] = T.Cast(T.uint8, byte[0])
                if fp8:
                    for j in T.unroll(EACH):
                        scaled[j] = scaled[j] * (_power(ONE + byte[0] - block_byte) * 64.0)
                    for q in T.unroll(EACH // 4):
                        words[i, q] = T.call_extern(
                            *("uint32", "four_of_e4m3", scaled[4 * q], scaled[4 * q + 1]),
                            *(scaled[4 * q + 2], scaled[4 * q + 3]),
                        )
                    for q in T.vectorized(EACH // 4):
                        payload[matrix, first + i, column * (BLOCK // 4) + at // 4 + q] = words[i, q]
            if turned:
                for q in T.unroll(EACH // 4):
                    for j in T.unroll(4):  # byte j of four rows
                        word[0] = T.uint32(0)
                        for i in T.unroll(TIMES):
                            word[0] = word[0] | (((words[i, q] >> (8 * j)) & T.uint32(0xFF)) << (8 * i))
                        square[at + 4 * q + j, thread // 16] = word[0]
            for step in (4, 8, 16):
                count[0] += T.shfl_xor(count[0], step)
            if lane == 0:
                counts[warp] = count[0]
            T.sync_threads()
            if thread == 0:
                for i in T.unroll(WARPS - 1):
                    count[0] += counts[i + 1]
                raised[matrix, row, column] = T.max(count[0], -1)
                if fp8:
                    block_scale[matrix, row, column] = T.Cast(T.uint8, block_byte)
            if turned:
                for i in T.unroll(BLOCK // WARPS):
                    turned_row = warp * (BLOCK // WARPS) + i
                    payload_turned[matrix, column * BLOCK + turned_row, row * (BLOCK // 4) + lane] = square[
                        turned_row, lane
                    ]

    return quantise_kernel
