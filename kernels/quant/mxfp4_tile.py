"""MXFP4 weights for sm_90a: a 128x128 block is read once and leaves as packed E2M1 with its scales and, where asked
for, as E4M3 with one scale, as it lies and transposed; and packed E2M1 leaves as numbers or as E4M3.

Letters: E matrices, or G groups, the only size that changes at run time; R rows, K columns. Integer arithmetic on the
floats' bits throughout, so bytes are those of `mxfp4_ref` and no rounding can move an exponent. Caller: `mxfp4_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

BLOCK, GROUP, WARPS = 128, 32, 16
"""A block's side, the elements of one scale, and the warps that share a block."""

EACH, TIMES = 8, 4
"""Neighbouring columns of a thread, and the rows that it has one after another: a half-warp has a row at a time."""

SPREAD, HEADROOM, ONE, NAN = 14, 6, 127, 255
"""As in `formats`: binades between a block's scales; the FP8 scale below the largest; the bytes of 1 and of NaN."""

LEAST_SHIFT, EXACT_SHIFT = -13, -8
"""Binades of a scale above its block's: below the former nothing is left of a group, from the latter on all is."""

READERS, ITEMS = 256, 2
"""Threads that unpack together, and how often each writes 16 bytes."""

CONVERTERS, LANE_ROWS = 4, 16
"""Warps that have a block each, and the rows that a lane has of it."""

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

FOUR_OF_CODES = (
    FOUR_OF_E4M3
    + """
__device__ __forceinline__ unsigned int four_of_codes(unsigned int codes, unsigned int low, unsigned int high) {
  return __byte_perm(low, high, codes & 0x7777) | __byte_perm(0x8000, 0, (codes >> 3) & 0x1111);
}
"""
)
"""The lowest four E2M1 codes to a word of bytes, by a table of what the eight magnitudes become."""


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


@T.macro
def _value(code):
    """2^-126 times the value of an E2M1 code, the lowest four bits: they are a small float's."""
    return T.reinterpret(((code & T.uint32(7)) << 22) | ((code & T.uint32(8)) << 28), T.float32)


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


