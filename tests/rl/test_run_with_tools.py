"""Proves: the whole loop with tools, in one process: turns are sampled, answered, scored and trained, the trainer's
log-probs are the engine's to the bit, and neither the number of engines nor a crash changes the weights.

The model is untrained; ends of turns and the marker of calls stand out among its tokens, so that turns end and most of
them call, malformed. That a model learns to call is proved by the recipe. Where calls are to be made, what reads turns
is put in: it reads a call in each.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollforward.model.dsml import AssistantTurn, parse_turn
from rollforward.model.tokenizer import DSML
from rollforward.rl.controller import RunOutcome
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import read_published, version_directory
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.runs import TASK, build_controller, small_run, write_calling_model

CHANGES: dict[str, Any] = {
    "tasks": [{**TASK, "tools": [{"name": "calculator"}], "max_observation_tokens": 96, "list_tools": False}],
    "sampling": {"max_new_tokens": 20, "top_p": 0.95},
    "micro_batch_tokens": 512,
    "steps": 2,
    "prompts_per_step": 3,
    "eval": {"prompts": 2, "every_steps": 2},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("models") / "plain")


def _finish(run_dir: Path, model_dir: Path, **changes: Any) -> tuple[RunOutcome, dict[str, str]]:
    run = small_run(run_dir, model_dir, **CHANGES | changes)
    controller, _, rollout = build_controller(run)
    try:
        outcome = controller.run()
    finally:
        rollout.close()
    return outcome, read_published(version_directory(run_dir / "weights", run.steps))[0].tensors


def test_turns_are_trained_alike_whatever_the_engines_and_crashes(model_dir: Path, tmp_path: Path) -> None:
    outcome, tensors = _finish(tmp_path / "one", model_dir)
    assert outcome.rollout_probs_diff_max == 0.0
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["num_turns/max"] for line in lines) > 1
    held = recover(tmp_path / "one" / "wal" / "engine-0").requests.values()
    assert any(request.observations for request in held)

    engines = {"engines": 2, "threads": 1, "max_batch_requests": 3, "wal": {"level": "process"}}
    assert _finish(tmp_path / "two", model_dir, rollout=engines) == (outcome, tensors)

    run = small_run(tmp_path / "crash", model_dir, **CHANGES)
    controller, _, rollout = build_controller(run)
    crash_at(rollout.replicas[0]._log, 40)
    with pytest.raises(CrashError):
        controller.run()
    rollout.replicas[0]._log.abandon()
    assert _finish(tmp_path / "crash", model_dir) == (outcome, tensors)


SLOW_TOOL = """
import time

def ponder() -> str:
    \"\"\"Takes its time.\"\"\"
    time.sleep(60)
    return "done"
"""


def test_a_tool_that_never_answers_is_told_to_the_user(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TOOL)
    slow = {"name": "ponder", "file": str(tmp_path / "slow.py"), "timeout_s": 0.05}
    task = {**CHANGES["tasks"][0], "tools": [slow], "max_turns": 2}
    run = small_run(tmp_path / "run", model_dir, **CHANGES | {"tasks": [task], "steps": 1, "prompts_per_step": 1})
    controller, _, rollout = build_controller(run)

    def read_turn(*_: Any, **__: Any) -> AssistantTurn:
        invoke = f'<{DSML}invoke name="ponder">\n</{DSML}invoke>'
        return parse_turn(f"\n\n<{DSML}tool_calls>\n{invoke}\n</{DSML}tool_calls>", "non-think")

    rollout.replicas[0]._environment._encoding.read_turn = read_turn
    try:
        controller.run()
    finally:
        rollout.close()
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    calls = line["tools/ponder/timeout"]
    assert calls > 0
    assert [name for name in line if name.startswith("tools/")] == ["tools/ponder/timeout"]
    told = f"step 1: tool ponder has not returned once in {calls:g} calls: {calls:g} timeout"
    assert told in capsys.readouterr().err
