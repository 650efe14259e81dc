"""MXFP4 weights for sm_90a: a 128x128 block is read once and leaves as packed E2M1 with its scales and, where asked
for, as E4M3 with one scale, as it lies and transposed.

Letters: E matrices, the only size that changes at run time; R rows, K columns. Integer arithmetic on the floats' bits
throughout, so bytes are those of `mxfp4_ref` and no rounding can move an exponent. Caller: `mxfp4`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

BLOCK, GROUP, WARPS = 128, 32, 16
"""A block's side, the elements of one scale, and the warps that share a block: 8 rows each, 4 columns a thread."""

ROWS = BLOCK // WARPS

SPREAD, HEADROOM, ONE = 14, 6, 127
"""As in `formats`: binades between a block's scales; the FP8 scale below the largest; the byte of 1."""

LARGEST = 0x7F400000
"""Bits of 6 x 2^125, the largest magnitude whose scale gives a finite float back."""


@T.macro
def _power(byte):
    return T.reinterpret(byte << 23, T.float32)


@T.macro
def _round(scaled):
    """To the nearest of E2M1's values, ties to even, zeros positive; see `formats.round_to_grid`."""
    step = T.reinterpret(T.reinterpret(scaled, T.int32) & 0x7F800000, T.float32) * (0.75 * 2.0**23)
    magic = T.max(step, T.float32(0.75 * 2.0**23))
    return T.ieee_sub(T.ieee_add(scaled, magic), magic)  # plain, the compiler cancels it


@T.macro
def _code(value):
    """The 4 bits of a value of the grid."""
    bits = T.reinterpret(value, T.int32)
    large = T.max(((bits >> 22) & 0x1FF) - 252, 0)
    half = T.if_then_else((bits & 0x7FFFFFFF) == 0x3F000000, 1, 0)
    return large | half | ((bits >> 28) & 8)


@T.macro
def _byte(top):
    """The scale's byte of a group whose largest magnitude has these bits, 0 where it comes out as zeros."""
    byte = T.max(((top + 0x3FFFFF) >> 23) - 2, 1)
    return T.if_then_else(T.reinterpret(top, T.float32) <= 0.25 * _power(byte), 0, byte)


def quantise(R: int, K: int, bf16: bool, fp8: bool, turned: bool) -> PrimFunc:
    """Of weights [E, R, K], multiples of 128: codes two to a byte, the low half of even columns [E, R, K / 2]; a scale
    for 32 columns [E, R, K / 32]; of each block the groups whose scale was raised, or minus one where a weight is not
    finite [E, R / 128, K / 128].

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
        packed: T.Tensor((E, R, K // 2), T.uint8),
        scale: T.Tensor((E, R, K // GROUP), T.uint8),
        raised: T.Tensor((E, R // BLOCK, K // BLOCK), T.int32),
        payload: T.Tensor((E, R, K) if fp8 else one, T.float8_e4m3fn),
        payload_turned: T.Tensor((E, K, R) if turned else one, T.float8_e4m3fn),
        block_scale: T.Tensor((E, R // BLOCK, K // BLOCK) if fp8 else one, T.uint8),
    ):
        with T.Kernel(K // BLOCK, R // BLOCK, E, threads=32 * WARPS) as (column, row, matrix):
            T.annotate_min_blocks_per_sm(2)
            v = T.alloc_local((ROWS, 4), dtype)
            top = T.alloc_local((ROWS,), T.int32)
            byte = T.alloc_local((1,), T.int32)
            pair = T.alloc_local((2,), T.uint8)
            code = T.alloc_local((4,), T.int32)
            eighth = T.alloc_local((4,), T.float8_e4m3fn)
            largest = T.alloc_local((1,), T.int32)
            count = T.alloc_local((1,), T.int32)
            tops = T.alloc_shared((WARPS,), T.int32)
            counts = T.alloc_shared((WARPS,), T.int32)
            turning = T.alloc_local((4, ROWS), T.float8_e4m3fn)
            square = T.alloc_shared((BLOCK, BLOCK + 16), T.float8_e4m3fn)
            thread = T.get_thread_binding()
            warp = thread // 32
            lane = thread % 32
            first = row * BLOCK + warp * ROWS

            for i in T.unroll(ROWS):
                for j in T.vectorized(4):
                    v[i, j] = w[matrix, first + i, column * BLOCK + lane * 4 + j]
            largest[0] = 0
            count[0] = 0
            for i in T.unroll(ROWS):
                top[i] = 0
                for j in T.unroll(4):
                    top[i] = T.max(top[i], T.reinterpret(T.Cast(T.float32, v[i, j]), T.int32) & 0x7FFFFFFF)
                for step in (1, 2, 4):
                    top[i] = T.max(top[i], T.shfl_xor(top[i], step))
                if top[i] > LARGEST:
                    count[0] = -(1 << 20)
                largest[0] = T.max(largest[0], _byte(top[i]))
            for step in (8, 16):
                largest[0] = T.max(largest[0], T.shfl_xor(largest[0], step))
            if lane == 0:
                tops[warp] = largest[0]
            T.sync_threads()
            for i in T.unroll(WARPS):
                largest[0] = T.max(largest[0], tops[i])

            filling = T.if_then_else(largest[0] == 0, ONE, largest[0])
            block_byte = T.if_then_else(largest[0] == 0, ONE, T.max(largest[0] - HEADROOM, 0))
            for i in T.unroll(ROWS):
                byte[0] = _byte(top[i])
                if (byte[0] > 0) & (byte[0] < largest[0] - SPREAD):
                    byte[0] = largest[0] - SPREAD
                    count[0] += 1
                    if T.reinterpret(top[i], T.float32) <= 0.25 * _power(byte[0]):
                        byte[0] = 0
                if byte[0] == 0:
                    byte[0] = filling
                for j in T.unroll(4):
                    value = _round(T.Cast(T.float32, v[i, j]) * _power(254 - byte[0]))
                    code[j] = _code(value)
                    eighth[j] = T.Cast(T.float8_e4m3fn, value * _power(ONE + byte[0] - block_byte))
                for j in T.unroll(2):
                    pair[j] = T.Cast(T.uint8, code[2 * j] | (code[2 * j + 1] << 4))
                for j in T.vectorized(2):
                    packed[matrix, first + i, column * (BLOCK // 2) + lane * 2 + j] = pair[j]
                if lane % 8 == 0:
                    scale[matrix, first + i, column * (BLOCK // GROUP) + lane // 8] = T.Cast(T.uint8, byte[0])
                if fp8:
                    for j in T.vectorized(4):
                        payload[matrix, first + i, column * BLOCK + lane * 4 + j] = eighth[j]
                for j in T.unroll(4):
                    turning[j, i] = eighth[j]
            if turned:
                for j in T.unroll(4):
                    for i in T.vectorized(ROWS):
                        square[lane * 4 + j, warp * ROWS + i] = turning[j, i]
            count[0] += T.shfl_xor(count[0], 8)
            count[0] += T.shfl_xor(count[0], 16)
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
                for i in T.unroll(ROWS):
                    for j in T.vectorized(4):
                        payload_turned[matrix, column * BLOCK + warp * ROWS + i, row * BLOCK + lane * 4 + j] = square[
                            warp * ROWS + i, lane * 4 + j
                        ]

    return quantise_kernel
