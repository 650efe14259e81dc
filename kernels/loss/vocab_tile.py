"""Kernels over the whole vocabulary for sm_90a: logits with what a softmax needs of them, and their gradients.

Letters: N tokens of a chunk, the only size that changes at run time; V vocabulary; D width; S tiles of the vocabulary.
Every order of summation is a function of the constants, so a row's bits depend neither on N nor on the row's place.
Callers: `vocab_sweep`.
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

ROW_THREADS, ROW_EACH = 256, 8
"""Threads of a row, and neighbouring columns that each takes at once."""

ROW_STEP = ROW_THREADS * ROW_EACH


def _product(D: int, tile_v: int):
    """Both sides of a tile's product hidden @ head.T over D: who loads and who multiplies, which meet at barriers."""
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

    return load, multiply


def logits(V: int, D: int, tile_v: int, token: bool, keep: int, pitch: int) -> PrimFunc:
    """Of the logits z = scale * hidden @ head.T [N, V], for each row and tile: top, mass and moment, which are its
    largest logit, sum exp(z - top) and sum exp(z - top) * (z - top).

    Args:
        token: write each row's logit of its own token.
        keep: what else of the logits is written: nothing (0), exp(z - top) as bfloat16 (`WEIGHTS`), the logits
            (`LOGITS`).
        pitch: numbers from one row of what is written to the next.
    """
    S = -(-V // tile_v)
    N = T.dynamic("N")
    part = 2 * PART if keep == WEIGHTS else PART  # of 32 KiB in both cases
    kept_dtype = T.float32 if keep == LOGITS else T.bfloat16
    load, multiply = _product(D, tile_v)

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
                T.dec_max_nreg(24)
                if thread < LOADER:
                    for u in T.serial(units):
                        row = (u * CTAS + cta) % row_tiles * TILE_N
                        tile = (u * CTAS + cta) // row_tiles
                        load(u, row, tile * tile_v, hidden, head, x, w, full, empty, thread)
            else:
                T.inc_max_nreg(240)
                z = T.alloc_fragment((TILE_N, tile_v), T.float32)
                wanted = T.alloc_fragment((TILE_N,), T.int32)
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
                    if keep == LOGITS:
                        store(z, staged, kept, row, tile * tile_v)
                    if token:
                        T.copy(token_ids[row], wanted)
                        for i, j in T.Parallel(TILE_N, tile_v):
                            if wanted[i] == tile * tile_v + j and row + i < N:
                                token_logit[row + i] = z[i, j]
                    if V % tile_v:
                        for i, j in T.Parallel(TILE_N, tile_v):
                            z[i, j] = T.if_then_else(tile * tile_v + j < V, z[i, j], -T.infinity(T.float32))
                    T.reduce_max(z, top, dim=1)
                    T.reducer_init(mass_sum)
                    T.reducer_init(moment_sum)
                    for i, j in T.Parallel(TILE_N, tile_v):
                        weight = T.__exp(z[i, j] - top[i])
                        T.reducer_update(mass_sum[i], weight)
                        slope = weight * (z[i, j] - top[i])
                        if V % tile_v:  # 0 * -inf
                            slope = T.if_then_else(tile * tile_v + j < V, slope, 0.0)
                        T.reducer_update(moment_sum[i], slope)
                        if keep == WEIGHTS:
                            z[i, j] = weight
                    T.finalize_reducer(mass_sum, mass)
                    T.finalize_reducer(moment_sum, moment)
                    T.copy(top, stats[0, tile, row])
                    T.copy(mass, stats[1, tile, row])
                    T.copy(moment, stats[2, tile, row])
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
    load, multiply = _product(D, tile_v)

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
                T.dec_max_nreg(24)
                if thread < LOADER:
                    for u in T.serial(units):
                        row = (u * CTAS + cta) % row_tiles * TILE_N
                        tile = (u * CTAS + cta) // row_tiles
                        load(u, row, tile * tile_v, hidden, head, x, w, full, empty, thread)
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
                    T.finalize_reducer(mass_sum, mass)
                    T.finalize_reducer(moment_sum, moment)
                    T.copy(top, stats[0, tile, row])
                    T.copy(mass, stats[1, tile, row])
                    T.copy(moment, stats[2, tile, row])
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
