"""Hyper-connections of four bfloat16 streams for sm_90a: out of a sublayer, and across into the next one, or into one.

Letters: N tokens and G groups of blocks, the only sizes that change at run time; D width; J = 4 D, a token's streams
side by side; X = 24 mixing numbers (4 pre, 4 post, 16 comb, row-major j, k) or 4 of the head, in 32 places. Sums over a
token's entries have an order that depends on D alone, so a row's bits depend neither on N nor on G nor on its place.
Callers: `mix_sweep`.

`across` reads and writes a token once. A group of D / 256 blocks, which stay, takes 16 tokens a round; a block has 256
columns of each stream, and its part of the projection in registers. Eight warps compute. One thread has bulk copies
move a round in and out, as lines of 64 columns a token whose 16-byte chunks are permuted so that lanes meet in no bank.
A block's partial sums go to the block that has the token, one of whose warps adds them and says to all what the
token's streams are multiplied by; another warp waits for that, for all tokens of a round, which is merged four rounds
later from what lies on the chip; a third has Sinkhorn of the block's own tokens. What blocks say is three floats and
the number of the round in one access of 16 bytes, so that who finds the number has the floats; the numbers go on from
launch to launch, so nothing is cleared, and no place is written again before all have read it: no block is five rounds
ahead of another.
The mean square of the merged input is pre^T G pre, with G the streams' products with each other, which are summed with
the projection: where it cancels, the streams' own rounding moves the input by more.
"""

# Long because a program is one function, and its file imports nothing of ours.

import tilelang.language as T
from tilelang import tvm
from tilelang.language import PrimFunc

M, PLACES = 4, 32
"""Streams, and places of the mixing numbers."""

RHO, RMS = 24, 25
"""Places of 1 / rms of a token's streams, and of its merged input, beside its weights."""

THREADS, EACH = 256, 8
"""Threads of a token or a block that compute, and neighbouring entries that each takes at once."""

COLUMNS, TOKENS = 256, 16
"""Columns of a stream that a block has, and tokens of a round: two for each quad of a warp's lanes, eight apart."""

LAG, AHEAD = 4, 1
"""Rounds after which a round is merged, and rounds that are loaded ahead."""

STAGES, WIDE = LAG + AHEAD, 64
"""Rounds on the chip, and columns that two warps share, one line for each token."""

PART = TOKENS * WIDE // 2
"""Words of a round's entries in 64 columns of one stream."""

WHOLE = COLUMNS // WIDE * PART
"""Words of a round's entries in a block's columns of one stream."""

SPACES = AHEAD + 2
"""Rounds whose sublayer's outputs and weights lie on the chip; the next inputs go out from the same places."""

GATE_PACKS, PACKS, SLOTS = 5, 12, 8
"""Accesses of a token's sums: those that make its input, and all; and rounds that lie in memory at a time."""

KEPT, BARRIERS = LAG, 8
"""Rounds whose gates lie on the chip, and barriers in turn: no waiting thread is that many rounds behind."""

SENT_NS, SAID_NS = 400, 1500
"""How long sums, and what is said of them, are on their way: who asks earlier is one more whom memory has to serve."""

GRAM = ((0, 0, 0, 1), (1, 0, 2, 3), (2, 1, 1, 2), (3, 3, 1, 3), (4, 2, 2, 3))
"""Products that give all ten of G: number, one side, two of the other side."""

PAIRS = tuple((2 * i + h, one, others[h]) for i, one, *others in GRAM for h in (0, 1))
"""Place in G, and the two streams. Streams with themselves are at 0, 4, 7 and 8."""

SQUARES = M + 2 * len(GRAM)
"""Place of the streams' own sum of squares among a token's sums: pre, G, this, post and comb, this again."""

OUT, OUT_SQUARES = 3 * GATE_PACKS, 3 * PACKS - 1
"""Places of the first of post and comb, and of the squares again."""

