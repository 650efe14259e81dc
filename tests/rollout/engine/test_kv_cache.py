"""Proves: who has a cache, who shares one and who loses it changes no bit. Random arrivals, lengths, orders of answers,
limits and tiny caches against a dense forward without a cache; slots, blocks and owners are counted after every step.

The small model has blocks of 8 tokens, so that short sequences cross many of them. The log is read at the end: nothing
is lost, logged twice or opened twice by preemption. Not here: files of key-values (test_kv_store.py).
"""

import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.cache import block_tokens, cache_bytes
from rollforward.model.config import CompressRates, ModelConfig
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.routing import Routing
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import build_weights
from rollforward.rollout.engine.kv_store import KvStore
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.engine.pool import CachePool
from rollforward.rollout.engine.sampler import draw_tokens, kept_mask, signed_seed
from rollforward.rollout.environment import Observation
from rollforward.rollout.errors import EngineError, EngineInputError, PausedError
from rollforward.rollout.types import Completion, Request, RequestId, SamplingParams, ToolUse, request_seed
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_recovery import recover
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.replicas import open_engine, packed_params
from tests.helpers.tiny import tiny_config

VOCAB = 12
CONFIG: ModelConfig = msgspec.structs.replace(
    tiny_config(),
    vocab_size=VOCAB,
    num_hidden_layers=3,
    hc_sinkhorn_iters=2,
    compress_rates=CompressRates(compressed_sparse_attention=4, heavily_compressed_attention=8),
    compress_ratios=(0, 4, 8, 0),
    sliding_window=6,
    index_topk=3,
)
BLOCK = 8
TOOLS = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
# Tokens that a prompt has in common with the others, and of its own: beginnings that end on, before and behind a block.
PROMPTS = [(0, 1), (8, 1), (8, 0), (16, 3), (17, 2), (24, 0), (25, 8), (0, 33)]
MEMBERS = 3


def _requests(version: int = 1) -> list[Request]:
    """Groups with and without tools, with and without routes; members differ in their cut of the vocabulary."""
    common = np.random.default_rng(0).integers(2, VOCAB, 64).astype(np.int32)
    requests: list[Request] = []
    for prompt, (num_common, num_own) in enumerate(PROMPTS):
        own = np.random.default_rng(1 + prompt).integers(2, VOCAB, num_own).astype(np.int32)
        for member in range(MEMBERS):
            request = Request(
                id=RequestId(0, prompt, member),
                prompt_ids=np.concatenate((common[:num_common], own)),
                seed=request_seed(7, 0, prompt, member),
                sampling=SamplingParams(max_new_tokens=3 + 5 * member, top_k=4 if member == 1 else 0),
                policy_version=version,
                tools=TOOLS if prompt % 3 else None,
                record_routes=prompt % 2 == 1,
            )
            requests.append(request)
    return requests


