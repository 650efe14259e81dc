"""Proves: what a turn says is called as written and answered in its order, whatever a policy writes; an engine with
real tools samples the same bits whatever the batch, the workers or a crash.

A small model writes no calls, so the engine's environment reads one out of a hash of each turn; everything behind that
(parser, sandbox, rendering) is real. Isolation is proved in tests/sandbox.
"""

import functools
import hashlib
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.model.config import ModelConfig
from rollforward.model.dsml import AssistantTurn, parse_turn
from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import Message, ReasoningEffort, ToolCall
from rollforward.model.precision import PackedTensor, pack_published
from rollforward.model.shapes import param_specs
from rollforward.model.tokenizer import DSML, USER, TokenizerConfig, train_tokenizer
from rollforward.rollout import replica as replica_module
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.environment import EnvironmentConfig, Observation, TaskTools
from rollforward.rollout.errors import EnvironmentConfigError, PausedError
from rollforward.rollout.ledger import LedgerProcess
from rollforward.rollout.tool_environment import ToolEnvironment, build_environment, fit_observation
from rollforward.rollout.types import Completion, FailureType, Request, StopReason, ToolUse
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import publish_weights, version_directory
from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.toolset import load_tool
from rollforward.sandbox.types import Call, CallResult, CallStatus
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.replicas import PROCESS, make_requests, open_engine
from tests.helpers.tiny import random_params, tiny_config

CALCULATOR = (ToolConfig(name="calculator"),)
MATHS = TaskTools(tools=CALCULATOR, max_observation_tokens=64)
TOOLS = ToolUse(task="maths", max_turns=3, max_observation_tokens=64)


@functools.cache
def encoding() -> ChatEncoding:
    texts = ["<tool_result>1 + 2</tool_result>", "calculator", "expression", "error: invoke parameter name string"]
    return ChatEncoding(train_tokenizer(texts * 20, TokenizerConfig(vocab_size=384)))


def call_of(tool: str, **arguments: str | float) -> str:
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{str(isinstance(value, str)).lower()}">{value}</{DSML}parameter>'
        for name, value in arguments.items()
    )
    return f'<{DSML}invoke name="{tool}">\n{parameters}\n</{DSML}invoke>'


def of_calls(*calls: str) -> str:
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(calls) + f"\n</{DSML}tool_calls>"


def written(*expressions: str, tool: str = "calculator") -> str:
    return of_calls(*(call_of(tool, expression=expression) for expression in expressions))


def turn_ids(text: str) -> np.ndarray:
    """Ids of a turn that spells its control tokens out."""
    tokenizer = encoding().tokenizer
    ids: list[int] = []
    for index, part in enumerate(text.split(DSML)):
        ids += [tokenizer.control_id(DSML)] if index else []
        ids += tokenizer.encode(part)
    return np.array([*ids, tokenizer.eos_id], dtype=np.int32)


def request(max_observation_tokens: int = 64) -> Request:
    tools = msgspec.structs.replace(TOOLS, max_observation_tokens=max_observation_tokens)
    return make_requests([4], tools=tools)[0]


class ScriptedRunner:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Future[CallResult]]] = []
        self.is_down = False

    def submit(self, call: Call) -> Future[CallResult]:
        self.calls.append((call, Future()))
        return self.calls[-1][1]

    def answer(self, index: int, text: str, status: CallStatus = CallStatus.OK) -> None:
        self.calls[index][1].set_result(CallResult(status=status, text=text, detail="it broke"))

    def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def environment(runner: ScriptedRunner) -> ToolEnvironment:
    return ToolEnvironment(encoding(), {"maths": MATHS}, {CALCULATOR: runner})


def observed(environment: ToolEnvironment) -> list[int]:
    (observation,) = environment.collect(block=True)
    assert observation.failure is None
    return observation.token_ids.tolist()


