"""Proves: the engine samples what the model and the keyed sampler say, whatever the batch, the limits or a crash.

Every completion is compared bit for bit, log-probs included. Not here: the log's own faults (test_wal_*.py).
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.transformer import Model
from rollforward.rollout.engine.sampler import draw_tokens, signed_seed
from rollforward.rollout.errors import EngineError, EngineInputError, WalStalledError
from rollforward.rollout.types import Completion, FailureType, Request, ResumeStats, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_records import RecordType
from rollforward.rollout.wal_recovery import recover
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    frame_seed,
    parse_segment_header,
    scan_frames,
)
from tests.helpers.replicas import make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config

LENGTHS = [1, 5, 17, 33, 66]


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    return packed_params(tiny_config())


@pytest.fixture(scope="module")
def undisturbed(packed: dict[str, PackedTensor], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    engine, log = open_engine(tmp_path_factory.mktemp("log"), packed)
    with log:
        return engine.generate(make_requests(LENGTHS, members=2))


def test_completions_are_what_model_and_sampler_say(
    packed: dict[str, PackedTensor], undisturbed: list[Completion]
) -> None:
    """The oracle recomputes every prefix from position 0 in one dense forward, without a cache or an engine."""
    config = tiny_config()
    model = Model(config, {name: unpack_published(tensor) for name, tensor in packed.items()}, precision="native")
    for request, completion in zip(make_requests(LENGTHS, members=2), undisturbed, strict=True):
        tokens = np.concatenate((request.prompt_ids, completion.token_ids))
        logits_TV = model.logits(torch.tensor(tokens[None], dtype=torch.int64))[0, request.prompt_ids.size - 1 : -1]
        positions = torch.arange(request.prompt_ids.size, tokens.size)
        seeds = torch.full_like(positions, signed_seed(request.seed))
        drawn = draw_tokens(logits_TV, seeds, positions, torch.ones(len(positions)))
        assert drawn.tolist() == completion.token_ids.tolist()
        logprobs, _ = token_logprob(logits_TV, drawn, temperature=1.0)
        assert logprobs.numpy().tobytes() == completion.behavior_logprobs.tobytes()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_requests": 1},
        {"max_batch_requests": 3},
        {"prefill_chunk_tokens": 1},
        {"prefill_chunk_tokens": 7},
        {"max_batch_requests": 5, "prefill_chunk_tokens": 33},
    ],
)
def test_limits_change_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, limits: dict[str, int]
) -> None:
    engine, log = open_engine(tmp_path, packed, **limits)
    with log:
        assert engine.generate(make_requests(LENGTHS, members=2)) == undisturbed


def test_order_and_company_change_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)
    with log:
        reverse = engine.generate(requests[::-1][:6])
        alone = [engine.generate([request])[0] for request in requests[: len(requests) - 6]]
    assert [*alone, *reverse[::-1]] == undisturbed


def test_greedy_takes_the_largest_logit_and_logs_at_temperature_one(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    config = tiny_config()
    model = Model(config, {name: unpack_published(tensor) for name, tensor in packed.items()}, precision="native")
    engine, log = open_engine(tmp_path, packed)
    with log:
        (completion,) = engine.generate(make_requests([9], temperature=0.0, max_new_tokens=4))
    request = make_requests([9])[0]
    tokens = torch.tensor(np.concatenate((request.prompt_ids, completion.token_ids))[None], dtype=torch.int64)
    logits_TV = model.logits(tokens)[0, 8:-1]
    assert logits_TV.argmax(-1).tolist() == completion.token_ids.tolist()
    expected = torch.log_softmax(logits_TV.double(), -1).max(-1).values
    assert np.allclose(completion.behavior_logprobs, expected.numpy(), atol=1e-5)


class _CrashError(Exception):
    """The process ended here."""


def _crash_after(log: WalWriter, steps: int) -> None:
    """Let the writer take `steps` more decode steps and fail at the next one, before it is logged."""
    append, left = log.append_step, [steps]

    def counted(*args: object, **kwargs: object) -> int:
        if left[0] == 0:
            raise _CrashError
        left[0] -= 1
        return append(*args, **kwargs)  # type: ignore[arg-type]

    log.append_step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 11])
def test_a_crash_at_every_decode_step_changes_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, steps: int
) -> None:
    """Whatever became durable is kept, the rest is drawn again; nothing is lost, doubled or different."""
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)
    _crash_after(log, steps)
    with pytest.raises(_CrashError):
        engine.generate(requests)
    with pytest.raises(EngineError, match="an earlier generate raised"):
        engine.generate(requests)
    log.abandon()
    held = recover(tmp_path)
    engine, log = open_engine(tmp_path, packed, max_batch_requests=5)
    with log:
        assert engine.generate(requests) == undisturbed
    after = recover(tmp_path)
    for identity, request in held.requests.items():
        kept = request.token_ids
        assert after.requests[identity].token_ids[: len(kept)].tolist() == kept.tolist()
    assert sum(len(request.token_ids) for request in after.requests.values()) == sum(
        completion.token_ids.size for completion in undisturbed
    )


def test_a_disk_that_stalls_before_the_completions_leave_ends_the_replica(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Nothing runs or waits any more, but what was sampled has not left: asked again here it would be sampled twice."""
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)

    def stalls(seq: int) -> None:
        raise WalStalledError("seq is not durable")

    with log:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "wait_durable", stalls)
            with pytest.raises(WalStalledError):
                engine.generate(requests)
        with pytest.raises(EngineError, match="an earlier generate raised"):
            engine.generate(requests)
        with pytest.raises(EngineError, match="replace the replica if it raised"):
            engine.load_weights(2, packed)
    engine, log = open_engine(tmp_path, packed)
    with log:
        assert engine.generate(requests) == undisturbed
        assert engine.resume_stats().answered == len(requests)
    assert recover(tmp_path).problems == ()