LARGEST = max(-(-request.max_tokens // BLOCK) for request in _requests())


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    return packed_params(CONFIG)


def _open(
    directory: Path, packed: dict[str, PackedTensor], order: int | None = None, **limits: Any
) -> tuple[LocalEngine, WalWriter]:
    environment = ScriptedEnvironment(VOCAB, order=order)
    return open_engine(directory, packed, model_config=CONFIG, environment=environment, **limits)


@pytest.fixture(scope="module")
def undisturbed(packed: dict[str, PackedTensor], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    engine, log = _open(tmp_path_factory.mktemp("log"), packed, prefix_sharing=False)
    with log:
        completions = engine.generate(_requests())
        assert engine.cache_stats().preemptions == engine.cache_stats().prefix_hits == 0
    return completions


def test_the_engine_without_limits_is_the_dense_model(
    packed: dict[str, PackedTensor], undisturbed: list[Completion]
) -> None:
    """One forward over each finished sequence, without a cache, gives every token, log-prob and route."""
    assert block_tokens(CONFIG) == BLOCK
    transformer = Transformer(CONFIG, "native")
    weights = build_weights(CONFIG, {name: unpack_published(tensor) for name, tensor in packed.items()})
    assert max(len(completion.turns) for completion in undisturbed) > 1
    for request, completion in zip(_requests(), undisturbed, strict=True):
        tokens = torch.tensor(np.concatenate((request.prompt_ids, completion.token_ids)), dtype=torch.int64)
        routing = Routing(CONFIG)
        with torch.no_grad():
            streams = transformer.streams(weights, tokens, packed_batch(CONFIG, [len(tokens)]), routing=routing)
            logits_TV = transformer.logits(weights, transformer.hidden(weights, streams))
        position_T = torch.tensor(np.flatnonzero(completion.sampled_mask) + request.prompt_ids.size)
        rows_TV = logits_TV[position_T - 1]
        top_k_T = torch.full_like(position_T, request.sampling.top_k)
        cut_TV = rows_TV.masked_fill(~kept_mask(rows_TV, torch.ones(len(rows_TV)).double(), top_k_T), -torch.inf)
        seed_T = torch.full_like(position_T, signed_seed(request.seed))
        drawn_T = draw_tokens(cut_TV, seed_T, position_T, torch.ones(len(position_T)))
        assert drawn_T.tolist() == completion.token_ids[completion.sampled_mask].tolist()
        logprob_T, _ = token_logprob(cut_TV, drawn_T, temperature=1.0)
        assert logprob_T.numpy().tobytes() == completion.behavior_logprobs[completion.sampled_mask].tobytes()
        if request.record_routes:
            assert completion.routes is not None
            assert completion.routes[:-1].tolist() == routing.taken_TLK()[:-1].tolist()


class _Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests come in which call, and what the engine may use."""

    calls: tuple[tuple[int, ...], ...]
    max_batch_requests: int
    prefill_chunk_tokens: int
    spare_blocks: int
    prefix_sharing: bool
    answers: int | None


@st.composite
def _arrivals(draw: st.DrawFn, most: int) -> _Arrivals:
    chosen = draw(st.lists(st.integers(0, len(PROMPTS) * MEMBERS - 1), min_size=2, max_size=most, unique=True))
    cut = draw(st.integers(1, len(chosen)))
    return _Arrivals(
        calls=tuple(filter(None, (tuple(chosen[:cut]), tuple(chosen[cut:])))),
        max_batch_requests=draw(st.integers(1, 6)),
        prefill_chunk_tokens=draw(st.sampled_from([1, 3, 8, 11, 100])),
        spare_blocks=draw(st.integers(0, 6)),
        prefix_sharing=draw(st.sampled_from([True, True, False])),
        answers=draw(st.none() | st.integers(0, 99)),
    )


def _run(packed: dict[str, PackedTensor], undisturbed: list[Completion], arrivals: _Arrivals) -> LocalEngine:
    requests = _requests()
    with TemporaryDirectory() as directory:
        engine, log = _open(
            Path(directory),
            packed,
            arrivals.answers,
            max_batch_requests=arrivals.max_batch_requests,
            prefill_chunk_tokens=arrivals.prefill_chunk_tokens,
            cache_blocks=LARGEST + arrivals.spare_blocks,
            prefix_sharing=arrivals.prefix_sharing,
        )
        with log:
            for call in arrivals.calls:
                answers = engine.generate([requests[index] for index in call])
                assert answers == [undisturbed[index] for index in call]
        held = recover(Path(directory))
    assert held.problems == ()
    for index in [index for call in arrivals.calls for index in call]:
        logged, completion = held.requests[requests[index].id], undisturbed[index]
        assert logged.num_openings == 1
        assert logged.token_ids.tolist() == completion.token_ids[completion.sampled_mask].tolist()
    return engine


@settings(max_examples=6, deadline=None)
@given(arrivals=_arrivals(8))
def test_no_bit_depends_on_who_had_a_cache(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], arrivals: _Arrivals
) -> None:
    _run(packed, undisturbed, arrivals)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=400, deadline=None)
@given(arrivals=_arrivals(len(PROMPTS) * MEMBERS))
def test_no_bit_depends_on_who_had_a_cache_at_length(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], arrivals: _Arrivals
) -> None:
    _run(packed, undisturbed, arrivals)


@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_a_cache_for_one_serves_all(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], prefix_sharing: bool
) -> None:
    """As many blocks as the longest request alone needs; keeps the property above from proving nothing."""
    everything = _Arrivals(
        calls=(tuple(range(len(undisturbed))),),
        max_batch_requests=6,
        prefill_chunk_tokens=11,
        spare_blocks=0,
        prefix_sharing=prefix_sharing,
        answers=3,
    )
    stats = _run(packed, undisturbed, everything).cache_stats()
    assert stats.preemptions > 2
    assert (stats.prefix_hits > 2) == prefix_sharing


def test_a_sequence_takes_the_bytes_that_the_layout_says(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Of real storage, slot and blocks, after every step; model/cache.py's account is that of the published layouts."""
    engine, log = _open(tmp_path, packed, max_batch_requests=6, prefix_sharing=False)
    inside: Any = engine
    says = cache_bytes(CONFIG, packed=False)
    lengths: set[int] = set()

    def measure() -> None:
        storage = inside._forward.storage
        for sequence in inside._scheduler.opened:
            if sequence.slot >= 0 and sequence.num_missing == 1:
                taken = sum(
                    plane[list(sequence.blocks) if name.endswith("entries") else [sequence.slot]].nbytes
                    for name, plane in storage.items()
                )
                assert taken == says.of_sequence(sequence.num_cached)
                lengths.add(sequence.num_cached)

    engine.check_integrity = measure  # type: ignore[method-assign]
    with log:
        assert engine.generate(_requests()) == undisturbed
    assert {length % BLOCK for length in lengths} == set(range(BLOCK))
    assert max(lengths) > 4 * BLOCK


def test_a_block_too_many_is_found(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    engine, log = _open(tmp_path, packed)
    grow = CachePool.grow
    with log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachePool, "grow", lambda pool, slot, tokens: grow(pool, slot, tokens + BLOCK))
        with pytest.raises(EngineError, match="blocks for"):
            engine.generate(_requests()[:1])


def test_later_members_and_other_prompts_start_behind_what_is_kept(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Two prompts share 24 tokens (three blocks) and end at 24 and 33: the snapshot of the first is at 16."""
    requests = _requests()
    engine, log = _open(tmp_path, packed, max_batch_requests=1, cache_blocks=LARGEST)
    with log:
        for index in (15, 16, 17):
            assert engine.generate([requests[index]]) == [undisturbed[index]]
        stats = engine.cache_stats()
        assert (stats.prefix_hits, stats.prefix_tokens) == (2, 32)
        assert engine.generate([requests[18]]) == [undisturbed[18]]


def test_a_prefix_without_routes_is_not_for_a_request_that_records_them(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = _requests()
    silent = msgspec.structs.replace(requests[15], id=RequestId(1, 5, 0), record_routes=False)
    engine, log = _open(tmp_path, packed, cache_blocks=LARGEST)
    with log:
        engine.generate([silent])
        assert engine.generate([requests[15]]) == [undisturbed[15]]
        assert engine.cache_stats().prefix_hits == 0
        again = msgspec.structs.replace(silent, id=RequestId(1, 5, 1))
        engine.generate([again])
        assert engine.cache_stats().prefix_hits == 1


def test_nothing_of_older_weights_is_used(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    """The same prompts under other weights: were a prefix of version 1 taken, the tokens would be others."""
    other = packed_params(CONFIG, seed=2)
    fresh, log = _open(tmp_path / "fresh", other, prefix_sharing=False)
    fresh.load_weights(2, other)
    with log:
        expected = fresh.generate(_requests(version=2)[9:18])
    engine, log = _open(tmp_path / "kept", packed, max_batch_requests=2)
    with log:
        engine.generate(_requests()[9:18])
        hits = engine.cache_stats().prefix_hits
        engine.load_weights(2, other)
        requests = [
            msgspec.structs.replace(request, id=msgspec.structs.replace(request.id, step=1))
            for request in _requests(version=2)[9:18]
        ]
        answers = engine.generate(requests)
        assert engine.cache_stats().prefix_hits > hits > 0
    for answer, wanted in zip(answers, expected, strict=True):
        assert msgspec.structs.replace(answer, id=wanted.id) == wanted


class _HeldBack(ScriptedEnvironment):
    """Answers the requests of one prompt only when nothing else can be answered, and then it must be allowed."""

    def __init__(self, prompt: int, is_allowed: Callable[[], bool]) -> None:
        super().__init__(VOCAB)
        self._prompt, self._is_allowed = prompt, is_allowed

    def collect(self, *, block: bool) -> list[Observation]:
        ready = [one for one in self._pending if one.id.prompt != self._prompt]
        if not ready and block:
            assert self._is_allowed(), "the engine waits for a tool while others could run"
            ready = list(self._pending)
        self._pending = [one for one in self._pending if one not in ready]
        return ready


def test_who_waits_for_a_tool_makes_room_for_who_can_run(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """A tool keeps requests 3..5 waiting, older than all others, until every other one is over."""
    requests = _requests()
    chosen = [3, 4, 5, 0, 9, 18, 19, 20]
    assert any(len(undisturbed[index].turns) > 1 for index in (3, 4, 5))
    closed: list[object] = []
    environment = _HeldBack(1, lambda: len(closed) >= 5)
    engine, log = open_engine(
        tmp_path,
        packed,
        model_config=CONFIG,
        environment=environment,
        cache_blocks=LARGEST,
        max_batch_requests=len(chosen),
    )
    append_close = log.append_close

    def counted(*args: object, **kwargs: object) -> int:
        closed.append(args)
        return append_close(*args, **kwargs)  # type: ignore[arg-type]

    log.append_close = counted  # type: ignore[method-assign]
    with log:
        assert engine.generate([requests[index] for index in chosen]) == [undisturbed[index] for index in chosen]


def test_a_request_that_alone_does_not_fit_is_refused_before_anything_starts(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    requests = _requests()
    largest = max(requests, key=lambda request: request.max_tokens)
    engine, log = _open(tmp_path, packed, cache_blocks=LARGEST - 1)
    with log:
        with pytest.raises(EngineInputError, match=f"Set it to {LARGEST} or more"):
            engine.generate([requests[0], largest])
        assert len(engine.generate(requests[:1])) == 1
    assert set(recover(tmp_path).requests) == {requests[0].id}


def _pause_at(engine: LocalEngine, log: WalWriter, number: int) -> None:
    """Pause from another thread when the step of this number is logged."""
    append, left = log.append_step, [number]

    def counted(*args: object, **kwargs: object) -> int:
        left[0] -= 1
        if left[0] == 0:
            thread = threading.Thread(target=engine.pause)
            thread.start()
            thread.join()
        return append(*args, **kwargs)  # type: ignore[arg-type]

    log.append_step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(("number", "blocks"), [(1, None), (4, None), (9, LARGEST + 4), (14, LARGEST)])
@pytest.mark.parametrize("saves", [True, False])
def test_paused_requests_go_on_with_their_key_values_or_without(
    packed: dict[str, PackedTensor],
    undisturbed: list[Completion],
    tmp_path: Path,
    number: int,
    blocks: int | None,
    saves: bool,
) -> None:
    requests = _requests()
    store = KvStore(tmp_path / "kv", CONFIG, "native", max_bytes=1 << 30)
    engine, log = _open(tmp_path / "log", packed, 5, cache_blocks=blocks)
    _pause_at(engine, log, number)
    with pytest.raises(PausedError):
        engine.generate(requests)
    num_saved = engine.save_kv(store) if saves else 0
    assert (num_saved > 0) == saves
    log.abandon()  # what was drawn was durable before PausedError came
    drawn = sum(len(request.token_ids) for request in recover(tmp_path / "log").requests.values())
    assert drawn > 0
    store = KvStore(tmp_path / "kv", CONFIG, "native", max_bytes=1 << 30)
    environment = ScriptedEnvironment(VOCAB)
    engine, log = open_engine(
        tmp_path / "log", packed, model_config=CONFIG, environment=environment, kv_store=store, cache_blocks=blocks
    )
    with log:
        assert engine.generate(requests) == undisturbed
        assert engine.resume_stats().tokens == drawn
    assert recover(tmp_path / "log").problems == ()


def test_a_paused_engine_takes_nothing_and_one_that_runs_saves_nothing(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    engine, log = _open(tmp_path / "log", packed)
    store = KvStore(tmp_path / "kv", CONFIG, "native", max_bytes=1 << 30)
    with log:
        with pytest.raises(EngineError, match="not paused"):
            engine.save_kv(store)
        engine.pause()
        with pytest.raises(PausedError):
            engine.generate(_requests()[:1])
        assert engine.save_kv(store) == 0
    assert recover(tmp_path / "log").requests == {}
