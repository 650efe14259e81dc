"""Proves: turns with tools change nothing about the promises. Tokens go in as they came out, bits do not depend on
batches, engines, tool delays or crashes, a call begins when its turn is durable, budgets span all turns, and every end
has its reason.

The environment is scripted (its answers are a hash of the turn); the model has a vocabulary of 12, so that turns end.
Real tools are in tests/rollout/test_tool_environment.py.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.transformer import Model
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.engine.sampler import draw_tokens, signed_seed
from rollforward.rollout.errors import EngineError, EngineInputError
from rollforward.rollout.types import Completion, FailureType, Int32Array, Request, StopReason, ToolUse
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import recover
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.replicas import make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config

VOCAB_SIZE = 12
CONFIG: ModelConfig = msgspec.structs.replace(tiny_config(), vocab_size=VOCAB_SIZE)
TOOLS = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
LENGTHS = [1, 17, 66]


def _requests(**changes: object) -> list[Request]:
    requests = make_requests(LENGTHS, members=4, max_new_tokens=28, vocab_size=VOCAB_SIZE, tools=TOOLS)
    return [msgspec.structs.replace(request, **changes) for request in requests]


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    return packed_params(CONFIG)


def _sample(
    directory: Path,
    packed: dict[str, PackedTensor],
    requests: list[Request],
    environment: ScriptedEnvironment | None = None,
    **limits: int,
) -> list[Completion]:
    environment = environment or ScriptedEnvironment(VOCAB_SIZE)
    engine, log = open_engine(directory, packed, model_config=CONFIG, environment=environment, **limits)
    with log:
        return engine.generate(requests)


@pytest.fixture(scope="module")
def undisturbed(packed: dict[str, PackedTensor], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    return _sample(tmp_path_factory.mktemp("log"), packed, _requests())


def test_every_end_occurs(undisturbed: list[Completion]) -> None:
    """Keeps the tests below from proving nothing."""
    reasons = Counter(completion.stop_reason for completion in undisturbed)
    assert set(reasons) == {StopReason.EOS, StopReason.LENGTH, StopReason.TURNS}
    assert {len(completion.turns) for completion in undisturbed} == {1, 2, 3}


def test_turns_are_what_model_sampler_and_environment_say(
    packed: dict[str, PackedTensor], undisturbed: list[Completion]
) -> None:
    """One dense forward over the finished sequence predicts every sampled token; the rest are the answers."""
    model = Model(CONFIG, {name: unpack_published(tensor) for name, tensor in packed.items()}, precision="native")
    environment = ScriptedEnvironment(VOCAB_SIZE)
    for request, completion in zip(_requests(), undisturbed, strict=True):
        tokens = np.concatenate((request.prompt_ids, completion.token_ids))
        logits_TV = model.logits(torch.tensor(tokens[None], dtype=torch.int64))[0]
        positions = torch.tensor(np.flatnonzero(completion.sampled_mask) + request.prompt_ids.size)
        drawn = draw_tokens(
            logits_TV[positions - 1],
            torch.full_like(positions, signed_seed(request.seed)),
            positions,
            torch.ones(len(positions)),
        )
        assert drawn.tolist() == completion.token_ids[completion.sampled_mask].tolist()
        *called, last = completion.turns
        said = [environment.answer(turn).tolist() for turn in called]
        assert completion.token_ids[~completion.sampled_mask].tolist() == [token for one in said for token in one]
        assert all(turn[-1] == CONFIG.eos_token_id and environment.is_call(request, turn) for turn in called)
        assert (completion.behavior_logprobs[~completion.sampled_mask] == 0).all()
        is_call = last[-1] == CONFIG.eos_token_id and environment.is_call(request, last)
        match completion.stop_reason:
            case StopReason.EOS:
                assert last[-1] == CONFIG.eos_token_id
                assert not is_call
            case StopReason.TURNS:
                assert is_call
                assert len(completion.turns) == TOOLS.max_turns
            case reason:
                assert (reason, completion.num_sampled_tokens) == (StopReason.LENGTH, 28)


def test_an_end_at_the_budgets_last_token_is_an_end_and_a_call_there_is_the_budget(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    environment = ScriptedEnvironment(VOCAB_SIZE)
    seen: set[StopReason] = set()
    for index, (request, completion) in enumerate(zip(_requests(), undisturbed, strict=True)):
        first = completion.turns[0]
        if first[-1] != CONFIG.eos_token_id:
            continue
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=first.size)
        (answer,) = _sample(tmp_path / str(index), packed, [msgspec.structs.replace(request, sampling=sampling)])
        assert answer.token_ids.tolist() == first.tolist()
        assert (answer.stop_reason == StopReason.LENGTH) == environment.is_call(request, first)
        seen.add(answer.stop_reason)
    assert seen == {StopReason.EOS, StopReason.LENGTH}


@pytest.mark.parametrize(
    ("limits", "order"),
    [
        ({"max_batch_requests": 1}, None),
        ({"max_batch_requests": 4}, 1),
        ({"prefill_chunk_tokens": 1}, 2),
        ({"prefill_chunk_tokens": 7}, 3),
        ({}, 4),
    ],
)
def test_limits_and_tool_delays_change_no_bit(
    packed: dict[str, PackedTensor],
    undisturbed: list[Completion],
    tmp_path: Path,
    limits: dict[str, int],
    order: int | None,
) -> None:
    environment = ScriptedEnvironment(VOCAB_SIZE, order=order)
    assert _sample(tmp_path, packed, _requests(), environment, **limits) == undisturbed
    assert len(environment.begun) == sum(len(completion.turns) - 1 for completion in undisturbed)


def test_two_engines_and_another_order_change_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = _requests()[::-1]
    answers = [_sample(tmp_path / str(index), packed, requests[index::2]) for index in range(2)]
    by_id = {completion.id: completion for part in answers for completion in part}
    assert [by_id[completion.id] for completion in undisturbed] == undisturbed


def test_the_engine_waits_only_when_nothing_can_run(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    """Every answer is there at the first look, so a single request waits once a call and a full batch seldom."""
    environment = ScriptedEnvironment(VOCAB_SIZE)
    _sample(tmp_path / "one", packed, _requests()[:1], environment)
    assert environment.num_waits == len(environment.begun)
    environment = ScriptedEnvironment(VOCAB_SIZE)
    _sample(tmp_path / "all", packed, _requests(), environment)
    assert environment.num_waits <= len(environment.begun) // 4


class _WatchedEnvironment(ScriptedEnvironment):
    """Refuses to begin while the newest step of the log is not durable, or to end what is not."""

    def watch(self, log: WalWriter) -> None:
        self._log = log
        self.newest_step = -1
        self.steps_that_call: set[int] = set()
        self.num_durable_waits = 0
        self.close_seqs: list[int] = []
        append_step, append_close, wait_durable = log.append_step, log.append_close, log.wait_durable

        def append(*args: Any, **kwargs: Any) -> int:
            self.newest_step = append_step(*args, **kwargs)
            return self.newest_step

        def close(*args: Any, **kwargs: Any) -> int:
            self.close_seqs.append(append_close(*args, **kwargs))
            return self.close_seqs[-1]

        def wait(seq: int) -> None:
            self.num_durable_waits += 1
            wait_durable(seq)

        log.append_step, log.append_close, log.wait_durable = append, close, wait  # type: ignore[method-assign]

    def end(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        super().end(request, turn_ids, turn=turn, attempt=attempt, position=position)
        assert len(self.ended) <= sum(seq <= self._log.durable_seq for seq in self.close_seqs)

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        assert self._log.durable_seq >= self.newest_step
        self.steps_that_call.add(self.newest_step)
        super().begin(request, turn_ids, turn=turn, attempt=attempt, position=position)


def test_a_call_begins_when_its_turn_is_durable_and_the_callers_of_a_step_wait_once(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """On a disk that takes longer than a step of the engine. Every request has a twin, which calls with it."""
    requests = [
        msgspec.structs.replace(one, id=msgspec.structs.replace(one.id, step=step))
        for step in (0, 1)
        for one in _requests()
    ]
    slow = WalConfig(level="node")
    log, recovered = open_log(tmp_path, stream="engine-0", config=slow, sync=lambda _: time.sleep(0.02))
    environment = _WatchedEnvironment(VOCAB_SIZE)
    engine = LocalEngine(
        CONFIG,
        precision="native",
        config=RolloutConfig(wal=slow),
        log=log,
        recovered=recovered,
        environment=environment,
    )
    engine.load_weights(1, packed)
    environment.watch(log)
    with log:
        answers = engine.generate(requests)
    assert answers[: len(undisturbed)] == undisturbed
    assert environment.num_durable_waits == len(environment.steps_that_call) + 1, "one more for the completions"
    assert len(environment.steps_that_call) <= len(environment.begun) // 2
    turns = {one.id: len(one.turns) for one in answers}
    assert sorted(environment.ended) == sorted(turns.items()), "each once, with its last turn"


def test_a_broken_environment_is_an_infra_failure_of_its_request_alone(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = _requests()
    broken = next(completion.id for completion in undisturbed if len(completion.turns) > 1)
    for environment in (ScriptedEnvironment(VOCAB_SIZE, broken={broken}), ScriptedEnvironment(VOCAB_SIZE)):
        # The second time it is answered from the log, to the same bits, although the environment is whole again.
        answers = _sample(tmp_path, packed, requests, environment)
        for answer, expected in zip(answers, undisturbed, strict=True):
            if answer.id != broken:
                assert answer == expected
                continue
            assert (answer.stop_reason, answer.failure) == (StopReason.ABORTED, FailureType.INFRA)
            assert answer.token_ids.tolist() == expected.turns[0].tolist()
            assert answer.detail == ("" if environment.begun == [] else "scripted")
    assert environment.begun == []


def test_an_evaluation_that_the_environment_failed_is_asked_again_by_the_next_process(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    requests = [
        msgspec.structs.replace(request, id=msgspec.structs.replace(request.id, is_eval=True))
        for request in _requests()
    ]
    expected = [msgspec.structs.replace(one, id=request.id) for one, request in zip(undisturbed, requests, strict=True)]
    broken = next(one.id for one in expected if len(one.turns) > 1)
    failing = ScriptedEnvironment(VOCAB_SIZE, broken={broken})
    for max_attempts in (2, 1):  # the second time no attempt is left, and the log answers
        answers = _sample(tmp_path, packed, requests, failing, max_attempts=max_attempts)
        assert [one.id for one in answers if one.failure is not None] == [broken]
    assert _sample(tmp_path, packed, requests) == expected
    assert recover(tmp_path).requests[broken].attempt == 1
    assert recover(tmp_path).problems == ()


def test_a_crash_at_every_record_of_a_trajectory_with_turns_changes_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Inside a turn, after its end without the answer, after the answer, after the last token without CLOSE."""
    chosen = min(
        (index for index, completion in enumerate(undisturbed) if len(completion.turns) > 1),
        key=lambda index: undisturbed[index].token_ids.size,
    )
    request, expected = _requests()[chosen], undisturbed[chosen]
    num_records = 1 + expected.num_sampled_tokens + len(expected.turns) - 1 + 1
    for number in range(num_records):
        directory = tmp_path / str(number)
        environment = ScriptedEnvironment(VOCAB_SIZE)
        engine, log = open_engine(directory, packed, model_config=CONFIG, environment=environment)
        crash_at(log, number)
        with pytest.raises(CrashError):
            engine.generate([request])
        log.close()
        held = recover(directory).requests
        assert len(held) == (number > 0)
        assert _sample(directory, packed, [request]) == [expected]
        after = recover(directory)
        assert after.problems == ()
        assert after.requests[request.id].token_ids.size == expected.num_sampled_tokens
        assert len(after.requests[request.id].observations) == len(expected.turns) - 1