PRELUDE = """
__device__ __forceinline__ unsigned int two_of_bf16(float low, float high) {
  unsigned int two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
__device__ __forceinline__ void move_one(void* to, float a) { *(float*)to = a; }
__device__ __forceinline__ void move_two(void* to, float a, float b) { *(float2*)to = make_float2(a, b); }
__device__ __forceinline__ void move_four(void* to, const void* from) { *(uint4*)to = *(const uint4*)from; }
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  unsigned int place = (unsigned int)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
}
__device__ __forceinline__ void put(void* to, float a, float b, float c, int round) {
  asm volatile("{ .reg .b64 low, high; .reg .b128 all; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};"
      " mov.b128 all, {low, high}; st.relaxed.gpu.global.b128 [%0], all; }"
      :: "l"(to), "r"(__float_as_int(a)), "r"(__float_as_int(b)), "r"(__float_as_int(c)), "r"(round) : "memory");
}
__device__ __forceinline__ void get(const char* from, int* word) {
  asm volatile("{ .reg .b64 low, high; .reg .b128 all; ld.relaxed.gpu.global.b128 all, [%4];"
      " mov.b128 {low, high}, all; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
      : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(from) : "memory");
}
template <int COUNT> __device__ __forceinline__ void gather(
    const void* from, int apart, int count, int round, float* sums) {
  const char* at = (const char*)from;
  int word[COUNT][4];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    word[i][0] = word[i][1] = word[i][2] = 0;
    word[i][3] = round;
    if (i < count) get(at + i * apart, word[i]);
  }
  bool all;
  int turns = 0;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (word[i][3] != round) { all = false; get(at + i * apart, word[i]); }
    if (++turns > (1 << 22)) __trap();  // seconds: a block of the group is not there
  } while (!all);
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int c = 0; c < 3; ++c) sums[c] += __int_as_float(word[i][c]);
}
"""
"""What has no name in TileLang: accesses whose order the barriers here give, where the compiler would add more; copies
to the chip that their own thread awaits; and the exchange between blocks, whose 16 bytes are one access."""


def _do(name, *operands):
    return T.call_extern("handle", name, *operands)


def _to(name, place, *operands):
    """Call with the address of a place, and numbers."""
    return T.call_extern("handle", name, T.address_of(place), *operands)


def _move(name, place, source):
    return T.call_extern("handle", name, T.address_of(place), T.address_of(source))


def _low(word):
    return T.reinterpret(word << 16, T.float32)


def _high(word):
    return T.reinterpret(word & T.uint32(0xFFFF0000), T.float32)


def _two(low, high):
    return T.call_extern("uint32", "two_of_bf16", low, high)


def _sigmoid(x):
    return T.fast_rcp(1.0 + T.exp(-x))


@T.macro
def _product(c, at, a, a_at, b, b_at):
    """c [16, 8] += a [16, 16] @ b [16, 8], of a warp."""
    T.ptx_mma(
        *("float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32"),
        *(a.data, a_at, b.data, b_at, c.data, at, T.bool(False)),
    )


@T.macro
def _products(kept, first, a, c, gram, pair, tiles: int):
    """Of eight tokens and a warp's 32 columns of each stream: with the projection, and with each other."""
    T.clear(c)
    T.clear(gram)
    for m in T.unroll(M):
        for s in T.unroll(2):
            for i in T.unroll(tiles):
                _product(c, i * 4, a, ((m * 2 + s) * tiles + i) * 4, kept, first + m * 4 + s * 2)
    for s in T.unroll(2):
        for i, one, other, another in GRAM:
            for h in T.unroll(2):
                pair[2 * h] = kept[first + other * 4 + s * 2 + h]
                pair[2 * h + 1] = kept[first + another * 4 + s * 2 + h]
            _product(gram, i * 4, pair, 0, kept, first + one * 4 + s * 2)


