"""Hyper-connections of four bfloat16 streams for sm_90a: in, out, and their gradients.

Letters: N tokens, the only size that changes at run time; D width; J = 4 D, a token's streams side by side; X = 24
mixing numbers (4 pre, 4 post, 16 comb, row-major j, k) or 4 of the head, in 32 places. Sums over a token's entries have
an order that depends on D alone, so a row's bits depend neither on N nor on its place. Callers: `mix_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

M, PLACES, SPLITS = 4, 32, 16
"""Streams, places of the mixing numbers, and slices of J whose products are summed apart, whatever N."""

TILE_N, TILE_K, STAGES = 128, 64, 4
THREADS, EACH = 256, 8
"""Threads of a token, and neighbouring entries that each takes at once."""


def project(D: int) -> PrimFunc:
    """Slices [16, N, 32] whose sum is the projection of the streams: x [N, J] @ w.T, with w [32, J] as the sum of two
    bfloat16: its products have 16 bits of it, and the streams' are exact."""
    J = M * D
    steps = -(-J // (SPLITS * TILE_K))
    N = T.dynamic("N")

    @T.prim_func
    def project_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        w: T.Tensor((2, PLACES, J), T.bfloat16),
        slices: T.Tensor((SPLITS, N, PLACES), T.float32),
    ):
        with T.Kernel(T.ceildiv(N, TILE_N), SPLITS, threads=256) as (row, split):
            a = T.alloc_shared((TILE_N, TILE_K), T.bfloat16)
            high = T.alloc_shared((PLACES, TILE_K), T.bfloat16)
            low = T.alloc_shared((PLACES, TILE_K), T.bfloat16)
            total = T.alloc_fragment((TILE_N, PLACES), T.float32)
            rest = T.alloc_fragment((TILE_N, PLACES), T.float32)
            T.clear(total)
            T.clear(rest)
            for k in T.Pipelined(steps, num_stages=STAGES):
                T.copy(x[row * TILE_N, (split * steps + k) * TILE_K], a)
                T.copy(w[0, 0, (split * steps + k) * TILE_K], high)
                T.copy(w[1, 0, (split * steps + k) * TILE_K], low)
                T.gemm(a, high, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(a, low, rest, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(TILE_N, PLACES):
                total[i, j] += rest[i, j]
            T.copy(total, slices[split, row * TILE_N, 0])

    return project_kernel


@T.macro
def _sum_of_block(value, places, thread):
    """The sum of the threads' values, in each of them; the same tree for all tokens."""
    for step in (16, 8, 4, 2, 1):
        value[0] += T.shfl_xor(value[0], step)
    if thread % 32 == 0:
        places[thread // 32] = value[0]
    T.sync_threads()
    value[0] = ((places[0] + places[1]) + (places[2] + places[3])) + ((places[4] + places[5]) + (places[6] + places[7]))


@T.macro
def _sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


def enter(D: int, iters: int, head: bool, normed: bool) -> PrimFunc:
    """From the streams x [N, J] and the slices of their projection: the sublayer's input sum_j pre_j x_j [N, D] and the
    token's weights [N, 32]: pre, post, comb, and 1 / rms of its streams at place 24.

    Args:
        iters: Sinkhorn passes.
        head: 4 mixing numbers, pre alone.
        normed: the input is divided by its own rms and multiplied by norm [D].
    """
    J, steps = M * D, -(-D // (THREADS * EACH))
    N = T.dynamic("N")

    @T.macro
    def over(c, other, step, eps):
        """One number of comb over the sum of its row (step 1) or its column (4)."""
        other[0] = c[0] + T.shfl_xor(c[0], step)
        other[0] += T.shfl_xor(other[0], 2 * step)
        c[0] *= T.fast_rcp(other[0] + eps)

    @T.macro
    def merge(held, pre, value, s, j):
        value[0] = pre[0] * T.Cast(T.float32, held[s * M, j])
        for m in T.unroll(M - 1):
            value[0] += pre[m + 1] * T.Cast(T.float32, held[s * M + m + 1, j])

    @T.prim_func
    def enter_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        slices: T.Tensor((SPLITS, N, PLACES), T.float32),
        base: T.Tensor((M if head else 24,), T.float32),
        scale: T.Tensor((1 if head else 3,), T.float32),
        norm: T.Tensor((D if normed else 1,), T.float32),
        eps: T.float32,
        norm_eps: T.float32,
        weights: T.Tensor((N, PLACES), T.float32),
        y: T.Tensor((N, D), T.bfloat16),
    ):
        # Long because a program is one function.
        with T.Kernel(N, threads=THREADS) as token:
            T.annotate_min_blocks_per_sm(3)
            held = T.alloc_local((steps * M, EACH), T.bfloat16)
            value = T.alloc_local((1,), T.float32)
            short = T.alloc_local((EACH,), T.bfloat16)
            square = T.alloc_local((1,), T.float32)
            c = T.alloc_local((1,), T.float32)
            other = T.alloc_local((1,), T.float32)
            raw = T.alloc_shared((PLACES,), T.float32)
            pre = T.alloc_shared((M,), T.float32)
            places = T.alloc_shared((8,), T.float32)
            again = T.alloc_shared((8,), T.float32)
            thread = T.get_thread_binding()

            square[0] = 0.0
            for s in T.unroll(steps):
                for m in T.unroll(M):
                    if s * THREADS * EACH + thread * EACH < D:
                        for j in T.vectorized(EACH):
                            held[s * M + m, j] = x[token, m * D + s * THREADS * EACH + thread * EACH + j]
                        for j in T.unroll(EACH):
                            square[0] += T.Cast(T.float32, held[s * M + m, j]) * T.Cast(T.float32, held[s * M + m, j])
            if thread < PLACES:
                value[0] = slices[0, token, thread]
                for s in T.unroll(SPLITS - 1):
                    value[0] += slices[s + 1, token, thread]
                raw[thread] = value[0]
            _sum_of_block(square, places, thread)
            rho = T.ieee_frsqrt(square[0] / J + norm_eps)
            if thread < M:
                pre[thread] = _sigmoid(raw[thread] * rho * scale[0] + base[thread]) + eps
                weights[token, thread] = pre[thread]
            T.sync_threads()
            if not head and thread >= THREADS - 32:  # the last warp, while the others go on; comb_jk is of lane 4 j + k
                lane = thread % 32
                if lane < M:
                    weights[token, M + lane] = 2.0 * _sigmoid(raw[M + lane] * rho * scale[1] + base[M + lane])
                c[0] = raw[2 * M + lane % 16] * rho * scale[2] + base[2 * M + lane % 16]
                other[0] = T.max(c[0], T.shfl_xor(c[0], 1))
                other[0] = T.max(other[0], T.shfl_xor(other[0], 2))
                c[0] = T.exp(c[0] - other[0])
                over(c, other, 1, 0.0)
                c[0] += eps
                over(c, other, 4, eps)
                for _ in T.serial(iters - 1):
                    over(c, other, 1, eps)
                    over(c, other, 4, eps)
                if lane < M * M:
                    weights[token, 2 * M + lane] = c[0]
            if thread == 32:
                weights[token, 24] = rho
            if normed:
                square[0] = 0.0
                for s in T.unroll(steps):
                    for j in T.unroll(EACH):
                        merge(held, pre, value, s, j)
                        if s * THREADS * EACH + thread * EACH < D:
                            square[0] += value[0] * value[0]
                _sum_of_block(square, again, thread)
                square[0] = T.ieee_frsqrt(square[0] / D + norm_eps)
            for s in T.unroll(steps):
                if s * THREADS * EACH + thread * EACH < D:
                    for j in T.unroll(EACH):
                        merge(held, pre, value, s, j)
                        if normed:
                            value[0] = value[0] * square[0] * norm[s * THREADS * EACH + thread * EACH + j]
                        short[j] = T.Cast(T.bfloat16, value[0])
                    for j in T.vectorized(EACH):
                        y[token, s * THREADS * EACH + thread * EACH + j] = short[j]

    return enter_kernel


def leave(D: int) -> PrimFunc:
    """The streams after a sublayer with output f [N, D]: x'_k = post_k f + sum_j comb_jk x_j [N, J]."""
    J, steps = M * D, -(-D // (THREADS * EACH))
    N = T.dynamic("N")

    @T.prim_func
    def leave_kernel(
        f: T.Tensor((N, D), T.bfloat16),
        x: T.Tensor((N, J), T.bfloat16),
        weights: T.Tensor((N, PLACES), T.float32),
        streams: T.Tensor((N, J), T.bfloat16),
    ):
        with T.Kernel(N, steps, threads=THREADS) as (token, step):
            held = T.alloc_local((M, EACH), T.bfloat16)
            from_f = T.alloc_local((EACH,), T.bfloat16)
            short = T.alloc_local((EACH,), T.bfloat16)
            mixing = T.alloc_local((24,), T.float32)
            value = T.alloc_local((1,), T.float32)
            for i in T.vectorized(24):
                mixing[i] = weights[token, i]
            at = step * THREADS * EACH + T.get_thread_binding() * EACH
            if at < D:
                for m in T.unroll(M):
                    for j in T.vectorized(EACH):
                        held[m, j] = x[token, m * D + at + j]
                for j in T.vectorized(EACH):
                    from_f[j] = f[token, at + j]
                for k in T.unroll(M):
                    for j in T.unroll(EACH):
                        value[0] = mixing[M + k] * T.Cast(T.float32, from_f[j])
                        for m in T.unroll(M):
                            value[0] += mixing[2 * M + m * M + k] * T.Cast(T.float32, held[m, j])
                        short[j] = T.Cast(T.bfloat16, value[0])
                    for j in T.vectorized(EACH):
                        streams[token, k * D + at + j] = short[j]

    return leave_kernel
