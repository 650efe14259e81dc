"""Proves: every step is one JSON line, a later process is a later attempt, a torn line does no harm; W&B keeps its id
and its steps only grow, whatever was killed; W&B that fails does not stop a run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from rollforward.rl.answers import ANSWERS_NAME, Answer
from rollforward.rl.config import TrackerConfig
from rollforward.rl.errors import TrackerError
from rollforward.rl.tracker import METRICS_NAME, Tracker, TrackerState

ANSWER = Answer(
    task="sums",
    prompt=0,
    member=1,
    question="1 + 1 =",
    text="2 Ü",
    reward=1.0,
    advantage=0.5,
    num_turns=1,
    num_tokens=2,
    stop_reason="eos",
    failure=None,
    left_out="'a' is no regular file",
)


def _tracker(run_dir: Path, mode: str = "disabled", state: TrackerState | None = None) -> Tracker:
    tracker = Tracker(run_dir, TrackerConfig(mode=mode), run_config={"seed": 1})  # type: ignore[arg-type]
    tracker.begin(state)
    return tracker


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class FakeWandb:
    """A W&B run that notes what it is told, drops steps that go back as the real one does, and fails on request."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.kept: list[tuple[int, dict[str, Any]]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.exit_codes: list[int] = []
        self.accepts_from = 0
        self.fails: set[str] = set()

    def init(self, **arguments: Any) -> "FakeWandb":
        if "init" in self.fails:
            raise wandb.Error("no API key\nlong explanation")
        self.inits.append(arguments)
        return self

    @property
    def step(self) -> int:
        """What the real one says: offline it knows nothing of earlier processes."""
        return self.accepts_from if self.inits[-1]["mode"] == "online" else 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, record: dict[str, Any], step: int) -> None:
        if "log" in self.fails:
            raise RuntimeError("broken pipe")
        if step >= self.accepts_from:
            self.kept.append((step, record))
            self.accepts_from = step + 1

    def finish(self, exit_code: int) -> None:
        if "finish" in self.fails:
            raise RuntimeError("broken pipe")
        self.exit_codes.append(exit_code)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    made = FakeWandb()
    monkeypatch.setattr(wandb, "init", made.init)
    return made


def test_lines_attempts_and_a_torn_line(tmp_path: Path) -> None:
    first = _tracker(tmp_path)
    first.log(1, {"critic/rewards/mean": 0.25, "bad": float("nan")})
    first.close()
    for name in (METRICS_NAME, ANSWERS_NAME):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 2, \xff"att')
    second = _tracker(tmp_path)
    assert (first.attempt, second.attempt) == (0, 1)
    second.log(2, {"critic/rewards/mean": 0.5}, (ANSWER,))
    second.close()
    assert json.loads((tmp_path / ANSWERS_NAME).read_text(errors="replace").splitlines()[-1])["attempt"] == 1
    lines = (tmp_path / METRICS_NAME).read_text(errors="replace").splitlines()
    start, end = json.loads(lines[0]), json.loads(lines[-1])
    assert (start["step"], start["attempt"], start["critic/rewards/mean"], start["bad"]) == (1, 0, 0.25, None)
    assert (end["step"], end["attempt"], end["critic/rewards/mean"]) == (2, 1, 0.5)
    assert (start["wandb_step"], end["wandb_step"]) == (0, 1)


def test_replayed_steps_are_kept_and_marked(tmp_path: Path, fake: FakeWandb) -> None:
    """Killed two steps after a checkpoint, twice; W&B's own step never goes back, so that it drops nothing."""
    saved: TrackerState | None = None
    for attempt in range(3):
        tracker = _tracker(tmp_path, "offline", saved)
        tracker.log(1, {"reward": attempt})
        saved = saved or tracker.state
        tracker.log(2, {"reward": attempt + 0.5})
    assert [(step, record["train/step"], record["attempt"]) for step, record in fake.kept] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 1, 1),
        (3, 2, 1),
        (4, 1, 2),
        (5, 2, 2),
    ]
    assert len({init["id"] for init in fake.inits}) == 1
    assert all(init["resume"] == "allow" for init in fake.inits)
    assert ("*", "train/step") in fake.metrics


