"""Proves: a whole run of distillation brings the student nearer to its teachers and says of every step what it did; a
student that is its own teacher stays as it is; teachers of a token add up; only one teacher is in use and one being
loaded, however many there are; teachers say something of sampled tokens alone, and that is what their models say.

Real tasks, models, engine, log and cache in one process; only Ray is absent. Runs that are interrupted are in
test_interrupted_runs.py, ranks in tests/parity/test_distill_ranks.py.
"""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.distill import teachers
from rollforward.distill.config import DistillRun
from rollforward.distill.hidden_cache import HIDDEN_NAME, HiddenCache, ShardKey
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.transformer import load_model, packed_batch
from rollforward.rl.errors import NoTrainableTrajectoriesError
from rollforward.rollout.types import Completion, FailureType, Request, RequestId, StopReason
from tests.helpers.distill_runs import build_distill, finish_distill, metrics, published, small_distill, write_models
from tests.helpers.runs import TASK, LocalRollout, write_calling_model
from tests.helpers.teachers import mapped_teachers

SHORT: dict[str, Any] = {"steps": 1, "eval": {"prompts": 1, "every_steps": 100}, "tasks": [TASK]}
"""A single step of one task."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root, "student", "a", "b")
    return root


def _run(models: Path, run_dir: Path, teachers: dict[str, Any], **changes: Any) -> DistillRun:
    """Teachers by name -> fields of their configuration; where none says otherwise their directory has their name."""
    named = {name: {"model_dir": str(models / name)} | fields for name, fields in teachers.items()}
    return small_distill(run_dir, models / "student", named, **changes)


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillRun:
    """Two tasks, each with its teacher, over a few steps."""
    run = _run(
        models,
        tmp_path_factory.mktemp("finished") / "run",
        {"a": {"tasks": ["chain_sum"]}, "b": {"tasks": ["other"]}},
        steps=4,
        optim={"type": "adamw", "lr": 5e-3},
        eval={"prompts": 1, "every_steps": 100},
        checkpoint_every_steps=4,
    )
    outcome, tensors = finish_distill(run)
    assert outcome.rollout_probs_diff_max == 0.0
    assert outcome.steps == 4
    assert sum(tensors[name] != before for name, before in published(run, 3).items()) > len(tensors) / 2
    return run


def test_the_student_comes_nearer_to_its_teachers(finished: DistillRun) -> None:
    distances = [line["opd/kl"] for line in metrics(finished)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


def test_every_step_says_what_was_scored_and_learned(finished: DistillRun) -> None:
    for line in metrics(finished):
        assert line["training/rollout_probs_diff_max"] == 0.0
        assert line["opd/teachers"] == line["opd/head_loads"] == line["opd/teacher_loads"] == 2
        assert (line["opd/cache_hits"], line["opd/cache_misses"] >= 2) == (0, True)
        assert 1 <= line["opd/heads_held_max"] <= 2
        assert 1 <= line["opd/teachers_held_max"] <= 2
        assert line["opd/scored_tokens"] == 6 * line["response_length/mean"]
        of_teachers = [line[f"opd/kl_by_teacher/{name}"] for name in "ab"]
        assert 0 < min(of_teachers) <= line["opd/kl"] <= max(of_teachers)
        # Every token of the step has the same weight, and their sum is 1.
        assert line["opd/loss"] == pytest.approx(line["opd/kl"], rel=1e-6)
        assert line["opd/cache_written_bytes"] > line["opd/scored_tokens"] * 2 * 128


def test_nothing_of_teachers_is_left_behind(finished: DistillRun) -> None:
    assert list((Path(finished.run_dir) / HIDDEN_NAME).iterdir()) == []


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ({"type": "reverse_kl"}, {}),
        ({"type": "forward_kl"}, {"recompute": True}),
        ({"type": "jensen_shannon", "beta": 0.3}, {"precision": "fp32"}),
        ({"type": "sampled_token", "baseline": True}, {"keep_routing": False}),
    ],
    ids=["reverse", "forward", "jensen_shannon", "sampled"],
)
def test_a_student_that_is_all_of_its_teachers_stays_as_it_is(
    models: Path, tmp_path: Path, loss: dict[str, Any], changes: dict[str, Any]
) -> None:
    student = {"model_dir": str(models / "student")}
    both = {"x": student, "y": student | {"weight": 3.0}}
    run = _run(models, tmp_path / "run", both, routing="all", loss=loss, **SHORT | changes)
    _, tensors = finish_distill(run)
    assert tensors == published(run, 0)
    (line,) = metrics(run)
    measures = {name: value for name, value in line.items() if name.startswith("opd/") and "_by_teacher/" in name}
    assert {name.rpartition("/")[2] for name in measures} == {"x", "y"}
    assert set(measures.values()) == {0.0}
    assert (line["opd/loss"], line["actor/grad_norm"], line["training/rollout_probs_diff_max"]) == (0.0, 0.0, 0.0)


def test_teachers_of_a_token_add_up(models: Path, tmp_path: Path) -> None:
    """Two halves of a teacher are the teacher, to the bit: halving is exact, and both leaves of the sum are equal.
    Other shares are the teacher to rounding."""
    whole = {**SHORT, "micro_batch_tokens": 1024, "routing": "all"}
    found: dict[str, tuple[dict[str, str], dict[str, float]]] = {}
    a = str(models / "a")
    for label, teachers_ in {
        "one": {"a": {}},
        "halves": {"x": {"model_dir": a, "weight": 0.5}, "y": {"model_dir": a, "weight": 0.5}},
        "uneven": {"x": {"model_dir": a, "weight": 0.3}, "y": {"model_dir": a, "weight": 0.7}},
        "double": {"a": {"weight": 2.0}},
    }.items():
        run = _run(models, tmp_path / label, teachers_, **whole)
        _, tensors = finish_distill(run)
        (line,) = metrics(run)
        found[label] = tensors, line
    one, halves, uneven, double = (found[label] for label in ("one", "halves", "uneven", "double"))
    assert halves[0] == one[0]
    assert halves[1]["actor/grad_norm"] == one[1]["actor/grad_norm"]
    for line in (halves[1], uneven[1]):
        assert line["opd/cache_misses"] == 2
        assert line["opd/loss"] == pytest.approx(one[1]["opd/loss"], rel=1e-6)
        assert line["actor/grad_norm"] == pytest.approx(one[1]["actor/grad_norm"], rel=1e-4)
    assert double[1]["actor/grad_norm"] == 2 * one[1]["actor/grad_norm"]
    assert double[1]["opd/loss"] == pytest.approx(2 * one[1]["opd/loss"], rel=1e-6)
    assert double[1]["opd/kl"] == one[1]["opd/kl"], "the mean is of tokens, whatever their teachers' weights"


class _LiveHeads:
    """How many heads of teachers were in memory at one time, counted when one is read and when one is used."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        self._read, self._known = read, []  # type: ignore[var-annotated]
        self.most = self.reads = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.note(being_read=1)
        head_VE = self._read(*args, **kwargs)
        self.reads += 1
        self._known.append(weakref.ref(head_VE))
        return head_VE

    def note(self, *, being_read: int = 0) -> None:
        alive = being_read + sum(one() is not None for one in self._known)
        self.most = max(self.most, alive)


