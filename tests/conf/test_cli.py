"""Proves: verbs, recipes, addressed overrides; mistakes end with code 2, a message, no traceback, without torch or ray.

The verbs' work is played by modules made here; the real ones have their own tests.
"""

import errno
import fcntl
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.conf import cli, jobs
from rollforward.conf.errors import ConfError, RunDirError, UsageError
from rollforward.conf.recipe import RecipeRun, address, spell_out


class FakeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str
    model_dir: str = "none"
    steps: int = 1
    seed: int = 0
    fail: bool = False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeRun]:
    """Two verbs whose work is to note the configuration; the working directory is a new one."""
    made: list[FakeRun] = []
    module: Any = types.ModuleType("fake_work")

    def main(config: FakeRun) -> int:
        made.append(config)
        return 3 if config.fail else 0

    module.main, module.FakeRun = main, FakeRun
    monkeypatch.setitem(sys.modules, "fake_work", module)
    for verb in ("sft", "train"):
        monkeypatch.setitem(cli.VERBS, verb, cli.Verb("fake_work", "fake_work:FakeRun", "fake"))
    # train's root chooses an algorithm, which the fake has not: both use the root of sft.
    monkeypatch.setattr(jobs, "load_config", lambda schema, root, *a, **k: _load(schema, "sft", *a, **k))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(
        "summary: two runs\nruns:\n- {name: warmup, verb: sft, config: {steps: 5}}\n"
        "- {name: grpo, verb: train, config: {model_dir: '${run_dir:warmup}/model', steps: 7}}\n"
    )
    return made


_load = jobs.load_config


def test_a_recipe_runs_in_order_and_a_run_names_an_earlier_ones_directory(calls: list[FakeRun], tmp_path: Path) -> None:
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 0
    out = tmp_path / "out"
    assert calls == [
        FakeRun(run_dir=f"{out}/warmup", steps=5),
        FakeRun(run_dir=f"{out}/grpo", steps=7, model_dir=f"{out}/warmup/model"),
    ]
    assert json.loads((out / "grpo" / "config.json").read_text())["steps"] == 7
    assert json.loads((out / "grpo" / "finished.json").read_text())["verb"] == "train"


def test_overrides_reach_the_run_they_address(calls: list[FakeRun]) -> None:
    assert cli.main(["train", "recipe=two.yaml", "steps=9", "warmup.steps=2", "all.seed=4"]) == 0
    assert [(call.steps, call.seed) for call in calls] == [(2, 4), (9, 4)]


def test_a_verb_executes_the_recipe_up_to_its_own_last_run(calls: list[FakeRun]) -> None:
    assert cli.main(["sft", "recipe=two.yaml", "steps=9"]) == 0
    assert [call.steps for call in calls] == [9]


def test_finished_runs_are_kept_and_an_unfinished_one_is_called_again(calls: list[FakeRun], tmp_path: Path) -> None:
    arguments = ["train", "recipe=two.yaml", "run_dir=out"]
    assert cli.main(arguments) == 0
    (tmp_path / "out" / "grpo" / "finished.json").unlink()
    assert cli.main(arguments) == 0
    assert [Path(call.run_dir).name for call in calls] == ["warmup", "grpo", "grpo"]


def test_a_run_that_fails_ends_the_pipeline_with_its_code(calls: list[FakeRun], tmp_path: Path) -> None:
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out", "warmup.fail=true"]) == 3
    assert len(calls) == 1
    assert not (tmp_path / "out" / "warmup" / "finished.json").exists()


def test_who_is_interrupted_learns_how_to_go_on(
    calls: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(config: FakeRun) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["fake_work"], "main", interrupted)
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 130
    assert f"it goes on with: rollforward resume {tmp_path}/out" in capsys.readouterr().err


