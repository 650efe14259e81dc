"""Proves: SFT learns, and one that was interrupted at any step ends with the same weights as one that was not.

One process. Not here: the command line around it (tests/e2e).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.model.scoring import ScoringBatch
from rollforward.model.trainer import LossFunction, StepResult, Trainer
from rollforward.rl.config import SFTRun
from rollforward.rl.setup import load_parts
from rollforward.rl.sft import SFTLoop
from rollforward.rl.tracker import Tracker
from rollforward.rollout.weights import read_published
from tests.helpers.ranks import join_alone
from tests.helpers.runs import TASK, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def _loop(run_dir: Path, model_dir: Path, **changes: Any) -> SFTLoop:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "start": {"type": "checkpoint", "model_dir": str(model_dir)},
        "tasks": [TASK],
        "optim": {"type": "adamw", "lr": 2e-3, "warmup_steps": 2},
        "steps": 6,
        "micro_batch_tokens": 96,
        "micro_batches_per_step": 2,
        "max_prompt_tokens": 40,
        "max_answer_tokens": 8,
        "eval": {"prompts": 4, "every_steps": 6},
        "checkpoint_every_steps": 2,
        "tracker": {"mode": "disabled"},
        "rollout": {"threads": 1, "wal": {"level": "process"}},
    }
    run = msgspec.convert(values | changes, SFTRun)
    run_dir.mkdir(parents=True, exist_ok=True)
    join_alone(run_dir)
    parts = load_parts(
        model_dir, run.tasks, max_prompt_tokens=run.max_prompt_tokens, max_new_tokens=8, sandbox=run.sandbox
    )
    return SFTLoop(run, parts, model_dir, Tracker(run_dir, run.tracker, run_config={}))


def _losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["sft/loss"] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    _loop(run_dir, model_dir).run()
    return run_dir


def test_the_loss_falls(undisturbed: Path) -> None:
    losses = _losses(undisturbed)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < 0.8 * losses[1]


class _KilledError(Exception):
    """The process ended here."""


@pytest.mark.parametrize("dies_at", [1, 3, 4, 6])
def test_an_interrupted_run_ends_with_the_same_weights(
    undisturbed: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    step, left = Trainer.train_step, [dies_at]

    def dying(
        self: Trainer, batches: Sequence[ScoringBatch], loss: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        left[0] -= 1
        if left[0] == 0:
            raise _KilledError
        return step(self, batches, loss, temperature=temperature)

    monkeypatch.setattr(Trainer, "train_step", dying)
    with pytest.raises(_KilledError):
        _loop(tmp_path / "run", model_dir).run()
    monkeypatch.undo()
    _loop(tmp_path / "run", model_dir).run()
    assert read_published(tmp_path / "run" / "model")[0] == read_published(undisturbed / "model")[0]
    assert _losses(tmp_path / "run") == _losses(undisturbed)
