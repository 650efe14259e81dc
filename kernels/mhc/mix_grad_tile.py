"""Gradients of hyper-connections of four bfloat16 streams for sm_90a; see `mix_tile` for letters and places.

Sums over tokens have an order that depends on their number alone, and no row of the others. Caller: `mix_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

M, PLACES, SPLITS = 4, 32, 16
"""As in `mix_tile`: streams, places of the mixing numbers, slices of a projection."""

THREADS, EACH = 256, 8
"""Threads of a token, and neighbouring entries that each takes at once."""

GATE_THREADS = 128
"""Tokens of a block whose gates have their gradients, one a thread."""

BACK_N, BACK_J, BACK_TOKENS = 64, 128, 2048
"""Tokens and entries of a tile of the streams' gradient, and tokens whose part of the projection's is summed apart."""

BACK_STAGES, BACK_THREADS = 3, 256


@T.macro
def _columns(c, divisor, eps):
    """c [4 j, 4 k] over its sums over j plus eps, which are left in divisor."""
    for k in T.unroll(M):
        divisor[k] = ((c[k] + c[M + k]) + (c[2 * M + k] + c[3 * M + k])) + eps
        rest = T.fast_rcp(divisor[k])
        for j in T.unroll(M):
            c[M * j + k] = c[M * j + k] * rest


@T.macro
def _rows(c, divisor, eps):
    for j in T.unroll(M):
        divisor[j] = ((c[M * j] + c[M * j + 1]) + (c[M * j + 2] + c[M * j + 3])) + eps
        rest = T.fast_rcp(divisor[j])
        for k in T.unroll(M):
            c[M * j + k] = c[M * j + k] * rest


@T.macro
def _softmax(c):
    for j in T.unroll(M):
        top = T.max(T.max(c[M * j], c[M * j + 1]), T.max(c[M * j + 2], c[M * j + 3]))
        for k in T.unroll(M):
            c[M * j + k] = T.exp(c[M * j + k] - top)
        rest = T.fast_rcp((c[M * j] + c[M * j + 1]) + (c[M * j + 2] + c[M * j + 3]))
        for k in T.unroll(M):
            c[M * j + k] = c[M * j + k] * rest


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


def enter_dots(D: int) -> PrimFunc:
    """The gradient of pre from that of the input dy [N, D], sum_d dy x_j, at places 0 to 3 of [N, 32]."""
    J, steps = M * D, -(-D // (THREADS * EACH))
    N = T.dynamic("N")

    @T.prim_func
    def enter_dots_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        grad_weights: T.Tensor((N, PLACES), T.float32),
    ):
        with T.Kernel(N, threads=THREADS) as token:
            of_y = T.alloc_local((EACH,), T.bfloat16)
            of_x = T.alloc_local((M, EACH), T.bfloat16)
            dots = T.alloc_local((M,), T.float32)
            places = T.alloc_shared((8, M), T.float32)
            value = T.alloc_local((1,), T.float32)
            thread = T.get_thread_binding()
            for m in T.unroll(M):
                dots[m] = 0.0
            for s in T.unroll(steps):
                at = s * THREADS * EACH + thread * EACH
                if at < D:
                    for j in T.vectorized(EACH):
                        of_y[j] = dy[token, at + j]
                    for m in T.unroll(M):
                        for j in T.vectorized(EACH):
                            of_x[m, j] = x[token, m * D + at + j]
                    for m in T.unroll(M):
                        for j in T.unroll(EACH):
                            dots[m] += T.Cast(T.float32, of_y[j]) * T.Cast(T.float32, of_x[m, j])
            for step in (16, 8, 4, 2, 1):
                for m in T.unroll(M):
                    dots[m] += T.shfl_xor(dots[m], step)
            if thread % 32 == 0:
                for m in T.unroll(M):
                    places[thread // 32, m] = dots[m]
            T.sync_threads()
            if thread < M:
                value[0] = places[0, thread]
                for i in T.unroll(7):
                    value[0] += places[i + 1, thread]
                grad_weights[token, thread] = value[0]

    return enter_dots_kernel


def gates_backward(D: int, iters: int, head: bool) -> PrimFunc:
    """From the gradients of pre, post and comb [N, 32]: of the mixing numbers before base and scale, `logit_grads`
    [N, 32], and what times them sums to the gradient of the scales, `raw` [N, 32]; of the projection, as two bfloat16
    `mix_grads` [N, 64]: high halves and low ones; and the factor of the streams themselves, `stream_factor` [N].

    One thread a token: Sinkhorn runs forward, its divisors are kept, and backward.
    """
    J, X = M * D, M if head else 24
    N = T.dynamic("N")
    passes = 2 * iters - 1

    @T.macro
    def undo(c, grad, kept, at, thread, along, across, against):
        """Through one pass: grad = (grad - sum(grad c)) / divisor, and c what it was before. Sums go `along`."""
        for o in T.unroll(M):
            against[0] = 0.0
            for i in T.unroll(M):
                against[0] += grad[along * i + across * o] * c[along * i + across * o]
            rest = T.fast_rcp(kept[at * M + o, thread])
            for i in T.unroll(M):
                grad[along * i + across * o] -= against[0]
                grad[along * i + across * o] *= rest
                c[along * i + across * o] *= kept[at * M + o, thread]

    @T.prim_func
    def gates_backward_kernel(
        slices: T.Tensor((SPLITS, N, PLACES), T.float32),
        base: T.Tensor((X,), T.float32),
        scale: T.Tensor((1 if head else 3,), T.float32),
        weights: T.Tensor((N, PLACES), T.float32),
        grad_weights: T.Tensor((N, PLACES), T.float32),
        eps: T.float32,
        logit_grads: T.Tensor((N, PLACES), T.float32),
        raw: T.Tensor((N, PLACES), T.float32),
        mix_grads: T.Tensor((N, 2 * PLACES), T.bfloat16),
        stream_factor: T.Tensor((N,), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(T.ceildiv(N, GATE_THREADS), threads=GATE_THREADS) as block:
            mixed = T.alloc_local((PLACES,), T.float32)
            logit = T.alloc_local((PLACES,), T.float32)
            c = T.alloc_local((M * M,), T.float32)
            grad = T.alloc_local((M * M,), T.float32)
            divisor = T.alloc_local((M,), T.float32)
            against = T.alloc_local((1,), T.float32)
            kept = T.alloc_shared((1 if head else passes * M, GATE_THREADS), T.float32)
            thread = T.get_thread_binding()
            token = block * GATE_THREADS + thread
            if token < N:
                rho = weights[token, 24]
                for i in T.unroll(PLACES):
                    mixed[i] = 0.0
                    logit[i] = 0.0
                for s in T.serial(SPLITS):
                    for i in T.unroll(X):
                        mixed[i] += slices[s, token, i]
                for i in T.unroll(M):
                    gate = weights[token, i] - eps
                    logit[i] = grad_weights[token, i] * gate * (1.0 - gate)
                if not head:
                    for i in T.unroll(M):
                        gate = 0.5 * weights[token, M + i]
                        logit[M + i] = grad_weights[token, M + i] * 2.0 * gate * (1.0 - gate)
                    for i in T.unroll(M * M):
                        c[i] = mixed[2 * M + i] * rho * scale[2] + base[2 * M + i]
                        grad[i] = grad_weights[token, 2 * M + i]
                    _softmax(c)
                    for i in T.unroll(M * M):
                        c[i] += eps
                    _columns(c, divisor, eps)
                    for i in T.unroll(M):
                        kept[i, thread] = divisor[i]
                    for it in T.serial(iters - 1):
                        _rows(c, divisor, eps)
                        for i in T.unroll(M):
                            kept[(2 * it + 1) * M + i, thread] = divisor[i]
                        _columns(c, divisor, eps)
                        for i in T.unroll(M):
                            kept[(2 * it + 2) * M + i, thread] = divisor[i]
                    for it in T.serial(iters - 1):
                        undo(c, grad, kept, 2 * (iters - 1 - it), thread, M, 1, against)
                        undo(c, grad, kept, 2 * (iters - 1 - it) - 1, thread, 1, M, against)
                    undo(c, grad, kept, 0, thread, M, 1, against)
                    for j in T.unroll(M):
                        against[0] = 0.0
                        for k in T.unroll(M):
                            c[M * j + k] -= eps
                            against[0] += grad[M * j + k] * c[M * j + k]
                        for k in T.unroll(M):
                            logit[2 * M + M * j + k] = c[M * j + k] * (grad[M * j + k] - against[0])
                against[0] = 0.0
                for i in T.unroll(PLACES):
                    logit_grads[token, i] = logit[i]
                    raw[token, i] = mixed[i] * rho
                for i in T.unroll(X):
                    logit[i] = (
                        logit[i] * scale[0 if head else T.if_then_else(i < M, 0, T.if_then_else(i < 2 * M, 1, 2))]
                    )
                    against[0] += logit[i] * mixed[i]
                for i in T.unroll(PLACES):
                    value = logit[i] * rho
                    high = T.Cast(T.bfloat16, value)
                    low = T.Cast(T.bfloat16, value - T.Cast(T.float32, high))
                    mix_grads[token, i] = high
                    mix_grads[token, PLACES + i] = low
                stream_factor[token] = -(rho * rho * rho) * against[0] / J

    return gates_backward_kernel


def streams_backward(D: int) -> PrimFunc:
    """The gradient of the streams [N, J], which is added to what is there already: pre_j dy, through the projection,
    and through the rms; and of the projection [ceil(N / 2048), 64, J], one for each 2048 tokens: high and low halves.

    mix_grads are those of `gates_backward`, w [2, 32, J] those of `project`. A warp loads ahead of those that multiply.
    """
    J = M * D
    N = T.dynamic("N")

    @T.prim_func
    def streams_backward_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        weights: T.Tensor((N, PLACES), T.float32),
        mix_grads: T.Tensor((N, 2 * PLACES), T.bfloat16),
        stream_factor: T.Tensor((N,), T.float32),
        w: T.Tensor((2, PLACES, J), T.bfloat16),
        grad_x: T.Tensor((N, J), T.bfloat16),
        grad_w: T.Tensor((T.ceildiv(N, BACK_TOKENS), 2 * PLACES, J), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(J // BACK_J, T.ceildiv(N, BACK_TOKENS), threads=BACK_THREADS + 128) as (column, chunk):
            of_x = T.alloc_shared((BACK_STAGES, BACK_N, BACK_J), T.bfloat16)
            of_y = T.alloc_shared((BACK_STAGES, BACK_N, BACK_J), T.bfloat16)
            of_g = T.alloc_shared((BACK_STAGES, BACK_N, BACK_J), T.bfloat16)
            mix = T.alloc_shared((BACK_STAGES, BACK_N, 2 * PLACES), T.bfloat16)
            high = T.alloc_shared((2 * PLACES, BACK_J), T.bfloat16)
            low = T.alloc_shared((2 * PLACES, BACK_J), T.bfloat16)
            out = T.alloc_shared((BACK_N, BACK_J), T.bfloat16)
            full = T.alloc_barrier([1] * BACK_STAGES)
            empty = T.alloc_barrier([BACK_THREADS // 32] * BACK_STAGES)
            thread = T.get_thread_binding()
            at = column * BACK_J
            steps = T.min(T.ceildiv(N - chunk * BACK_TOKENS, BACK_N), BACK_TOKENS // BACK_N)
            if thread >= BACK_THREADS:
                T.dec_max_nreg(24)
                if thread < BACK_THREADS + 32:
                    for step in T.serial(steps):
                        s = step % BACK_STAGES
                        row = chunk * BACK_TOKENS + step * BACK_N
                        T.mbarrier_wait_parity(empty[s], ((step // BACK_STAGES) & 1) ^ 1)
                        rows, columns = slice(row, row + BACK_N), slice(at, at + BACK_J)
                        T.tma_copy(mix_grads[rows, :], mix[s, :, :], barrier=full[s], leader_scope_threads=32)
                        T.tma_copy(x[rows, columns], of_x[s, :, :], barrier=full[s], leader_scope_threads=32)
                        T.tma_copy(
                            dy[rows, at % D : at % D + BACK_J], of_y[s, :, :], barrier=full[s], leader_scope_threads=32
                        )
                        T.tma_copy(grad_x[rows, columns], of_g[s, :, :], barrier=full[s], leader_scope_threads=32)
                        if thread == BACK_THREADS:
                            T.mbarrier_arrive(full[s])
            else:
                T.inc_max_nreg(232)
                z = T.alloc_fragment((BACK_N, BACK_J), T.float32)
                sums = T.alloc_fragment((2 * PLACES, BACK_J), T.float32)
                pre = T.alloc_fragment((BACK_N,), T.float32)
                factor = T.alloc_fragment((BACK_N,), T.float32)
                for i, j in T.Parallel(2 * PLACES, BACK_J):
                    high[i, j] = w[0, i % PLACES, at + j]
                    low[i, j] = w[1, i % PLACES, at + j]
                T.fence_proxy_async()
                T.sync_threads(1, BACK_THREADS)
                T.clear(sums)
                for step in T.serial(steps):
                    s = step % BACK_STAGES
                    row = chunk * BACK_TOKENS + step * BACK_N
                    for i in T.Parallel(BACK_N):
                        pre[i] = T.if_then_else(row + i < N, weights[row + i, at // D], 0.0)
                        factor[i] = T.if_then_else(row + i < N, stream_factor[row + i], 0.0)
                    T.clear(z)
                    T.mbarrier_wait_parity(full[s], (step // BACK_STAGES) & 1)
                    T.wgmma_gemm(mix[s, :, :], high, z, policy=T.GemmWarpPolicy.FullCol)
                    T.wgmma_gemm(mix[s, :, :], low, z, policy=T.GemmWarpPolicy.FullCol)
                    T.wgmma_gemm(mix[s, :, :], of_x[s, :, :], sums, transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(BACK_N, BACK_J):
                        z[i, j] += (
                            pre[i] * T.Cast(T.float32, of_y[s, i, j])
                            + factor[i] * T.Cast(T.float32, of_x[s, i, j])
                            + T.Cast(T.float32, of_g[s, i, j])
                        )
                    if thread % 32 == 0:
                        T.mbarrier_arrive(empty[s])
                    T.tma_store_wait(0)
                    T.sync_threads(1, BACK_THREADS)
                    for i, j in T.Parallel(BACK_N, BACK_J):
                        out[i, j] = T.Cast(T.bfloat16, z[i, j])
                    T.fence_proxy_async()
                    T.sync_threads(1, BACK_THREADS)
                    T.tma_copy(out, grad_x[row, at])
                T.copy(sums, grad_w[chunk, 0, at])
                T.tma_store_wait(0, read=False)

    return streams_backward_kernel
