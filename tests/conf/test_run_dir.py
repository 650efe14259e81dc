"""Proves: a run directory serves one process and one run; lost or damaged files of it are named, never guessed at."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rollforward.conf.errors import RunDirError
from rollforward.conf.load import write_resolved
from rollforward.conf.run_dir import (
    CONFIG_NAME,
    FINISHED_NAME,
    check_settings,
    finish,
    forget_mistake,
    held,
    is_finished,
)
from rollforward.conf.schema import movable_keys
from rollforward.model.train_config import AdamW
from rollforward.rl.config import RLRun


class Place(msgspec.Struct, frozen=True):
    may_change: ClassVar[frozenset[str]] = frozenset({"ranks", "address"})
    ranks: int = 1
    address: str | None = None
    threads: int = 1


class Task(msgspec.Struct, frozen=True):
    name: str
    image: str = "host"


class Settings(msgspec.Struct, frozen=True):
    steps: int = 1
    place: Place = Place()
    tasks: list[Task] = msgspec.field(default_factory=list[Task])


def test_one_process_at_a_time_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rollforward.conf.run_dir import held\n"
        f"with held(Path({str(tmp_path / 'run')!r})): print('in', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    with pytest.raises(RunDirError, match="in use by another process"), held(tmp_path / "run"):
        pass
    other.kill()
    other.wait()
    with held(tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_the_users_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(RunDirError, match="Choose another run_dir"), held(run_dir):
            pass


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]"])
def test_damaged_settings_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(content)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunDirError):
        check_settings(tmp_path, Settings())


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", FINISHED_NAME])
def test_a_run_without_its_settings_is_not_gone_on_with(tmp_path: Path, left: str) -> None:
    write_resolved(Settings(), tmp_path / CONFIG_NAME)
    (tmp_path / left).write_text("")
    check_settings(tmp_path, Settings())
    (tmp_path / CONFIG_NAME).unlink()
    with pytest.raises(RunDirError, match=f"holds {left} of a run but not its config.json"):
        check_settings(tmp_path, Settings())


def test_settings_are_fixed_when_the_work_begins(tmp_path: Path) -> None:
    write_resolved(Settings(steps=1), tmp_path / CONFIG_NAME)
    check_settings(tmp_path, Settings(steps=2))
    (tmp_path / "wal").mkdir()
    with pytest.raises(RunDirError, match=r"steps \(was 1, now 2\)"):
        check_settings(tmp_path, Settings(steps=2))


def test_of_a_list_of_settings_only_what_differs_is_named(tmp_path: Path) -> None:
    write_resolved(Settings(tasks=[Task("a"), Task("b", image="old")]), tmp_path / CONFIG_NAME)
    (tmp_path / "wal").mkdir()
    with pytest.raises(RunDirError, match=r'other settings: tasks\[1\]\.image \(was "old", now "new"\)\. A run'):
        check_settings(tmp_path, Settings(tasks=[Task("a"), Task("b", image="new")]))
    with pytest.raises(RunDirError, match=r'tasks\[1\]\.image \(was "old", now absent\), tasks\[1\]\.name'):
        check_settings(tmp_path, Settings(tasks=[Task("a")]))


def test_where_a_run_works_may_change_and_is_said(tmp_path: Path) -> None:
    write_resolved(Settings(), tmp_path / CONFIG_NAME)
    (tmp_path / "checkpoints").mkdir()
    assert check_settings(tmp_path, Settings()) is None
    elsewhere = Place(ranks=2, address="head:1")
    told = check_settings(tmp_path, Settings(place=elsewhere))
    changes = 'place.address (was null, now "head:1"), place.ranks (was 1, now 2)'
    assert told == f"{tmp_path} goes on elsewhere: {changes}"
    for other in (Settings(place=Place(ranks=2, threads=2)), Settings(steps=2, place=elsewhere)):
        with pytest.raises(RunDirError) as raised:
            check_settings(tmp_path, other)
        assert "ranks" not in str(raised.value), "only what hinders is named"
    finish(tmp_path, name="a", verb="sft", seconds=1)
    assert check_settings(tmp_path, Settings(place=elsewhere)) is None, "a finished run does not go on"


def test_what_may_change_of_the_real_runs() -> None:
    """Bits depend on threads: torch divides long sums by them. They do not depend on ranks."""
    run = msgspec.convert(
        {
            "run_dir": "a",
            "model_dir": "b",
            "tasks": [{"type": "reasoning_gym", "name": "sums", "dataset": "chain_sum"}],
            "algo": {"type": "grpo", "group_size": 2},
            "optim": {"type": "hybrid_muon", "lr": 1.0},
            "sampling": {"max_new_tokens": 8},
            "steps": 1,
            "prompts_per_step": 1,
            "micro_batch_tokens": 1024,
        },
        RLRun,
    )
    cluster = [
        "cluster.address",
        "cluster.learner_heartbeat_timeout_s",
        "cluster.learner_ranks",
        "cluster.learner_resources",
        "cluster.num_cpus",
        "cluster.rank_timeout_s",
        "cluster.replica_resources",
    ]
    assert sorted(movable_keys(run)) == [*cluster, "optim.max_padding", "optim.zero_size"]
    assert sorted(movable_keys(msgspec.structs.replace(run, optim=AdamW(lr=1.0)))) == cluster


def test_a_directory_with_other_things_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "console.txt").write_text("")
    check_settings(tmp_path, Settings())
    check_settings(tmp_path / "absent", Settings())


def test_only_a_whole_mark_finishes(tmp_path: Path) -> None:
    assert not is_finished(tmp_path)
    finish(tmp_path, name="a", verb="sft", seconds=1.23456)
    assert is_finished(tmp_path)
    assert json.loads((tmp_path / FINISHED_NAME).read_text()) == {"name": "a", "verb": "sft", "seconds": 1.235}
    assert os.listdir(tmp_path) == [FINISHED_NAME]
    for content in ("", '{"name"', "[]", "{}"):
        (tmp_path / FINISHED_NAME).write_text(content)
        assert not is_finished(tmp_path)


def test_what_a_mistake_before_the_first_step_left_does_not_fix_the_settings(tmp_path: Path) -> None:
    write_resolved(Settings(steps=1), tmp_path / CONFIG_NAME)
    (tmp_path / "init").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    forget_mistake(tmp_path)
    check_settings(tmp_path, Settings(steps=2))


@pytest.mark.parametrize("begun", ["metrics.jsonl", "checkpoints/1"])
def test_what_a_run_that_has_begun_left_stays(tmp_path: Path, begun: str) -> None:
    write_resolved(Settings(steps=1), tmp_path / CONFIG_NAME)
    (tmp_path / "init").mkdir()
    (tmp_path / begun).parent.mkdir(exist_ok=True)
    (tmp_path / begun).write_text("{}\n")
    forget_mistake(tmp_path)
    assert (tmp_path / "init").is_dir()
    assert (tmp_path / begun).is_file()
    with pytest.raises(RunDirError, match=r"steps \(was 1, now 2\)"):
        check_settings(tmp_path, Settings(steps=2))
