"""Proves: a run of distillation that ended anywhere in a step goes on to the weights of a run that nobody disturbed,
computes again what is missing and nothing else, and trusts no file that is damaged, torn or of another teacher; a
teacher that was replaced is told by its name.

In one process, whose end is an exception; SIGKILL and Ray are in tests/faults/test_distill_crash.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from rollforward.distill import learner, teachers
from rollforward.distill.config import DistillRun
from rollforward.distill.errors import HiddenCacheError, TeacherError, TeacherReadError
from rollforward.distill.hidden_cache import HIDDEN_NAME
from rollforward.distill.learner import DistillLearner
from rollforward.rl.controller import Controller
from tests.helpers.distill_runs import (
    LocalPool,
    build_distill,
    finish_distill,
    learner_settings,
    metrics,
    published,
    small_distill,
    write_models,
)
from tests.helpers.ranks import join_alone
from tests.helpers.runs import LocalRollout

TASKS = {
    "a": {"tasks": ["chain_sum"]},
    "b": {"tasks": ["other"]},
    "c": {"tasks": ["chain_sum", "other"], "weight": 0.5},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root, "student", "a", "b", "c")
    return root


def _run(models: Path, run_dir: Path, steps: int = 1) -> DistillRun:
    """One trajectory a micro-batch: twelve shards a step, of three teachers."""
    named = {name: {"model_dir": str(models / name)} | fields for name, fields in TASKS.items()}
    changes: dict[str, Any] = {"steps": steps, "max_prompt_tokens": 12, "micro_batch_tokens": 18}
    return small_distill(run_dir, models / "student", named, **changes, eval={"prompts": 1, "every_steps": 100})


@pytest.fixture(scope="module")
def undisturbed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """The weights after each of two steps."""
    run = _run(models, tmp_path_factory.mktemp("undisturbed") / "run", steps=2)
    _, tensors = finish_distill(run)
    return {1: published(run, 1), 2: tensors}


class _KilledError(Exception):
    """The process ended here."""


def _killing(function: Callable[..., Any], call: int, *, after: bool = False) -> Callable[..., Any]:
    """The function, but the process ends at a call of it, counted from 0: before it or after it."""
    left = [call]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1 and not after:
            raise _KilledError
        result = function(*args, **kwargs)
        if left[0] == -1:
            raise _KilledError
        return result

    return counted


def _die(run: DistillRun, arm: Callable[[Controller, LocalPool], None]) -> None:
    """A process of the run that ends where it was told to."""
    controller, pool, rollout = build_distill(run)
    arm(controller, pool)
    with pytest.raises(_KilledError):
        controller.run()
    _abandon(rollout)


def _abandon(rollout: LocalRollout) -> None:
    for replica in rollout.replicas:
        replica._log.abandon()


def _shards(run: DistillRun) -> dict[str, int]:
    """Files of hidden vectors -> inode: one that is written again has another."""
    root = Path(run.run_dir) / HIDDEN_NAME
    return {str(path.relative_to(root)): path.stat().st_ino for path in sorted(root.glob("step_*/*.arrow"))}


@pytest.fixture(scope="module")
def scored(models: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillRun:
    """A run that ended in the loss of its first step: all shards are there."""
    run = _run(models, tmp_path_factory.mktemp("scored") / "run")

    def arm(_controller: Controller, pool: LocalPool) -> None:
        pool.learner.trainer.hidden_step = _killing(pool.learner.trainer.hidden_step, 0)  # type: ignore[method-assign]

    _die(run, arm)
    assert len(_shards(run)) == 12
    return run


@pytest.fixture
def resumed(models: Path, scored: DistillRun, tmp_path: Path) -> DistillRun:
    """That run, in a directory of its own."""
    shutil.copytree(scored.run_dir, tmp_path / "run", symlinks=True)
    return _run(models, tmp_path / "run")


def test_a_run_that_ended_anywhere_in_a_step_ends_with_the_same_weights(
    models: Path, undisturbed: dict[int, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One death after another in one run; each time what was finished is kept, to the inode."""
    run = _run(models, tmp_path / "run", steps=2)
    loss = learner.distill_loss

    def in_scoring(_controller: Controller, pool: LocalPool) -> None:
        cache = pool.learner._cache
        cache.write = _killing(cache.write, 1, after=True)  # type: ignore[method-assign]

    def between_teachers(_controller: Controller, pool: LocalPool) -> None:
        scorer = pool.learner._scorer
        scorer.score = _killing(scorer.score, 1)  # type: ignore[method-assign]

    def in_the_loss(_controller: Controller, _pool: LocalPool) -> None:
        monkeypatch.setattr(learner, "distill_loss", _killing(loss, 7))

    def after_the_update(_controller: Controller, pool: LocalPool) -> None:
        monkeypatch.setattr(learner, "distill_loss", loss)
        pool.update = _killing(pool.update, 0, after=True)  # type: ignore[method-assign]

    def before_the_checkpoint(controller: Controller, _pool: LocalPool) -> None:
        controller._save = _killing(controller._save, 0)  # type: ignore[method-assign]

    def in_the_second_step(_controller: Controller, pool: LocalPool) -> None:
        cache = pool.learner._cache
        cache.write = _killing(cache.write, 15, after=True)  # type: ignore[method-assign]

    kept: dict[str, int] = {}
    for arm, num_finished in (
        (in_scoring, 2),
        (between_teachers, 6),
        (in_the_loss, 12),
        (after_the_update, 12),
        (before_the_checkpoint, 0),
        (in_the_second_step, 4),
    ):
        _die(run, arm)
        left = _shards(run)
        assert len(left) == num_finished, arm.__name__
        assert arm is before_the_checkpoint or kept.items() <= left.items(), arm.__name__
        kept = left
    controller, pool, rollout = build_distill(run)
    written: list[str] = []
    write = pool.learner._cache.write

    def noting(step: int, index: int, *args: Any) -> int:
        written.append(
            str(pool.learner._cache.path(step, index, args[0].teacher).relative_to(pool.learner._cache._root))
        )
        return write(step, index, *args)

    pool.learner._cache.write = noting  # type: ignore[method-assign]
    controller.run()
    rollout.close()
    assert published(run, 2) == undisturbed[2]
    assert len(kept) == 4
    assert len(written) == 8
    assert not kept.keys() & set(written)
    *_, line = metrics(run)
    assert (line["opd/cache_hits"], line["opd/cache_misses"]) == (4, 8)
    assert line["training/rollout_probs_diff_max"] == 0.0
    assert _shards(run) == {}