@pytest.mark.parametrize("number", [20, 33, 41])
def test_a_crash_among_many_changes_no_bit(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, number: int
) -> None:
    """Two crashes, what was queued is lost; answers come late and in another order each time."""
    requests = _requests()
    for attempt in range(2):
        engine, log = open_engine(
            tmp_path,
            packed,
            model_config=CONFIG,
            environment=ScriptedEnvironment(VOCAB_SIZE, order=number + attempt),
            max_batch_requests=6,
        )
        crash_at(log, number)
        with pytest.raises(CrashError):
            engine.generate(requests)
        log.abandon()
    assert _sample(tmp_path, packed, requests, ScriptedEnvironment(VOCAB_SIZE, order=9)) == undisturbed
    assert recover(tmp_path).problems == ()


def test_finished_turns_are_answered_from_the_log_without_forward_or_tools(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    _sample(tmp_path, packed, _requests())
    environment = ScriptedEnvironment(VOCAB_SIZE)
    engine, log = open_engine(tmp_path, packed, model_config=CONFIG, environment=environment)
    crash_at(log, 0)
    with log:
        assert engine.generate(_requests()) == undisturbed
    assert environment.begun == []


def test_misuse_of_tools_is_named(packed: dict[str, PackedTensor], tmp_path: Path) -> None:
    requests = _requests()
    engine, log = open_engine(tmp_path / "a", packed, model_config=CONFIG)
    with log, pytest.raises(EngineInputError, match="uses the tools of task scripted, but this engine has none"):
        engine.generate(requests)
    narrow = msgspec.structs.replace(TOOLS, max_observation_tokens=CONFIG.max_position_embeddings)
    environment = ScriptedEnvironment(VOCAB_SIZE)
    engine, log = open_engine(tmp_path / "b", packed, model_config=CONFIG, environment=environment)
    with log, pytest.raises(EngineInputError, match="max_position_embeddings"):
        engine.generate(_requests(tools=narrow))
    engine, log = open_engine(tmp_path / "c", packed, model_config=CONFIG, environment=environment)
    with log, pytest.raises(EngineError, match=r"an answer has between 1 and tools\.max_observation_tokens = 1"):
        engine.generate(_requests(tools=msgspec.structs.replace(TOOLS, max_observation_tokens=1)))
    _sample(tmp_path / "d", packed, requests)
    with pytest.raises(EngineInputError, match="another prompt, seed, sampling or tools"):
        _sample(tmp_path / "d", packed, _requests(tools=msgspec.structs.replace(TOOLS, max_turns=2)))
