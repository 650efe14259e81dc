"""Gradients of hyper-connections of four bfloat16 streams for sm_90a; see `mix_tile` for letters and places.

Sums over tokens have an order that depends on their number alone, and no row of the others. Caller: `mix_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

M, PLACES, SPLITS = 4, 32, 16
"""As in `mix_tile`: streams, places of the mixing numbers, slices of a projection."""

THREADS, EACH = 256, 8
"""Threads of a token, and neighbouring entries that each takes at once."""

DOT_STEP, DOT_THREADS, GATE_TOKENS, GATE_THREADS = 256, 256, 8, 384
"""Entries that a warp takes at once, threads that take sums over tokens' streams, their tokens, and all threads."""

BACK_N, BACK_D, BACK_TOKENS, BACK_THREADS = 64, 64, 2048, 256
"""Tokens and columns of a tile of the streams' gradient, tokens whose part of the projection's is summed apart, and
threads that multiply and add."""

LOADED, STAGED = 18, 3
"""Tiles of 8 KiB that are loaded ahead, or wait to be stored."""

SUM_THREADS = 256


def _row_owner(i, j):
    """Thread of a part j of the sums over a row i of a tile of 64 x 64, whose columns 8 groups of 8 threads share."""
    return j // 4 * 128 + i // 16 * 32 + i % 8 * 4 + j % 4


def _row_place(i, _):
    return i % 16 // 8


def _column_owner(i, j):
    """Thread of a part i of the sums over a column j of such a tile, whose rows 32 threads share."""
    return j // 32 * 128 + i // 8 * 32 + i % 8 * 4 + j % 8 // 2


def _column_place(_, j):
    return j % 32 // 8 * 2 + j % 2