def dequantise(bf16: bool) -> PrimFunc:
    """Numbers [G, 32] of groups of 32 codes and their scale: float32, or with bf16 bfloat16; exact in both.

    A word of codes is one thread's: four codes, or with bf16 eight.
    """
    G = T.dynamic("G")
    each = 8 if bf16 else 4  # 16 bytes are written at once
    words = GROUP // each

    @T.prim_func
    def dequantise_kernel(
        packed: T.Tensor((G, words), T.uint32 if bf16 else T.uint16),
        scale: T.Tensor((G,), T.uint8),
        numbers: T.Tensor((G, GROUP), T.bfloat16 if bf16 else T.float32),
    ):
        with T.Kernel(T.ceildiv(G * words, READERS * ITEMS), threads=READERS) as block:
            codes = T.alloc_local((ITEMS,), T.uint32)
            byte = T.alloc_local((ITEMS,), T.int32)
            held = T.alloc_local((each,), T.bfloat16 if bf16 else T.float32)
            thread = T.get_thread_binding()
            for i in T.unroll(ITEMS):
                at = (block * ITEMS + i) * READERS + thread
                if at < G * words:
                    codes[i] = T.Cast(T.uint32, packed[at // words, at % words])
                    byte[i] = T.Cast(T.int32, scale[at // words])
            for i in T.unroll(ITEMS):
                at = (block * ITEMS + i) * READERS + thread
                power = T.if_then_else(
                    byte[i] == 0, 0x00400000, T.if_then_else(byte[i] == NAN, 0x7FC00000, byte[i] << 23)
                )
                for j in T.unroll(each):
                    value = _value(codes[i] >> (4 * j)) * 2.0**126 * T.reinterpret(power, T.float32)
                    held[j] = T.Cast(T.bfloat16 if bf16 else T.float32, value)
                if at < G * words:
                    for j in T.vectorized(each):
                        numbers[at // words, at % words * each + j] = held[j]

    return dequantise_kernel


def to_fp8(R: int, K: int, turned: bool) -> PrimFunc:
    """Of packed weights [E, R, K / 2], R and K multiples of 128, and their scales: the same values as E4M3 [E, R, K]
    with one scale for a block [E, R / 128, K / 128], and of each block the groups that lost something, or minus one
    where a scale is NaN.

    A block is one warp's, a lane has a group of 32 columns in 16 rows, and nobody waits for another. Four or eight
    elements are one word here.

    Args:
        turned: write also E4M3 [E, K, R].
    """
    E = T.dynamic("E")
    columns = K // BLOCK
    blocks = R // BLOCK * columns

    @T.macro
    def give_row(codes, low, high, first, second, payload, matrix, row, group, lane):
        """A row of a group, two times 16 bytes; neighbouring lanes exchange, so that they write neighbouring ones."""
        odd = lane % 2
        for w in T.unroll(4):
            first[w] = T.call_extern("uint32", "four_of_codes", codes[w // 2] >> (16 * (w % 2)), low, high)
            second[w] = T.call_extern("uint32", "four_of_codes", codes[2 + w // 2] >> (16 * (w % 2)), low, high)
            got = T.shfl_xor(T.if_then_else(odd == 1, first[w], second[w]), 1)
            first[w] = T.if_then_else(odd == 1, got, first[w])
            second[w] = T.if_then_else(odd == 1, second[w], got)
        for w in T.vectorized(4):
            payload[matrix, row, (2 * group - odd) * 4 + w] = first[w]
        for w in T.vectorized(4):
            payload[matrix, row, (2 * group + 2 - odd) * 4 + w] = second[w]

    @T.macro
    def give_columns(q, words, quarters, payload_turned, matrix, row, group):
        """Four columns of a group, whose rows are bytes of words."""
        for s in T.unroll(LANE_ROWS // 4):
            a = T.call_extern("uint32", "__byte_perm", words[4 * s], words[4 * s + 1], 0x5140)
            b = T.call_extern("uint32", "__byte_perm", words[4 * s + 2], words[4 * s + 3], 0x5140)
            c = T.call_extern("uint32", "__byte_perm", words[4 * s], words[4 * s + 1], 0x7362)
            d = T.call_extern("uint32", "__byte_perm", words[4 * s + 2], words[4 * s + 3], 0x7362)
            quarters[0, s] = T.call_extern("uint32", "__byte_perm", a, b, 0x5410)
            quarters[1, s] = T.call_extern("uint32", "__byte_perm", a, b, 0x7632)
            quarters[2, s] = T.call_extern("uint32", "__byte_perm", c, d, 0x5410)
            quarters[3, s] = T.call_extern("uint32", "__byte_perm", c, d, 0x7632)
        for j in T.unroll(4):
            for s in T.vectorized(LANE_ROWS // 4):
                payload_turned[matrix, group * GROUP + 4 * q + j, row // 4 + s] = quarters[j, s]

    @T.prim_func
    def to_fp8_kernel(
        packed: T.Tensor((E, R, K // EACH), T.uint32),
        scale: T.Tensor((E, R, K // GROUP), T.uint8),
        payload: T.Tensor((E, R, K // 4), T.uint32),
        payload_turned: T.Tensor((E, K, R // 4) if turned else (1, 1, 1), T.uint32),
        block_scale: T.Tensor((E, R // BLOCK, K // BLOCK), T.uint8),
        lost: T.Tensor((E, R // BLOCK, K // BLOCK), T.int32),
    ):
        # Long because a program is one function.
        with T.Kernel(T.ceildiv(blocks, CONVERTERS), E, threads=32 * CONVERTERS, prelude=FOUR_OF_CODES) as (
            few,
            matrix,
        ):
            codes = T.alloc_local((LANE_ROWS, 4), T.uint32)
            byte = T.alloc_local((LANE_ROWS,), T.int32)
            low = T.alloc_local((LANE_ROWS,), T.uint32)
            high = T.alloc_local((LANE_ROWS,), T.uint32)
            bad = T.alloc_local((2,), T.uint32)
            row_codes = T.alloc_local((4,), T.uint32)
            first = T.alloc_local((4,), T.uint32)
            second = T.alloc_local((4,), T.uint32)
            words = T.alloc_local((LANE_ROWS,), T.uint32)
            quarters = T.alloc_local((4, LANE_ROWS // 4), T.uint32)
            largest = T.alloc_local((1,), T.int32)
            found = T.alloc_local((1,), T.uint32)
            count = T.alloc_local((1,), T.int32)
            thread = T.get_thread_binding()
            lane = thread % 32
            block = few * CONVERTERS + thread // 32
            row = block // columns * BLOCK + lane // 4 * LANE_ROWS
            group = block % columns * (BLOCK // GROUP) + lane % 4
            if block < blocks:
                for i in T.unroll(LANE_ROWS):
                    for w in T.vectorized(4):
                        codes[i, w] = packed[matrix, row + i, group * 4 + w]
                    byte[i] = T.Cast(T.int32, scale[matrix, row + i, group])
                largest[0] = 0  # bytes are counted from 1, so that 0 is a block of zeros
                count[0] = 0
                for i in T.unroll(LANE_ROWS):
                    if byte[i] == NAN:
                        count[0] = -(1 << 20)
                    every = codes[i, 0] | codes[i, 1] | codes[i, 2] | codes[i, 3]
                    if (every & T.uint32(0x77777777)) != 0:
                        largest[0] = T.max(largest[0], byte[i] + 1)
                for step in (1, 2, 4, 8, 16):
                    largest[0] = T.max(largest[0], T.shfl_xor(largest[0], step))

                block_byte = T.if_then_else(largest[0] == 0, ONE, T.max(largest[0] - 1 - HEADROOM, 0))
                for i in T.unroll(LANE_ROWS):
                    shift = T.min(T.max(byte[i] - block_byte, LEAST_SHIFT), HEADROOM)
                    one = _power(ONE + shift)
                    low[i] = T.call_extern("uint32", "four_of_e4m3", 0.0, 0.5 * one, one, 1.5 * one)
                    high[i] = T.call_extern("uint32", "four_of_e4m3", 2.0 * one, 3.0 * one, 4.0 * one, 6.0 * one)
                    if shift < EXACT_SHIFT:
                        bad[0] = T.uint32(0)
                        bad[1] = T.uint32(0)
                        for c in T.unroll(8):  # what is no whole number of E4M3's smallest is lost
                            steps = _value(T.uint32(c)) * 2.0**126 * (one * 2.0**9)
                            if T.Cast(T.float32, T.Cast(T.int32, steps)) != steps:
                                bad[c // 4] = bad[c // 4] | (T.uint32(1) << (8 * (c % 4)))
                        found[0] = T.uint32(0)
                        for w in T.unroll(4):
                            for part in T.unroll(2):
                                found[0] = found[0] | T.call_extern(
                                    *("uint32", "__byte_perm", bad[0], bad[1]),
                                    (codes[i, w] >> (16 * part)) & T.uint32(0x7777),
                                )
                        if found[0] != 0:
                            count[0] += 1
                    for w in T.unroll(4):
                        row_codes[w] = codes[i, w]
                    give_row(
                        *(row_codes, low[i], high[i], first, second, payload, matrix, row + i, group, lane),
                    )
                if turned:
                    for q in T.unroll(EACH):
                        for i in T.unroll(LANE_ROWS):
                            words[i] = T.call_extern(
                                *("uint32", "four_of_codes", codes[i, q // 2] >> (16 * (q % 2)), low[i], high[i])
                            )
                        give_columns(q, words, quarters, payload_turned, matrix, row, group)
                for step in (1, 2, 4, 8, 16):
                    count[0] += T.shfl_xor(count[0], step)
                if lane == 0:
                    lost[matrix, block // columns, block % columns] = T.max(count[0], -1)
                    block_scale[matrix, block // columns, block % columns] = T.Cast(T.uint8, block_byte)

    return to_fp8_kernel
