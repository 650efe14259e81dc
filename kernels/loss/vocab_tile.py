"""Kernels over the whole vocabulary for sm_90a: logits with what a softmax needs of them, and their gradients.

Letters: N tokens of a chunk, the only size that changes at run time; V vocabulary; D width; S tiles of the vocabulary.
Every order of summation is a function of the constants, so a row's bits depend neither on N nor on the row's place.
Callers: `vocab_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

TILE_N, TILE_K, STAGES = 128, 64, 4
"""Tile of the products beside `tile_v` columns: two groups of four warps with 64 rows each, FP32 sums in registers."""

PART = 32
"""Columns of a tile of which a thread holds the teacher's logits beside the student's."""

ROW_THREADS, ROW_STEP = 256, 2048
"""Threads of a row, and columns that they take at once."""


def logits(V: int, D: int, tile_v: int, store: bool, teacher: bool, token: bool) -> PrimFunc:
    """Logits scale * hidden @ head.T [N, V], and of each row and tile top, mass and moment: its largest logit,
    sum exp(z - top) and sum exp(z - top) * (z - top).

    Args:
        store: write the logits.
        teacher: the moment is sum exp(z - top) * (z - u), u being the teacher's logits; scale is not looked at.
        token: write each row's logit of its own token.
    """
    S = -(-V // tile_v)
    N = T.dynamic("N")

    @T.prim_func
    def logits_kernel(
        hidden: T.Tensor((N, D), T.bfloat16),
        head: T.Tensor((V, D), T.bfloat16),
        scale: T.float32,
        teacher_logits: T.Tensor((N if teacher else 1, V if teacher else 1), T.float32),
        token_ids: T.Tensor((N if token else 1,), T.int32),
        logits: T.Tensor((N if store else 1, V if store else 1), T.float32),
        stats: T.Tensor((3, S, N), T.float32),
        token_logit: T.Tensor((N if token else 1,), T.float32),
    ):
        with T.Kernel(T.ceildiv(N, TILE_N), S, threads=256) as (row, tile):
            x = T.alloc_shared((TILE_N, TILE_K), T.bfloat16)
            w = T.alloc_shared((tile_v, TILE_K), T.bfloat16)
            z = T.alloc_fragment((TILE_N, tile_v), T.float32)
            u = T.alloc_fragment((TILE_N, PART), T.float32)
            wanted = T.alloc_fragment((TILE_N,), T.int32)
            top = T.alloc_fragment((TILE_N,), T.float32)
            mass = T.alloc_fragment((TILE_N,), T.float32)
            moment = T.alloc_fragment((TILE_N,), T.float32)
            mass_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")
            moment_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")

            T.clear(z)
            for k in T.Pipelined(T.ceildiv(D, TILE_K), num_stages=STAGES):
                T.copy(hidden[row * TILE_N, k * TILE_K], x)
                T.copy(head[tile * tile_v, k * TILE_K], w)
                T.gemm(x, w, z, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            if not teacher:
                for i, j in T.Parallel(TILE_N, tile_v):
                    z[i, j] *= scale
            if store:
                T.copy(z, logits[row * TILE_N, tile * tile_v])
            if token:
                T.copy(token_ids[row * TILE_N], wanted)
                for i, j in T.Parallel(TILE_N, tile_v):
                    if wanted[i] == tile * tile_v + j and row * TILE_N + i < N:
                        token_logit[row * TILE_N + i] = z[i, j]
            if V % tile_v:
                for i, j in T.Parallel(TILE_N, tile_v):
                    z[i, j] = T.if_then_else(tile * tile_v + j < V, z[i, j], -T.infinity(T.float32))
            T.reduce_max(z, top, dim=1)
            T.reducer_init(mass_sum)
            T.reducer_init(moment_sum)
            for part in T.unroll(tile_v // PART):
                if teacher:
                    T.copy(teacher_logits[row * TILE_N, tile * tile_v + part * PART], u)
                for i, j in T.Parallel(TILE_N, PART):
                    weight = T.__exp(z[i, part * PART + j] - top[i])
                    T.reducer_update(mass_sum[i], weight)
                    slope = weight * (z[i, part * PART + j] - (u[i, j] if teacher else top[i]))
                    if V % tile_v:  # 0 * -inf
                        slope = T.if_then_else(tile * tile_v + part * PART + j < V, slope, 0.0)
                    T.reducer_update(moment_sum[i], slope)
            T.finalize_reducer(mass_sum, mass)
            T.finalize_reducer(moment_sum, moment)
            T.copy(top, stats[0, tile, row * TILE_N])
            T.copy(mass, stats[1, tile, row * TILE_N])
            T.copy(moment, stats[2, tile, row * TILE_N])

    return logits_kernel


def hidden_grad(V: int, D: int, tile_d: int) -> PrimFunc:
    """Gradient of the hidden states [N, D]: gradient of the logits [N, V] @ head [V, D], vocabulary left to right."""
    N = T.dynamic("N")

    @T.prim_func
    def hidden_grad_kernel(
        logits_grad: T.Tensor((N, V), T.bfloat16),
        head: T.Tensor((V, D), T.bfloat16),
        grad: T.Tensor((N, D), T.float32),
    ):
        with T.Kernel(T.ceildiv(N, TILE_N), T.ceildiv(D, tile_d), threads=256) as (row, column):
            g = T.alloc_shared((TILE_N, TILE_K), T.bfloat16)
            w = T.alloc_shared((TILE_K, tile_d), T.bfloat16)
            y = T.alloc_fragment((TILE_N, tile_d), T.float32)
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(V, TILE_K), num_stages=STAGES):
                T.copy(logits_grad[row * TILE_N, k * TILE_K], g)
                T.copy(head[k * TILE_K, column * tile_d], w)
                T.gemm(g, w, y, policy=T.GemmWarpPolicy.FullRow)
            T.copy(y, grad[row * TILE_N, column * tile_d])

    return hidden_grad_kernel


@T.macro
def _fold(stats, row, S, P, shift, top, log_mass, mean):
    """Of a row's tiles [3, S, N]: its largest logit, the logarithm of its mass above that, and its moment over its
    mass; `shift`: the tiles' moments are about their own tops."""
    tops = T.alloc_fragment((P,), T.float32)
    masses = T.alloc_fragment((P,), T.float32)
    moments = T.alloc_fragment((P,), T.float32)
    mass = T.alloc_fragment((1,), T.float32)
    for i in T.Parallel(P):
        tops[i] = T.if_then_else(i < S, stats[0, i, row], -T.infinity(T.float32))
        masses[i] = T.if_then_else(i < S, stats[1, i, row], 0.0)
        moments[i] = T.if_then_else(i < S, stats[2, i, row], 0.0)
    T.reduce_max(tops, top, dim=0)
    for i in T.Parallel(P):
        share = T.__exp(tops[i] - top[0])
        if shift:  # 0 * -inf
            moments[i] += T.if_then_else(masses[i] > 0, (tops[i] - top[0]) * masses[i], 0.0)
        moments[i] *= share
        masses[i] *= share
    T.reduce_sum(masses, mass, dim=0)
    T.reduce_sum(moments, mean, dim=0)
    mean[0] = mean[0] / mass[0]
    log_mass[0] = T.log(mass[0])


