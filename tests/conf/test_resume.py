"""Proves: `resume DIR` does what is left of a command, with its settings and no others but where it works; what it
cannot use it names.

The verbs' work is played by a module made here.
"""

import json
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from rollforward.conf import cli, jobs
from rollforward.conf.errors import ConfigError, RunDirError
from rollforward.conf.resume import RUNS_NAME, recorded_jobs
from rollforward.conf.run_dir import held


class FakeCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    may_change: ClassVar[frozenset[str]] = frozenset({"ranks", "address"})
    ranks: int = 1
    address: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.ranks > 8 and self.address is None:
            raise ValueError("more than 8 ranks need an address")


class FakeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str
    model_dir: str = "none"
    steps: int = 1
    sizes: tuple[int, ...] = (1, 2)


class PlacedRun(FakeRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cluster: FakeCluster = FakeCluster()


class Work:
    """Notes every run; raises KeyboardInterrupt in the one that it is told."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.directories: set[Path] = set()
        self.stops_at = ""

    def main(self, config: FakeRun) -> int:
        name = Path(config.run_dir).name
        ranks = f" on {config.cluster.ranks}" if isinstance(config, PlacedRun) and config.cluster.ranks > 1 else ""
        self.made.append(f"{name} {config.steps}{ranks}")
        self.directories.add(Path.cwd())
        (Path(config.run_dir) / "metrics.jsonl").write_text("")
        if name == self.stops_at:
            raise KeyboardInterrupt
        return 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Work:
    made = Work()
    module: Any = types.ModuleType("fake_work")
    module.main, module.FakeRun, module.PlacedRun = made.main, FakeRun, PlacedRun
    monkeypatch.setitem(sys.modules, "fake_work", module)
    for verb in ("sft", "train", "eval"):
        schema = "FakeRun" if verb == "sft" else "PlacedRun"
        monkeypatch.setitem(cli.VERBS, verb, cli.Verb("fake_work", f"fake_work:{schema}", "fake"))
    load = jobs.load_config
    monkeypatch.setattr(jobs, "load_config", lambda schema, root, *a, **k: load(schema, "sft", *a, **k))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.yaml").write_text(
        "summary: three runs\nruns:\n- {name: warmup, verb: sft, config: {steps: 5}}\n"
        "- {name: grpo, verb: train, config: {model_dir: '${run_dir:warmup}/model', steps: 7}}\n"
        "- {name: heldout, verb: eval, config: {model_dir: '${run_dir:grpo}/model'}}\n"
    )
    return made


def _interrupted(work: Work, at: str, *settings: str, verb: str = "train") -> None:
    work.stops_at = at
    assert cli.main([verb, "recipe=three.yaml", "run_dir=out", *settings]) == 130
    work.stops_at = ""
    work.made.clear()


@pytest.mark.parametrize(("at", "left"), [("warmup", ["warmup 5", "grpo 9"]), ("grpo", ["grpo 9"])])
def test_what_is_left_of_a_recipe_is_done(work: Work, at: str, left: list[str], tmp_path: Path) -> None:
    """Also a run that had not begun, whose settings the command line changed and whose recipe is gone."""
    _interrupted(work, at, "steps=9")
    (tmp_path / "three.yaml").unlink()
    assert cli.main(["resume", "out"]) == 0
    assert work.made == left
    assert cli.main(["resume", "out"]) == 0
    assert work.made == left, "finished runs are kept"


def test_a_run_inside_a_recipe_goes_on_up_to_itself(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    _interrupted(work, "warmup")
    assert cli.main(["resume", "out/warmup/"]) == 0
    assert work.made == ["warmup 5"]
    assert f"next in this recipe: rollforward resume {Path('out').resolve()}" in capsys.readouterr().err


def test_a_command_that_is_refused_does_not_replace_what_the_one_at_work_recorded(work: Work) -> None:
    _interrupted(work, "warmup")
    with held(Path("out/warmup")):
        assert cli.main(["train", "recipe=three.yaml", "run_dir=out", "steps=9"]) == 2
    assert cli.main(["resume", "out"]) == 0
    assert work.made == ["warmup 5", "grpo 7"]


def test_a_single_run(work: Work) -> None:
    work.stops_at = "alone"
    assert cli.main(["sft", "run_dir=alone", "steps=3"]) == 130
    work.stops_at = ""
    assert cli.main(["resume", "alone"]) == 0
    assert work.made == ["alone 3", "alone 3"]


def test_the_command_for_the_rest_of_a_recipe_repeats_its_settings(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "recipe=three.yaml", "run_dir=out", "steps=9", "warmup.steps=2"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next in this recipe: ")]
    command = line.partition(": rollforward ")[2].split()
    assert command[0] == "eval"
    assert cli.main(command) == 0, capsys.readouterr().err
    assert work.made == ["warmup 2", "grpo 9", "heldout 1"]


def test_a_shorter_command_does_not_shorten_the_record(work: Work) -> None:
    _interrupted(work, "grpo", verb="eval")
    assert cli.main(["sft", "recipe=three.yaml", "run_dir=out"]) == 0
    assert cli.main(["resume", "out"]) == 0
    assert work.made == ["grpo 7", "heldout 1"]


def test_settings_can_be_shown(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    _interrupted(work, "warmup")
    assert cli.main(["resume", "out", "--cfg", "job"]) == 0
    assert "# grpo (rollforward train)" in capsys.readouterr().out
    assert work.made == []


def test_a_directory_that_was_moved_is_named(work: Work, tmp_path: Path) -> None:
    _interrupted(work, "grpo")
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    with pytest.raises(
        RunDirError, match=r"was begun in .*/out/warmup and lies in .*/elsewhere/warmup now.*Move it back"
    ):
        recorded_jobs(tmp_path / "elsewhere")


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def test_a_run_goes_on_where_its_command_was_typed(
    work: Work, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is where its relative paths lie: a recipe's run, and one for which the command was repeated elsewhere."""
    _interrupted(work, "grpo")
    monkeypatch.chdir(elsewhere)
    assert cli.main(["resume", str(tmp_path / "out")]) == 0
    assert (work.made, work.directories, Path.cwd()) == (["grpo 7"], {tmp_path}, elsewhere)
    (tmp_path / "out" / "grpo" / "finished.json").unlink()
    work.stops_at = "grpo"
    assert cli.main(["train", f"recipe={tmp_path}/three.yaml", f"run_dir={tmp_path}/out"]) == 130
    work.stops_at = ""
    work.directories.clear()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume", "out/grpo"]) == 0
    assert work.directories == {elsewhere}


def test_a_directory_that_is_gone_is_named_and_the_command_can_be_repeated(
    work: Work, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere)
    work.stops_at = "alone"
    command = ["sft", f"run_dir={tmp_path}/alone", "steps=3"]
    assert cli.main(command) == 130
    work.stops_at = ""
    monkeypatch.chdir(tmp_path)
    elsewhere.rmdir()
    with pytest.raises(RunDirError, match=f"typed in {elsewhere}, .*is no directory now. Put it back, or repeat"):
        recorded_jobs(tmp_path / "alone")
    assert cli.main(command) == 0
    assert [job.directory for job in recorded_jobs(tmp_path / "alone")] == [tmp_path]


def test_a_job_works_in_what_came_along_and_records_no_directory(
    work: Work, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded = json.dumps({"runtime_env": {"working_dir": "gcs://files.zip"}, "metadata": {}})
    _interrupted(work, "grpo")
    monkeypatch.chdir(elsewhere)
    with monkeypatch.context() as job:
        job.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", uploaded)
        assert recorded_jobs(tmp_path / "out")[0].directory is None
        job.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {}}))
        assert recorded_jobs(tmp_path / "out")[0].directory == tmp_path
        assert cli.main(["sft", f"run_dir={tmp_path}/alone"]) == 0
    assert recorded_jobs(tmp_path / "alone")[0].directory is None
    assert recorded_jobs(tmp_path / "out")[0].directory == tmp_path


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"holds no runs\.json"):
        recorded_jobs(tmp_path)
    with pytest.raises(RunDirError, match="is no directory"):
        recorded_jobs(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"runs": []}', b'{"runs": [{"name": "a"}]}'])