def test_finished_requests_are_answered_from_the_log_without_a_forward(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)
    with log:
        engine.generate(requests)
    engine, log = open_engine(tmp_path, packed)
    _crash_after(log, 0)
    with log:
        assert engine.generate(requests) == undisturbed


def _flip_byte(directory: Path, record_type: RecordType) -> None:
    """Damage a byte of the first record of a type."""
    (segment,) = directory.glob("*.wal")
    content = segment.read_bytes()
    header = parse_segment_header(content)
    assert isinstance(header, SegmentHeader)
    scan = scan_frames(content, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(header.stream, header.epoch))
    frame = next(frame for frame in scan.frames if frame.frame_type == record_type)
    data = bytearray(content)
    data[frame.end - 9] ^= 1  # the last 8 bytes may be padding
    segment.write_bytes(data)


@pytest.mark.parametrize("record_type", [RecordType.OPEN, RecordType.STEP, RecordType.CLOSE])
def test_damaged_requests_are_sampled_again_to_the_same_bits_and_others_go_on(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, record_type: RecordType
) -> None:
    """Without its OPEN a request is known only by its later records, that is by name."""
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)
    with log:
        engine.generate(requests[:4])
    _flip_byte(tmp_path, record_type)
    damaged = recover(tmp_path)
    assert damaged.failed
    assert (set(damaged.failed) <= set(damaged.requests)) == (record_type != RecordType.OPEN)
    engine, log = open_engine(tmp_path, packed)
    with log:
        assert engine.generate(requests) == undisturbed
        assert engine.resume_stats().begun_again == len(damaged.failed)
        assert engine.resume_stats().answered == 4 - len(damaged.failed)
    after = recover(tmp_path)
    assert after.failed == {}
    assert {identity for identity, held in after.requests.items() if held.attempt == 1} == set(damaged.failed)
    for identity, held in damaged.requests.items():
        if identity in damaged.failed:
            (kept,) = [earlier for earlier in after.earlier_attempts if earlier.request.id == identity]
            assert kept.token_ids.tolist() == held.token_ids.tolist()
    engine, log = open_engine(tmp_path, packed)
    _crash_after(log, 0)
    with log:
        assert engine.generate(requests) == undisturbed