def test_who_made_a_mistake_is_not_told_to_repeat_it(
    calls: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(config: FakeRun) -> int:
        raise ConfError("no such dataset")

    monkeypatch.setattr(sys.modules["fake_work"], "main", refuses)
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 2
    assert "goes on" not in capsys.readouterr().err


def test_other_settings_in_an_old_run_dir_are_refused_before_anything_runs(calls: list[FakeRun]) -> None:
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 0
    with pytest.raises(RunDirError, match=r"steps \(was 7, now 8\)"):
        cli.execute(cli.plan_jobs("train", ["recipe=two.yaml", "run_dir=out", "steps=8"]))
    assert len(calls) == 2


def test_a_run_dir_in_which_another_process_works_is_refused(
    calls: list[FakeRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["sft", "run_dir=out", "steps=2"]) == 2
    assert "out is in use by another process" in capsys.readouterr().err
    assert calls == []
    assert cli.main(["sft", "run_dir=out", "steps=2"]) == 0


def test_every_run_is_validated_before_the_first_starts(calls: list[FakeRun]) -> None:
    assert cli.main(["train", "recipe=two.yaml", "steps=x"]) == 2
    assert calls == []
    assert not Path("runs").exists()


def test_a_run_named_like_a_setting_is_refused(calls: list[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("summary: s\nruns: [{name: seed, verb: sft}, {name: b, verb: train}]\n")
    with pytest.raises(UsageError, match="would mean two things"):
        cli.plan_jobs("train", ["recipe=bad.yaml"])
    assert calls == []


def test_without_a_recipe_the_run_dir_is_the_run(calls: list[FakeRun], tmp_path: Path) -> None:
    assert cli.main(["sft", "run_dir=it's, here", "steps=2"]) == 0
    assert calls == [FakeRun(run_dir=f"{tmp_path}/it's, here", steps=2)]


def test_overrides_spelled_out_mean_the_same_behind_another_verb() -> None:
    runs = [RecipeRun(name="a", verb="sft"), RecipeRun(name="b", verb="train"), RecipeRun(name="c", verb="eval")]
    given = ["x=1", "a.y=2", "++optim.lr=3", "~v", "all.seed=4", "algo=grpo"]
    spelled = spell_out(runs[:2], "train", given)
    assert spelled == ["b.x=1", "a.y=2", "++b.optim.lr=3", "~b.v", "all.seed=4", "b.algo=grpo"]
    before, after = address(runs[:2], "train", given), address(runs, "eval", spelled)
    assert (after["a"], after["b"]) == (before["a"], before["b"])


def test_addresses() -> None:
    runs = [RecipeRun(name="a", verb="sft"), RecipeRun(name="b", verb="train"), RecipeRun(name="c", verb="train")]
    given = ["x=1", "a.y=2", "++b.z.w=3", "~all.v", "optim.lr=4"]
    assert address(runs, "train", given) == {
        "a": ["y=2", "~v"],
        "b": ["x=1", "++z.w=3", "~v", "optim.lr=4"],
        "c": ["x=1", "~v", "optim.lr=4"],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian is not a command", "train"]),
        (["train", "recipe=tinny"], ["recipe=tinny", "Did you mean recipe=tiny?"]),
        (
            ["train", "recipe=tiny", "grop.steps=3"],
            ["grop is no run of recipe=tiny and no setting of train. Did you mean grpo?", "Runs: sft, grpo;"],
        ),
        (
            ["train", "recipe=tiny", "heldout.seed=1"],
            [
                "heldout is a run of recipe=tiny that train does not execute",
                "rollforward eval recipe=tiny heldout.seed=1",
            ],
        ),
        (["train", "recipe=tiny", "optm.lr=3"], ["run grpo: optm is not a setting. Did you mean optim?"]),
        (
            ["train", "recipe=tiny", "sft.steps=481"],
            ["run sft: optim.decay_steps is 460", "Set sft.optim.decay_steps=461 or more"],
        ),
        (["train", "--fast"], ["--fast is not an option"]),
        (["train", "--cfg", "all"], ["--cfg job"]),
        (["plan"], ["model is required"]),
        (["plan", "modle=flash"], ["modle is not a setting", "Did you mean model?"]),
        (["plan", "recipe=tiny"], ["has no run of plan"]),
        (["train"], ["Start from a recipe: rollforward train recipe=tiny"]),
        (["resum"], ["Did you mean resume?"]),
        (["resume"], ["resume is followed by nothing; it takes one directory"]),
        (["resume", "out", "more"], ["resume is followed by out more", "where it works may be said anew"]),
        (["resume", "/nowhere"], ["/nowhere is no directory"]),
    ],
)
def test_a_mistake_ends_with_code_2_and_a_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert [word for word in words if word not in output.err] == [], output.err
    assert output.out == ""
    assert "Traceback" not in output.err
    assert all(line.startswith("error: ") for line in output.err.splitlines())


def test_an_error_of_another_folder_or_wrapped_by_ray_is_told_without_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrapped(Exception):  # noqa: N818 - stands for ray.exceptions.RayTaskError
        cause = ConfError("the reason")

    def fail(arguments: list[str]) -> int:
        raise Wrapped

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == 2

    def bug(arguments: list[str]) -> int:
        raise ValueError("a bug keeps its traceback")

    monkeypatch.setattr(cli, "_dispatch", bug)
    with pytest.raises(ValueError, match="keeps its traceback"):
        cli.main([])


def test_help_lists_verbs_recipes_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in (*cli.VERBS, "resume", "submit", "recipes", "tiny"))
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "algo.group_size=8" in text
    assert "algo=" in text
    assert "algo.type=grpo" in text, "the root YAML chooses it"
    assert "run_dir=required" not in text, "the command line chooses it"
    assert "tasks[].dataset=required" in text
    assert "null switches the mask off" in text, "the second line of a field's words"
    assert cli.main(["eval", "--help"]) == 0
    assert "algo=" not in capsys.readouterr().out, "eval has no algorithm"


def test_cfg_job_prints_every_run_and_starts_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe=tiny", "algo.group_size=4", "--cfg", "job"]) == 0
    text = capsys.readouterr().out
    assert "group_size: 4" in text
    assert text.count("(rollforward ") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "from rollforward.conf.console import result\nfor _ in range(9): result('x' * 99999)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x", "")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "recipe=tiny", "algo.grup_size=2"]])