def test_results_come_in_the_order_of_the_calls(environment: ToolEnvironment, runner: ScriptedRunner) -> None:
    ids = turn_ids("Let me see." + written("1 + 2", "3 * 4"))
    assert environment.is_call(request(), ids)
    assert not environment.is_call(request(), turn_ids("The answer is 3."))
    environment.begin(request(), ids, turn=1)
    assert [call.arguments for call, _ in runner.calls] == [{"expression": "1 + 2"}, {"expression": "3 * 4"}]
    runner.answer(1, "12")
    assert environment.collect(block=False) == []
    runner.answer(0, "3")
    assert observed(environment) == encoding().encode_observation(["3", "12"])
    environment.close()
    assert runner.is_down


def test_what_a_tool_says_of_its_failure_is_an_answer(environment: ToolEnvironment, runner: ScriptedRunner) -> None:
    environment.begin(request(), turn_ids(written("1 / 0")), turn=1)
    runner.answer(0, "ZeroDivisionError: division by zero", CallStatus.ERROR)
    assert observed(environment) == encoding().encode_observation(["error: ZeroDivisionError: division by zero"])


def test_a_broken_sandbox_is_an_infra_failure(environment: ToolEnvironment, runner: ScriptedRunner) -> None:
    environment.begin(request(), turn_ids(written("1", "2")), turn=1)
    runner.answer(0, "1")
    runner.answer(1, "", CallStatus.INFRA)
    (observation,) = environment.collect(block=True)
    assert (observation.failure, observation.detail) == (FailureType.INFRA, "it broke")
    assert observation.token_ids.size == 0


@pytest.mark.parametrize(
    "text", [f"<{DSML}tool_calls>", f"a {DSML}", written("1") + " and more", written("1").replace("name=", "nam=")]
)
def test_a_malformed_call_is_told_and_nothing_runs(
    environment: ToolEnvironment, runner: ScriptedRunner, text: str
) -> None:
    ids = turn_ids(text)
    assert environment.is_call(request(), ids)
    environment.begin(request(), ids, turn=1)
    assert encoding().decode_turn(observed(environment)).count("error: ") == 1
    assert runner.calls == []


def test_a_call_that_is_only_spelled_is_an_answer(environment: ToolEnvironment) -> None:
    """A user's or a tool's text may hold one for the policy to copy; only the control token makes a call."""
    tokenizer = encoding().tokenizer
    ids = np.array([*tokenizer.encode(written("1 + 2")), tokenizer.eos_id], dtype=np.int32)
    assert encoding().decode_turn(ids.tolist()) == written("1 + 2")
    assert not environment.is_call(request(), ids)


def test_a_stray_control_token_makes_no_call_of_an_answer_and_none_count_beside_it(
    environment: ToolEnvironment, runner: ScriptedRunner
) -> None:
    stray = encoding().tokenizer.control_id(USER)
    assert not environment.is_call(request(), np.array([stray, *turn_ids("The answer is 3.")], dtype=np.int32))
    ids = np.array([stray, *turn_ids(written("1 + 2"))], dtype=np.int32)
    assert environment.is_call(request(), ids)
    environment.begin(request(), ids, turn=1)
    assert f"error: the control token {USER} stands in the turn" in encoding().decode_turn(observed(environment))
    assert runner.calls == []


def test_answers_are_cut_inside_their_texts() -> None:
    limit = 48
    frame = encoding().encode_observation(["", ""])
    for texts in (["1", "2"], ["x" * 500, "2"], ["日本" * 90, "\ud800" * 40], ["", ""]):
        ids = fit_observation(encoding(), texts, MATHS, limit)
        assert len(ids) <= limit
        told = encoding().decode_turn(ids)
        assert told.count("<tool_result>") == told.count("</tool_result>") == 2
        assert [ids[0], *ids[-2:]] == [frame[0], *frame[-2:]]
        is_short = (
            len(encoding().encode_observation([text.encode(errors="replace").decode() for text in texts])) <= limit
        )
        assert ("(cut)" in told) != is_short
    assert "too many calls" in encoding().decode_turn(fit_observation(encoding(), ["1"] * 40, MATHS, limit))


def test_who_is_woken_returns_without_an_answer_and_has_it_later(
    environment: ToolEnvironment, runner: ScriptedRunner
) -> None:
    """Also where the wake comes first: whoever pauses does not know how far the other thread is."""
    environment.begin(request(), turn_ids(written("1 + 2")), turn=1)
    environment.wake()
    assert environment.collect(block=True) == []
    timer = threading.Timer(0.05, environment.wake)
    timer.start()
    assert environment.collect(block=True) == []
    timer.join()
    environment.wake()
    runner.answer(0, "3")
    assert observed(environment) == encoding().encode_observation(["3"])