def reverse_kl_rows(V: int, tile_v: int) -> PrimFunc:
    """KL(student || teacher) of each row [N], and the gradient of the student's logits [N, V], from both logits [N, V]
    and their stats. A row of weight 0 is written as zeros, whatever it holds.
    """
    S = -(-V // tile_v)
    P = max(ROW_THREADS, 1 << (S - 1).bit_length())
    N = T.dynamic("N")

    @T.prim_func
    def reverse_kl_rows_kernel(
        student: T.Tensor((N, V), T.float32),
        teacher: T.Tensor((N, V), T.float32),
        student_stats: T.Tensor((3, S, N), T.float32),
        teacher_stats: T.Tensor((3, S, N), T.float32),
        row_weight: T.Tensor((N,), T.float32),
        logits_grad: T.Tensor((N, V), T.bfloat16),
        kl: T.Tensor((N,), T.float32),
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            p_top = T.alloc_fragment((1,), T.float32)
            q_top = T.alloc_fragment((1,), T.float32)
            p_log_mass = T.alloc_fragment((1,), T.float32)
            q_log_mass = T.alloc_fragment((1,), T.float32)
            mean = T.alloc_fragment((1,), T.float32)
            unused = T.alloc_fragment((1,), T.float32)
            p_log = T.alloc_fragment((ROW_STEP,), T.float32)
            q_log = T.alloc_fragment((ROW_STEP,), T.float32)
            g = T.alloc_fragment((ROW_STEP,), T.bfloat16)
            terms = T.alloc_reducer((1,), T.float32, op="sum")
            total = T.alloc_fragment((1,), T.float32)

            _fold(student_stats, row, S, P, False, p_top, p_log_mass, mean)
            _fold(teacher_stats, row, S, P, False, q_top, q_log_mass, unused)
            weight = row_weight[row]
            # Sum of p (log p - log q) without its terms: the centre of the gradient.
            centre = mean[0] - ((p_top[0] - q_top[0]) + (p_log_mass[0] - q_log_mass[0]))
            T.reducer_init(terms)
            for step in T.serial(T.ceildiv(V, ROW_STEP)):
                T.copy(student[row, step * ROW_STEP], p_log)
                T.copy(teacher[row, step * ROW_STEP], q_log)
                for j in T.Parallel(ROW_STEP):
                    p_log[j] = (p_log[j] - p_top[0]) - p_log_mass[0]
                    q_log[j] = (q_log[j] - q_top[0]) - q_log_mass[0]
                for j in T.Parallel(ROW_STEP):
                    p = T.__exp(p_log[j])
                    q = T.__exp(q_log[j])
                    term = T.max(p * (p_log[j] - q_log[j]) + (q - p), 0.0)
                    if V % ROW_STEP:
                        term = T.if_then_else(step * ROW_STEP + j < V, term, 0.0)
                    T.reducer_update(terms[0], term)
                    g[j] = T.if_then_else(weight != 0.0, weight * (p * ((p_log[j] - q_log[j]) - centre)), 0.0)
                T.copy(g, logits_grad[row, step * ROW_STEP])
            T.finalize_reducer(terms, total)
            for _ in T.Parallel(1):
                kl[row] = T.if_then_else(weight != 0.0, total[0], 0.0)

    return reverse_kl_rows_kernel


def logprob_rows(V: int, tile_v: int) -> PrimFunc:
    """Of each row [N]: log-probability of its token, entropy, largest logit and logarithm of the mass above that."""
    S = -(-V // tile_v)
    P = max(ROW_THREADS, 1 << (S - 1).bit_length())
    N = T.dynamic("N")

    @T.prim_func
    def logprob_rows_kernel(
        stats: T.Tensor((3, S, N), T.float32),
        token_logit: T.Tensor((N,), T.float32),
        logprob: T.Tensor((N,), T.float32),
        entropy: T.Tensor((N,), T.float32),
        tops: T.Tensor((N,), T.float32),
        log_masses: T.Tensor((N,), T.float32),
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            top = T.alloc_fragment((1,), T.float32)
            log_mass = T.alloc_fragment((1,), T.float32)
            mean = T.alloc_fragment((1,), T.float32)
            _fold(stats, row, S, P, True, top, log_mass, mean)
            for _ in T.Parallel(1):
                logprob[row] = (token_logit[row] - top[0]) - log_mass[0]
                entropy[row] = log_mass[0] - mean[0]
                tops[row] = top[0]
                log_masses[row] = log_mass[0]

    return logprob_rows_kernel


def logprob_grad_rows(V: int) -> PrimFunc:
    """Gradient of scale * logits [N, V] before the scale, from those of a row's log-probability and entropy:
    scale * (a (onehot - p) - b p (log p + entropy)). Rows where a and b are 0 are zeros, whatever they hold.
    """
    N = T.dynamic("N")

    @T.prim_func
    def logprob_grad_rows_kernel(
        logits: T.Tensor((N, V), T.float32),
        tops: T.Tensor((N,), T.float32),
        log_masses: T.Tensor((N,), T.float32),
        entropies: T.Tensor((N,), T.float32),
        token_ids: T.Tensor((N,), T.int32),
        logprob_grads: T.Tensor((N,), T.float32),
        entropy_grads: T.Tensor((N,), T.float32),
        scale: T.float32,
        logits_grad: T.Tensor((N, V), T.bfloat16),
    ):
        with T.Kernel(N, threads=ROW_THREADS) as row:
            p_log = T.alloc_fragment((ROW_STEP,), T.float32)
            g = T.alloc_fragment((ROW_STEP,), T.bfloat16)
            a = logprob_grads[row] * scale
            b = entropy_grads[row] * scale
            top = tops[row]
            log_mass = log_masses[row]
            entropy = entropies[row]
            token = token_ids[row]
            for step in T.serial(T.ceildiv(V, ROW_STEP)):
                T.copy(logits[row, step * ROW_STEP], p_log)
                for j in T.Parallel(ROW_STEP):
                    p_log[j] = (p_log[j] - top) - log_mass
                for j in T.Parallel(ROW_STEP):
                    p = T.__exp(p_log[j])
                    own = T.if_then_else(step * ROW_STEP + j == token, a, 0.0)
                    value = own - p * (a + b * (p_log[j] + entropy))
                    g[j] = T.if_then_else((a != 0.0) | (b != 0.0), value, 0.0)
                T.copy(g, logits_grad[row, step * ROW_STEP])

    return logprob_grad_rows_kernel