def test_a_damaged_record_is_named_and_the_command_writes_it_anew(work: Work, tmp_path: Path, content: bytes) -> None:
    _interrupted(work, "grpo")
    whole = (tmp_path / "out" / RUNS_NAME).read_bytes()
    (tmp_path / "out" / RUNS_NAME).write_bytes(content)
    with pytest.raises(RunDirError, match=r"runs\.json.*Repeat the command"):
        recorded_jobs(tmp_path / "out")
    assert cli.main(["train", "recipe=three.yaml", "run_dir=out"]) == 0
    assert (tmp_path / "out" / RUNS_NAME).read_bytes() == whole


def test_a_setting_that_is_no_longer_known_is_named(work: Work, tmp_path: Path) -> None:
    _interrupted(work, "grpo")
    path = tmp_path / "out" / RUNS_NAME
    record = json.loads(path.read_text())
    record["runs"][1]["config"]["momentum"] = 3
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"run grpo, which was begun with another version: momentum is not a setting"):
        recorded_jobs(tmp_path / "out")


def test_a_record_that_was_changed_by_hand_does_not_change_a_run(work: Work, tmp_path: Path) -> None:
    _interrupted(work, "grpo")
    path = tmp_path / "out" / RUNS_NAME
    record = json.loads(path.read_text())
    record["runs"][1]["config"]["steps"] = 8
    path.write_text(json.dumps(record))
    with pytest.raises(RunDirError, match=r"steps \(was 7, now 8\)"):
        cli.execute(recorded_jobs(tmp_path / "out"))
    assert work.made == []