def test_a_task_that_leaves_no_room_for_an_answer_is_refused(runner: ScriptedRunner) -> None:
    narrow = msgspec.structs.replace(MATHS, max_observation_tokens=8)
    with pytest.raises(EnvironmentConfigError, match=r"max_observation_tokens is 8; .* shortest answer"):
        ToolEnvironment(encoding(), {"maths": narrow}, {CALCULATOR: runner})


@pytest.fixture(scope="module")
def sandbox() -> Generator[FunctionSandbox]:
    with FunctionSandbox(SandboxConfig(workers=2), CALCULATOR) as started:
        yield started


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (written("1 + 2", "2 ** 10"), ["3", "1024"]),
        (written("1 / 0"), None),
        (written("1", tool="compass"), None),
        (written("1").replace("expression", "formula"), None),
    ],
)
def test_real_tools_answer(sandbox: FunctionSandbox, text: str, said: list[str] | None) -> None:
    environment = ToolEnvironment(encoding(), {"maths": MATHS}, {CALCULATOR: sandbox})
    environment.begin(request(), turn_ids(text), turn=1)
    ids = observed(environment)
    if said is not None:
        assert ids == encoding().encode_observation(said)
    else:
        assert "error: " in encoding().decode_turn(ids)


FAILING_TOOLS = """
import os, time

def nap(seconds: float) -> str:
    \"\"\"Sleeps.\"\"\"
    time.sleep(seconds)
    return "slept"

def fill(chars: int) -> str:
    \"\"\"Takes memory.\"\"\"
    return str(len("x" * chars))

def leave() -> str:
    \"\"\"Ends its process.\"\"\"
    os._exit(3)

def fail() -> str:
    \"\"\"Raises.\"\"\"
    raise ValueError("no")
"""


def test_every_outcome_of_a_call_is_counted_by_its_tool(tmp_path: Path) -> None:
    """Nothing else tells of a tool that runs out of time at each call: to the model that is one answer of many."""
    (tmp_path / "failing.py").write_text(FAILING_TOOLS)
    names = ("nap", "fill", "leave", "fail")
    tools = tuple(ToolConfig(name=name, file=str(tmp_path / "failing.py"), timeout_s=0.5) for name in names)
    task = TaskTools(tools=tools, max_observation_tokens=400, max_calls_per_turn=5)
    limits = SandboxConfig(workers=2, memory_bytes=64 << 20)
    turns = [
        [call_of("nap", seconds=0), call_of("nap", seconds=30), call_of("nap", seconds=40)],
        [call_of("fill", chars=10**9), call_of("leave"), call_of("fail"), call_of("fill", chars=3)],
        [call_of("nap", hours=1), call_of("nap", seconds=0), call_of("compass"), call_of("wheel")],
        [call_of("fail")] * 5 + [call_of("ax")],
    ]
    with FunctionSandbox(limits, tools) as sandbox:
        environment = ToolEnvironment(encoding(), {"maths": task}, {tools: sandbox})
        for calls in turns:
            environment.begin(request(400), turn_ids(of_calls(*calls)), turn=1)
            observed(environment)
    assert environment.counts().outcomes.calls == {
        "nap/ok": 2,
        "nap/timeout": 2,
        "nap/refused": 1,
        "fill/oom": 1,
        "fill/ok": 1,
        "leave/killed": 1,
        "fail/error": 1,
        "fail/refused": 5,
        "unknown": 3,
    }


def test_a_broken_sandbox_is_counted_too(environment: ToolEnvironment, runner: ScriptedRunner) -> None:
    environment.begin(request(), turn_ids(written("1", "2")), turn=1)
    runner.answer(1, "", CallStatus.INFRA)
    runner.answer(0, "1")
    (observation,) = environment.collect(block=True)
    assert observation.failure is FailureType.INFRA
    assert environment.counts().outcomes.calls == {"calculator/ok": 1, "calculator/infra": 1}