def leave_backward(D: int) -> PrimFunc:
    """From the gradient g of the streams after a sublayer [N, J]: those of its output, sum_k post_k g_k [N, D], and of
    the streams before it, sum_k comb_jk g_k [N, J]; and of post and comb, at places 4 to 23 of [N, 32]."""
    J, steps = M * D, -(-D // (THREADS * EACH))
    N = T.dynamic("N")

    @T.prim_func
    def leave_backward_kernel(
        g: T.Tensor((N, J), T.bfloat16),
        f: T.Tensor((N, D), T.bfloat16),
        x: T.Tensor((N, J), T.bfloat16),
        weights: T.Tensor((N, PLACES), T.float32),
        grad_f: T.Tensor((N, D), T.bfloat16),
        grad_x: T.Tensor((N, J), T.bfloat16),
        grad_weights: T.Tensor((N, PLACES), T.float32),
    ):
        with T.Kernel(N, threads=THREADS) as token:
            T.annotate_min_blocks_per_sm(2)
            of_g = T.alloc_local((M, EACH), T.bfloat16)
            of_x = T.alloc_local((M, EACH), T.bfloat16)
            of_f = T.alloc_local((EACH,), T.bfloat16)
            short = T.alloc_local((EACH,), T.bfloat16)
            mixing = T.alloc_local((24,), T.float32)
            dots = T.alloc_local((20,), T.float32)
            value = T.alloc_local((1,), T.float32)
            places = T.alloc_shared((8, 20), T.float32)
            thread = T.get_thread_binding()

            for i in T.vectorized(24):
                mixing[i] = weights[token, i]
            for i in T.unroll(20):
                dots[i] = 0.0
            for s in T.serial(steps):
                at = s * THREADS * EACH + thread * EACH
                if at < D:
                    for m in T.unroll(M):
                        for j in T.vectorized(EACH):
                            of_g[m, j] = g[token, m * D + at + j]
                        for j in T.vectorized(EACH):
                            of_x[m, j] = x[token, m * D + at + j]
                    for j in T.vectorized(EACH):
                        of_f[j] = f[token, at + j]
                    for j in T.unroll(EACH):
                        value[0] = 0.0
                        for k in T.unroll(M):
                            value[0] += mixing[M + k] * T.Cast(T.float32, of_g[k, j])
                            dots[k] += T.Cast(T.float32, of_f[j]) * T.Cast(T.float32, of_g[k, j])
                        short[j] = T.Cast(T.bfloat16, value[0])
                    for j in T.vectorized(EACH):
                        grad_f[token, at + j] = short[j]
                    for m in T.unroll(M):
                        for j in T.unroll(EACH):
                            value[0] = 0.0
                            for k in T.unroll(M):
                                value[0] += mixing[2 * M + m * M + k] * T.Cast(T.float32, of_g[k, j])
                                dots[M + m * M + k] += T.Cast(T.float32, of_x[m, j]) * T.Cast(T.float32, of_g[k, j])
                            short[j] = T.Cast(T.bfloat16, value[0])
                        for j in T.vectorized(EACH):
                            grad_x[token, m * D + at + j] = short[j]
            for step in (16, 8, 4, 2, 1):
                for i in T.unroll(20):
                    dots[i] += T.shfl_xor(dots[i], step)
            if thread % 32 == 0:
                for i in T.unroll(20):
                    places[thread // 32, i] = dots[i]
            T.sync_threads()
            if thread < 20:
                value[0] = places[0, thread]
                for i in T.unroll(7):
                    value[0] += places[i + 1, thread]
                grad_weights[token, M + thread] = value[0]

    return leave_backward_kernel


def gates_backward(D: int, iters: int, head: bool, normed: bool) -> PrimFunc:
    """What a site's gradients need of each token: first the gradient of pre, which takes a pass over the streams
    x [N, J] and the gradient of the sublayer's input dy [N, D], then those of the gates and back through Sinkhorn.

    Args:
        iters: Sinkhorn passes.
        head: 4 mixing numbers, pre alone.
        normed: the input is the merged streams over their rms and times norm [D], whose gradient is made here.

    `raw` [N, 32] are the mixing numbers before 1 / rms, weights [N, 32] what the way in made of them, grad_weights
    [N, 32] the gradients of its post and comb; out_weights [N, 32] have post and comb of a way out before it. Written
    are the gradient of the projection, as two bfloat16 [N, 64], high halves and low ones; `numbers`, what
    `streams_backward` needs of a token (`PRE` and the places after it), 0 after the last one; and for each 8 tokens
    the sums of the gradients of base (places 0 to 23) and scale (24 to 26).

    A warp takes the sums of one token; another gates of two, one of each 16 lanes, meanwhile.
    """
    J, X, dots = M * D, M if head else 24, 2 * M + 2 if normed else M
    steps = D // DOT_STEP
    each = 2 if steps % 2 == 0 else 1
    N = T.dynamic("N")
    passes = 2 * iters - 1

    @T.macro
    def row_sum(value, other):
        other[0] = value[0] + T.shfl_xor(value[0], 1)
        other[0] += T.shfl_xor(other[0], 2)

    @T.macro
    def column_sum(value, other):
        other[0] = value[0] + T.shfl_xor(value[0], 4)
        other[0] += T.shfl_xor(other[0], 8)

    @T.macro
    def undo(c, grad, kept, at, other, sum_of):
        """Through one pass: grad = (grad - sum(grad c)) / divisor, and c what it was before."""
        value = T.alloc_local((1,), T.float32)
        value[0] = grad[0] * c[0]
        sum_of(value, other)
        grad[0] = (grad[0] - other[0]) * T.fast_rcp(kept[at])
        c[0] *= kept[at]

    @T.macro
    def sinkhorn_backward(c, grad, kept, other, eps):
        """From the logit and the gradient of a number of comb: the gradient of the logit, in `grad`."""
        other[0] = T.max(c[0], T.shfl_xor(c[0], 1))
        other[0] = T.max(other[0], T.shfl_xor(other[0], 2))
        c[0] = T.exp(c[0] - other[0])
        row_sum(c, other)
        c[0] = c[0] * T.fast_rcp(other[0]) + eps
        for i in T.unroll(passes):
            if i % 2 == 0:
                column_sum(c, other)
            else:
                row_sum(c, other)
            kept[i] = other[0] + eps
            c[0] *= T.fast_rcp(kept[i])
        for i in T.unroll(passes):
            if (passes - 1 - i) % 2 == 0:
                undo(c, grad, kept, passes - 1 - i, other, column_sum)
            else:
                undo(c, grad, kept, passes - 1 - i, other, row_sum)
        c[0] -= eps
        kept[0] = grad[0] * c[0]
        other[0] = kept[0] + T.shfl_xor(kept[0], 1)
        other[0] += T.shfl_xor(other[0], 2)
        grad[0] = c[0] * (grad[0] - other[0])

    @T.prim_func
    def gates_backward_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        norm: T.Tensor((D if normed else 1,), T.float32),
        raw: T.Tensor((N, PLACES), T.float32),
        base: T.Tensor((X,), T.float32),
        scale: T.Tensor((1 if head else 3,), T.float32),
        weights: T.Tensor((N, PLACES), T.float32),
        grad_weights: T.Tensor((N, PLACES), T.float32),
        out_weights: T.Tensor((N, PLACES), T.float32),
        eps: T.float32,
        norm_eps: T.float32,
        mix_grads: T.Tensor((N, 2 * PLACES), T.bfloat16),
        numbers: T.Tensor((T.ceildiv(N, BACK_N), PLACES, BACK_N), T.float32),
        by_place: T.Tensor((T.ceildiv(N, BACK_N) * (BACK_N // GATE_TOKENS), PLACES), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(T.ceildiv(N, BACK_N) * (BACK_N // GATE_TOKENS), threads=GATE_THREADS) as block:
            T.annotate_min_blocks_per_sm(2)
            of_y = T.alloc_local((each, EACH), T.bfloat16)
            of_x = T.alloc_local((each * M, EACH), T.bfloat16)
            n = T.alloc_local((EACH,), T.float32)
            of_norm = T.alloc_local((2,), T.float32)
            of_scale = T.alloc_local((3,), T.float32)
            short = T.alloc_local((2,), T.bfloat16)
            pre = T.alloc_local((M,), T.float32)
            sums = T.alloc_local((dots,), T.float32)
            value = T.alloc_local((2,), T.float32)
            c = T.alloc_local((1,), T.float32)
            comb = T.alloc_local((1,), T.float32)
            gate = T.alloc_local((1,), T.float32)
            other = T.alloc_local((1,), T.float32)
            kept = T.alloc_local((passes,), T.float32)
            of_token = T.alloc_shared((GATE_TOKENS, dots), T.float32)
            of_places = T.alloc_shared((GATE_TOKENS, PLACES), T.float32)
            thread = T.get_thread_binding()
            comb[0] = 0.0
            if thread < DOT_THREADS:
                token = block * GATE_TOKENS + thread // 32
                if token < N:
                    for i in T.vectorized(M):
                        pre[i] = weights[token, i]
                    for i in T.unroll(dots):
                        sums[i] = 0.0
                    for s in T.serial(steps // each):
                        for e in T.unroll(each):
                            at = (s * each + e) * DOT_STEP + thread % 32 * EACH
                            for j in T.vectorized(EACH):
                                of_y[e, j] = dy[token, at + j]
                            for m in T.unroll(M):
                                for j in T.vectorized(EACH):
                                    of_x[e * M + m, j] = x[token, m * D + at + j]
                        for e in T.unroll(each):
                            if normed:
                                for h in T.unroll(2):
                                    for j in T.vectorized(EACH // 2):
                                        n[h * (EACH // 2) + j] = norm[
                                            (s * each + e) * DOT_STEP + thread % 32 * EACH + h * (EACH // 2) + j
                                        ]
                            for j in T.unroll(EACH):
                                value[0] = T.Cast(T.float32, of_y[e, j])
                                if normed:
                                    value[0] *= n[j]
                                    value[1] = pre[0] * T.Cast(T.float32, of_x[e * M, j])
                                    for m in T.unroll(M - 1):
                                        value[1] += pre[m + 1] * T.Cast(T.float32, of_x[e * M + m + 1, j])
                                    sums[2 * M] += value[1] * value[1]
                                    sums[2 * M + 1] += value[0] * value[1]
                                for m in T.unroll(M):
                                    sums[m] += value[0] * T.Cast(T.float32, of_x[e * M + m, j])
                                    if normed:
                                        sums[M + m] += value[1] * T.Cast(T.float32, of_x[e * M + m, j])
                    for step in (16, 8, 4, 2, 1):
                        for i in T.unroll(dots):
                            sums[i] += T.shfl_xor(sums[i], step)
                    if thread % 32 == 0:
                        for i in T.unroll(dots):
                            of_token[thread // 32, i] = sums[i]
            else:
                if not head:
                    lane = thread % 16
                    token = T.min(block * GATE_TOKENS + (thread - DOT_THREADS) // 16, N - 1)
                    c[0] = raw[token, 2 * M + lane] * weights[token, 24] * scale[2] + base[2 * M + lane]
                    comb[0] = grad_weights[token, 2 * M + lane]
                    sinkhorn_backward(c, comb, kept, other, eps)
            T.sync_threads()
            if thread >= DOT_THREADS:
                lane = thread % 16
                slot = (thread - DOT_THREADS) // 16
                token = block * GATE_TOKENS + slot
                there = token < N
                at = T.min(token, N - 1)
                rho = weights[at, 24]
                # By 16 lanes: gradients of the logit of pre or post, and of a number of comb.
                gate[0] = 0.0
                of_norm[0] = 1.0
                of_norm[1] = 0.0
                if normed:
                    of_norm[0] = T.ieee_frsqrt(of_token[slot, 2 * M] / D + norm_eps)
                    of_norm[1] = of_norm[0] * of_norm[0] * of_norm[0] * of_token[slot, 2 * M + 1] / D
                if lane < M:
                    gate[0] = of_token[slot, lane]
                    if normed:
                        gate[0] = of_norm[0] * gate[0] - of_norm[1] * of_token[slot, M + lane]
                    gate[0] *= (weights[at, lane] - eps) * (1.0 + eps - weights[at, lane])
                elif not head and lane < 2 * M:
                    gate[0] = grad_weights[at, lane] * weights[at, lane] * (1.0 - 0.5 * weights[at, lane])
                if not there:
                    gate[0] = 0.0
                    comb[0] = 0.0
                # Gradients of the scales, in every lane; their sum is of 1 / rms.
                of_scale[0] = gate[0] * raw[at, lane % X] * rho
                of_scale[2] = 0.0
                if not head:
                    of_scale[2] = comb[0] * raw[at, 2 * M + lane] * rho
                for step in (1, 2):
                    of_scale[0] += T.shfl_xor(of_scale[0], step)
                for step in (1, 2, 4, 8):
                    of_scale[2] += T.shfl_xor(of_scale[2], step)
                of_scale[1] = T.shfl_sync(of_scale[0], thread % 32 // 16 * 16 + M)
                of_scale[0] = T.shfl_sync(of_scale[0], thread % 32 // 16 * 16)
                other[0] = of_scale[0] * scale[0]
                if not head:
                    other[0] += of_scale[1] * scale[1] + of_scale[2] * scale[2]
                of_places[slot, 8 + lane] = comb[0]
                of_places[slot, T.if_then_else(lane < 8, lane, 16 + lane)] = T.if_then_else(
                    lane < 8,
                    gate[0],
                    T.if_then_else(lane == 8, of_scale[0], T.if_then_else(lane == 9, of_scale[1], of_scale[2])),
                )
                gate[0] *= T.if_then_else(lane < M, scale[0], scale[0 if head else 1]) * rho
                comb[0] *= scale[0 if head else 2] * rho
                other[0] *= -(rho * rho) / J
                for i in (0, 1):
                    value[0] = comb[0] if i == 1 else gate[0]
                    place = 8 + lane if i == 1 else T.if_then_else(lane < 8, lane, 16 + lane)
                    short[0] = T.Cast(T.bfloat16, value[0])
                    short[1] = T.Cast(T.bfloat16, value[0] - T.Cast(T.float32, short[0]))
                    if there:
                        mix_grads[token, place] = short[0]
                        mix_grads[token, PLACES + place] = short[1]
                value[0] = T.if_then_else(lane < M, weights[at, lane], out_weights[at, lane])
                value[1] = T.if_then_else(
                    lane < 8,
                    out_weights[at, 16 + lane],
                    T.if_then_else(lane == 8, other[0], T.if_then_else(lane == 9, of_norm[0], of_norm[1])),
                )
                for i in (0, 1):
                    numbers[token // BACK_N, i * 16 + lane, token % BACK_N] = T.if_then_else(there, value[i], 0.0)
            T.sync_threads()
            if thread < PLACES:
                value[0] = of_places[0, thread]
                for i in T.unroll(GATE_TOKENS - 1):
                    value[0] += of_places[i + 1, thread]
                by_place[block, thread] = value[0]

    return gates_backward_kernel


def streams_backward(D: int, normed: bool, across: bool) -> PrimFunc:
    """The gradient of the streams x [N, J] that a site reads, from that of them by other ways, g [N, J], and that of
    the sublayer's input, dy [N, D]: g_j + pre_j dy, through the projection, and through both rms.

    Args:
        normed: the input is normalised, as in `gates_backward`.
        across: x are the streams after a sublayer with output f [N, D] and `before` [N, J] those before it. The
            gradient of x stays here; written are those of f [N, D] and of `before` [N, J], and for each 64 columns
            the sums over them of the gradients of post and comb [D / 64, N, 20]. Otherwise that of x is written, to
            grad_x [N, J], which may be g.

    Besides, for each 2048 tokens, of the projection [ceil(N / 2048), 64, J], high and low halves, and of norm
    [ceil(N / 2048), D]. mix_grads and `numbers` are from `gates_backward`, w [2, 32, J] is as in `project`.

    A block walks over the tokens with 64 columns of every stream. One warp loads tiles of 64 x 64 in the order in which
    eight multiply and add; another stores.
    """
    J = M * D
    N = T.dynamic("N")
    loads, stores = (15, 5) if across else (10, 4)

    @T.macro
    def load(at, source, row, column, tiles, full, empty, thread):
        slot = at % LOADED
        T.mbarrier_wait_parity(empty[slot], ((at // LOADED) & 1) ^ 1)
        T.tma_copy(
            source[row : row + BACK_N, column : column + BACK_D],
            tiles[slot, :, :],
            barrier=full[slot],
            leader_scope_threads=32,
        )
        if thread == BACK_THREADS:
            T.mbarrier_arrive(full[slot])

    @T.macro
    def store(at, staged, target, row, column, filled, stored, thread):
        T.mbarrier_wait_parity(filled[at % STAGED], (at // STAGED) & 1)
        T.tma_copy(
            staged[at % STAGED, :, :],
            target[row : row + BACK_N, column : column + BACK_D],
            leader_scope_threads=32,
        )
        T.tma_store_wait(1)
        T.sync_warp()
        if (thread == BACK_THREADS + 32) and (at > 0):
            T.mbarrier_arrive(stored[(at + STAGED - 1) % STAGED])

    @T.macro
    def wait(at, full):
        T.mbarrier_wait_parity(full[at % LOADED], (at // LOADED) & 1)

    @T.macro
    def release(at, empty, thread):
        T.sync_warp()
        if thread % 32 == 0:
            T.mbarrier_arrive(empty[at % LOADED])

    @T.macro
    def stage(at, short, staged, filled, stored, thread):
        T.mbarrier_wait_parity(stored[at % STAGED], ((at // STAGED) & 1) ^ 1)
        T.copy(short, staged[at % STAGED, :, :])
        T.fence_proxy_async()
        T.sync_warp()
        if thread % 32 == 0:
            T.mbarrier_arrive(filled[at % STAGED])

    @T.macro
    def take(at, short, tiles, full, empty, thread):
        wait(at, full)
        T.copy(tiles[at % LOADED, :, :], short)
        release(at, empty, thread)

    @T.macro
    def project(m, u, z, tiles, of_w, full):
        wait(u + 1 + m, full)
        s = u % LOADED
        policy = T.GemmWarpPolicy.FullCol
        T.wgmma_gemm(tiles[s, :, 0:PLACES], of_w[m, :, :], z, policy=policy, clear_accum=True)
        T.wgmma_gemm(tiles[s, :, PLACES : 2 * PLACES], of_w[m, :, :], z, policy=policy)
        T.wgmma_gemm(tiles[s, :, 0:PLACES], of_w[M + m, :, :], z, policy=policy)

    @T.macro
    def add(m, u, sums, tiles):
        T.wgmma_gemm(
            tiles[u % LOADED, :, :],
            tiles[(u + 1 + m) % LOADED, :, :],
            sums,
            transpose_A=True,
            policy=T.GemmWarpPolicy.FullCol,
        )

    @T.macro
    def total(m, u, s, z, y, short, of_token, tiles, full, empty, thread):
        take(u + 6 + m, short, tiles, full, empty, thread)
        for i, j in T.Parallel(BACK_N, BACK_D):
            z[i, j] += T.Cast(T.float32, short[i, j]) + of_token[s, m, i] * y[i, j]
        T.copy(tiles[(u + 1 + m) % LOADED, :, :], short)
        for i, j in T.Parallel(BACK_N, BACK_D):
            z[i, j] += of_token[s, 24, i] * T.Cast(T.float32, short[i, j])

    @T.macro
    def mix(at, s, z0, z1, z2, z3, d0, d1, d2, d3, short, of_token, halves):
        """From f or a stream before the sublayer, its gradient, in its place, and the sums of it times gradients."""
        for d in (d0, d1, d2, d3):
            T.clear(d)
        for i, j in T.Parallel(BACK_N, BACK_D):
            value = T.Cast(T.float32, short[i, j])
            o = j // 32 * 4 + j % 8 // 2
            d0[i, o] += z0[i, j] * value
            d1[i, o] += z1[i, j] * value
            d2[i, o] += z2[i, j] * value
            d3[i, o] += z3[i, j] * value
            short[i, j] = T.Cast(
                T.bfloat16,
                of_token[s, M + M * at, i] * z0[i, j]
                + of_token[s, M + M * at + 1, i] * z1[i, j]
                + of_token[s, M + M * at + 2, i] * z2[i, j]
                + of_token[s, M + M * at + 3, i] * z3[i, j],
            )
        for d in (d0, d1, d2, d3):
            for step in (1, 2):
                for i, o in T.Parallel(BACK_N, 8):
                    d[i, o] += T.shfl_xor(d[i, o], step)
        for i, o in T.Parallel(BACK_N, 8):
            if o % 4 == 0:
                halves[o // 4, i, M * at] = d0[i, o]
                halves[o // 4, i, M * at + 1] = d1[i, o]
                halves[o // 4, i, M * at + 2] = d2[i, o]
                halves[o // 4, i, M * at + 3] = d3[i, o]

    @T.macro
    def put(at, z, short, staged, filled, stored, thread):
        for i, j in T.Parallel(BACK_N, BACK_D):
            short[i, j] = T.Cast(T.bfloat16, z[i, j])
        stage(at, short, staged, filled, stored, thread)

    @T.macro
    def release_told(s, untold, thread):
        T.sync_warp()
        if thread % 32 == 0:
            T.mbarrier_arrive(untold[s])

    @T.prim_func
    def streams_backward_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        g: T.Tensor((N, J), T.bfloat16),
        norm: T.Tensor((D if normed else 1,), T.float32),
        numbers: T.Tensor((T.ceildiv(N, BACK_N), PLACES, BACK_N), T.float32),
        mix_grads: T.Tensor((N, 2 * PLACES), T.bfloat16),
        w: T.Tensor((2, PLACES, J), T.bfloat16),
        f: T.Tensor((N, D) if across else (1, 1), T.bfloat16),
        before: T.Tensor((N, J) if across else (1, 1), T.bfloat16),
        grad_f: T.Tensor((N, D) if across else (1, 1), T.bfloat16),
        grad_x: T.Tensor((N, J), T.bfloat16),
        dots: T.Tensor((D // BACK_D, N, 20) if across else (1, 1, 1), T.float32),
        grad_w: T.Tensor((T.ceildiv(N, BACK_TOKENS), 2 * PLACES, J), T.float32),
        grad_norm: T.Tensor((T.ceildiv(N, BACK_TOKENS), D if normed else 1), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(D // BACK_D, T.ceildiv(N, BACK_TOKENS), threads=BACK_THREADS + 128) as (column, chunk):
            tiles = T.alloc_shared((LOADED, BACK_N, BACK_D), T.bfloat16)
            staged = T.alloc_shared((STAGED, BACK_N, BACK_D), T.bfloat16)
            of_w = T.alloc_shared((2 * M, PLACES, BACK_D), T.bfloat16)
            of_token = T.alloc_shared((2, PLACES, BACK_N), T.float32)
            halves = T.alloc_shared((2, BACK_N, 20), T.float32)
            full = T.alloc_barrier([1] * LOADED)
            empty = T.alloc_barrier([BACK_THREADS // 32] * LOADED)
            filled = T.alloc_barrier([BACK_THREADS // 32] * STAGED)
            stored = T.alloc_barrier([1] * STAGED)
            told = T.alloc_barrier([1] * 2)
            untold = T.alloc_barrier([BACK_THREADS // 32] * 2)
            ready = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            at = column * BACK_D
            steps = T.min(T.ceildiv(N - chunk * BACK_TOKENS, BACK_N), BACK_TOKENS // BACK_N)
            if thread >= BACK_THREADS:
                T.dec_max_nreg(24)
                if thread < BACK_THREADS + 32:
                    for h in T.unroll(2):
                        for m in T.unroll(M):
                            T.tma_copy(
                                w[h, :, m * D + at : m * D + at + BACK_D],
                                of_w[h * M + m, :, :],
                                barrier=ready[0],
                                leader_scope_threads=32,
                            )
                    if thread == BACK_THREADS:
                        T.mbarrier_arrive(ready[0])
                    for step in T.serial(steps):
                        row = chunk * BACK_TOKENS + step * BACK_N
                        T.mbarrier_wait_parity(untold[step % 2], ((step // 2) & 1) ^ 1)
                        T.tma_copy(
                            numbers[row // BACK_N, :, :],
                            of_token[step % 2, :, :],
                            barrier=told[step % 2],
                            leader_scope_threads=32,
                        )
                        if thread == BACK_THREADS:
                            T.mbarrier_arrive(told[step % 2])
                        load(step * loads, mix_grads, row, 0, tiles, full, empty, thread)
                        for m in T.unroll(M):
                            load(step * loads + 1 + m, x, row, m * D + at, tiles, full, empty, thread)
                        load(step * loads + 5, dy, row, at, tiles, full, empty, thread)
                        for m in T.unroll(M):
                            load(step * loads + 6 + m, g, row, m * D + at, tiles, full, empty, thread)
                        if across:
                            load(step * loads + 10, f, row, at, tiles, full, empty, thread)
                            for m in T.unroll(M):
                                load(step * loads + 11 + m, before, row, m * D + at, tiles, full, empty, thread)
                elif thread < BACK_THREADS + 64:
                    for step in T.serial(steps):
                        row = chunk * BACK_TOKENS + step * BACK_N
                        if across:
                            store(step * stores, staged, grad_f, row, at, filled, stored, thread)
                        for m in T.unroll(M):
                            store(
                                step * stores + (stores - M) + m,
                                staged,
                                grad_x,
                                row,
                                m * D + at,
                                filled,
                                stored,
                                thread,
                            )
                    T.tma_store_wait(0, read=False)
            else:
                T.inc_max_nreg(240)
                z0 = T.alloc_fragment((BACK_N, BACK_D), T.float32)
                z1 = T.alloc_fragment((BACK_N, BACK_D), T.float32)
                z2 = T.alloc_fragment((BACK_N, BACK_D), T.float32)
                z3 = T.alloc_fragment((BACK_N, BACK_D), T.float32)
                w0 = T.alloc_fragment((2 * PLACES, BACK_D), T.float32)
                w1 = T.alloc_fragment((2 * PLACES, BACK_D), T.float32)
                w2 = T.alloc_fragment((2 * PLACES, BACK_D), T.float32)
                w3 = T.alloc_fragment((2 * PLACES, BACK_D), T.float32)
                y = T.alloc_fragment((BACK_N, BACK_D), T.float32)
                short = T.alloc_fragment((BACK_N, BACK_D), T.bfloat16)
                rms = T.alloc_fragment((BACK_N,), T.float32)
                rms_grad = T.alloc_fragment((BACK_N,), T.float32)
                scale = T.alloc_fragment((BACK_D,), T.float32)
                # Sums that a thread has to itself: over its columns of a row, and over its rows of a column.
                d0 = T.alloc_fragment((BACK_N, 8), T.float32)
                d1 = T.alloc_fragment((BACK_N, 8), T.float32)
                d2 = T.alloc_fragment((BACK_N, 8), T.float32)
                d3 = T.alloc_fragment((BACK_N, 8), T.float32)
                of_norm = T.alloc_fragment((32, BACK_D), T.float32)
                T.annotate_layout(
                    {
                        one: T.Fragment((BACK_N, 8), forward_thread_fn=_row_owner, forward_index_fn=_row_place)
                        for one in (d0, d1, d2, d3)
                    }
                    | {
                        of_norm: T.Fragment(
                            (32, BACK_D), forward_thread_fn=_column_owner, forward_index_fn=_column_place
                        )
                    }
                )
                for sums in (w0, w1, w2, w3):
                    T.clear(sums)
                if normed:
                    T.copy(norm[at : at + BACK_D], scale)
                    T.clear(of_norm)
                T.mbarrier_wait_parity(ready[0], 0)
                for step in T.serial(steps):
                    u = step * loads
                    row = chunk * BACK_TOKENS + step * BACK_N
                    s = step % 2
                    T.mbarrier_wait_parity(told[s], (step // 2) & 1)
                    wait(u, full)
                    project(0, u, z0, tiles, of_w, full)
                    project(1, u, z1, tiles, of_w, full)
                    project(2, u, z2, tiles, of_w, full)
                    project(3, u, z3, tiles, of_w, full)
                    add(0, u, w0, tiles)
                    add(1, u, w1, tiles)
                    add(2, u, w2, tiles)
                    add(3, u, w3, tiles)
                    if normed:
                        T.clear(y)
                        for m in T.unroll(M):
                            T.copy(tiles[(u + 1 + m) % LOADED, :, :], short)
                            for i, j in T.Parallel(BACK_N, BACK_D):
                                y[i, j] += of_token[s, m, i] * T.Cast(T.float32, short[i, j])
                        for i in T.Parallel(BACK_N):
                            rms[i] = of_token[s, 25, i]
                            rms_grad[i] = of_token[s, 26, i]
                    take(u + 5, short, tiles, full, empty, thread)
                    for i, j in T.Parallel(BACK_N, BACK_D):
                        if normed:
                            of_norm[i // 16 * 8 + i % 8, j] += rms[i] * T.Cast(T.float32, short[i, j]) * y[i, j]
                            y[i, j] = rms[i] * T.Cast(T.float32, short[i, j]) * scale[j] - rms_grad[i] * y[i, j]
                        else:
                            y[i, j] = T.Cast(T.float32, short[i, j])
                    T.wait_wgmma(4)
                    total(0, u, s, z0, y, short, of_token, tiles, full, empty, thread)
                    total(1, u, s, z1, y, short, of_token, tiles, full, empty, thread)
                    total(2, u, s, z2, y, short, of_token, tiles, full, empty, thread)
                    total(3, u, s, z3, y, short, of_token, tiles, full, empty, thread)
                    T.wait_wgmma(0)
                    T.sync_warp()
                    for i in T.unroll(1 + M):
                        if thread % 32 == 0:
                            T.mbarrier_arrive(empty[(u + i) % LOADED])
                    if across:
                        for i in T.unroll(1 + M):
                            take(u + 10 + i, short, tiles, full, empty, thread)
                            mix(i, s, z0, z1, z2, z3, d0, d1, d2, d3, short, of_token, halves)
                            stage(step * stores + i, short, staged, filled, stored, thread)
                        T.sync_threads(1, BACK_THREADS)
                        for i, j in T.Parallel(BACK_N, 20):
                            if row + i < N:
                                dots[column, row + i, j] = halves[0, i, j] + halves[1, i, j]
                    else:
                        put(step * stores, z0, short, staged, filled, stored, thread)
                        put(step * stores + 1, z1, short, staged, filled, stored, thread)
                        put(step * stores + 2, z2, short, staged, filled, stored, thread)
                        put(step * stores + 3, z3, short, staged, filled, stored, thread)
                    release_told(s, untold, thread)
                T.copy(w0, grad_w[chunk, 0, at])
                T.copy(w1, grad_w[chunk, 0, D + at])
                T.copy(w2, grad_w[chunk, 0, 2 * D + at])
                T.copy(w3, grad_w[chunk, 0, 3 * D + at])
                if normed:
                    for step in (4, 8, 16):
                        for i, j in T.Parallel(32, BACK_D):
                            of_norm[i, j] += T.shfl_xor(of_norm[i, j], step)
                    T.sync_threads(1, BACK_THREADS)
                    for i, j in T.Parallel(32, BACK_D):
                        if i % 8 == 0:
                            halves[0, j, i // 8] = of_norm[i, j]
                    T.sync_threads(1, BACK_THREADS)
                    if thread < BACK_D:
                        grad_norm[chunk, at + thread] = (halves[0, thread, 0] + halves[0, thread, 1]) + (
                            halves[0, thread, 2] + halves[0, thread, 3]
                        )

    return streams_backward_kernel


def parameter_sums(D: int, head: bool, normed: bool) -> PrimFunc:
    """The gradients of a site's parameters from parts of tokens, in their order: of the projection [X, J] from
    `streams_backward`'s grad_w [C, 64, J], of norm [D] from its grad_norm [C, D], and of base and scale, at their
    places of [32], from `gates_backward`'s by_place."""
    J, X = M * D, M if head else 24
    wide = SUM_THREADS * 4
    blocks, norm_blocks = X * J // wide, -(-D // wide) if normed else 0
    lanes = SUM_THREADS // 8
    C = T.dynamic("C")
    G = T.dynamic("G")

    @T.prim_func
    def parameter_sums_kernel(
        grad_w: T.Tensor((C, 2 * PLACES, J), T.float32),
        norm_parts: T.Tensor((C, D if normed else 1), T.float32),
        by_place: T.Tensor((G, PLACES), T.float32),
        grad_fn: T.Tensor((X, J), T.float32),
        grad_norm: T.Tensor((D if normed else 1,), T.float32),
        grad_numbers: T.Tensor((PLACES,), T.float32),
    ):
        with T.Kernel(blocks + norm_blocks + 1, threads=SUM_THREADS) as block:
            total = T.alloc_local((4,), T.float32)
            part = T.alloc_local((4,), T.float32)
            low = T.alloc_local((4,), T.float32)
            of_lanes = T.alloc_shared((lanes, PLACES), T.float32)
            thread = T.get_thread_binding()
            for i in T.unroll(4):
                total[i] = 0.0
            if block < blocks:
                place = block // (J // wide)
                at = block % (J // wide) * wide + thread * 4
                for c in T.serial(C):
                    for i in T.vectorized(4):
                        part[i] = grad_w[c, place, at + i]
                    for i in T.vectorized(4):
                        low[i] = grad_w[c, PLACES + place, at + i]
                    for i in T.unroll(4):
                        total[i] += part[i] + low[i]
                for i in T.vectorized(4):
                    grad_fn[place, at + i] = total[i]
            elif block < blocks + norm_blocks:
                at = (block - blocks) * wide + thread * 4
                if at < (D if normed else 0):
                    for c in T.serial(C):
                        for i in T.vectorized(4):
                            part[i] = norm_parts[c, at + i]
                        for i in T.unroll(4):
                            total[i] += part[i]
                    for i in T.vectorized(4):
                        grad_norm[at + i] = total[i]
            else:
                for b in T.serial(T.ceildiv(G, lanes)):
                    if b * lanes + thread // 8 < G:
                        for i in T.vectorized(4):
                            part[i] = by_place[b * lanes + thread // 8, thread % 8 * 4 + i]
                        for i in T.unroll(4):
                            total[i] += part[i]
                for i in T.vectorized(4):
                    of_lanes[thread // 8, thread % 8 * 4 + i] = total[i]
                T.sync_threads()
                if thread < PLACES:
                    total[0] = of_lanes[0, thread]
                    for i in T.unroll(lanes - 1):
                        total[0] += of_lanes[i + 1, thread]
                    grad_numbers[thread] = total[0]

    return parameter_sums_kernel


def weight_sums(D: int) -> PrimFunc:
    """The gradients of post and comb, at places 4 to 23 of [N, 32] and 0 elsewhere, from their parts over 64 columns
    [D / 64, N, 20]."""
    N = T.dynamic("N")

    @T.prim_func
    def weight_sums_kernel(
        dots: T.Tensor((D // BACK_D, N, 20), T.float32),
        grad_weights: T.Tensor((N, PLACES), T.float32),
    ):
        with T.Kernel(T.ceildiv(N * 8, SUM_THREADS), threads=SUM_THREADS) as block:
            T.annotate_min_blocks_per_sm(2)
            total = T.alloc_local((4,), T.float32)
            part = T.alloc_local((4, 4), T.float32)
            thread = T.get_thread_binding()
            token = (block * SUM_THREADS + thread) // 8
            at = thread % 8 * 4
            if token < N:
                for i in T.unroll(4):
                    total[i] = 0.0
                if at >= M and at < 24:
                    for s in T.serial(D // BACK_D // 4):
                        for e in T.unroll(4):
                            for i in T.vectorized(4):
                                part[e, i] = dots[s * 4 + e, token, at - M + i]
                        for e in T.unroll(4):
                            for i in T.unroll(4):
                                total[i] += part[e, i]
                for i in T.vectorized(4):
                    grad_weights[token, at + i] = total[i]

    return weight_sums_kernel