def test_a_step_that_was_learned_but_not_published_is_learned_again_from_what_is_cached(
    models: Path, undisturbed: dict[int, dict[str, str]], resumed: DistillRun
) -> None:
    before = _shards(resumed)
    controller, pool, rollout = build_distill(resumed)
    pool.update = _killing(pool.update, 0, after=True)  # type: ignore[method-assign]
    with pytest.raises(_KilledError):
        controller.run()
    _abandon(rollout)
    assert _shards(resumed) == before
    _, tensors = finish_distill(resumed)
    assert tensors == undisturbed[1]
    (line,) = metrics(resumed)
    assert (line["opd/cache_hits"], line["opd/cache_misses"]) == (12, 0)
    assert "opd/scored_tokens" not in line


def test_scores_of_a_step_behind_the_checkpoint_are_there_when_the_run_comes_to_it_again(
    models: Path, undisturbed: dict[int, dict[str, str]], tmp_path: Path
) -> None:
    """The run ends in the loss of its second step, and has no checkpoint but its start."""
    run = msgspec.structs.replace(_run(models, tmp_path / "run", steps=2), checkpoint_every_steps=2)

    def arm(_controller: Controller, pool: LocalPool) -> None:
        pool.learner.trainer.hidden_step = _killing(pool.learner.trainer.hidden_step, 1)  # type: ignore[method-assign]

    _die(run, arm)
    before = len(metrics(run))
    _, tensors = finish_distill(run)
    assert tensors == undisturbed[2]
    hits = [(line["step"], line["opd/cache_hits"]) for line in metrics(run)[before:]]
    assert hits == [(1, 0), (2, 12)]