def test_of_many_teachers_one_is_in_use_and_one_being_loaded(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"teacher-{index:02d}" for index in range(12)]
    for index, name in enumerate(names):
        (tmp_path / "teachers" / name).mkdir(parents=True)
        for file in (models / "ab"[index % 2]).iterdir():
            (tmp_path / "teachers" / name / file.name).hardlink_to(file)
    run = small_distill(
        tmp_path / "run",
        models / "student",
        {name: {} for name in names},
        teacher_store=str(tmp_path / "teachers"),
        routing="weights",
        **SHORT | {"prompts_per_step": 20},
    )
    heads = _LiveHeads(teachers.read_head)
    monkeypatch.setattr(teachers, "read_head", heads)
    mapped: list[set[str]] = []
    write, read = HiddenCache.write, HiddenCache.read

    def noting_write(cache: HiddenCache, step: int, index: int, key: ShardKey, *values: Tensor) -> int:
        heads.note()
        mapped.append(mapped_teachers(tmp_path / "teachers"))
        assert key.teacher == "student" or key.teacher in mapped[-1]
        return write(cache, step, index, key, *values)

    def noting_read(*args: Any) -> Any:
        heads.note()
        return read(*args)

    monkeypatch.setattr(HiddenCache, "write", noting_write)
    monkeypatch.setattr(HiddenCache, "read", noting_read)
    finish_distill(run)
    (line,) = metrics(run)
    drawn = int(line["opd/teachers"])
    assert drawn > 6
    assert line["opd/head_loads"] == line["opd/teacher_loads"] == drawn
    assert heads.reads == 1 + 2 * drawn, "the canary's, for the scores, and for the loss"
    assert (line["opd/heads_held_max"], line["opd/teachers_held_max"]) == (2, 2)
    assert heads.most == 2
    assert len(mapped) > drawn
    assert max(map(len, mapped)) <= 2
    assert mapped_teachers(tmp_path / "teachers") == set()


def _finish_with(run: DistillRun, spoil: Callable[[Sequence[Completion]], list[Completion]]) -> LocalRollout:
    """Run to the end with other completions than were sampled."""
    controller, _, rollout = build_distill(run)
    generate = rollout.generate
    rollout.generate = lambda requests: spoil(generate(requests))  # type: ignore[method-assign]
    try:
        controller.run()
    finally:
        rollout.close()
    return rollout


def _lost(completion: Completion) -> Completion:
    """What a completion is that the platform lost on the way."""
    return msgspec.structs.replace(completion, stop_reason=StopReason.ABORTED, failure=FailureType.INFRA)


