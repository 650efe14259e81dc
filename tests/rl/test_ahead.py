"""Proves: what can be known of a later run is refused before the first begins: devices, a cluster, tasks, judges; what
an earlier run has yet to make is not looked for."""

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollforward.conf.cli import main
from rollforward.kernels.errors import BackendError
from rollforward.rl.ahead import check
from rollforward.rl.config import SFTRun
from rollforward.rl.errors import ClusterError, ModelDirectoryError, TaskError
from tests.helpers.runs import TASK, small_run, write_model


def _unused_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _is_refused_ahead(directory: Path, setting: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message of the command, of whose runs none has begun."""
    assert main(["train", "recipe=tiny", f"run_dir={directory}", setting]) == 2
    assert not [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_kernel_of_a_later_run_without_its_device_costs_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _is_refused_ahead(tmp_path, "kernels.mix=tile", capsys)
    assert "grpo, a later run of this recipe, could not begin: kernels.mix is tile" in told
    assert told.endswith("In a run that is grpo.kernels.mix=reference\n"), "what is to be typed names the run"


def test_a_cluster_of_a_later_run_that_does_not_answer_costs_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"localhost:{_unused_port()}"
    told = _is_refused_ahead(tmp_path, f"cluster.address={address}", capsys)
    assert f"grpo, a later run of this recipe, could not begin: cluster.address is {address}, where no Ray" in told


MADE_LATER = "first/model"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cluster": {"learner_resources": {"gold": 1}}}, ClusterError, "learner_resources is set"),
        ({"tasks": [{**TASK, "dataset": "chain_sun"}]}, TaskError, "no dataset 'chain_sun'"),
        (
            {"tasks": [{**TASK, "tools": [{"name": "bash"}], "substrate": "container", "image": "nope"}]},
            TaskError,
            "image is 'nope'",
        ),
        (
            {
                "tasks": [
                    {
                        "type": "dataset",
                        "name": "mine",
                        "path": "absent.jsonl",
                        "reward": {"type": "math_verify"},
                        "heldout_size": 4,
                    }
                ]
            },
            TaskError,
            "there is no file absent.jsonl",
        ),
        (
            {
                "tasks": [
                    {
                        "type": "dataset",
                        "name": "mine",
                        "path": {"type": "evens"},
                        "reward": {
                            "type": "rubric",
                            "criteria": [{"name": "even", "text": "It is even."}],
                            "judge": {"type": "model", "model_dir": "absent"},
                        },
                    }
                ],
            },
            ModelDirectoryError,
            r"task mine: reward\.judge\.model_dir is absent, where there is no directory",
        ),
    ],
)
def test_what_needs_no_model_is_checked_without_it(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    run = small_run(tmp_path / "second", tmp_path / MADE_LATER, **{"micro_batch_tokens": 4096} | changes)
    with pytest.raises(error, match=message):
        check(run, [tmp_path / "first"])


def test_a_model_that_is_yet_to_be_made_is_not_looked_for_and_another_is(tmp_path: Path) -> None:
    run = small_run(tmp_path / "second", tmp_path / MADE_LATER)
    check(run, [tmp_path / "first"])
    with pytest.raises(ModelDirectoryError, match=r"model_dir is .*first/model, where there is no directory"):
        check(run, [tmp_path / "firs"])
    (tmp_path / "first").mkdir()
    write_model(tmp_path / MADE_LATER)
    check(run, [])
    with pytest.raises(TaskError, match=r"prompt tokens; max_prompt_tokens is 4\."):
        check(small_run(tmp_path / "second", tmp_path / MADE_LATER, max_prompt_tokens=4), [])
    with pytest.raises(BackendError, match=r"kernels\.mix is tile"):
        check(small_run(tmp_path / "second", tmp_path / MADE_LATER, kernels={"mix": "tile"}, precision="native"), [])


def _sft(directory: Path, **task: Any) -> SFTRun:
    answers = {"type": "dataset", "name": "mine", "reward": {"type": "math_verify"}, "heldout_size": 4}
    return msgspec.convert(
        {
            "run_dir": str(directory / "second"),
            "start": {"type": "checkpoint", "model_dir": str(directory / MADE_LATER)},
            "tasks": [answers | task],
            "optim": {"type": "adamw", "lr": 1e-3},
            "steps": 1,
            "micro_batch_tokens": 512,
            "max_prompt_tokens": 40,
            "max_answer_tokens": 8,
            "eval": {"prompts": 4},
        },
        SFTRun,
    )


def test_what_a_later_run_is_to_learn_from_is_looked_at(tmp_path: Path) -> None:
    unsolved, long = tmp_path / "unsolved.jsonl", tmp_path / "long.jsonl"
    unsolved.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(20)))
    long.write_text("".join(json.dumps({"question": f"{n}?", "answer": "9" * 99}) + "\n" for n in range(20)))
    (tmp_path / "reward.py").write_text("def score(question, answer, text):\n    return 1.0\n")
    verified = {"type": "python", "file": str(tmp_path / "reward.py")}
    with pytest.raises(TaskError, match=r"task mine: train example 0 has no written answer"):
        check(_sft(tmp_path, path=str(unsolved), reward=verified, answer_column=None), [tmp_path / "first"])
    run = _sft(tmp_path, path=str(long))
    check(run, [tmp_path / "first"])
    with pytest.raises(ModelDirectoryError, match=r"^start\.model_dir is .*first/model, where there is no directory"):
        check(run, [])
    (tmp_path / "first").mkdir()
    write_model(tmp_path / MADE_LATER)
    with pytest.raises(
        TaskError, match=r"task mine: conversation 0 has \d+ answer tokens, more than max_answer_tokens"
    ):
        check(run, [])