def test_the_checkpoint_alone_holds_id_and_next_step(tmp_path: Path, fake: FakeWandb) -> None:
    """What lay beside it in the run directory is lost."""
    tracker = _tracker(tmp_path, "offline")
    tracker.log(1, {})
    tracker.log(2, {})
    state = tracker.state
    assert state == TrackerState(wandb_id=fake.inits[0]["id"], next_step=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = _tracker(elsewhere, "offline", state)
    again.log(3, {})
    assert fake.inits[1]["id"] == fake.inits[0]["id"]
    assert [step for step, _ in fake.kept] == [0, 1, 2]


def test_without_a_checkpoint_the_id_is_kept_too(tmp_path: Path, fake: FakeWandb) -> None:
    _tracker(tmp_path, "offline")
    _tracker(tmp_path, "offline", TrackerState(wandb_id=None, next_step=0))
    assert fake.inits[0]["id"] == fake.inits[1]["id"]


def test_online_wandb_knows_better_what_it_has(tmp_path: Path, fake: FakeWandb) -> None:
    fake.accepts_from = 7
    tracker = _tracker(tmp_path, "online")
    tracker.log(1, {})
    assert [step for step, _ in fake.kept] == [7]


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_wandb_that_breaks_is_told_once_and_training_goes_on(
    tmp_path: Path, fake: FakeWandb, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    tracker = _tracker(tmp_path, "offline")
    fake.fails.add(fails)
    for step in (1, 2, 3):
        tracker.log(step, {"reward": 0.5})
    tracker.close()
    assert capsys.readouterr().err.count("W&B failed and is left out until the run is resumed (broken pipe)") == 1
    assert [line["step"] for line in _lines(tmp_path / METRICS_NAME)] == [1, 2, 3]


def test_wandb_that_does_not_start_stops_a_new_run_and_no_resumed_one(
    tmp_path: Path, fake: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails.add("init")
    with pytest.raises(TrackerError, match=r"tracker\.mode is online.*: no API key\. Call `wandb login`"):
        _tracker(tmp_path, "online")
    fake.fails.clear()
    _tracker(tmp_path, "online").log(1, {})
    fake.fails.add("init")
    resumed = _tracker(tmp_path, "online")
    resumed.log(2, {})
    assert resumed.attempt == 1
    assert "left out until the run is resumed (no API key)" in capsys.readouterr().err
    fake.fails.clear()
    _tracker(tmp_path, "online").log(3, {})
    assert [step for step, _ in fake.kept] == [0, 2], "the step in between is in metrics.jsonl alone"
    assert len({init["id"] for init in fake.inits}) == 1


def test_answers_are_lines_and_a_table(tmp_path: Path, fake: FakeWandb) -> None:
    tracker = _tracker(tmp_path, "offline")
    tracker.log(1, {"reward": 0.5}, [ANSWER])
    tracker.log(2, {"reward": 0.5})
    (line,) = _lines(tmp_path / ANSWERS_NAME)
    assert (line["step"], line["attempt"], line["text"], line["advantage"]) == (1, 0, "2 Ü", 0.5)
    table = fake.kept[0][1]["answers"]
    assert table.columns[:4] == ["step", "attempt", "task", "prompt"]
    assert table.data == [[1, 0, "sums", 0, 1, "1 + 1 =", "2 Ü", 1.0, 0.5, 1, 2, "eos", None, "'a' is no regular file"]]
    assert "answers" not in fake.kept[1][1]


def test_a_failed_body_is_a_failed_run(tmp_path: Path, fake: FakeWandb) -> None:
    with pytest.raises(KeyError), _tracker(tmp_path, "offline"):
        raise KeyError
    with _tracker(tmp_path, "offline"):
        pass
    assert fake.exit_codes == [1, 0]


def test_the_real_wandb_offline(tmp_path: Path) -> None:
    ids: list[str] = []
    for step in (1, 2):
        tracker = _tracker(tmp_path, "offline")
        tracker.log(step, {"critic/rewards/mean": 0.5, "bad": float("nan")}, [ANSWER])
        assert tracker.wandb_place == str(tmp_path / "wandb")
        tracker.close()
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1]
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert all(name.endswith(ids[0]) for name in runs)