@T.macro
def _mix(kept, first, raw, mixing):
    """The streams after a sublayer, rounded, of those before it and its output."""
    for k in T.unroll(M):
        for h in T.unroll(EACH // 2):
            low = T.alloc_var(T.float32)
            high = T.alloc_var(T.float32)
            low = mixing[k] * _low(raw[M, h])
            high = mixing[k] * _high(raw[M, h])
            for m in T.unroll(M):
                low += mixing[M + m * M + k] * _low(raw[m, h])
                high += mixing[M + m * M + k] * _high(raw[m, h])
            kept[first + k * 4 + h] = _two(low, high)


@T.macro
def _gates(whole, q, gate, found, scaling, basis, eps, norm_eps, D: int, head: bool):
    """What each stream of a token is multiplied by to be merged; found: 1 / rms, the lane's pre, 1 / rms of the
    input."""
    found[0] = T.rsqrt(whole[SQUARES] / (M * D) + norm_eps)
    found[1] = (
        _sigmoid(
            T.if_then_else(
                q < 2, T.if_then_else(q == 0, whole[0], whole[1]), T.if_then_else(q == 2, whole[2], whole[3])
            )
            * found[0]
            * scaling
            + basis
        )
        + eps
    )
    for j in T.unroll(M):
        gate[j] = T.shfl_sync(found[1], j, width=M)
    found[2] = 1.0
    if not head:
        found[2] = 0.0
        for at, one, other in PAIRS:
            found[2] += (1.0 if one == other else 2.0) * (gate[one] * gate[other]) * whole[M + at]
        found[2] = T.rsqrt(T.max(found[2], 0.0) / D + norm_eps)
    for j in T.unroll(M):
        gate[j] *= found[2]


@T.macro
def _merge(raw, gate, n, value):
    for h in T.unroll(EACH // 2):
        value[2 * h] = gate[n, 0] * _low(raw[0, h])
        value[2 * h + 1] = gate[n, 0] * _high(raw[0, h])
        for m in T.unroll(M - 1):
            value[2 * h] += gate[n, m + 1] * _low(raw[m + 1, h])
            value[2 * h + 1] += gate[n, m + 1] * _high(raw[m + 1, h])


@T.macro
def _invert(rest, sums):
    """Reciprocals of four sums, by twos: half as many of the slow instruction."""
    for i in T.unroll(2):
        both = T.fast_rcp(sums[2 * i] * sums[2 * i + 1])
        rest[2 * i] = both * sums[2 * i + 1]
        rest[2 * i + 1] = both * sums[2 * i]


@T.macro
def _over(comb, sums, rest, eps, along, across):
    """comb over its sums `along`."""
    for i in T.unroll(M):
        sums[i] = (comb[across * i] + comb[across * i + along]) + (
            comb[across * i + 2 * along] + (comb[across * i + 3 * along] + eps)
        )
    _invert(rest, sums)
    for i in T.unroll(M):
        for j in T.unroll(M):
            comb[across * i + along * j] *= rest[i]


@T.macro
def _sinkhorn(comb, sums, rest, eps, iters: int):
    for j in T.unroll(M):
        top = T.max(T.max(comb[M * j], comb[M * j + 1]), T.max(comb[M * j + 2], comb[M * j + 3]))
        for k in T.unroll(M):
            comb[M * j + k] = T.exp(comb[M * j + k] - top)
        sums[j] = (comb[M * j] + comb[M * j + 1]) + (comb[M * j + 2] + comb[M * j + 3])
    _invert(rest, sums)
    for j in T.unroll(M * M):
        comb[j] = comb[j] * rest[j // M] + eps
    _over(comb, sums, rest, eps, M, 1)
    for _ in T.serial(iters - 1):
        _over(comb, sums, rest, eps, 1, M)
        _over(comb, sums, rest, eps, M, 1)


def _streams(streams, N, D):
    """How a bulk copy takes a block's columns of all streams of a round's tokens: by 64 columns, streams, tokens."""
    sizes, strides, box = (WIDE, N, M, D // WIDE), (2, M * D * 2, D * 2, WIDE * 2), (WIDE, TOKENS, M, COLUMNS // WIDE)
    return T.create_tma_descriptor(9, 4, streams.data, *sizes, *strides, *box, 1, 1, 1, 1, 0, 3, 2, 0)


def _rows(rows, N, D):
    """The same of the sublayer's output or the next one's input."""
    sizes, strides, box = (WIDE, N, D // WIDE), (2, D * 2, WIDE * 2), (WIDE, TOKENS, COLUMNS // WIDE)
    return T.create_tma_descriptor(9, 3, rows.data, *sizes, *strides, *box, 1, 1, 1, 0, 3, 2, 0)


def _mixings(before, N):
    """The same of the weights of a round's tokens."""
    return T.create_tma_descriptor(7, 2, before.data, PLACES, N, 4, PLACES * 4, PLACES, TOKENS, 1, 1, 0, 3, 2, 0)


def _store(descriptor, source, *at):
    return T.call_intrin("handle", tvm.ir.Op.get("tl.tma_store"), descriptor, T.address_of(source), *at, 0, 0)


def _loads(D: int, leaves: bool, X: int, tiles: int):
    """What comes to the chip: a thread's entries of a round, and the block's columns of the projection."""
    first_word = (STAGES - 3) * M * WHOLE  # of the stages that the projection comes through before they are a round's

    @T.macro
    def load_ahead(x, f, before, ahead, of_f, mixings, full, row, round, part, N):
        """A round, by one thread."""
        stage, space, chunk = round % STAGES, round % SPACES, part * (COLUMNS // WIDE)
        T.mbarrier_arrive_expect_tx(full[stage], ((M + 1) * WHOLE + TOKENS * PLACES if leaves else M * WHOLE) * 4)
        T.tma_load(_streams(x, N, D), full[stage], T.address_of(ahead[stage * M * WHOLE]), 0, row, 0, chunk, 0)
        if leaves:
            T.tma_load(_rows(f, N, D), full[stage], T.address_of(of_f[space * WHOLE]), 0, row, chunk, 0)
            T.tma_load(_mixings(before, N), full[stage], T.address_of(mixings[space * TOKENS * PLACES]), 0, row, 0)

    @T.macro
    def load_projection(fn, ahead, thread, column):
        """A warp's 32 columns, whole lines at a time; each stream can be awaited alone."""
        for m in T.unroll(M):
            for i in T.unroll(X // 4):
                row = i * 4 + thread % 32 // 8
                place = (thread // 32 * X * M + m * X + row) * 32 + (thread % 8 ^ (row & 1)) * 4
                _move(
                    "copy_ahead",
                    ahead[first_word + place],
                    fn[row, m * D + column + thread % 8 // 2 * 16 + thread % 2 * 4],
                )
            _do("close_copies")

    @T.macro
    def split_projection(ahead, a, value, thread):
        """Into registers as the sum of two bfloat16, 16 bits of each number: rows of the upper halves, of the lower."""
        g = thread % 32 // 4
        for m in tuple(range(M)):
            _do(f"wait_copies<{M - 1 - m}>")
            T.sync_warp()
            for i in T.unroll(tiles):
                row = T.min(8 * i + g, X - 1)
                for h in T.unroll(2):
                    place = (thread // 32 * X * M + m * X + row) * 32 + ((thread % 4 * 2 + h) ^ (row & 1)) * 4
                    _move("move_four", value[h * 4], ahead[first_word + place])
                if X < 8:
                    for j in T.unroll(EACH):
                        value[j] = T.if_then_else(g < X, value[j], 0.0)
                for h in T.unroll(EACH // 2):
                    at = ((m * 2 + h // 2) * tiles + i) * 4 + h % 2 * 2
                    a[at] = _two(value[2 * h], value[2 * h + 1])
                    a[at + 1] = _two(value[2 * h] - _low(a[at]), value[2 * h + 1] - _high(a[at]))

    return load_ahead, load_projection, split_projection


def across(D: int, iters: int, leaves: bool, head: bool) -> PrimFunc:
    """Out of a sublayer with output f [N, D] and into the next: from the streams x [N, J] before it and their weights
    `before` [N, 32], the streams after it, x'_k = post_k f + sum_j comb_jk x_j; of these their projection by fn [X, J]
    before 1 / rms, raw [N, 32]; their weights [N, 32]: pre, post, comb, 1 / rms at place 24, and of the merged input at
    25; and the input sum_j pre_j x'_j [N, D], over its rms and times norm [D].

    Args:
        iters: Sinkhorn passes.
        leaves: without it x are the streams, and f, `before` and the streams after are absent.
        head: 4 mixing numbers, pre alone; no norm.

    rounds_had [G, D / 256] and sums are what the groups tell each other; zeros at first, then as they are left.
    """
    parts, (X, tiles, packs) = D // COLUMNS, (M, 1, GATE_PACKS) if head else (24, 3, PACKS)
    share = -(-TOKENS // parts)  # tokens of a round whose sums a block has
    batch = max(1, 4 // share)  # rounds whose tokens have Sinkhorn at once
    ring, outs = 2 * batch, M + M * M
    load_ahead, load_projection, split_projection = _loads(D, leaves, X, tiles)
    N, G = T.dynamic("N"), T.dynamic("G")

    @T.prim_func
    def across_kernel(
        f: T.Tensor((N if leaves else 1, D), T.bfloat16),
        x: T.Tensor((N, M * D), T.bfloat16),
        before: T.Tensor((N if leaves else 1, PLACES), T.float32),
        fn: T.Tensor((X, M * D), T.float32),
        base: T.Tensor((X,), T.float32),
        scale: T.Tensor((1 if head else 3,), T.float32),
        norm: T.Tensor((1 if head else D,), T.float32),
        eps: T.float32,
        norm_eps: T.float32,
        rounds_had: T.Tensor((G, parts), T.int32),
        sums: T.Tensor((G, SLOTS, TOKENS, parts + 1, PACKS, 4), T.int32),
        streams: T.Tensor((N if leaves else 1, M * D), T.bfloat16),
        raw_sums: T.Tensor((N, PLACES), T.float32),
        weights: T.Tensor((N, PLACES), T.float32),
        y: T.Tensor((N, D), T.bfloat16),
    ):
        # Long because a program is one function.
        with T.Kernel(G * parts, threads=THREADS + 128, prelude=PRELUDE) as block:
            ahead = T.alloc_shared((STAGES * M * WHOLE,), T.uint32)
            of_f = T.alloc_shared((SPACES * WHOLE,), T.uint32)
            partial = T.alloc_shared((THREADS // 32, 3 * packs, TOKENS + 2), T.float32)
            mixings = T.alloc_shared((SPACES * TOKENS * PLACES if leaves else 1,), T.float32)
            gates = T.alloc_shared((KEPT, TOKENS, M), T.float32)
            own = T.alloc_shared((ring, share, 3 * PACKS), T.float32)
            norms = T.alloc_shared((COLUMNS,), T.float32)
            bases = T.alloc_shared((X,), T.float32)
            full = T.alloc_barrier([1] * STAGES)  # a round is there, and the place of the last input but two is free
            merged = T.alloc_barrier([THREADS // 32] * BARRIERS)  # one before it is merged
            ready = T.alloc_barrier([THREADS // 32] * BARRIERS)  # partial sums of a round are there
            sent = T.alloc_barrier([THREADS // 32] * BARRIERS)  # ... are with the group
            known = T.alloc_barrier([1] * BARRIERS)  # what its tokens' streams are multiplied by is here
            summed = T.alloc_barrier([1] * ring)  # sums of the block's own tokens are here
            free = T.alloc_barrier([1] * 2)  # ... have been read
            thread = T.get_thread_binding()
            group, part = block // parts, block % parts
            rounds = T.alloc_var(T.int32)
            had = T.alloc_var(T.int32)
            rounds = (T.ceildiv(N, TOKENS) - group + G - 1) // G
            if (
                norm_eps < 0.0
            ):  # never; a program that may wait for its whole grid has all of its blocks started at once
                T.sync_grid()
            if thread < THREADS:
                T.inc_max_nreg(192 if leaves else 184)
                a = T.alloc_local((M * 2 * tiles * 4,), T.uint32)
                c = T.alloc_local((tiles * 4,), T.float32)
                gram = T.alloc_local((len(GRAM) * 4,), T.float32)
                square = T.alloc_local((2,), T.float32)
                raw = T.alloc_local((M + 1, 4), T.uint32)
                kept = T.alloc_local((2 * M * 4,), T.uint32)
                pair = T.alloc_local((4,), T.uint32)
                mixing = T.alloc_local((outs,), T.float32)
                value = T.alloc_local((EACH,), T.float32)
                total = T.alloc_local((3,), T.float32)
                of_norm = T.alloc_local((EACH,), T.float32)
                gate = T.alloc_local((2, M), T.float32)
                warp, lane = thread // 32, thread % 32
                g, q = lane // 4, lane % 4  # a lane's tokens are g and g + 8
                chunk = q * 2 + warp % 2  # of eight; the lanes that access at once meet in no bank
                mine = g * WIDE // 2 + (chunk ^ g) * 4

                had = rounds_had[group, part]
                if rounds > 0:
                    load_projection(fn, ahead, thread, part * COLUMNS + warp // 2 * WIDE + warp % 2 * EACH)
                if not head:
                    _to("move_one", norms[thread], norm[part * COLUMNS + thread])
                if rounds > 0:
                    split_projection(ahead, a, value, thread)
                T.sync_threads(1, THREADS)
                for r in T.serial(rounds + LAG):
                    if r >= LAG:
                        past = r - LAG
                        T.mbarrier_wait_parity(known[past % BARRIERS], past // BARRIERS & 1)
                        for n in T.unroll(2):
                            _move("move_four", gate[n, 0], gates[past % KEPT, n * 8 + g, 0])
                            for m in T.unroll(M):
                                place = (
                                    ((past % STAGES * (COLUMNS // WIDE) + warp // 2) * M + m) * PART
                                    + n * PART // 2
                                    + mine
                                )
                                _move("move_four", raw[m, 0], ahead[place])
                            _merge(raw, gate, n, value)
                            if not head:
                                for h in T.unroll(2):
                                    _move("move_four", of_norm[h * 4], norms[warp // 2 * WIDE + chunk * EACH + h * 4])
                                for j in T.unroll(EACH):
                                    value[j] *= of_norm[j]
                            for h in T.unroll(EACH // 2):
                                pair[h] = _two(value[2 * h], value[2 * h + 1])
                            place = ((r - 1) % SPACES * (COLUMNS // WIDE) + warp // 2) * PART + n * PART // 2 + mine
                            _move("move_four", of_f[place], pair[0])
                        T.fence_proxy_async()
                    T.sync_warp()
                    if lane == 0:
                        T.mbarrier_arrive(merged[r % BARRIERS])
                    T.mbarrier_wait_parity(full[r % STAGES], r // STAGES & 1)
                    if r < rounds:
                        for n in T.unroll(2):
                            for m in T.unroll(M):
                                place = (
                                    ((r % STAGES * (COLUMNS // WIDE) + warp // 2) * M + m) * PART + n * PART // 2 + mine
                                )
                                if leaves:
                                    _move("move_four", raw[m, 0], ahead[place])
                                else:
                                    _move("move_four", kept[n * 16 + m * 4], ahead[place])
                            if leaves:
                                place = (r % SPACES * (COLUMNS // WIDE) + warp // 2) * PART + n * PART // 2 + mine
                                _move("move_four", raw[M, 0], of_f[place])
                                for i in T.unroll(outs // 4):
                                    place = (r % SPACES * TOKENS + n * 8 + g) * PLACES + ((i + 1) ^ g) * 4
                                    _move("move_four", mixing[i * 4], mixings[place])
                                _mix(kept, n * 16, raw, mixing)
                                for m in T.unroll(M):
                                    place = (
                                        (r % STAGES * (COLUMNS // WIDE) + warp // 2) * M + m
                                    ) * PART + n * PART // 2
                                    _move("move_four", ahead[place + mine], kept[n * 16 + m * 4])
                        if leaves:
                            T.fence_proxy_async()
                        for n in T.unroll(2):
                            _products(kept, n * 16, a, c, gram, pair, tiles)
                            if n == 0:  # until here the round before may have been read
                                last = r + BARRIERS - 1
                                T.mbarrier_wait_parity(sent[last % BARRIERS], (last // BARRIERS & 1) ^ 1)
                            for i in tuple(range(tiles)):
                                row = (g if head else T.if_then_else(g < M, g, g + 11)) if i == 0 else 8 * i + g + 11
                                if not head or g < M:
                                    one, other = c[i * 4] + c[i * 4 + 2], c[i * 4 + 1] + c[i * 4 + 3]
                                    _to("move_two", partial[warp, row, n * 8 + q * 2], one, other)
                            if q == g // 2:  # who has a token's products with itself
                                for h in T.unroll(2):
                                    square[h] = (gram[h] + gram[8 + h]) + (gram[14 + h] + gram[16 + h])
                                for row in (SQUARES,) if head else (SQUARES, 3 * packs - 1):
                                    odd = T.if_then_else(g % 2 == 0, square[0], square[1])
                                    _to("move_one", partial[warp, row, n * 8 + g], odd)
                                for i in T.unroll(2 * len(GRAM)):
                                    odd = T.if_then_else(g % 2 == 0, gram[i * 2], gram[i * 2 + 1])
                                    _to("move_one", partial[warp, M + i, n * 8 + g], odd)
                        T.sync_warp()
                        if lane == 0:
                            T.mbarrier_arrive(ready[r % BARRIERS])
                    if r < rounds:
                        T.mbarrier_wait_parity(ready[r % BARRIERS], r // BARRIERS & 1)
                        token, pack = thread // packs, thread % packs
                        if token < TOKENS:
                            for i in T.unroll(3):
                                for w in T.unroll(8):
                                    value[w] = partial[w, pack * 3 + i, token]
                                total[i] = ((value[0] + value[1]) + (value[2] + value[3])) + (
                                    (value[4] + value[5]) + (value[6] + value[7])
                                )
                            _to(
                                *("put", sums[group, (had + r) & (SLOTS - 1), token, part, pack, 0]),
                                *(total[0], total[1], total[2], had + r + 1),
                            )
                        T.sync_warp()
                        if lane == 0:
                            T.mbarrier_arrive(sent[r % BARRIERS])
            else:
                T.dec_max_nreg(120 if leaves else 136)
                e, lane = thread - THREADS, thread % 32
                three = T.alloc_local((3,), T.float32)
                had = rounds_had[group, part]
                if e < 32:  # sums of the block's own tokens, by halves of the group
                    whole = T.alloc_local((3 * GATE_PACKS,), T.float32)
                    gate = T.alloc_local((M,), T.float32)
                    found = T.alloc_local((3,), T.float32)
                    half, pack, q = lane // 16, lane % 16, lane % M
                    scaling = scale[0]
                    basis = base[q]
                    for r in T.serial(T.if_then_else(part * share < TOKENS, rounds, 0)):
                        if not head and r >= ring and r % batch == 0:
                            old = r // batch - 2
                            T.mbarrier_wait_parity(free[old % 2], old // 2 & 1)
                        T.mbarrier_wait_parity(sent[r % BARRIERS], r // BARRIERS & 1)
                        if r + 1 < rounds:
                            _do("__nanosleep", SENT_NS)
                        for o in T.serial(share):
                            if part * share + o < TOKENS:
                                place = part * share + o
                                for i in T.unroll(3):
                                    three[i] = 0.0
                                if pack < packs:
                                    _to(
                                        f"gather<{-(-parts // 2)}>",
                                        sums[group, (had + r) & (SLOTS - 1), place, half, pack, 0],
                                        *(2 * PACKS * 16, (parts - half + 1) // 2, had + r + 1, T.address_of(three[0])),
                                    )
                                for i in T.unroll(3):
                                    three[i] += T.shfl_xor(three[i], 16)
                                if lane < packs:
                                    for i in T.unroll(3):
                                        _to("move_one", own[r % ring, o, pack * 3 + i], three[i])
                                T.sync_warp()
                                for i in T.unroll(3 * GATE_PACKS):
                                    whole[i] = own[r % ring, o, i]
                                _gates(whole, q, gate, found, scaling, basis, eps, norm_eps, D, head)
                                if lane < 2:
                                    _to(
                                        "put",
                                        sums[group, (had + r) & (SLOTS - 1), place, parts, lane, 0],
                                        *(T.if_then_else(lane == 0, gate[0], gate[3]), gate[1], gate[2], had + r + 1),
                                    )
                                token = (r * G + group) * TOKENS + place
                                if lane < M and token < N:
                                    weights[token, q] = found[1]
                                    raw_sums[token, q] = own[r % ring, o, q]
                                    if q == 0:
                                        weights[token, RHO] = found[0]
                                        if not head:
                                            weights[token, RMS] = found[2]
                        T.sync_warp()
                        if lane == 0:
                            T.mbarrier_arrive(summed[r % ring])
                elif e < 64:  # what all tokens' streams are multiplied by
                    for r in T.serial(rounds):
                        T.mbarrier_wait_parity(sent[r % BARRIERS], r // BARRIERS & 1)
                        if r + 1 < rounds:
                            _do("__nanosleep", SAID_NS)
                        for i in T.unroll(3):
                            three[i] = 0.0
                        _to(
                            *("gather<1>", sums[group, (had + r) & (SLOTS - 1), lane // 2, parts, lane % 2, 0]),
                            *(0, 1, had + r + 1, T.address_of(three[0])),
                        )
                        if lane % 2 == 0:
                            for i in T.unroll(3):
                                _to("move_one", gates[r % KEPT, lane // 2, i], three[i])
                        else:
                            _to("move_one", gates[r % KEPT, lane // 2, 3], three[0])
                        T.sync_warp()
                        if lane == 0:
                            T.mbarrier_arrive(known[r % BARRIERS])
                    if lane == 0 and rounds > 0:  # who sums has read the number, for its tokens' are among these
                        rounds_had[group, part] = had + rounds
                elif e < 96:
                    if lane == 0:
                        chunk = part * (COLUMNS // WIDE)
                        for s in tuple(range(AHEAD)):
                            if s < rounds:
                                row = (s * G + group) * TOKENS
                                load_ahead(x, f, before, ahead, of_f, mixings, full, row, s, part, N)
                            else:
                                T.mbarrier_arrive(full[s])
                        for r in T.serial(rounds + LAG):
                            T.mbarrier_wait_parity(merged[r % BARRIERS], r // BARRIERS & 1)
                            T.tma_store_wait(int(leaves))
                            if r + AHEAD < rounds:
                                row = ((r + AHEAD) * G + group) * TOKENS
                                load_ahead(x, f, before, ahead, of_f, mixings, full, row, r + AHEAD, part, N)
                            else:  # nothing comes, but what went out from its place has been read
                                T.mbarrier_arrive(full[(r + AHEAD) % STAGES])
                            if r >= LAG:
                                row = ((r - LAG) * G + group) * TOKENS
                                _store(_rows(y, N, D), of_f[(r - 1) % SPACES * WHOLE], 0, row, chunk)
                            T.tma_store_arrive()
                            if leaves:
                                if r < rounds:
                                    row = (r * G + group) * TOKENS
                                    T.mbarrier_wait_parity(ready[r % BARRIERS], r // BARRIERS & 1)
                                    _store(_streams(streams, N, D), ahead[r % STAGES * M * WHOLE], 0, row, 0, chunk)
                                T.tma_store_arrive()  # of nothing too: so many are waited for
                        T.tma_store_wait(0)
                elif not head:
                    comb = T.alloc_local((M * M,), T.float32)
                    rest = T.alloc_local((M,), T.float32)
                    added = T.alloc_local((M,), T.float32)
                    rho = T.alloc_var(T.float32)
                    if lane < X:
                        _to("move_one", bases[lane], base[lane])
                    T.sync_warp()
                    if part * share < TOKENS:
                        for turn in T.serial(T.ceildiv(rounds, batch)):
                            count = T.min(rounds - turn * batch, batch)
                            last = turn * batch + count - 1
                            T.mbarrier_wait_parity(summed[last % ring], last // ring & 1)
                            mine, o = turn * batch + lane // share, lane % share
                            first = (mine * G + group) * TOKENS + part * share + o
                            if lane < count * share and part * share + o < TOKENS and first < N:
                                rho = T.rsqrt(own[mine % ring, o, OUT_SQUARES] / (M * D) + norm_eps)
                                for i in T.unroll(M * M):
                                    comb[i] = own[mine % ring, o, OUT + M + i] * rho * scale[2] + bases[2 * M + i]
                                _sinkhorn(comb, added, rest, eps, iters)
                                for i in T.unroll(M):
                                    for j in T.vectorized(M):
                                        weights[first, 2 * M + i * M + j] = comb[i * M + j]
                            for s in T.unroll(-(-batch * share * outs // 32)):
                                late, i = (s * 32 + lane) // outs, (s * 32 + lane) % outs
                                mine, o = turn * batch + late // share, late % share
                                first = (mine * G + group) * TOKENS + part * share + o
                                if late < count * share and part * share + o < TOKENS and first < N:
                                    raw_sums[first, M + i] = own[mine % ring, o, OUT + i]
                                    if i < M:
                                        rho = T.rsqrt(own[mine % ring, o, OUT_SQUARES] / (M * D) + norm_eps)
                                        logit = own[mine % ring, o, OUT + i] * rho * scale[1] + bases[M + i]
                                        weights[first, M + i] = 2.0 * _sigmoid(logit)
                            T.sync_warp()
                            if lane == 0:
                                T.mbarrier_arrive(free[turn % 2])

    return across_kernel


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
