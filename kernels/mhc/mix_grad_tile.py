"""Gradients of hyper-connections of four bfloat16 streams for sm_90a; see `mix_tile` for letters and places.

Sums over tokens have an order that depends on their number alone, and no row of the others. Caller: `mix_grad_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

M, PLACES = 4, 32
"""As in `mix_tile`: streams, and places of the mixing numbers."""

THREADS, EACH = 256, 8
"""Threads of a token, and neighbouring entries that each takes at once."""

GATE_TOKENS, GATE_CTAS, GATE_THREADS = 8, 264, 128
"""Tokens whose gates' gradients a block makes at once, blocks, two for a multiprocessor, and threads beside those that
sum over entries."""

BACK_N, BACK_D = 64, 64
"""As in `mix_streams_grad_tile`: tokens and columns of a tile."""

SUM_THREADS = 256


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


def gates_backward(D: int, iters: int, head: bool) -> PrimFunc:
    """What a site's gradients need of each token: first the gradient of pre, which takes a pass over the streams
    x [N, J] and the gradient of the sublayer's input dy [N, D], then those of the gates and back through Sinkhorn.

    Args:
        iters: Sinkhorn passes.
        head: 4 mixing numbers, pre alone, and no norm. Else the input is the merged streams over their rms and times
            norm [D], whose gradient is made here.

    `raw` [N, 32] are the mixing numbers before 1 / rms, weights [N, 32] what the way in made of them, grad_weights
    [N, 32] the gradients of its post and comb; out_weights [N, 32] have post and comb of a way out before it.

    Written are mix_grads [N, 64], the gradients of `raw` as the sum of two bfloat16, high halves and low ones; for
    `streams_backward` `numbers` [ceil(N / 64), 32, 64], 0 after the last token: pre, post and comb of the way out at
    their places, at 24 the factor of the streams themselves, at 25 and 26 those of dy and of y in the gradient of the
    merged streams y; and by_place, for each 8 tokens the sums of the gradients of base (0 to 23) and scale (24 to 26).

    Blocks walk over groups of tokens. Eight warps take the sums over a token's entries together; four more run through
    Sinkhorn meanwhile, then make the gates' gradients, each with a token.
    """
    J, X, dots = M * D, M if head else 24, M if head else 2 * M + 2
    steps = -(-D // (THREADS * EACH))
    each = steps if steps <= 2 else 1  # in a loop over pairs of steps four registers would lie in memory
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
    def undo(c, grad, kept, at, thread, other, sum_of):
        """Through one pass: grad = (grad - sum(grad c)) / divisor, and c what it was before."""
        times = T.alloc_local((1,), T.float32)
        times[0] = grad[0] * c[0]
        sum_of(times, other)
        grad[0] = (grad[0] - other[0]) * T.fast_rcp(kept[at, thread])
        c[0] *= kept[at, thread]

    @T.macro
    def sinkhorn_backward(c, grad, kept, thread, other, eps):
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
            other[0] += eps
            kept[i, thread] = other[0]
            c[0] *= T.fast_rcp(other[0])
        for i in T.unroll(passes):
            if (passes - 1 - i) % 2 == 0:
                undo(c, grad, kept, passes - 1 - i, thread, other, column_sum)
            else:
                undo(c, grad, kept, passes - 1 - i, thread, other, row_sum)
        c[0] -= eps
        times = T.alloc_local((1,), T.float32)
        times[0] = grad[0] * c[0]
        row_sum(times, other)
        grad[0] = c[0] * (grad[0] - other[0])

    @T.macro
    def entries(token, part, x, dy, norm, weights, parts, thread):
        """Sums over a token's entries, for each group of 32 threads eight parts of each: of dy x_j, and with a norm of
        y x_j, y y and dy y, where y are the merged streams, and dy has the norm's weight."""
        of_y = T.alloc_local((each, EACH), T.bfloat16)
        of_x = T.alloc_local((each * M, EACH), T.bfloat16)
        n = T.alloc_local((EACH,), T.float32)
        pre = T.alloc_local((M,), T.float32)
        sums = T.alloc_local((dots,), T.float32)
        value = T.alloc_local((2,), T.float32)
        lane = thread % 32
        for i in T.vectorized(M):
            pre[i] = weights[token, i]
        for i in T.unroll(dots):
            sums[i] = 0.0
        for s in T.serial(-(-steps // each)):
            for e in T.unroll(each):
                at = ((s * each + e) * THREADS + thread) * EACH
                if at < D:
                    for j in T.vectorized(EACH):
                        of_y[e, j] = dy[token, at + j]
                    for m in T.unroll(M):
                        for j in T.vectorized(EACH):
                            of_x[e * M + m, j] = x[token, m * D + at + j]
            for e in T.unroll(each):
                at = ((s * each + e) * THREADS + thread) * EACH
                if at < D:
                    if not head:
                        for h in T.unroll(2):
                            for j in T.vectorized(EACH // 2):
                                n[h * (EACH // 2) + j] = norm[at + h * (EACH // 2) + j]
                    for j in T.unroll(EACH):
                        value[0] = T.Cast(T.float32, of_y[e, j])
                        if not head:
                            value[0] *= n[j]
                            value[1] = pre[0] * T.Cast(T.float32, of_x[e * M, j])
                            for m in T.unroll(M - 1):
                                value[1] += pre[m + 1] * T.Cast(T.float32, of_x[e * M + m + 1, j])
                            sums[2 * M] += value[1] * value[1]
                            sums[2 * M + 1] += value[0] * value[1]
                        for m in T.unroll(M):
                            sums[m] += value[0] * T.Cast(T.float32, of_x[e * M + m, j])
                            if not head:
                                sums[M + m] += value[1] * T.Cast(T.float32, of_x[e * M + m, j])
        for step in (16, 8):
            for i in T.unroll(dots):
                sums[i] += T.shfl_xor(sums[i], step)
        if lane < 8:
            for i in T.unroll(dots):
                parts[part, i, thread // 32 * 8 + lane] = sums[i]

    @T.macro
    def gates(
        token, part, raw, scale, weights, grad_weights, out_weights, eps, norm_eps, mix_grads, parts, told, logit, lane
    ):
        """What a token's sums and the gradients of its comb's logits give; a lane has a place."""
        # Long because every step has the numbers of the one before.
        pre = T.alloc_local((M,), T.float32)
        sums = T.alloc_local((dots,), T.float32)
        value = T.alloc_local((2,), T.float32)
        other = T.alloc_local((1,), T.float32)
        of_norm = T.alloc_local((2,), T.float32)
        of_scale = T.alloc_local((3,), T.float32)
        short = T.alloc_local((2,), T.bfloat16)
        rho = weights[token, 24]
        for i in T.vectorized(M):
            pre[i] = weights[token, i]
        for i in T.unroll(dots):
            sums[i] = parts[part, i, lane] + parts[part, i, 32 + lane]
        for step in (16, 8, 4, 2, 1):
            for i in T.unroll(dots):
                sums[i] += T.shfl_xor(sums[i], step)
        of_norm[0] = 1.0
        of_norm[1] = 0.0
        if not head:
            of_norm[0] = T.ieee_frsqrt(sums[2 * M] / D + norm_eps)
            of_norm[1] = of_norm[0] * of_norm[0] * of_norm[0] * sums[2 * M + 1] / D
        # From here a lane has its place.
        for m in T.unroll(M):
            if lane == m:
                value[0] = sums[m]
                if not head:
                    value[0] = of_norm[0] * sums[m] - of_norm[1] * sums[M + m]
                logit[0] = value[0] * (pre[m] - eps) * (1.0 + eps - pre[m])
        if lane >= M and lane < 2 * M:
            logit[0] = 0.0
            if not head:
                logit[0] = grad_weights[token, lane] * weights[token, lane] * (1.0 - 0.5 * weights[token, lane])
        value[0] = 0.0
        if lane < X:
            value[0] = raw[token, lane]
        else:
            logit[0] = 0.0
        # Gradients of the scales, in every lane; their sum is of 1 / rms.
        value[0] *= logit[0] * rho
        for step in (1, 2):
            value[0] += T.shfl_xor(value[0], step)
        of_scale[0] = T.shfl_sync(value[0], 0)
        of_scale[1] = T.shfl_sync(value[0], M)
        of_scale[2] = T.shfl_sync(value[0], 2 * M)
        for m in T.unroll(M - 1):
            of_scale[2] += T.shfl_sync(value[0], 3 * M + m * M)
        other[0] = of_scale[0] * scale[0]
        if not head:
            other[0] += of_scale[1] * scale[1] + of_scale[2] * scale[2]
        other[0] *= -(rho * rho) / J
        value[0] = logit[0]
        value[1] = out_weights[token, lane]
        for m in T.unroll(3):
            if lane == 24 + m:
                value[0] = of_scale[m]
                value[1] = other[0] if m == 0 else of_norm[m - 1]
        for m in T.unroll(M):
            if lane == m:
                value[1] = pre[m]
        told[0] = value[0]
        told[1] = value[1]
        of_place = 0 if head else T.if_then_else(lane < M, 0, T.if_then_else(lane < 2 * M, 1, 2))
        logit[0] *= scale[of_place] * rho
        short[0] = T.Cast(T.bfloat16, logit[0])
        short[1] = T.Cast(T.bfloat16, logit[0] - T.Cast(T.float32, short[0]))
        mix_grads[token, lane] = short[0]
        mix_grads[token, PLACES + lane] = short[1]

    @T.prim_func
    def gates_backward_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        norm: T.Tensor((1 if head else D,), T.float32),
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
        with T.Kernel(GATE_CTAS, threads=THREADS + GATE_THREADS) as cta:
            T.annotate_min_blocks_per_sm(2)
            logit = T.alloc_local((1,), T.float32)
            c = T.alloc_local((1,), T.float32)
            other = T.alloc_local((1,), T.float32)
            kept = T.alloc_shared((1 if head else passes, GATE_THREADS), T.float32)
            told = T.alloc_local((2,), T.float32)
            parts = T.alloc_shared((2 * GATE_TOKENS, dots, 64), T.float32)
            of_places = T.alloc_shared((GATE_TOKENS, PLACES), T.float32)
            of_numbers = T.alloc_shared((GATE_TOKENS, PLACES + 1), T.float32)
            full = T.alloc_barrier([THREADS // 32] * 2)
            empty = T.alloc_barrier([GATE_THREADS // 32] * 2)
            thread = T.get_thread_binding()
            lane = thread % 32
            groups = T.ceildiv(T.ceildiv(N, BACK_N) * (BACK_N // GATE_TOKENS) - cta, GATE_CTAS)
            if thread < THREADS:
                T.inc_max_nreg(96)
                for g in T.serial(groups):
                    T.mbarrier_wait_parity(empty[g % 2], ((g // 2) & 1) ^ 1)
                    for t in T.serial(GATE_TOKENS):
                        token = (g * GATE_CTAS + cta) * GATE_TOKENS + t
                        if token < N:
                            entries(token, g % 2 * GATE_TOKENS + t, x, dy, norm, weights, parts, thread)
                    T.sync_warp()
                    if lane == 0:
                        T.mbarrier_arrive(full[g % 2])
            else:
                T.dec_max_nreg(48)
                for g in T.serial(groups):
                    group = g * GATE_CTAS + cta
                    for t in T.serial(GATE_TOKENS * 32 // GATE_THREADS):
                        slot = t * (GATE_THREADS // 32) + (thread - THREADS) // 32
                        token = group * GATE_TOKENS + slot
                        logit[0] = 0.0
                        if token < N and not head:
                            # Lanes 8 to 23 have the numbers of comb at their places, and the rest have them once more.
                            place = 2 * M + (lane + M * M // 2) % (M * M)
                            c[0] = raw[token, place] * weights[token, 24] * scale[2] + base[place]
                            logit[0] = grad_weights[token, place]
                            sinkhorn_backward(c, logit, kept, thread - THREADS, other, eps)
                        told[0] = 0.0
                        told[1] = 0.0
                        T.mbarrier_wait_parity(full[g % 2], (g // 2) & 1)
                        if token < N:
                            gates(
                                *(
                                    token,
                                    g % 2 * GATE_TOKENS + slot,
                                    raw,
                                    scale,
                                    weights,
                                    grad_weights,
                                    out_weights,
                                    eps,
                                ),
                                *(norm_eps, mix_grads, parts, told, logit, lane),
                            )
                        of_places[slot, lane] = told[0]
                        of_numbers[slot, lane] = told[1]
                    T.sync_warp()
                    if lane == 0:
                        T.mbarrier_arrive(empty[g % 2])
                    T.sync_threads(1, GATE_THREADS)
                    for i in T.unroll(GATE_TOKENS * PLACES // GATE_THREADS):
                        at = i * GATE_THREADS + thread - THREADS
                        row = group * GATE_TOKENS % BACK_N + at % GATE_TOKENS
                        numbers[group // (BACK_N // GATE_TOKENS), at // GATE_TOKENS, row] = of_numbers[
                            at % GATE_TOKENS, at // GATE_TOKENS
                        ]
                    if thread < THREADS + PLACES:
                        other[0] = of_places[0, lane]
                        for i in T.unroll(GATE_TOKENS - 1):
                            other[0] += of_places[i + 1, lane]
                        by_place[group, lane] = other[0]
                    T.sync_threads(1, GATE_THREADS)

    return gates_backward_kernel


def parameter_sums(D: int, head: bool) -> PrimFunc:
    """The gradients of a site's parameters from parts of tokens, in their order: of the projection [X, J] from
    `streams_backward`'s grad_w [C, 64, J], of norm [D] from its grad_norm [C, D], and of base and scale, at their
    places of [32], from `gates_backward`'s by_place."""
    J, X = M * D, M if head else 24
    wide = SUM_THREADS * 4
    blocks, norm_blocks = X * J // wide, 0 if head else -(-D // wide)
    lanes = SUM_THREADS // 8
    C = T.dynamic("C")
    G = T.dynamic("G")

    @T.prim_func
    def parameter_sums_kernel(
        grad_w: T.Tensor((C, 2 * PLACES, J), T.float32),
        norm_parts: T.Tensor((C, 1 if head else D), T.float32),
        by_place: T.Tensor((G, PLACES), T.float32),
        grad_fn: T.Tensor((X, J), T.float32),
        grad_norm: T.Tensor((1 if head else D,), T.float32),
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
                if at < (0 if head else D):
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
    [D / 64, 20, N]."""
    N = T.dynamic("N")
    tokens = SUM_THREADS // (PLACES // M)
    each = D // BACK_D // 4

    @T.prim_func
    def weight_sums_kernel(
        dots: T.Tensor((D // BACK_D, 20, N), T.float32),
        grad_weights: T.Tensor((N, PLACES), T.float32),
    ):
        with T.Kernel(T.ceildiv(N, tokens), threads=SUM_THREADS) as block:
            T.annotate_min_blocks_per_sm(4)
            total = T.alloc_local((M,), T.float32)
            part = T.alloc_local((4, M), T.float32)
            thread = T.get_thread_binding()
            token = block * tokens + thread % tokens
            at = thread // tokens * M
            if token < N:
                for i in T.unroll(M):
                    total[i] = 0.0
                if at >= M and at < 24:
                    for s in T.serial(each):
                        for e in T.unroll(4):
                            for i in T.unroll(M):
                                part[e, i] = dots[s * 4 + e, at - M + i, token]
                        for e in T.unroll(4):
                            for i in T.unroll(M):
                                total[i] += part[e, i]
                for i in T.vectorized(M):
                    grad_weights[token, at + i] = total[i]

    return weight_sums_kernel
