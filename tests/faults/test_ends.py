"""Proves: a command that is ended, by Ctrl-C, SIGTERM or an error, says so in a line and how it goes on, in every kind
of run; nothing else speaks after it. Real processes and signals.

That what was interrupted ends as it would have: the other tests of this folder.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.commands import command
from tests.helpers.runs import TASK, write_model

WAIT_S = 240.0
"""For a process to get somewhere; nothing is measured."""

TASKS = f"tasks=[{json.dumps(TASK)}]".replace('"', "")
COMMON = ("max_prompt_tokens=40", "rollout.threads=1")
SFT = (
    TASKS,
    *COMMON,
    "start.type=checkpoint",
    "steps=100000",
    "micro_batch_tokens=96",
    "max_answer_tokens=8",
    "eval={prompts: 4, every_steps: 100000}",
    "tracker.mode=disabled",
)
MUON = "optim={type: hybrid_muon, lr: 1e-3}"
ADAMW = "optim={type: adamw, lr: 1e-3}"
GRPO = (
    *COMMON,
    ADAMW,
    "sampling.max_new_tokens=6",
    "prompts_per_step=4",
    "micro_batch_tokens=256",
    "eval={prompts: 1, every_steps: 100000}",
    "tracker.mode=disabled",
    "cluster.learner_threads=1",
    "algo.group_size=2",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def _ended(words: list[str], number: signal.Signals, sign: Path, log: Path) -> tuple[int, str]:
    """Exit code and standard error of a process that gets a signal once there is something in `sign`."""
    with log.open("w") as stderr:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            deadline_s = time.monotonic() + WAIT_S
            while not sign.exists() or (sign.is_file() and not sign.read_bytes()):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline_s, log.read_text()[-3000:]
                time.sleep(0.02)
            os.kill(process.pid, number)
            return process.wait(WAIT_S), log.read_text()
        finally:
            process.kill()
            process.wait()


def _assert_interrupted(code: int, text: str, name: str, run_dir: Path) -> None:
    assert code == 130, text[-3000:]
    assert text.splitlines()[-2:] == [
        f"{name} has not finished; it goes on with: rollforward resume {run_dir}",
        "error: interrupted",
    ]


@pytest.mark.parametrize(
    ("number", "optim"),
    [
        pytest.param(signal.SIGTERM, MUON, id="SIGTERM-muon"),
        pytest.param(signal.SIGINT, MUON, id="SIGINT-muon", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ADAMW, id="SIGTERM-adamw", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, ADAMW, id="SIGINT-adamw", marks=pytest.mark.slow),
    ],
)
def test_fine_tuning_that_is_ended_says_how_it_goes_on_and_nothing_more(
    model_dir: Path, tmp_path: Path, number: signal.Signals, optim: str
) -> None:
    run_dir = tmp_path / "run"
    words = command("sft", f"run_dir={run_dir}", f"start.model_dir={model_dir}", *SFT, optim)
    code, text = _ended(words, number, run_dir / "metrics.jsonl", tmp_path / "log.txt")
    _assert_interrupted(code, text, "sft", run_dir)


@pytest.mark.slow
def test_an_evaluation_that_is_ended_says_how_it_goes_on(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (TASKS, *COMMON, "prompts=12", "sampling={max_new_tokens: 2000, temperature: 1.0}")
    words = command("eval", f"run_dir={run_dir}", f"model_dir={model_dir}", *settings)
    code, text = _ended(words, signal.SIGTERM, run_dir / "wal" / "eval", tmp_path / "log.txt")
    _assert_interrupted(code, text, "eval", run_dir)


@pytest.mark.slow
def test_distillation_that_is_ended_says_how_it_goes_on(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    teachers = f"teachers={{same: {{model_dir: {model_dir}, tasks: [chain_sum]}}}}"
    settings = [one for one in GRPO if not one.startswith("algo.")]
    words = command("distill", f"run_dir={run_dir}", f"model_dir={model_dir}", teachers, TASKS, *settings, "steps=1000")
    cache = f"teacher_cache.directory={tmp_path / 'teachers'}"
    code, text = _ended([*words, cache], signal.SIGTERM, run_dir / "metrics.jsonl", tmp_path / "log.txt")
    _assert_interrupted(code, text, "distill", run_dir)


def test_fine_tuning_that_an_error_ends_says_it_in_a_line(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    optim = MUON.replace("1e-3", "1e30")
    words = command("sft", f"run_dir={run_dir}", f"start.model_dir={model_dir}", *SFT, optim)
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    *_, hint, said = done.stderr.splitlines()
    assert hint == f"sft has not finished; it goes on with: rollforward resume {run_dir}"
    assert re.match(r"error: .*finite", said)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_a_run_in_a_line_that_names_it(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "reward.py").write_text("def score(question, answer, text):\n    return 1 / 0\n")
    rows = [json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    task = (
        f"tasks=[{{type: dataset, name: mine, path: {tmp_path / 'rows.jsonl'}, heldout_size: 4,"
        f" reward: {{type: python, file: {tmp_path / 'reward.py'}}}}}]"
    )
    words = command("train", f"run_dir={run_dir}", f"model_dir={model_dir}", task, *GRPO, "steps=1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    *_, hint, said = done.stderr.splitlines()
    assert hint == f"train has not finished; it goes on with: rollforward resume {run_dir}"
    assert said.startswith("error: step 1: 8 of 8 answers have no score and are left out; one (data): ")
    assert "reward.py" in said
    assert "ZeroDivisionError" in said
    assert "Mend what failed, then `rollforward resume`" in said
    assert "run_dir/wal" not in said, "what was sampled is in order"
    assert "Traceback" not in done.stderr