def test_a_completion_that_the_platform_lost_is_left_out(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[ShardKey] = []
    write = HiddenCache.write

    def noting(cache: HiddenCache, step: int, index: int, key: ShardKey, *values: Tensor) -> int:
        keys.append(key)
        return write(cache, step, index, key, *values)

    monkeypatch.setattr(HiddenCache, "write", noting)
    run = _run(models, tmp_path / "run", {"a": {}}, **SHORT, routing="all", samples_per_prompt=2)
    lost = RequestId(0, 2, 1)
    _finish_with(run, lambda found: [_lost(one) if one.id == lost else one for one in found])
    (line,) = metrics(run)
    assert line["failure/infra/rate"] == 1 / 12
    taught = {identity for key in keys if key.teacher == "a" for identity in key.trajectories}
    assert taught == {RequestId(0, prompt, member) for prompt in range(6) for member in range(2)} - {lost}


def test_a_step_of_which_nothing_is_left_ends_the_run_and_changes_nothing(models: Path, tmp_path: Path) -> None:
    run = _run(
        models, tmp_path / "run", {"a": {}}, **SHORT, routing="all", rollout={"threads": 1, "max_infra_share": 1.0}
    )
    with pytest.raises(NoTrainableTrajectoriesError, match=r"none of the 6 trajectories .* 6 failed as infra"):
        _finish_with(run, lambda found: [one if one.id.is_eval else _lost(one) for one in found])
    assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == ["v000000"]
    assert not any((tmp_path / "run" / HIDDEN_NAME).iterdir())


def test_teachers_say_what_their_models_say_of_the_sampled_tokens_of_all_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cached has the bits of a plain forward of the teacher over each whole conversation, at the tokens that
    the student drew: neither at prompts nor at what a tool said."""
    plain = tmp_path / "plain"
    student = write_calling_model(plain)
    shards: list[tuple[ShardKey, Tensor, Tensor]] = []
    write = HiddenCache.write

    def noting(cache: HiddenCache, step: int, index: int, key: ShardKey, hidden_RE: Tensor, said_R: Tensor) -> int:
        shards.append((key, hidden_RE, said_R))
        return write(cache, step, index, key, hidden_RE, said_R)

    monkeypatch.setattr(HiddenCache, "write", noting)
    tools = {**TASK, "tools": [{"name": "calculator"}], "max_observation_tokens": 96, "list_tools": False}
    run = small_distill(
        tmp_path / "run",
        student,
        {"plain": {"model_dir": str(plain)}},
        **SHORT | {"tasks": [tools]},
        routing="all",
        sampling={"max_new_tokens": 20, "top_p": 0.95, "temperature": 0.8},
        micro_batch_tokens=512,
    )
    controller, _, rollout = build_distill(run)
    generate = rollout.generate
    asked: dict[RequestId, tuple[Request, Completion]] = {}

    def noting_generate(requests: Sequence[Request]) -> list[Completion]:
        completions = generate(requests)
        asked.update({one.id: (request, one) for request, one in zip(requests, completions, strict=True)})
        return completions

    rollout.generate = noting_generate  # type: ignore[method-assign]
    controller.run()
    rollout.close()
    (line,) = metrics(run)
    assert line["num_turns/max"] > 1
    assert line["training/rollout_probs_diff_max"] == 0.0
    shards = [shard for shard in shards if shard[0].teacher == "plain"]
    trained = [completion for _, completion in asked.values() if not completion.id.is_eval]
    assert any(not completion.sampled_mask.all() for completion in trained), "a tool said something"
    assert line["opd/scored_tokens"] == sum(completion.num_sampled_tokens for completion in trained)
    model = load_model(plain, precision="native")
    assert {identity for key, *_ in shards for identity in key.trajectories} == {one.id for one in trained}
    for key, hidden_RE, logprobs_R in shards:
        expected = [_said(model, *asked[identity]) for identity in key.trajectories]
        assert torch.equal(hidden_RE, torch.cat([hidden_NE for hidden_NE, _ in expected]))
        assert torch.equal(logprobs_R, torch.cat([logprobs_N for _, logprobs_N in expected]))


@torch.no_grad()
def _said(model: Any, request: Request, completion: Completion) -> tuple[Tensor, Tensor]:
    """Hidden vectors and log-probs of a model at the tokens of a completion that were sampled."""
    token_ids = torch.tensor(np.concatenate((request.prompt_ids, completion.token_ids)), dtype=torch.int64)
    sampled = torch.tensor(np.flatnonzero(completion.sampled_mask) + request.prompt_ids.size)
    streams_TMD = model.transformer.streams(model.weights, token_ids, packed_batch(model.config, (len(token_ids),)))
    hidden_TD = model.transformer.hidden(model.weights, streams_TMD)
    logits_TV = row_linear(hidden_TD, model.weights.head)
    logprobs_T, _ = token_logprob(logits_TV[:-1], token_ids[1:], temperature=1.0)
    return hidden_TD[sampled - 1], logprobs_T[sampled - 1]
