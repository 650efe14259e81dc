"""Proves: `rollforward drill` kills real processes of a real run, which ends with the undisturbed bits; its comparison
finds every planted difference; processes are found by kind below their driver alone.

What is planned is in tests/conf/test_drill.py, a replica alone under many more kills in test_kill_harness.py.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollforward.rl.drill_compare import differences, held_tokens, logged_requests
from rollforward.rl.drill_config import DrillKind, DrillMoment
from rollforward.rl.drill_moments import Moments
from rollforward.rl.drill_processes import end, family, kill, victims
from rollforward.rollout.types import StopReason
from rollforward.rollout.wal import open_log
from tests.helpers.commands import command, write_recipe
from tests.helpers.replicas import PROCESS, make_requests

NAMES = {"kills", "tokens_published", "tokens_lost", "tokens_duplicated", "bit_equal"} | {
    f"recovery_s_{name}" for name in ("p50", "max")
}


def _drill(directory: Path, recipe: str | Path, *settings: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, last line and messages of a drill."""
    words = command("drill", f"recipe={recipe}", f"run_dir={directory}", *settings)
    done = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def _require_clean(code: int, last: dict[str, Any], told: str, *, kills: int) -> None:
    assert code == 0, told
    assert last.keys() == NAMES
    assert (last["kills"], last["tokens_lost"], last["tokens_duplicated"], last["bit_equal"]) == (kills, 0, 0, True)
    assert last["tokens_published"] > 100
    assert 0 < last["recovery_s_p50"] <= last["recovery_s_max"]
    assert told.count("kill ") == kills


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_run_whose_engine_and_driver_are_killed(tmp_path: Path) -> None:
    """The directories that it leaves are then what a planted loss is found in."""
    small = ["drill.kills=2", "drill.kinds=[engine,driver]", "drill.steps=3"]
    _require_clean(*_drill(tmp_path / "drill", write_recipe(tmp_path), *small), kills=2)
    quiet, disturbed = tmp_path / "drill" / "undisturbed" / "grpo", tmp_path / "drill" / "disturbed_1" / "grpo"
    assert differences(quiet, disturbed, logged_requests(disturbed)) == []
    manifest = disturbed / "model" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"policy_version":3', '"policy_version":4'))
    shutil.rmtree(disturbed / "wal" / "engine-0")
    found = differences(quiet, disturbed, logged_requests(disturbed))
    assert "model/manifest.json differs" in found
    assert any(text.endswith("is absent") for text in found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tiny_recipe_with_every_kind_killed_at_every_moment(tmp_path: Path) -> None:
    _require_clean(*_drill(tmp_path / "drill", "tiny", "drill.kills=16"), kills=16)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three completions, two steps and an evaluation."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "manifest.json").write_text('{"tensors":{"a":"1"}}')
    (run / "eval_000002.json").write_text("[1]")
    metrics = [{"step": step, "attempt": 0, "time_s": 1.0, "critic/rewards/mean": 0.5 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    answer = {"step": 1, "attempt": 0, "prompt": 0, "member": 1, "text": "4"}
    (run / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    _write_log(run, lambda token: token)
    return run


def _write_log(run: Path, change: Callable[[int], int]) -> None:
    """Requests of 1, 2 and 3 tokens; `change` has a say in the last token of the last."""
    shutil.rmtree(run / "wal", ignore_errors=True)
    writer, _ = open_log(run / "wal" / "engine-0", stream="engine-0", config=PROCESS)
    with writer:
        for slot, request in enumerate(make_requests([4], members=3)):
            writer.append_open(request, slot=slot)
            for position in range(slot + 1):
                token = 10 * slot + position
                token = change(token) if token == 22 else token
                row = np.array([slot], np.uint16), np.array([token], np.int32), np.array([-token], np.float32)
                writer.append_step(*row, policy_version=1)
            writer.append_close(slot, StopReason.EOS)


def _lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines[-1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _append(path: Path, **changes: Any) -> None:
    line = json.loads(path.read_text().splitlines()[-1]) | changes
    path.write_text(path.read_text() + json.dumps(line) + "\n")


def test_what_a_kill_may_change_is_no_difference(run_dir: Path, tmp_path: Path) -> None:
    """A step repeated, other times, a line torn, a replica that handed an unfinished request to another."""
    other = shutil.copytree(run_dir, tmp_path / "other")
    _append(
        other / "metrics.jsonl",
        attempt=1,
        time_s=9.0,
        **{"timing_s/gen": 3.0, "wal/frames": 8.0, "failure/engine_lost": 1.0},
    )
    _append(other / "answers.jsonl", attempt=1)
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "crit')
    writer, _ = open_log(other / "wal" / "engine-1", stream="engine-1", config=PROCESS)
    with writer:
        writer.append_open(make_requests([4], members=3)[2], slot=0)
    requests = logged_requests(other)
    assert differences(run_dir, other, requests) == []
    assert sorted(len(one.tokens) // 4 for one in held_tokens(other, requests)) == [1, 2, 3]


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (
        lambda run: (run / "model" / "manifest.json").write_text('{"tensors":{"a":"2"}}'),
        "model/manifest.json",
    ),
    "no weights": (lambda run: shutil.rmtree(run / "model"), "model/manifest.json"),
    "evaluation": (lambda run: (run / "eval_000002.json").write_text("[0]"), "eval_000002.json"),
    "metric": (
        lambda run: _lines(run / "metrics.jsonl", lambda line: line.update({"critic/rewards/mean": 0.9})),
        "metrics of step 2 differ: critic/rewards/mean",
    ),
    "failures": (
        lambda run: _lines(run / "metrics.jsonl", lambda line: line.update({"failure/infra/rate": 0.1})),
        "metrics of step 2 differ: failure/infra/rate",
    ),
    "repetition": (lambda run: _append(run / "metrics.jsonl", **{"critic/rewards/mean": 0.9}), "metrics of step 2"),
    "further step": (lambda run: _append(run / "metrics.jsonl", step=3), "metrics of step 3 stands in one run alone"),
    "answer": (lambda run: _lines(run / "answers.jsonl", lambda line: line.update(text="5")), "answer 1-0-1"),
    "token": (lambda run: _write_log(run, lambda token: token + 1), "completion s0-p0-m2: tokens differ"),
    "log": (lambda run: shutil.rmtree(run / "wal"), "completion s0-p0-m0 is absent"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_found(run_dir: Path, tmp_path: Path, planted: str) -> None:
    plant, expected = PLANTED[planted]
    other = shutil.copytree(run_dir, tmp_path / "other")
    plant(other)
    assert any(text.startswith(expected) for text in differences(run_dir, other, logged_requests(other)))


@contextlib.contextmanager
def _family() -> Generator[subprocess.Popen[bytes]]:
    """A process with children that are called like a run's; a stranger of the same title is not below it."""
    program = (
        "import subprocess, sys, time\n"
        'child = \'import subprocess, time; subprocess.Popen(["sleep /program.py", "60"], executable="/bin/sleep");'
        " time.sleep(60)'\n"
        "subprocess.Popen(['ray::RolloutActor.generate', '-c', child], executable=sys.executable)\n"
        "subprocess.Popen(['ray::LearnerActor', '60'], executable='/bin/sleep')\n"
        "subprocess.Popen(['ray::LearnerActor.update', '60'], executable='/bin/sleep')\n"
        "time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program])
    stranger = subprocess.Popen(["ray::LearnerActor", "60"], executable="/bin/sleep")
    try:
        deadline_s = time.monotonic() + 30
        while len(family(driver.pid)) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        yield driver
    finally:
        processes = {*family(driver.pid)}
        driver.kill()
        driver.wait()
        end(processes, 0.0)
        stranger.kill()
        stranger.wait()


def test_what_a_run_is_at_is_seen_by_its_files(tmp_path: Path) -> None:
    moments = Moments(tmp_path)
    assert moments.wait("any", 0.0)
    written: dict[DrillMoment, str] = {
        "publish": "grpo/weights/.v000003",
        "checkpoint": "grpo/checkpoints/.step_000002",
    }
    for moment, partial in written.items():
        directory = tmp_path / f"{partial}.partial"
        assert not moments.wait(moment, 0.01)
        directory.mkdir(parents=True)
        assert moments.wait(moment, 0.0)
        directory.rename(directory.with_suffix(""))
        assert not moments.wait(moment, 0.01)
    writer, _ = open_log(tmp_path / "grpo" / "wal" / "engine-0", stream="engine-0", config=PROCESS)
    with writer:
        assert not moments.wait("commit", 0.05), "what was written before is no commit of now"
        later = threading.Timer(0.2, writer.append_version, [1])
        later.start()
        assert moments.wait("commit", 10.0)
        later.join()


def test_processes_are_found_by_kind_and_killed() -> None:
    with _family() as driver:
        kinds: tuple[DrillKind, ...] = ("engine", "learner", "sandbox", "driver")
        found = {kind: victims(driver.pid, kind) for kind in kinds}
        assert {kind: len(pids) for kind, pids in found.items()} == {
            "engine": 1,
            "learner": 2,
            "sandbox": 1,
            "driver": 1,
        }
        assert found["driver"] == [driver.pid]
        assert kill(found["engine"][0])
        deadline_s = time.monotonic() + 30
        while victims(driver.pid, "engine") and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert victims(driver.pid, "driver") == [], "without a replica it is not at work"
        assert len(victims(driver.pid, "learner")) == 2
    assert not kill(driver.pid)
