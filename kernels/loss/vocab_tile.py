"""Products over the whole vocabulary for sm_90a: logits with what a softmax needs of them, and the gradient of the
hidden states.

Letters: N tokens of a chunk, the only size that changes at run time; V vocabulary; D width; S tiles of the vocabulary.
Every order of summation is a function of the constants, so a row's bits depend neither on N nor on the row's place.
What is done to rows of logits between the products: `vocab_rows_tile`. Caller: `vocab_sweep`.
"""

import tilelang.language as T
from tilelang.language import PrimFunc

TILE_N, TILE_K, STAGES = 128, 64, 4
"""Tile of the products beside `tile_v` columns: two groups of four warps with 64 rows each, FP32 sums in registers."""

CTAS, CONSUMERS, LOADER = 132, 256, 288
"""Blocks that walk over the tiles, of which no result depends on how many there are; threads that multiply; and the end
of the one warp that loads for them, ahead of the tile that they are at."""

PART = 64
"""Columns of a tile of which a thread holds the teacher's logits beside the student's, or that are stored at once."""

WEIGHTS, LOGITS = 1, 2
"""What `logits` may write beside its stats."""


def _product(D: int, tile_v: int):
    """Both sides of tiles' products hidden @ head.T over D, which meet at barriers: who loads for one tile after
    another, and who multiplies for one."""
    steps = -(-D // TILE_K)

    @T.macro
    def load(u, row, column, hidden, head, x, w, full, empty, thread):
        for k in T.serial(steps):
            at = u * steps + k
            s = at % STAGES
            T.mbarrier_wait_parity(empty[s], ((at // STAGES) & 1) ^ 1)
            span = slice(k * TILE_K, (k + 1) * TILE_K)
            T.tma_copy(hidden[row : row + TILE_N, span], x[s, :, :], barrier=full[s], leader_scope_threads=32)
            T.tma_copy(head[column : column + tile_v, span], w[s, :, :], barrier=full[s], leader_scope_threads=32)
            if thread == CONSUMERS:
                T.mbarrier_arrive(full[s])

    @T.macro
    def multiply(u, x, w, z, full, empty, thread):
        T.clear(z)
        for k in T.serial(steps):
            at = u * steps + k
            T.mbarrier_wait_parity(full[at % STAGES], (at // STAGES) & 1)
            T.wgmma_gemm(
                x[at % STAGES, :, :], w[at % STAGES, :, :], z, transpose_B=True, policy=T.GemmWarpPolicy.FullRow
            )
            T.wait_wgmma(1)
            if (thread % 32 == 0) and (k > 0):
                T.mbarrier_arrive(empty[(at + STAGES - 1) % STAGES])
        T.wait_wgmma(0)
        if thread % 32 == 0:
            T.mbarrier_arrive(empty[(u * steps + steps - 1) % STAGES])

    @T.macro
    def load_all(units, row_tiles, cta, hidden, head, x, w, full, empty, thread):
        row = T.alloc_var(T.int32)
        tile = T.alloc_var(T.int32)
        T.dec_max_nreg(24)
        if thread < LOADER:
            for u in T.serial(units):
                row = (u * CTAS + cta) % row_tiles * TILE_N
                tile = (u * CTAS + cta) // row_tiles
                load(u, row, tile * tile_v, hidden, head, x, w, full, empty, thread)

    return load_all, multiply


@T.macro
def _give_sums(mass_sum, moment_sum, mass, moment, stats, row, tile):
    """Write a tile's mass and moment."""
    T.finalize_reducer(mass_sum, mass)
    T.finalize_reducer(moment_sum, moment)
    T.copy(mass, stats[1, tile, row])
    T.copy(moment, stats[2, tile, row])


def logits(V: int, D: int, tile_v: int, token: bool, keep: int, pitch: int, masked: bool) -> PrimFunc:
    """Of the logits z = scale * hidden @ head.T [N, V], for each row and tile: top, mass and moment, which are its
    largest logit, sum exp(z - top) and sum exp(z - top) * (z - top).

    Args:
        token: write each row's logit of its own token.
        masked: z is -inf where the row's bit in mask is 0 (`kept_tile`); of a tile without a bit top is -inf, and mass
            and moment are 0.
        keep: what else of the logits is written: nothing (0), exp(z - top) as bfloat16 (`WEIGHTS`), the logits
            (`LOGITS`).
        pitch: numbers from one row of what is written to the next.
    """
    S = -(-V // tile_v)
    N = T.dynamic("N")
    part = 2 * PART if keep == WEIGHTS else PART  # of 32 KiB in both cases
    kept_dtype = T.float32 if keep == LOGITS else T.bfloat16
    load_all, multiply = _product(D, tile_v)

    @T.macro
    def store(z, staged, kept, row, column):
        for p in T.unroll(tile_v // part):
            T.tma_store_wait(0)
            T.sync_threads(1, CONSUMERS)
            for i, j in T.Parallel(TILE_N, part):
                staged[i, j] = z[i, p * part + j]
            T.fence_proxy_async()
            T.sync_threads(1, CONSUMERS)
            T.tma_copy(staged, kept[row, column + p * part])

    @T.prim_func
    def logits_kernel(
        hidden: T.Tensor((N, D), T.bfloat16),
        head: T.Tensor((V, D), T.bfloat16),
        scale: T.float32,
        token_ids: T.Tensor((N if token else 1,), T.int32),
        mask: T.Tensor((N if masked else 1, S * tile_v // 32 if masked else 1), T.int32),
        kept: T.StridedTensor((N if keep else 1, V if keep else 1), (pitch, 1), kept_dtype),
        stats: T.Tensor((3, S, N), T.float32),
        token_logit: T.Tensor((N if token else 1,), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(CTAS, threads=CONSUMERS + 128) as cta:
            x = T.alloc_shared((STAGES, TILE_N, TILE_K), T.bfloat16)
            w = T.alloc_shared((STAGES, tile_v, TILE_K), T.bfloat16)
            staged = T.alloc_shared((TILE_N if keep else 1, part), kept_dtype)
            full = T.alloc_barrier([1] * STAGES)
            empty = T.alloc_barrier([CONSUMERS // 32] * STAGES)
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            tile = T.alloc_var(T.int32)
            row_tiles = T.ceildiv(N, TILE_N)
            units = T.ceildiv(row_tiles * S - cta, CTAS)
            if thread >= CONSUMERS:
                load_all(units, row_tiles, cta, hidden, head, x, w, full, empty, thread)
            else:
                T.inc_max_nreg(240)
                z = T.alloc_fragment((TILE_N, tile_v), T.float32)
                wanted = T.alloc_fragment((TILE_N,), T.int32)
                if masked:
                    bits = T.alloc_fragment((TILE_N, tile_v // 32), T.int32)
                top = T.alloc_fragment((TILE_N,), T.float32)
                mass = T.alloc_fragment((TILE_N,), T.float32)
                moment = T.alloc_fragment((TILE_N,), T.float32)
                mass_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")
                moment_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")
                for u in T.serial(units):
                    row = (u * CTAS + cta) % row_tiles * TILE_N
                    tile = (u * CTAS + cta) // row_tiles
                    multiply(u, x, w, z, full, empty, thread)
                    for i, j in T.Parallel(TILE_N, tile_v):
                        z[i, j] *= scale
                    if masked:
                        for i, j in T.Parallel(TILE_N, tile_v // 32):
                            bits[i, j] = mask[T.min(row + i, N - 1), tile * (tile_v // 32) + j]
                        for i, j in T.Parallel(TILE_N, tile_v):
                            bit = (bits[i, j // 32] >> (j % 32)) & 1
                            z[i, j] = T.if_then_else(bit != 0, z[i, j], -T.infinity(T.float32))
                    if keep == LOGITS:
                        store(z, staged, kept, row, tile * tile_v)
                    if token:
                        T.copy(token_ids[row], wanted)
                        for i, j in T.Parallel(TILE_N, tile_v):
                            if wanted[i] == tile * tile_v + j and row + i < N:
                                token_logit[row + i] = z[i, j]
                    if V % tile_v and not masked:
                        for i, j in T.Parallel(TILE_N, tile_v):
                            z[i, j] = T.if_then_else(tile * tile_v + j < V, z[i, j], -T.infinity(T.float32))
                    T.reduce_max(z, top, dim=1)
                    if masked:  # what is about it must be a number
                        T.copy(top, stats[0, tile, row])
                        for i in T.Parallel(TILE_N):
                            top[i] = T.max(top[i], T.min_value(T.float32))
                    T.reducer_init(mass_sum)
                    T.reducer_init(moment_sum)
                    for i, j in T.Parallel(TILE_N, tile_v):
                        weight = T.__exp(z[i, j] - top[i])
                        T.reducer_update(mass_sum[i], weight)
                        slope = weight * (z[i, j] - top[i])
                        if masked or V % tile_v:  # 0 * -inf; sums are rounded alike in all programs
                            slope = weight * T.max(z[i, j] - top[i], T.min_value(T.float32))
                        T.reducer_update(moment_sum[i], slope)
                        if keep == WEIGHTS:
                            z[i, j] = weight
                    if not masked:
                        T.copy(top, stats[0, tile, row])
                    _give_sums(mass_sum, moment_sum, mass, moment, stats, row, tile)
                    if keep == WEIGHTS:
                        store(z, staged, kept, row, tile * tile_v)
                T.tma_store_wait(0, read=False)

    return logits_kernel


def student_logits(V: int, D: int, tile_v: int) -> PrimFunc:
    """Of the logits z = hidden @ head.T and those u of a teacher [N, V], for each row and tile: top, mass and moment,
    which are the largest z, sum exp(z - top) and sum exp(z - top) * (z - u); and for each 64 columns their centre,
    which is their moment over their mass.

    In place of u, for each element, two bfloat16 in one word: exp(z - top), the low half, and exp(z - top) times
    z - u - centre, the high half: what the gradient is made of, rounded where it is small. A part of z - u common to
    all, and the lead of a token that has nearly all the mass, are not in it.
    """
    S = -(-V // tile_v)
    parts = tile_v // PART
    N = T.dynamic("N")
    load_all, multiply = _product(D, tile_v)

    @T.macro
    def fold(z, weights, p, place, top, mass_sum, moment_sum, of_part, centre, centres, staged, words):
        """A part whose teacher's logits are in weights, which become exp(z - top); its z become z - u."""
        row, tile = place
        sums = T.alloc_reducer((TILE_N,), T.float32, op="sum")
        slopes = T.alloc_reducer((TILE_N,), T.float32, op="sum")
        T.reducer_init(sums)
        T.reducer_init(slopes)
        for i, j in T.Parallel(TILE_N, PART):
            weight = T.__exp(z[i, p * PART + j] - top[i])
            z[i, p * PART + j] -= weights[i, j]
            weights[i, j] = weight
            slope = weight * z[i, p * PART + j]
            if V % tile_v:  # 0 * -inf
                slope = T.if_then_else(tile * tile_v + p * PART + j < V, slope, 0.0)
            T.reducer_update(sums[i], weight)
            T.reducer_update(slopes[i], slope)
            T.reducer_update(mass_sum[i], weight)  # of the tile, in the order in which `logits` adds it
            T.reducer_update(moment_sum[i], slope)
        T.finalize_reducer(sums, of_part)
        T.finalize_reducer(slopes, centre)
        for i in T.Parallel(TILE_N):
            centre[i] = T.if_then_else(of_part[i] > 0, centre[i] / of_part[i], 0.0)
        T.copy(centre, centres[tile * parts + p, row])
        T.tma_store_wait(0)
        T.sync_threads(1, CONSUMERS)
        for i, j in T.Parallel(TILE_N, PART):
            slope = weights[i, j] * (z[i, p * PART + j] - centre[i])
            low = T.Cast(T.uint32, T.reinterpret(T.Cast(T.bfloat16, weights[i, j]), T.uint16))
            high = T.Cast(T.uint32, T.reinterpret(T.Cast(T.bfloat16, slope), T.uint16))
            staged[i, j] = low | (high << 16)
        T.fence_proxy_async()
        T.sync_threads(1, CONSUMERS)
        T.tma_copy(staged, words[row, tile * tile_v + p * PART])

    @T.prim_func
    def student_logits_kernel(
        hidden: T.Tensor((N, D), T.bfloat16),
        head: T.Tensor((V, D), T.bfloat16),
        teacher: T.Tensor((N, V), T.float32),
        words: T.Tensor((N, V), T.uint32),
        stats: T.Tensor((3, S, N), T.float32),
        centres: T.Tensor((S * parts, N), T.float32),
    ):
        # Long because a program is one function.
        with T.Kernel(CTAS, threads=CONSUMERS + 128) as cta:
            x = T.alloc_shared((STAGES, TILE_N, TILE_K), T.bfloat16)
            w = T.alloc_shared((STAGES, tile_v, TILE_K), T.bfloat16)
            staged = T.alloc_shared((TILE_N, PART), T.uint32)
            full = T.alloc_barrier([1] * STAGES)
            empty = T.alloc_barrier([CONSUMERS // 32] * STAGES)
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            tile = T.alloc_var(T.int32)
            row_tiles = T.ceildiv(N, TILE_N)
            units = T.ceildiv(row_tiles * S - cta, CTAS)
            if thread >= CONSUMERS:
                load_all(units, row_tiles, cta, hidden, head, x, w, full, empty, thread)
            else:
                T.inc_max_nreg(240)
                z = T.alloc_fragment((TILE_N, tile_v), T.float32)
                odd = T.alloc_fragment((TILE_N, PART), T.float32)
                even = T.alloc_fragment((TILE_N, PART), T.float32)
                top = T.alloc_fragment((TILE_N,), T.float32)
                mass = T.alloc_fragment((TILE_N,), T.float32)
                moment = T.alloc_fragment((TILE_N,), T.float32)
                of_part = T.alloc_fragment((TILE_N,), T.float32)
                centre = T.alloc_fragment((TILE_N,), T.float32)
                mass_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")
                moment_sum = T.alloc_reducer((TILE_N,), T.float32, op="sum")
                for u in T.serial(units):
                    row = (u * CTAS + cta) % row_tiles * TILE_N
                    tile = (u * CTAS + cta) // row_tiles
                    T.copy(teacher[row, tile * tile_v], even)  # during the product
                    multiply(u, x, w, z, full, empty, thread)
                    if V % tile_v:
                        for i, j in T.Parallel(TILE_N, tile_v):
                            z[i, j] = T.if_then_else(tile * tile_v + j < V, z[i, j], -T.infinity(T.float32))
                    T.reduce_max(z, top, dim=1)
                    T.reducer_init(mass_sum)
                    T.reducer_init(moment_sum)
                    for pair in T.unroll(parts // 2):  # one part's numbers come while those of another are folded
                        T.copy(teacher[row, tile * tile_v + (2 * pair + 1) * PART], odd)
                        fold(
                            *(z, even, 2 * pair, (row, tile), top, mass_sum, moment_sum),
                            *(of_part, centre, centres, staged, words),
                        )
                        if 2 * pair + 2 < parts:
                            T.copy(teacher[row, tile * tile_v + (2 * pair + 2) * PART], even)
                        fold(
                            *(z, odd, 2 * pair + 1, (row, tile), top, mass_sum, moment_sum),
                            *(of_part, centre, centres, staged, words),
                        )
                    T.copy(top, stats[0, tile, row])
                    _give_sums(mass_sum, moment_sum, mass, moment, stats, row, tile)
                T.tma_store_wait(0, read=False)

    return student_logits_kernel


def hidden_grad(V: int, D: int, tile_d: int, pitch: int) -> PrimFunc:
    """Gradient of the hidden states [N, D]: gradient of the logits [N, V] @ head [V, D], vocabulary left to right.

    Args:
        pitch: numbers from one row of the logits' gradient to the next.
    """
    N = T.dynamic("N")

    @T.prim_func
    def hidden_grad_kernel(
        logits_grad: T.StridedTensor((N, V), (pitch, 1), T.bfloat16),
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