def _recorded_ranks(base: Path) -> list[object]:
    runs = json.loads((base / RUNS_NAME).read_text())["runs"]
    return [run["config"]["cluster"]["ranks"] for run in runs if "cluster" in run["config"]]


def test_another_cluster_goes_on_with_the_run(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    """Without prefix for every run that has the key, with a name for one; what was said stays said."""
    _interrupted(work, "grpo", verb="eval")
    work.stops_at = "grpo"
    assert cli.main(["resume", "out", "cluster.ranks=2"]) == 130
    told = [line for line in capsys.readouterr().err.splitlines() if "elsewhere" in line]
    assert told == [f"{Path('out/grpo').resolve()} goes on elsewhere: cluster.ranks (was 1, now 2)"]
    assert json.loads(Path("out/grpo/config.json").read_text())["cluster"]["ranks"] == 2
    work.stops_at = ""
    assert cli.main(["resume", "out", "grpo.cluster.ranks=4", "grpo.cluster.address=head"]) == 0
    assert work.made == ["grpo 7 on 2", "grpo 7 on 4", "heldout 1 on 2"]
    assert _recorded_ranks(Path("out")) == [4, 2]
    config = json.loads(Path("out/grpo/config.json").read_text())
    assert config["cluster"] == {"ranks": 4, "address": "head", "threads": 1}


def test_the_same_command_with_another_cluster_goes_on_too(work: Work) -> None:
    _interrupted(work, "grpo", verb="eval")
    assert cli.main(["train", "recipe=three.yaml", "run_dir=out", "cluster.ranks=2"]) == 0
    assert work.made == ["grpo 7 on 2"]
    assert _recorded_ranks(Path("out")) == [2, 1], "the longer command's last run is kept"


def test_one_run_of_a_recipe_on_another_cluster_keeps_the_record_of_the_rest(work: Work) -> None:
    _interrupted(work, "grpo", verb="eval")
    assert cli.main(["resume", "out/grpo", "all.cluster.ranks=2"]) == 0
    assert cli.main(["resume", "out"]) == 0
    assert work.made == ["grpo 7 on 2", "heldout 1"]


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_are_valid_only_together_may_come_in_any_order(work: Work, order: int) -> None:
    _interrupted(work, "grpo")
    settings = ["cluster.ranks=16", "cluster.address=head"][::order]
    assert cli.main(["resume", "out", *settings]) == 0
    assert work.made == ["grpo 7 on 16"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "steps=9",
            r"steps=9: a run goes on with the settings that it was begun with.*: cluster.ranks, cluster.address",
        ),
        ("grpo.steps=9", "grpo.steps=9: a run goes on"),
        ("cluster.threads=2", "cluster.threads=2: a run goes on"),
        ("cluster={ranks: 2}", "cluster={'ranks': 2}: a run goes on"),
        ("warmup.cluster.ranks=2", "may change: nothing of these runs"),
        ("run_dir=elsewhere", "run_dir=elsewhere: a run goes on"),
        ("cluster.ranks=two", 'cluster.ranks is "two"; expected int'),
        ("cluster.ranks=16", "more than 8 ranks need an address"),
        ("~cluster.ranks=2", "sets no value"),
        ("cluster.ranks=1,2", "names several values"),
    ],
)
def test_only_where_a_run_works_may_be_said_anew(
    work: Work, setting: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _interrupted(work, "grpo")
    before = Path("out/runs.json").read_bytes()
    assert cli.main(["resume", "out", setting]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert work.made == []
    assert Path("out/runs.json").read_bytes() == before
