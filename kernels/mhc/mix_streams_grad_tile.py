"""The gradient of hyper-connections' streams for sm_90a: in, or out and in; see `mix_tile` for letters and places.

Sums over tokens have an order that depends on their number alone, and no row of the others. Caller: `mix_grad_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

M, PLACES = 4, 32
"""As in `mix_tile`: streams, and places of the mixing numbers."""

BACK_N, BACK_D, BACK_TOKENS, BACK_THREADS = 64, 64, 2048, 256
"""Tokens and columns of a tile, tokens whose part of the projection's gradient is summed apart, and threads that
multiply and add."""


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


def streams_backward(D: int, head: bool, across: bool) -> PrimFunc:
    """The gradient of the streams x [N, J] that a site reads, from that of them by other ways, g [N, J], and that of
    the sublayer's input, dy [N, D]: g_j + pre_j dy, through the projection, and through both rms.

    Args:
        head: as in `gates_backward`.
        across: x are the streams after a sublayer with output f [N, D] and `before` [N, J] those before it. The
            gradient of x stays here; written are those of f [N, D] and of `before` [N, J], and for each 64 columns
            the sums over them of the gradients of post and comb [D / 64, 20, N]. Otherwise that of x is written, to
            grad_x [N, J], which may be g.

    Besides, for each 2048 tokens, of the projection [ceil(N / 2048), 64, J], high and low halves, and of norm
    [ceil(N / 2048), D]. mix_grads and `numbers` are from `gates_backward`, w [2, 32, J] from `mix_site.halves`.

    A block walks over the tokens with 64 columns of every stream. One warp loads tiles of 64 x 64 in the order in which
    eight multiply and add; another stores.
    """
    J = M * D
    N = T.dynamic("N")
    loads, stores, depth, staged_tiles = (15, 5, 1, 5) if across else (10, 4, 2, 2)

    def slot(step, i):
        """Of the i-th tile that is loaded in a step: the same place in every step, or every other."""
        return i if depth == 1 else step % depth * loads + i

    def parity(step):
        return (step // depth) & 1

    def turn(step, i):
        """Parity of the use of a staged tile's place."""
        return (step * (stores // staged_tiles) + i // staged_tiles) & 1

    @T.macro
    def load(step, i, source, row, column, tiles, full, empty, thread):
        T.mbarrier_wait_parity(empty[slot(step, i)], parity(step) ^ 1)
        T.tma_copy(
            source[row : row + BACK_N, column : column + BACK_D],
            tiles[slot(step, i), :, :],
            barrier=full[slot(step, i)],
            leader_scope_threads=32,
        )
        if thread == BACK_THREADS:
            T.mbarrier_arrive(full[slot(step, i)])

    @T.macro
    def store(step, i, staged, target, row, column, filled, stored, thread):
        T.mbarrier_wait_parity(filled[i % staged_tiles], turn(step, i))
        T.tma_copy(
            staged[i % staged_tiles, :, :],
            target[row : row + BACK_N, column : column + BACK_D],
            leader_scope_threads=32,
        )
        T.tma_store_wait(1)
        T.sync_warp()
        if (thread == BACK_THREADS + 32) and (step + i > 0):
            T.mbarrier_arrive(stored[(i + staged_tiles - 1) % staged_tiles])

    @T.macro
    def release(step, i, empty, thread):
        T.sync_warp()
        if thread % 32 == 0:
            T.mbarrier_arrive(empty[slot(step, i)])

    @T.macro
    def stage(step, i, short, staged, stored):
        T.mbarrier_wait_parity(stored[i % staged_tiles], turn(step, i) ^ 1)
        T.copy(short, staged[i % staged_tiles, :, :])

    @T.macro
    def publish(i, filled, thread):
        """Hand a staged tile to the warp that stores."""
        T.fence_proxy_async()
        T.sync_warp()
        if thread % 32 == 0:
            T.mbarrier_arrive(filled[i % staged_tiles])

    @T.macro
    def take(step, i, short, tiles, full, empty, thread):
        T.mbarrier_wait_parity(full[slot(step, i)], parity(step))
        T.copy(tiles[slot(step, i), :, :], short)
        release(step, i, empty, thread)

    @T.macro
    def project(step, m, z, tiles, of_w, full):
        """z = gradients of the raw mixing numbers times the projection, without the product of low halves."""
        T.mbarrier_wait_parity(full[slot(step, 1 + m)], parity(step))
        s, policy = slot(step, 0), T.GemmWarpPolicy.FullCol
        T.wgmma_gemm(tiles[s, :, 0:PLACES], of_w[m, :, :], z, policy=policy, clear_accum=True)
        T.wgmma_gemm(tiles[s, :, PLACES : 2 * PLACES], of_w[m, :, :], z, policy=policy)
        T.wgmma_gemm(tiles[s, :, 0:PLACES], of_w[M + m, :, :], z, policy=policy)

    @T.macro
    def add(step, m, sums, tiles):
        T.wgmma_gemm(
            tiles[slot(step, 0), :, :],
            tiles[slot(step, 1 + m), :, :],
            sums,
            transpose_A=True,
            policy=T.GemmWarpPolicy.FullCol,
        )

    @T.macro
    def total(step, m, z, y, short, of_token, tiles, full, empty, thread):
        """z + g + pre_m y + the factor of the streams themselves times them."""
        take(step, 6 + m, short, tiles, full, empty, thread)
        for i, j in T.Parallel(BACK_N, BACK_D):
            z[i, j] += T.Cast(T.float32, short[i, j]) + of_token[step % 2, m, i] * y[i, j]
        T.copy(tiles[slot(step, 1 + m), :, :], short)
        for i, j in T.Parallel(BACK_N, BACK_D):
            z[i, j] += of_token[step % 2, 24, i] * T.Cast(T.float32, short[i, j])

    @T.macro
    def mix(step, at, z0, z1, z2, z3, d0, d1, d2, d3, short, of_token, halves):
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
                of_token[step % 2, M + M * at, i] * z0[i, j]
                + of_token[step % 2, M + M * at + 1, i] * z1[i, j]
                + of_token[step % 2, M + M * at + 2, i] * z2[i, j]
                + of_token[step % 2, M + M * at + 3, i] * z3[i, j],
            )
        # Four threads have parts of four sums: each ends with one.
        for i, o in T.Parallel(BACK_N, 8):
            d0[i, o] = T.if_then_else(o % 2 == 0, d0[i, o], d1[i, o]) + T.shfl_xor(
                T.if_then_else(o % 2 == 0, d1[i, o], d0[i, o]), 1
            )
            d2[i, o] = T.if_then_else(o % 2 == 0, d2[i, o], d3[i, o]) + T.shfl_xor(
                T.if_then_else(o % 2 == 0, d3[i, o], d2[i, o]), 1
            )
        for i, o in T.Parallel(BACK_N, 8):
            halves[o // 4, M * at + o % 4, i] = T.if_then_else(o % 4 < 2, d0[i, o], d2[i, o]) + T.shfl_xor(
                T.if_then_else(o % 4 < 2, d2[i, o], d0[i, o]), 2
            )

    @T.macro
    def put(step, m, z, short, staged, filled, stored, thread):
        for i, j in T.Parallel(BACK_N, BACK_D):
            short[i, j] = T.Cast(T.bfloat16, z[i, j])
        stage(step, m, short, staged, stored)
        publish(m, filled, thread)

    @T.prim_func
    def streams_backward_kernel(
        x: T.Tensor((N, J), T.bfloat16),
        dy: T.Tensor((N, D), T.bfloat16),
        g: T.Tensor((N, J), T.bfloat16),
        norm: T.Tensor((1 if head else D,), T.float32),
        numbers: T.Tensor((T.ceildiv(N, BACK_N), PLACES, BACK_N), T.float32),
        mix_grads: T.Tensor((N, 2 * PLACES), T.bfloat16),
        w: T.Tensor((2, PLACES, J), T.bfloat16),
        f: T.Tensor((N, D) if across else (1, 1), T.bfloat16),
        before: T.Tensor((N, J) if across else (1, 1), T.bfloat16),
        grad_f: T.Tensor((N, D) if across else (1, 1), T.bfloat16),
        grad_x: T.Tensor((N, J), T.bfloat16),
        dots: T.Tensor((D // BACK_D, 20, N) if across else (1, 1, 1), T.float32),
        grad_w: T.Tensor((T.ceildiv(N, BACK_TOKENS), 2 * PLACES, J), T.float32),
        grad_norm: T.Tensor((T.ceildiv(N, BACK_TOKENS), 1 if head else D), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(D // BACK_D, T.ceildiv(N, BACK_TOKENS), threads=BACK_THREADS + 128) as (column, chunk):
            tiles = T.alloc_shared((depth * loads, BACK_N, BACK_D), T.bfloat16)
            staged = T.alloc_shared((staged_tiles, BACK_N, BACK_D), T.bfloat16)
            of_w = T.alloc_shared((2 * M, PLACES, BACK_D), T.bfloat16)
            of_token = T.alloc_shared((2, PLACES, BACK_N), T.float32)
            halves = T.alloc_shared((2 if across else 1, 20 if across else 4, BACK_N + 8), T.float32)
            full = T.alloc_barrier([1] * (depth * loads))
            empty = T.alloc_barrier([BACK_THREADS // 32] * (depth * loads))
            filled = T.alloc_barrier([BACK_THREADS // 32] * staged_tiles)
            stored = T.alloc_barrier([1] * staged_tiles)
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
                        load(step, 0, mix_grads, row, 0, tiles, full, empty, thread)
                        for m in T.unroll(M):
                            load(step, 1 + m, x, row, m * D + at, tiles, full, empty, thread)
                        load(step, 5, dy, row, at, tiles, full, empty, thread)
                        for m in T.unroll(M):
                            load(step, 6 + m, g, row, m * D + at, tiles, full, empty, thread)
                        if across:
                            load(step, 10, f, row, at, tiles, full, empty, thread)
                            for m in T.unroll(M):
                                load(step, 11 + m, before, row, m * D + at, tiles, full, empty, thread)
                elif thread < BACK_THREADS + 64:
                    for step in T.serial(steps):
                        row = chunk * BACK_TOKENS + step * BACK_N
                        if across:
                            store(step, 0, staged, grad_f, row, at, filled, stored, thread)
                        for m in T.unroll(M):
                            store(
                                step,
                                stores - M + m,
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
                if not head:
                    T.clear(of_norm)
                T.mbarrier_wait_parity(ready[0], 0)
                for step in T.serial(steps):
                    row = chunk * BACK_TOKENS + step * BACK_N
                    T.mbarrier_wait_parity(told[step % 2], (step // 2) & 1)
                    T.mbarrier_wait_parity(full[slot(step, 0)], parity(step))
                    for m, z in ((0, z0), (1, z1), (2, z2), (3, z3)):
                        project(step, m, z, tiles, of_w, full)
                        if not head:
                            T.copy(tiles[slot(step, 1 + m), :, :], short)
                            for i, j in T.Parallel(BACK_N, BACK_D):
                                value = of_token[step % 2, m, i] * T.Cast(T.float32, short[i, j])
                                y[i, j] = value + y[i, j] if m else value
                    take(step, 5, short, tiles, full, empty, thread)
                    if not head:
                        T.copy(norm[at : at + BACK_D], scale)
                        for i in T.Parallel(BACK_N):
                            rms[i] = of_token[step % 2, 25, i]
                            rms_grad[i] = of_token[step % 2, 26, i]
                    for i, j in T.Parallel(BACK_N, BACK_D):
                        if not head:
                            of_norm[i // 16 * 8 + i % 8, j] += rms[i] * T.Cast(T.float32, short[i, j]) * y[i, j]
                            y[i, j] = rms[i] * T.Cast(T.float32, short[i, j]) * scale[j] - rms_grad[i] * y[i, j]
                        else:
                            y[i, j] = T.Cast(T.float32, short[i, j])
                    T.wait_wgmma(0)
                    for m, z, sums in ((0, z0, w0), (1, z1, w1), (2, z2, w2), (3, z3, w3)):
                        add(step, m, sums, tiles)
                        total(step, m, z, y, short, of_token, tiles, full, empty, thread)
                    T.wait_wgmma(0)
                    T.sync_warp()
                    for i in T.unroll(1 + M):
                        if thread % 32 == 0:
                            T.mbarrier_arrive(empty[slot(step, i)])
                    if across:
                        for i in T.unroll(1 + M):
                            take(step, 10 + i, short, tiles, full, empty, thread)
                            mix(step, i, z0, z1, z2, z3, d0, d1, d2, d3, short, of_token, halves)
                            if i > 0:
                                publish(i - 1, filled, thread)
                            stage(step, i, short, staged, stored)
                        T.sync_threads(1, BACK_THREADS)
                        publish(M, filled, thread)
                        i = thread % BACK_N
                        if row + i < N:
                            for e in T.unroll(20 * BACK_N // BACK_THREADS):
                                j = e * (BACK_THREADS // BACK_N) + thread // BACK_N
                                dots[column, j, row + i] = halves[0, j, i] + halves[1, j, i]
                    else:
                        put(step, 0, z0, short, staged, filled, stored, thread)
                        put(step, 1, z1, short, staged, filled, stored, thread)
                        put(step, 2, z2, short, staged, filled, stored, thread)
                        put(step, 3, z3, short, staged, filled, stored, thread)
                    T.sync_warp()
                    if thread % 32 == 0:
                        T.mbarrier_arrive(untold[step % 2])
                T.copy(w0, grad_w[chunk, 0, at])
                T.copy(w1, grad_w[chunk, 0, D + at])
                T.copy(w2, grad_w[chunk, 0, 2 * D + at])
                T.copy(w3, grad_w[chunk, 0, 3 * D + at])
                if not head:
                    for step in (4, 8, 16):
                        for i, j in T.Parallel(32, BACK_D):
                            of_norm[i, j] += T.shfl_xor(of_norm[i, j], step)
                    T.sync_threads(1, BACK_THREADS)
                    for i, j in T.Parallel(32, BACK_D):
                        if i % 8 == 0:
                            halves[0, i // 8, j] = of_norm[i, j]
                    T.sync_threads(1, BACK_THREADS)
                    if thread < BACK_D:
                        grad_norm[chunk, at + thread] = (halves[0, 0, thread] + halves[0, 1, thread]) + (
                            halves[0, 2, thread] + halves[0, 3, thread]
                        )

    return streams_backward_kernel
