"""Proves: every step is one JSON line, a later process is a later attempt, a torn line does no harm, W&B keeps its
id."""

import json
from pathlib import Path

import pytest

from rollforward.rl.config import TrackerConfig
from rollforward.rl.tracker import METRICS_NAME, Tracker


def _tracker(run_dir: Path, mode: str = "disabled") -> Tracker:
    return Tracker(run_dir, TrackerConfig(mode=mode), run_config={"seed": 1})  # type: ignore[arg-type]


def test_lines_attempts_and_a_torn_line(tmp_path: Path) -> None:
    first = _tracker(tmp_path)
    first.log(1, {"critic/rewards/mean": 0.25, "bad": float("nan")})
    first.close()
    with (tmp_path / METRICS_NAME).open("ab") as file:
        file.write(b'{"step": 2, \xff"att')
    second = _tracker(tmp_path)
    assert (first.attempt, second.attempt) == (0, 1)
    second.log(2, {"critic/rewards/mean": 0.5})
    second.close()
    lines = (tmp_path / METRICS_NAME).read_text(errors="replace").splitlines()
    start, end = json.loads(lines[0]), json.loads(lines[-1])
    assert (start["step"], start["attempt"], start["critic/rewards/mean"], start["bad"]) == (1, 0, 0.25, None)
    assert (end["step"], end["attempt"], end["critic/rewards/mean"]) == (2, 1, 0.5)


def test_wandb_offline_keeps_the_id_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for step in (1, 2):
        tracker = _tracker(tmp_path, "offline")
        tracker.log(step, {"critic/rewards/mean": 0.5})
        tracker.close()
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1]
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert runs
    assert all(name.endswith(ids[0]) or ids[0] in name for name in runs)