def test_answering_imports_neither_torch_nor_ray(arguments: list[str]) -> None:
    heavy = "{'torch', 'ray', 'deepspeed', 'transformers', 'wandb', 'reasoning_gym'}"
    code = (
        "import sys; from rollforward.conf.cli import main; main(sys.argv[1:]); "
        f"sys.exit(','.join({heavy} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "Make room there"),
        (errno.EDQUOT, "Make room there"),
        (errno.EROFS, "Let this user write there"),
        (errno.EACCES, "Let this user write there"),
    ],
)
def test_a_disk_that_refuses_is_told_without_traceback_and_with_the_way_out(
    number: int, way_out: str, calls: list[FakeRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: FakeRun) -> int:
        raise OSError(number, os.strerror(number), "out/file")

    monkeypatch.setattr(sys.modules["fake_work"], "main", refuse)
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 2
    said = capsys.readouterr().err
    assert f"error: run warmup: [Errno {number}] {os.strerror(number)}: 'out/file'. {way_out}" in said
    assert "rollforward resume RUN_DIR" in said, "the same command would begin anew, in a directory of another time"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=two.yaml", "run_dir=out"], "error: run grpo: model_dir is a. Set grpo.model_dir=b\n"),
        (["run_dir=out"], "error: model_dir is a. Set model_dir=b\n"),
    ],
)
def test_a_mistake_that_one_of_several_runs_meets_names_the_run(
    words: list[str],
    said: str,
    calls: list[FakeRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(config: FakeRun) -> int:
        if Path(config.run_dir).name == "warmup":
            return 0
        raise ConfError("model_dir is a. Set model_dir=b")

    monkeypatch.setattr(sys.modules["fake_work"], "main", refuse)
    assert cli.main(["train", *words]) == 2
    assert capsys.readouterr().err.endswith(said)


@pytest.fixture
def asked(calls: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What was asked ahead: the run's directory, and those that are yet to be made."""
    made: list[tuple[str, list[str]]] = []

    def check(config: FakeRun, unmade: list[Path]) -> None:
        assert not calls, "asked before any run begins"
        made.append((Path(config.run_dir).name, [path.name for path in unmade]))
        if config.seed == 9:
            raise ConfError("seed is 9; it is not. Set seed=8, or model_dir=a")

    module: Any = types.ModuleType("fake_ahead")
    module.check = check
    monkeypatch.setitem(sys.modules, "fake_ahead", module)
    for verb in ("sft", "train"):
        monkeypatch.setitem(cli.VERBS, verb, cli.VERBS[verb]._replace(ahead="fake_ahead"))
    return made


def test_later_runs_are_asked_before_the_first_begins(
    calls: list[FakeRun], asked: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out", "seed=9"]) == 2
    assert (calls, asked) == ([], [("grpo", ["warmup"])])
    told = "error: grpo, a later run of this recipe, could not begin: seed is 9; it is not. Set grpo.seed=8, or grpo.mo"
    assert told in capsys.readouterr().err
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out", "seed=8"]) == 0, "another seed: nothing had begun"


def test_a_run_that_is_its_turn_asks_for_itself(
    asked: list[tuple[str, list[str]]], calls: list[FakeRun], tmp_path: Path
) -> None:
    assert cli.main(["sft", "run_dir=one"]) == 0
    calls.clear()
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 0
    (tmp_path / "out" / "grpo" / "finished.json").unlink()
    asked.clear()
    assert cli.main(["train", "recipe=two.yaml", "run_dir=out"]) == 0
    assert asked == []