def test_a_request_that_damage_meets_at_its_last_attempt_fails_as_infra(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = make_requests(LENGTHS, members=2)
    engine, log = open_engine(tmp_path, packed)
    with log:
        engine.generate(requests[:4])
    _flip_byte(tmp_path, RecordType.STEP)
    failed = set(recover(tmp_path).failed)
    for _ in range(2):  # and stays failed
        engine, log = open_engine(tmp_path, packed, max_attempts=1)
        with log:
            answers = engine.generate(requests)
            assert engine.resume_stats().given_up == len(failed)
        for answer, expected in zip(answers, undisturbed, strict=True):
            if answer.id in failed:
                assert (answer.failure, answer.stop_reason) == (FailureType.INFRA, StopReason.ABORTED)
            else:
                assert answer == expected


def test_the_budget_left_after_a_crash_is_what_was_not_logged(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    requests = make_requests([5], max_new_tokens=6)
    engine, log = open_engine(tmp_path, packed)
    _crash_after(log, 4)
    with pytest.raises(_CrashError):
        engine.generate(requests)
    log.close()
    engine, log = open_engine(tmp_path, packed)
    with log:
        (completion,) = engine.generate(requests)
        assert engine.resume_stats() == ResumeStats(resumed=1, tokens=4, prefilled_tokens=8)
    assert completion.token_ids.size <= 6
    assert recover(tmp_path).requests[requests[0].id].num_openings == 2


def test_misuse_is_named_before_anything_starts(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    engine, log = open_engine(tmp_path, packed, version=3)
    with log:
        with pytest.raises(EngineInputError, match="asks for weights 1, the engine holds 3"):
            engine.generate(make_requests([4]))
        with pytest.raises(EngineInputError, match="max_position_embeddings"):
            engine.generate(make_requests([4], max_new_tokens=100_000, version=3))
        request = make_requests([4], version=3)[0]
        with pytest.raises(EngineInputError, match="given twice"):
            engine.generate([request, request])
        with pytest.raises(EngineError, match="versions only grow"):
            engine.load_weights(3, packed)
    assert recover(tmp_path).requests == {}


def test_other_weights_under_the_number_of_the_logged_ones_answer_nothing(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    """A model directory that changed between two commands is another version 1: neither what the log holds nor what it
    has begun may be taken for what these weights say."""
    requests = make_requests([4, 5])
    others = packed_params(tiny_config(), seed=2)
    engine, log = open_engine(tmp_path, packed)
    with log:
        (first,) = engine.generate(requests[:1])
    for asked in (requests[:1], requests[1:]):
        engine, log = open_engine(tmp_path, others)
        with log:
            with pytest.raises(EngineInputError, match="weights 1 are others than those of that number in the log"):
                engine.generate(asked)
            with pytest.raises(EngineInputError, match="bring back the model"):
                engine.fingerprints()
    engine, log = open_engine(tmp_path, others, version=2)
    with log:
        assert engine.generate(make_requests([4, 5, 6], version=2)[2:])[0].policy_version == 2
    engine, log = open_engine(tmp_path, packed)
    with log:
        assert engine.generate(requests)[0] == first


def test_what_was_delivered_is_not_sampled_again_by_the_same_process(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    """Whoever lost an answer and asks again gets it from a new opening of the log; here it would be drawn again."""
    requests = make_requests([4, 5])
    engine, log = open_engine(tmp_path, packed)
    with log:
        (first,) = engine.generate(requests[:1])
        with pytest.raises(EngineInputError, match="given twice"):
            engine.generate(requests)
        engine.generate(requests[1:])
    assert [held.num_openings for held in recover(tmp_path).requests.values()] == [1, 1]
    engine, log = open_engine(tmp_path, packed)
    with log:
        assert engine.generate(requests)[0] == first
        with pytest.raises(EngineInputError, match="given twice"):
            engine.generate(requests[:1])


def test_a_request_of_another_run_is_refused(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    engine, log = open_engine(tmp_path, packed)
    with log:
        engine.generate(make_requests([4]))
    engine, log = open_engine(tmp_path, packed)
    other: Request = make_requests([6])[0]
    new = make_requests([4, 5])[1]
    with log:
        with pytest.raises(EngineInputError, match="another prompt, seed, sampling or tools"):
            engine.generate([new, other])
        engine.generate([new])  # nothing was started