def test_files_that_are_damaged_torn_exchanged_or_stale_are_named_and_scored_again(
    undisturbed: dict[int, dict[str, str]], resumed: DistillRun, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(resumed.run_dir) / HIDDEN_NAME / "step_000000"
    files = sorted(directory.iterdir())
    by_teacher = {name: [file for file in files if file.name.endswith(f"-{name}.arrow")] for name in "abc"}
    flipped, torn, *_ = by_teacher["a"]
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    torn.write_bytes(torn.read_bytes()[:-100])
    # Two of one teacher, and of two teachers.
    same, other, removed, *_ = by_teacher["c"]
    foreign = by_teacher["b"][0]
    same_content, other_content, foreign_content = (file.read_bytes() for file in (same, other, foreign))
    same.write_bytes(other_content)
    other.write_bytes(foreign_content)
    foreign.write_bytes(same_content)
    removed.unlink()
    (directory / "0099-a.arrow").write_bytes(b"left from another schedule")
    (directory.parent / "step_000007").mkdir()
    _, tensors = finish_distill(resumed)
    assert tensors == undisturbed[1]
    told = [line for line in capsys.readouterr().err.splitlines() if "scored again" in line]
    kinds = {flipped: "damaged", torn: "damaged", same: "stale", other: "foreign", foreign: "foreign"}
    assert len(told) == len(kinds)
    for file, kind in kinds.items():
        assert [line for line in told if f"{file} is {kind}: " in line and line.startswith("step 1: ")], (kind, told)
    (line,) = metrics(resumed)
    assert (line["opd/cache_hits"], line["opd/cache_misses"]) == (6, 6)
    assert _shards(resumed) == {}


def test_a_teacher_that_was_replaced_while_no_process_ran_is_refused_until_it_is_put_back(
    models: Path, undisturbed: dict[int, dict[str, str]], resumed: DistillRun, tmp_path: Path
) -> None:
    others = tmp_path / "models"
    shutil.copytree(models, others)
    shutil.rmtree(others / "c")
    shutil.copytree(others / "b", others / "c")
    before = _shards(resumed)
    with pytest.raises(TeacherError, match=r"teacher c: its version is \w{32}; the run in .* began with \w{32} "):
        build_distill(_run(others, Path(resumed.run_dir)))
    assert _shards(resumed) == before
    shutil.rmtree(others / "c")
    shutil.copytree(models / "c", others / "c")
    _, tensors = finish_distill(_run(others, Path(resumed.run_dir)))
    assert tensors == undisturbed[1]


def test_what_a_run_no_longer_knows_of_its_teachers_is_refused(resumed: DistillRun) -> None:
    file = Path(resumed.run_dir) / "teachers.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(TeacherError, match=r"teachers\.json cannot be read: .*choose another run_dir"):
        build_distill(resumed)


def test_a_teacher_that_is_replaced_during_the_run_ends_it_by_its_name(
    models: Path, undisturbed: dict[int, dict[str, str]], resumed: DistillRun, tmp_path: Path
) -> None:
    """Between scoring and the loss, where only its head is read again; put back, the run goes on."""
    others = tmp_path / "models"
    shutil.copytree(models, others)
    run = _run(others, Path(resumed.run_dir))
    controller, pool, rollout = build_distill(run)
    update, before = pool.update, _shards(run)

    def replaced(*args: Any) -> Any:
        (others / "b").rename(others / "away")
        shutil.copytree(others / "a", others / "b")
        return update(*args)

    pool.update = replaced  # type: ignore[method-assign]
    with pytest.raises(TeacherReadError, match=r"teacher b: .*written to, or replaced, during the run.*put it back"):
        controller.run()
    _abandon(rollout)
    assert _shards(run) == before
    assert not (Path(run.run_dir) / "weights" / "v000001").exists()
    shutil.rmtree(others / "b")
    (others / "away").rename(others / "b")
    _, tensors = finish_distill(run)
    assert tensors == undisturbed[1]


def test_a_rank_whose_node_has_another_teacher_by_that_name_refuses_it(models: Path, tmp_path: Path) -> None:
    """Files of the same sizes: the weights alone differ."""
    join_alone(tmp_path)
    settings = learner_settings(_run(models, tmp_path / "run"))
    version = settings.teachers["a"].version[:12]
    elsewhere = {**settings.teacher_urls, "a": str(models / "b")}
    with pytest.raises(TeacherReadError, match=rf"teacher a: .* the run began with version {version}.* resume"):
        DistillLearner(msgspec.structs.replace(settings, teacher_urls=elsewhere))
    shutil.copytree(models / "a", tmp_path / "copy")
    DistillLearner(msgspec.structs.replace(settings, teacher_urls=elsewhere | {"a": str(tmp_path / "copy")}))


def test_a_head_that_is_not_the_teachers_of_the_vectors_ends_the_run(
    resumed: DistillRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever let it through: the head must give again what the teacher said."""
    read = teachers.read_head

    def of_another(source: Any, **options: Any) -> Tensor:
        head_VE = read(source, **options)
        return head_VE.roll(1, 0) if source.name == "b" else head_VE

    monkeypatch.setattr(teachers, "read_head", of_another)
    controller, _, rollout = build_distill(resumed)
    with pytest.raises(HiddenCacheError, match=r"teacher b: its head gives the token of row 0 a log-prob of -.*resume"):
        controller.run()
    _abandon(rollout)
    assert not (Path(resumed.run_dir) / "weights" / "v000001").exists()


def test_a_shard_that_is_lost_between_scoring_and_the_loss_ends_the_run_before_the_step(
    undisturbed: dict[int, dict[str, str]], resumed: DistillRun
) -> None:
    controller, pool, rollout = build_distill(resumed)
    update = pool.update
    lost = sorted((Path(resumed.run_dir) / HIDDEN_NAME / "step_000000").iterdir())[-1]

    def without(*args: Any) -> Any:
        lost.unlink()
        return update(*args)

    pool.update = without  # type: ignore[method-assign]
    with pytest.raises(HiddenCacheError, match=rf"{lost.name} is absent.*same run_dir"):
        controller.run()
    _abandon(rollout)
    _, tensors = finish_distill(resumed)
    assert tensors == undisturbed[1]


def test_a_teacher_whose_files_are_damaged_is_refused_before_the_run_goes_on(
    models: Path, resumed: DistillRun, tmp_path: Path
) -> None:
    others = tmp_path / "models"
    shutil.copytree(models, others)
    (file,) = (others / "b").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(TeacherError, match="teacher b: "):
        build_distill(_run(others, Path(resumed.run_dir)))