def test_an_environment_is_built_from_its_record(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(encoding().tokenizer.serialized)
    config = EnvironmentConfig(model_dir=str(tmp_path), tasks={"maths": MATHS}, sandbox=SandboxConfig(workers=1))
    environment = build_environment(config)
    environment.begin(request(), turn_ids(written("6 * 7")), turn=1)
    assert observed(environment) == encoding().encode_observation(["42"])
    environment.close()
    environment.close()


def test_an_environment_that_cannot_be_built_leaves_no_sandbox(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(encoding().tokenizer.serialized)
    narrow = msgspec.structs.replace(MATHS, max_observation_tokens=1)
    config = EnvironmentConfig(model_dir=str(tmp_path), tasks={"maths": narrow}, sandbox=SandboxConfig(workers=1))
    before = set(threading.enumerate())
    with pytest.raises(EnvironmentConfigError):
        build_environment(config)
    assert set(threading.enumerate()) <= before


class _CallingEncoding(ChatEncoding):
    """Reads most turns as one or two calls, from a hash of their tokens."""

    def read_turn(
        self, token_ids: Sequence[int], effort: ReasoningEffort, *, is_call_begun: bool = False
    ) -> AssistantTurn:
        first, second, third = hashlib.blake2b(np.array(token_ids).tobytes(), digest_size=3).digest()
        expressions = [f"{first} + {second}", f"{second} // ({third // 3} % 2)"][: third % 3]
        text = written(*expressions) if expressions else "an answer"
        return parse_turn(text, effort, is_call_begun=is_call_begun)


def _config() -> ModelConfig:
    return msgspec.structs.replace(tiny_config(), vocab_size=encoding().tokenizer.vocab_size)


def test_a_sequence_of_turns_with_reasoning_is_what_a_history_with_tools_renders(sandbox: FunctionSandbox) -> None:
    """With tools all reasoning stays in every turn, so the ids that were sampled and observed, in order, are those of
    the conversation; nothing is ever rendered anew."""
    tools = (load_tool(CALCULATOR[0]),)
    asked = Message(role="user", content="What is 1 + 2, and 3 * 4?")

    def call(expression: str) -> ToolCall:
        return ToolCall(name="calculator", arguments=msgspec.json.encode({"expression": expression}).decode())

    said = (
        Message(role="assistant", content="", reasoning="The first one.", tool_calls=(call("1 + 2"),)),
        Message(role="tool", content="3"),
        Message(role="assistant", content="Now.", reasoning="Then both.", tool_calls=(call("3 * 4"), call("3 + 12"))),
        Message(role="tool", content="12"),
        Message(role="tool", content="15"),
        Message(role="assistant", content="3 and 12.", reasoning="That is it."),
    )
    whole = encoding().encode_conversation((asked, *said), "high", tools)
    ids, mask = np.array(whole.token_ids, np.int32), np.array(whole.trained_mask)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    turns = [piece for piece, is_sampled in zip(np.split(ids, edges), mask[[0, *edges]], strict=True) if is_sampled]
    assert len(turns) == 3
    high = msgspec.structs.replace(MATHS, effort="high", max_observation_tokens=200)
    environment = ToolEnvironment(encoding(), {"maths": high}, {CALCULATOR: sandbox})
    asking = request(200)
    sequence = encoding().encode_prompt([asked], "high", tools)
    for number, turn in enumerate(turns, 1):
        sequence += turn.tolist()
        assert environment.is_call(asking, turn) == (number < 3)
        if number < 3:
            environment.begin(asking, turn, turn=number)
            sequence += observed(environment)
    assert sequence == ids.tolist()


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    """The end of a turn stands out among the 384 tokens, or no turn would end."""
    params = random_params(_config())
    params["head.weight"][encoding().tokenizer.eos_id] *= 4
    return {spec.name: pack_published(spec, params[spec.name]) for spec in param_specs(_config())}


def _requests() -> list[Request]:
    return make_requests([3, 40], members=3, max_new_tokens=28, vocab_size=_config().vocab_size, tools=TOOLS)


def _environment(sandbox: FunctionSandbox) -> ToolEnvironment:
    return ToolEnvironment(_CallingEncoding(encoding().tokenizer), {"maths": MATHS}, {CALCULATOR: sandbox})


def _sample(
    directory: Path, packed: dict[str, PackedTensor], sandbox: FunctionSandbox, **limits: int
) -> list[Completion]:
    engine, log = open_engine(directory, packed, model_config=_config(), environment=_environment(sandbox), **limits)
    with log:
        return engine.generate(_requests())


def test_an_engine_with_real_tools_samples_the_same_bits_after_a_crash_and_in_any_batch(
    packed: dict[str, PackedTensor], sandbox: FunctionSandbox, tmp_path: Path
) -> None:
    undisturbed = _sample(tmp_path / "a", packed, sandbox)
    assert {StopReason.EOS, StopReason.TURNS} <= {completion.stop_reason for completion in undisturbed}
    answers = [text for completion in undisturbed for text in _observations(completion)]
    assert any("error: " in text for text in answers)
    assert _sample(tmp_path / "b", packed, sandbox, max_batch_requests=3, prefill_chunk_tokens=16) == undisturbed
    engine, log = open_engine(tmp_path / "c", packed, model_config=_config(), environment=_environment(sandbox))
    crash_at(log, 20)
    with pytest.raises(CrashError):
        engine.generate(_requests())
    log.abandon()
    assert _sample(tmp_path / "c", packed, sandbox) == undisturbed
    assert recover(tmp_path / "c").problems == ()


SLOW_TOOL = """
import time

def calculator(expression: str) -> str:
    \"\"\"Takes its time.\"\"\"
    time.sleep(600)
    return expression
"""


class _Waiting(ToolEnvironment):
    """Tells when the engine waits for a tool."""

    waits = threading.Event()

    def collect(self, *, block: bool) -> list[Observation]:
        if block:
            self.waits.set()
        return super().collect(block=block)


def test_a_replica_whose_requests_all_wait_for_a_slow_tool_hands_over(
    packed: dict[str, PackedTensor], sandbox: FunctionSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool sleeps for ten minutes; the successor, whose tools answer, goes on to the same bits. Only what reads
    calls out of the small model's turns is put in; it is the ledger's, so wrapped as in a drill."""
    undisturbed = _sample(tmp_path / "a", packed, sandbox)
    publish_weights(tmp_path / "weights", 1, _config(), packed)
    (tmp_path / "slow.py").write_text(SLOW_TOOL)
    slow = (ToolConfig(name="calculator", file=str(tmp_path / "slow.py"), timeout_s=900),)
    task = TaskTools(tools=slow, max_observation_tokens=64)

    def build(_: EnvironmentConfig, *, owner: str) -> ToolEnvironment:
        runner = FunctionSandbox(SandboxConfig(workers=2), slow)
        return _Waiting(_CallingEncoding(encoding().tokenizer), {"maths": task}, {slow: runner})

    monkeypatch.setattr(replica_module, "build_environment", build)
    with LedgerProcess() as ledger:
        replica = replica_module.Replica(
            "engine-0",
            tmp_path / "c",
            _config(),
            precision="native",
            config=RolloutConfig(threads=1, wal=PROCESS, ledger=str(ledger.path)),
            environment=EnvironmentConfig(model_dir="", tasks={"maths": task}, sandbox=SandboxConfig(workers=2)),
        )
        replica.load_weights(version_directory(tmp_path / "weights", 1))
        ended: list[BaseException] = []

        def generate() -> None:
            try:
                replica.generate(_requests())
            except PausedError as error:
                ended.append(error)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        assert _Waiting.waits.wait(60)
        stats = replica.drain(20)  # raises where it takes longer
        thread.join()
    assert len(ended) == 1
    assert stats.saved.saved > 0
    assert recover(tmp_path / "c").was_sealed
    assert _sample(tmp_path / "c", packed, sandbox) == undisturbed


def _observations(completion: Completion) -> list[str]:
    pieces = np.split(completion.token_ids, np.flatnonzero(np.diff(completion.sampled_mask)) + 1)
    return [encoding().decode_turn(piece.tolist()) for piece in pieces[1::2]]
