"""Rows of logits over the whole vocabulary for sm_90a: values, and the gradient of the logits in their place.

Letters: N tokens of a chunk, the only size that changes at run time; V vocabulary; S tiles of the vocabulary, of which
`vocab_tile` has written top, mass and moment. A row's bits depend neither on N nor on the row's place. Caller:
`vocab_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

PART = 64
"""Columns of a tile with a centre of their own, as in `vocab_tile`."""

ROW_THREADS, ROW_EACH = 256, 8
"""Threads of a row, and neighbouring columns that each takes at once."""

ROW_STEP = ROW_THREADS * ROW_EACH


@T.macro
def _fold(stats, row, S, P, about_top, top, mass, mean, scales):
    """Of a row's tiles: its largest logit, its mass above that, and its moment over its mass; of each tile what its
    weights are multiplied by to become probabilities.

    `about_top`: the tiles' moments are about their own tops, and the row's becomes one about the row's.
    """
    tops = T.alloc_fragment((P,), T.float32)
    masses = T.alloc_fragment((P,), T.float32)
    moments = T.alloc_fragment((P,), T.float32)
    for i in T.Parallel(P):
        tops[i] = T.if_then_else(i < S, stats[0, i, row], -T.infinity(T.float32))
        masses[i] = T.if_then_else(i < S, stats[1, i, row], 0.0)
        moments[i] = T.if_then_else(i < S, stats[2, i, row], 0.0)
    T.reduce_max(tops, top, dim=0)
    for i in T.Parallel(P):
        if about_top:  # 0 * -inf
            moments[i] += T.if_then_else(masses[i] > 0, (tops[i] - top[0]) * masses[i], 0.0)
        tops[i] = T.__exp(tops[i] - top[0])
        moments[i] *= tops[i]
        masses[i] *= tops[i]
    T.reduce_sum(masses, mass, dim=0)
    T.reduce_sum(moments, mean, dim=0)
    mean[0] = mean[0] / mass[0]
    for i in T.Parallel(P):
        scales[i] = tops[i] / mass[0]


def _padded(S: int) -> int:
    """Tiles of a row as a multiple of its threads."""
    return max(ROW_THREADS, 1 << (S - 1).bit_length())


def reverse_kl_rows(V: int, tile_v: int) -> PrimFunc:
    """KL(student || teacher) of each row [N], and the gradient of the student's logits, from `student_logits`' words,
    its centres, and both stats. A row of weight 0 is written as zeros, whatever it holds.

        lead = sum p (z - u);   kl = lead - (log sum exp z - log sum exp u);   dz = weight * p * (z - u - lead)

    The gradient is V bfloat16 at the start of each row of words, which are halves [N, 2 V] here.
    """
    S = -(-V // tile_v)
    P = _padded(S)
    N = T.dynamic("N")

    @T.prim_func
    def reverse_kl_rows_kernel(
        halves: T.Tensor((N, 2 * V), T.uint16),
        student_stats: T.Tensor((3, S, N), T.float32),
        centres: T.Tensor((S * (tile_v // PART), N), T.float32),
        teacher_stats: T.Tensor((3, S, N), T.float32),
        row_weight: T.Tensor((N,), T.float32),
        kl: T.Tensor((N,), T.float32),
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            p_top = T.alloc_fragment((1,), T.float32)
            q_top = T.alloc_fragment((1,), T.float32)
            p_mass = T.alloc_fragment((1,), T.float32)
            q_mass = T.alloc_fragment((1,), T.float32)
            lead = T.alloc_fragment((1,), T.float32)
            unused = T.alloc_fragment((1,), T.float32)
            scales = T.alloc_shared((P,), T.float32)
            held = T.alloc_local((2 * ROW_EACH,), T.uint16)
            thread = T.get_thread_binding()

            _fold(teacher_stats, row, S, P, True, q_top, q_mass, unused, scales)
            T.sync_threads()
            _fold(student_stats, row, S, P, False, p_top, p_mass, lead, scales)
            weight = row_weight[row]
            value = (lead[0] - (p_top[0] - q_top[0])) - T.log(p_mass[0] / q_mass[0])
            for _ in T.Parallel(1):
                kl[row] = T.if_then_else(weight != 0.0, T.max(value, 0.0), 0.0)
            for step in T.serial(T.ceildiv(V, ROW_STEP)):
                at = step * ROW_STEP + thread * ROW_EACH
                if at < V:
                    for j in T.vectorized(2 * ROW_EACH):
                        held[j] = halves[row, 2 * at + j]
                T.sync_threads()  # all have read what is written over; the first time also the tiles' numbers are there
                if at < V:
                    centre = centres[at // PART, row] - lead[0]
                    scale = weight * scales[at // tile_v]
                    for j in T.unroll(ROW_EACH):
                        p = T.reinterpret(T.Cast(T.uint32, held[2 * j]) << 16, T.float32)
                        slope = T.reinterpret(T.Cast(T.uint32, held[2 * j + 1]) << 16, T.float32)
                        value = T.if_then_else(weight != 0.0, scale * (slope + p * centre), 0.0)
                        held[j] = T.reinterpret(T.Cast(T.bfloat16, value), T.uint16)
                    for j in T.vectorized(ROW_EACH):
                        halves[row, at + j] = held[j]

    return reverse_kl_rows_kernel


def logprob_rows(V: int, tile_v: int) -> PrimFunc:
    """Of each row [N]: log-probability of its token, and entropy."""
    S = -(-V // tile_v)
    P = _padded(S)
    N = T.dynamic("N")

    @T.prim_func
    def logprob_rows_kernel(
        stats: T.Tensor((3, S, N), T.float32),
        token_logit: T.Tensor((N,), T.float32),
        logprob: T.Tensor((N,), T.float32),
        entropy: T.Tensor((N,), T.float32),
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            top = T.alloc_fragment((1,), T.float32)
            mass = T.alloc_fragment((1,), T.float32)
            mean = T.alloc_fragment((1,), T.float32)
            scales = T.alloc_fragment((P,), T.float32)
            _fold(stats, row, S, P, True, top, mass, mean, scales)
            for _ in T.Parallel(1):
                logprob[row] = (token_logit[row] - top[0]) - T.log(mass[0])
                entropy[row] = T.log(mass[0]) - mean[0]

    return logprob_rows_kernel


def logprob_grad_rows(V: int, tile_v: int, pitch: int) -> PrimFunc:
    """In place of a row's weights [N, V]: the gradient of the logits before their scale, from those of its
    log-probability (a) and entropy (b): scale * (a (onehot - p) - b p (log p + entropy)).

    Rows where a and b are 0 are zeros, whatever they hold. From one row to the next there are `pitch` numbers.
    """
    S = -(-V // tile_v)
    P = _padded(S)
    N = T.dynamic("N")

    @T.prim_func
    def logprob_grad_rows_kernel(
        kept: T.StridedTensor((N, V), (pitch, 1), T.bfloat16),
        stats: T.Tensor((3, S, N), T.float32),
        token_ids: T.Tensor((N,), T.int32),
        logprob_grads: T.Tensor((N,), T.float32),
        entropy_grads: T.Tensor((N,), T.float32),
        scale: T.float32,
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            top = T.alloc_fragment((1,), T.float32)
            mass = T.alloc_fragment((1,), T.float32)
            mean = T.alloc_fragment((1,), T.float32)
            scales = T.alloc_shared((P,), T.float32)
            weights = T.alloc_fragment((ROW_STEP,), T.bfloat16)

            _fold(stats, row, S, P, True, top, mass, mean, scales)
            a = logprob_grads[row] * scale
            b = entropy_grads[row] * scale
            entropy = T.log(mass[0]) - mean[0]
            token = token_ids[row]
            T.sync_threads()
            for step in T.serial(T.ceildiv(V, ROW_STEP)):
                T.copy(kept[row, step * ROW_STEP], weights)
                for j in T.Parallel(ROW_STEP):
                    tile = T.min((step * ROW_STEP + j) // tile_v, S - 1)
                    p = T.Cast(T.float32, weights[j]) * scales[tile]
                    surprise = T.if_then_else(p > 0, T.__log(p) + entropy, 0.0)
                    own = T.if_then_else(step * ROW_STEP + j == token, a, 0.0)
                    weights[j] = T.if_then_else((a != 0.0) | (b != 0.0), own - p * (a + b * surprise), 0.0)
                T.copy(weights, kept[row, step * ROW_STEP])

    return logprob_grad_rows_kernel
