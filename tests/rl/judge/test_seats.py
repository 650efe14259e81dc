"""Proves: a model that judges is the one that the run began with, or the run does not go on: other weights, another
tokenizer and another form of conversations are told from what was there, and put back it goes on. However its directory
is spelled, it is one judge.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.model.checkpoint import read_checkpoint, write_checkpoint
from rollforward.model.config import load_model_config
from rollforward.model.encoding_version import ENCODING_FILE
from rollforward.rl.errors import ModelDirectoryError
from rollforward.rl.judge.judging import Ask
from rollforward.rl.judge.seats import JudgeModel, Judges, LocalJudge, load_judges, local_engines
from rollforward.rl.setup import load_parts
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.reward_config import RubricReward
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.types import RequestId
from rollforward.sandbox.config import SandboxConfig
from tests.helpers.runs import write_model

ROLLOUT = msgspec.convert({"threads": 1, "wal": {"level": "process"}}, RolloutConfig)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def judge_dir(model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_dir, tmp_path / "judge")


def _task(index: int, judge_dir: str) -> TaskConfig:
    """A task that the model in a directory judges."""
    rubric: dict[str, Any] = {
        "type": "rubric",
        "criteria": [{"name": "even", "text": "It is even."}],
        "judge": {"type": "model", "model_dir": judge_dir, "precision": "fp32"},
        "max_verdict_tokens": 16,
    }
    task = {"type": "dataset", "name": f"evens-{index}", "path": {"type": "evens", "rows": 40}, "reward": rubric}
    return msgspec.convert(task | {"heldout_size": 10}, TaskConfig)


def _start(model_dir: Path, judge_dir: Path | list[str], run_dir: Path) -> list[JudgeModel]:
    """The judges' place in one process of a run, taken and given back. A directory, or how each task spells it."""
    spelled = [str(judge_dir)] if isinstance(judge_dir, Path) else judge_dir
    configs = [_task(index, one) for index, one in enumerate(spelled)]
    parts = load_parts(model_dir, configs, max_prompt_tokens=64, max_new_tokens=8, sandbox=SandboxConfig())
    models = list(load_judges(configs, parts.encoding, parts.model_config))
    engines: list[LocalJudge] = [local_engines(model, run_dir, ROLLOUT) for model in models]
    judges = Judges(models, engines, run_dir=run_dir, run_seed=0)
    try:
        judges.open()
        judging = judges.judging(lambda _: [], parts.encoding, parts.model_config)
        for index, config in enumerate(configs):
            (reward,) = (part.reward for part in config.reward_parts)
            assert isinstance(reward, RubricReward)
            ask = Ask(id=RequestId(0, index, 0), task="t", reward=reward, first=1, question="Even?", answer="4")
            assert len(judging.judge([ask], policy_version=0)[0].judgements) >= 3
    finally:
        judges.close()
    return models


def _another_weight(judge_dir: Path) -> None:
    config = load_model_config(judge_dir / "config.json")
    params = dict(read_checkpoint(judge_dir, config))
    params["head.weight"] = params["head.weight"].clone()
    params["head.weight"][0, 0] += 1.0
    shutil.rmtree(judge_dir / "rewritten", ignore_errors=True)
    write_checkpoint(judge_dir / "rewritten", config, params, precision="fp32")
    for file in (judge_dir / "rewritten").iterdir():
        shutil.copy(file, judge_dir / file.name)
    shutil.rmtree(judge_dir / "rewritten")


def _another_tokenizer(judge_dir: Path) -> None:
    file = judge_dir / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))


def _another_form(judge_dir: Path) -> None:
    (judge_dir / ENCODING_FILE).write_text(json.dumps({"encoding": "v4-0424"}))


@pytest.mark.parametrize("change", [_another_weight, _another_tokenizer, _another_form])
def test_another_judge_is_refused_and_the_first_goes_on(
    change: Callable[[Path], None], model_dir: Path, judge_dir: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    _start(model_dir, judge_dir, run_dir)
    began_with = json.loads((run_dir / "judges.json").read_text())
    assert list(began_with) == [str(judge_dir)]
    _start(model_dir, judge_dir, run_dir)
    shutil.copytree(judge_dir, tmp_path / "before")
    change(judge_dir)
    told = (
        rf"judge {judge_dir}: its version is \w{{32}}; the run in {run_dir} began with {began_with[str(judge_dir)]}"
        rf" \({run_dir}/judges.json\)\. Put the judge back as it was, or choose another run_dir"
    )
    with pytest.raises(ModelDirectoryError, match=told):
        _start(model_dir, judge_dir, run_dir)
    shutil.rmtree(judge_dir)
    shutil.copytree(tmp_path / "before", judge_dir)
    _start(model_dir, judge_dir, run_dir)
    assert json.loads((run_dir / "judges.json").read_text()) == began_with


def test_a_judge_that_lies_in_other_files_is_the_same(model_dir: Path, judge_dir: Path, tmp_path: Path) -> None:
    _start(model_dir, judge_dir, tmp_path / "run")
    config = load_model_config(judge_dir / "config.json")
    write_checkpoint(tmp_path / "again", config, dict(read_checkpoint(judge_dir, config)), precision="fp32")
    shutil.copy(judge_dir / "tokenizer.json", tmp_path / "again" / "tokenizer.json")
    shutil.rmtree(judge_dir)
    (tmp_path / "again").rename(judge_dir)
    _start(model_dir, judge_dir, tmp_path / "run")


def test_however_it_is_spelled_it_is_one_judge(
    model_dir: Path, judge_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(judge_dir)
    spellings = ["judge", str(judge_dir), "./link/", f"{tmp_path}/../{tmp_path.name}/judge"]
    (one,) = _start(model_dir, spellings, tmp_path / "run")
    assert one.judge.model_dir == "judge"
    # As the run began, so that a file of a run that was moved together with its judge is still understood.
    assert list(json.loads((tmp_path / "run" / "judges.json").read_text())) == ["judge"]
    for spelling in spellings:
        _start(model_dir, [spelling], tmp_path / "run")
    _another_weight(judge_dir)
    began_with = json.loads((tmp_path / "run" / "judges.json").read_text())["judge"]
    for spelling in spellings:
        with pytest.raises(ModelDirectoryError, match=f"the run in .*/run began with {began_with}"):
            _start(model_dir, [spelling], tmp_path / "run")


def test_a_run_that_no_longer_knows_its_judges_is_refused(model_dir: Path, judge_dir: Path, tmp_path: Path) -> None:
    _start(model_dir, judge_dir, tmp_path / "run")
    file = tmp_path / "run" / "judges.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelDirectoryError, match=r"judges\.json cannot be read: .*choose another run_dir"):
        _start(model_dir, judge_dir, tmp_path / "run")
