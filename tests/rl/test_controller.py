"""Proves: the loop does the same thing interrupted or not, with one replica or several; nothing runs on unproven
weights.

Real learner, replicas, log and checkpoints in one process; only Ray is absent (tests/e2e has it).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollforward.conf.errors import RunDirError
from rollforward.model.checkpoint import read_checkpoint
from rollforward.model.config import load_model_config
from rollforward.model.metrics import Metric
from rollforward.model.precision import pack_published
from rollforward.model.shapes import param_specs
from rollforward.rl.controller import RunOutcome
from rollforward.rl.errors import ProbabilityMismatchError
from rollforward.rl.learner import Learner
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rollout.errors import WeightsError
from rollforward.rollout.types import Completion, Request, RequestId
from rollforward.rollout.wal_records import RecordType
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import read_published, version_directory
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, frame_seed, scan_frames
from tests.helpers.replicas import fingerprints
from tests.helpers.runs import build_controller, small_run, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def _finish(run_dir: Path, model_dir: Path, **changes: object) -> tuple[RunOutcome, dict[str, str]]:
    """Run to the end; the outcome and the hashes of the final weights."""
    run = small_run(run_dir, model_dir, **changes)
    controller, _, rollout = build_controller(run)
    outcome = controller.run()
    rollout.close()
    manifest, _, _ = read_published(version_directory(run_dir / "weights", run.steps))
    return outcome, manifest.tensors


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunOutcome, dict[str, str]]:
    return _finish(tmp_path_factory.mktemp("undisturbed") / "run", model_dir)


def test_engine_and_trainer_agree_to_the_bit_while_weights_move(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path
) -> None:
    outcome, tensors = undisturbed
    config = load_model_config(model_dir)
    specs = {spec.name: spec for spec in param_specs(config)}
    masters = read_checkpoint(model_dir, config)
    start = fingerprints(config, {name: pack_published(specs[name], master) for name, master in masters.items()})
    moved = [name for name, spec in specs.items() if spec.trained and tensors[name] != start[name]]
    assert len(moved) > len(specs) / 2
    assert outcome.rollout_probs_diff_max == 0.0
    assert outcome.steps == 3
    assert outcome.trained_tokens > 0


@pytest.mark.parametrize("engines", [2, 3])
def test_the_number_of_replicas_changes_no_weight(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path, tmp_path: Path, engines: int
) -> None:
    rollout = {"threads": 1, "wal": {"level": "process"}, "engines": engines, "max_batch_requests": 3}
    outcome, tensors = _finish(tmp_path / "run", model_dir, rollout=rollout)
    assert tensors == undisturbed[1]
    assert outcome.before == undisturbed[0].before
    assert outcome.after == undisturbed[0].after


def test_micro_batches_change_the_weights_by_rounding_only(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path, tmp_path: Path
) -> None:
    outcome, _ = _finish(tmp_path / "run", model_dir, micro_batch_tokens=46)
    assert outcome.rollout_probs_diff_max == 0.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


class _KilledError(Exception):
    """The process ended here."""


class _DyingLearner:
    """A learner whose process ends at its n-th update, before it or after it."""

    def __init__(self, learner: Learner, dies_at: int, *, after_update: bool) -> None:
        self._learner, self._left, self._after_update = learner, dies_at, after_update

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        self._left -= 1
        if self._left == 0 and not self._after_update:
            raise _KilledError
        metrics = self._learner.update(step_dir, plans)
        if self._left == 0:
            raise _KilledError
        return metrics

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


@pytest.mark.parametrize(("dies_at", "after_update"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("checkpoint_every_steps", [1, 2])
def test_an_interrupted_run_ends_with_the_same_weights(
    undisturbed: tuple[RunOutcome, dict[str, str]],
    model_dir: Path,
    tmp_path: Path,
    dies_at: int,
    after_update: bool,
    checkpoint_every_steps: int,
) -> None:
    """Sampled tokens of the interrupted step are answered from the log, not drawn again."""
    run = small_run(tmp_path / "run", model_dir, checkpoint_every_steps=checkpoint_every_steps)
    controller, learner, rollout = build_controller(run)
    controller._stages._learner = _DyingLearner(learner, dies_at, after_update=after_update)  # type: ignore[attr-defined]
    with pytest.raises(_KilledError):
        controller.run()
    for replica in rollout.replicas:
        replica._log.abandon()
    logged = recover(tmp_path / "run" / "wal" / "engine-0").num_tokens
    outcome, tensors = _finish(tmp_path / "run", model_dir, checkpoint_every_steps=checkpoint_every_steps)
    assert tensors == undisturbed[1]
    assert outcome.after == undisturbed[0].after
    assert outcome.before == undisturbed[0].before
    assert outcome.rollout_probs_diff_max == 0.0
    whole = recover(tmp_path / "run" / "wal" / "engine-0")
    assert whole.num_tokens > logged or dies_at == 3
    assert all(request.num_openings == 1 for request in whole.requests.values())


def _sampled_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "samples").iterdir())


class _WatchingLearner:
    """A learner that notes which steps' samples lie there when it is asked to learn."""

    def __init__(self, learner: Learner, run_dir: Path) -> None:
        self._learner, self._run_dir = learner, run_dir
        self.seen: list[list[str]] = []

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        self.seen.append(_sampled_steps(self._run_dir))
        assert step_dir.name == self.seen[-1][-1]
        return self._learner.update(step_dir, plans)

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


@pytest.mark.parametrize("keep_samples", [False, True])
def test_samples_stay_until_a_checkpoint_covers_their_step(model_dir: Path, tmp_path: Path, keep_samples: bool) -> None:
    run = small_run(tmp_path / "run", model_dir, checkpoint_every_steps=2, steps=5, keep_samples=keep_samples)
    controller, learner, rollout = build_controller(run)
    watching = _WatchingLearner(learner, tmp_path / "run")
    controller._stages._learner = watching  # type: ignore[attr-defined]
    controller.run()
    rollout.close()
    names = [f"step_{step:06d}" for step in range(5)]
    if keep_samples:
        assert watching.seen == [names[: step + 1] for step in range(5)]
        assert _sampled_steps(tmp_path / "run") == names
    else:
        assert watching.seen == [names[:1], names[:2], names[2:3], names[2:4], names[4:]]
        assert _sampled_steps(tmp_path / "run") == []


def test_a_run_that_was_killed_between_writing_samples_and_learning_ends_with_the_same_weights(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path, tmp_path: Path
) -> None:
    """One file of the step is torn on top of it, and a half-written step of long ago lies there: both are made anew or
    removed."""
    run = small_run(tmp_path / "run", model_dir)
    controller, learner, rollout = build_controller(run)
    controller._stages._learner = _DyingLearner(learner, 2, after_update=False)  # type: ignore[attr-defined]
    with pytest.raises(_KilledError):
        controller.run()
    for replica in rollout.replicas:
        replica._log.abandon()
    samples = tmp_path / "run" / "samples"
    assert _sampled_steps(tmp_path / "run") == ["step_000001"]
    tokens = samples / "step_000001" / "tokens.arrow"
    tokens.write_bytes(tokens.read_bytes()[:100])
    (samples / ".step_000000.partial").mkdir()
    _, tensors = _finish(tmp_path / "run", model_dir)
    assert tensors == undisturbed[1]
    assert _sampled_steps(tmp_path / "run") == []


def test_samples_that_a_killed_run_left_beside_its_checkpoint_go_when_it_starts_again(
    model_dir: Path, tmp_path: Path
) -> None:
    _finish(tmp_path / "run", model_dir, steps=1)
    (tmp_path / "run" / "samples" / "step_000000").mkdir()
    _finish(tmp_path / "run", model_dir, steps=1)
    assert _sampled_steps(tmp_path / "run") == []


def test_a_run_that_was_killed_after_its_last_step_still_knows_its_accuracy(model_dir: Path, tmp_path: Path) -> None:
    first, tensors = _finish(tmp_path / "run", model_dir)
    again, tensors_again = _finish(tmp_path / "run", model_dir)
    assert tensors_again == tensors
    assert (again.before, again.after, again.steps) == (first.before, first.after, first.steps)
    assert first.after != first.before


def test_a_damaged_checkpoint_is_passed_over_and_changes_no_weight(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _finish(tmp_path / "run", model_dir)
    (optimizer,) = (tmp_path / "run" / "checkpoints" / "step_000003").rglob("adamw.safetensors")
    content = bytearray(optimizer.read_bytes())
    content[len(content) // 2] ^= 1
    optimizer.write_bytes(content)
    outcome, tensors = _finish(tmp_path / "run", model_dir)
    assert tensors == undisturbed[1]
    assert outcome.after == undisturbed[0].after
    told = capsys.readouterr().err
    assert "step_000003 is damaged" in told
    assert "step_000002" in told


def test_a_run_whose_log_forgets_what_checkpoints_cover_goes_on_from_any_of_them(
    undisturbed: tuple[RunOutcome, dict[str, str]], model_dir: Path, tmp_path: Path
) -> None:
    forgetful = {"rollout": {"threads": 1, "wal": {"level": "process", "keep_bytes": 0}}, "keep_checkpoints": 2}
    _finish(tmp_path / "run", model_dir, **forgetful)
    held = recover(tmp_path / "run" / "wal" / "engine-0")
    assert held.problems == ()
    assert held.scan.mark is not None
    assert {identity.step for identity in held.requests} == {2, 3}
    (tmp_path / "run" / "checkpoints" / "step_000003" / "state.json").unlink()
    outcome, tensors = _finish(tmp_path / "run", model_dir, **forgetful)
    assert tensors == undisturbed[1]
    assert outcome.after == undisturbed[0].after
    # What the damaged checkpoint had covered was answered from the log.
    assert recover(tmp_path / "run" / "wal" / "engine-0").num_tokens == held.num_tokens


def test_command_logs_go_with_the_checkpoint_that_covers_their_step(model_dir: Path, tmp_path: Path) -> None:
    kept = {"sandbox": {"container": {"keep_log_bytes": 0}}, "keep_checkpoints": 1}
    places = [tmp_path / "run" / "commands" / f"step_{step:06d}" for step in range(4)]
    for place in places:
        place.mkdir(parents=True)
        (place / "one.log").write_bytes(bytes(10))
    _finish(tmp_path / "run", model_dir, **kept)
    assert [place.exists() for place in places] == [False, False, False, True]


def test_a_lost_evaluation_is_named_with_its_way_out(model_dir: Path, tmp_path: Path) -> None:
    _finish(tmp_path / "run", model_dir, steps=1)
    (tmp_path / "run" / "eval_000000.json").write_text("[{")
    with pytest.raises(RunDirError, match=r"eval_000000\.json.* cannot be read.*Put it back"):
        _finish(tmp_path / "run", model_dir, steps=1)


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_damaged_log_is_named_and_its_requests_are_sampled_again_or_left_out(
    undisturbed: tuple[RunOutcome, dict[str, str]],
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    max_attempts: int,
) -> None:
    """Killed in the first step, then one flipped bit in the log of one replica of two: the requests that were open
    there are sampled again to the same weights, or, where that was their last attempt, the run goes on without them."""
    replicas = {"threads": 1, "wal": {"level": "process"}, "engines": 2, "max_attempts": max_attempts}
    controller, learner, rollout = build_controller(small_run(tmp_path / "run", model_dir, rollout=replicas))
    controller._stages._learner = _DyingLearner(learner, 1, after_update=False)  # type: ignore[attr-defined]
    with pytest.raises(_KilledError):
        controller.run()
    for replica in rollout.replicas:
        replica._log.abandon()
    (segment,) = (tmp_path / "run" / "wal" / "engine-0").glob("*.wal")
    data = bytearray(segment.read_bytes())
    frames = scan_frames(bytes(data), offset=SEGMENT_HEADER_BYTES, seed=frame_seed("engine-0", 1)).frames
    last_open = max(index for index, frame in enumerate(frames) if frame.frame_type == RecordType.OPEN)
    data[frames[last_open + 1].end - 1] ^= 1
    segment.write_bytes(data)
    finished = _finish(tmp_path / "run", model_dir, rollout=replicas)
    assert "lost_frames: 1 lost frames; 4 open requests fail; damaged: s0-p" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    is_sampled_again = max_attempts > 1
    assert lines[0]["failure/infra/rate"] == (0 if is_sampled_again else 0.5)
    assert lines[1]["failure/infra/rate"] == 0
    assert lines[0]["resume/begun_again"] == (4 if is_sampled_again else 0)
    assert lines[0]["resume/given_up"] == (0 if is_sampled_again else 4)
    assert (finished == undisturbed) == is_sampled_again


def test_a_replica_that_does_not_hold_what_was_published_gets_no_request(model_dir: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", model_dir)
    controller, _, rollout = build_controller(run)
    (replica,) = rollout.replicas
    load = replica.load_weights

    def load_and_corrupt(directory: Path) -> object:
        load(directory)
        held = replica._engine.held_tensors()
        held["norm.weight"].view(-1)[0] += 1
        return replica.acknowledge()

    replica.load_weights = load_and_corrupt  # type: ignore[method-assign,assignment]
    with pytest.raises(WeightsError, match=r"engine-0 does not hold the published norm\.weight \(version 0\)"):
        controller.run()
    assert rollout.num_requests == 0


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.weight", "layers.3.ffn.experts.w1.weight", "head.weight"])
def test_a_bit_that_flips_in_an_engine_weight_stops_the_run_with_its_name(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    """The flip comes after the gate has opened; the step's log-probs differ, and a new hash names the tensor."""
    run = small_run(tmp_path / "run", model_dir)
    controller, _, rollout = build_controller(run)
    (replica,) = rollout.replicas
    generate = replica.generate

    def flip_then_generate(requests: Sequence[Request]) -> list[Completion]:
        if requests[0].id == RequestId(1, 0, 0):
            tensor = replica._engine.held_tensors()[name]
            tensor.view(torch.int32).view(-1)[:64] ^= 1 << 23
        return generate(requests)

    replica.generate = flip_then_generate  # type: ignore[method-assign]
    escaped = name.replace(".", r"\.")
    with pytest.raises(WeightsError, match=rf"engine-0 does not hold the published {escaped} \(version 1\)"):
        controller.run()


def test_a_disagreement_without_a_culprit_stops_the_run(model_dir: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", model_dir)
    controller, _, rollout = build_controller(run)
    (replica,) = rollout.replicas
    generate = replica.generate

    def misreport(requests: Sequence[Request]) -> list[Completion]:
        completions = generate(requests)
        for completion in completions[:1]:
            completion.behavior_logprobs[:] = np.nextafter(completion.behavior_logprobs, np.float32(-9))
        return completions

    replica.generate = misreport  # type: ignore[method-assign]
    with pytest.raises(ProbabilityMismatchError, match=r"step 1: training/rollout_probs_diff_max is \d"):
        controller.run()


def test_held_out_answers_and_metrics_are_written(model_dir: Path, tmp_path: Path) -> None:
    outcome, _ = _finish(tmp_path / "run", model_dir, steps=1, eval={"prompts": 4, "every_steps": 1})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 1
    for name in (
        "actor/pg_loss",
        "actor/entropy",
        "actor/grad_norm",
        "critic/rewards/mean",
        "response_length/mean",
        "training/rollout_probs_diff_max",
        "wal/commits",
        "timing_s/gen",
        "timing_s/step",
        "weights/bytes",
        "weights/publish_s",
        "weights/load_s",
        "val-core/chain_sum/acc/mean@1",
    ):
        assert isinstance(lines[0][name], float | int), name
    assert lines[0]["weights/never_written"] == 0
    assert lines[0]["weights/changed_tensors"] > 10
    saved = json.loads((tmp_path / "run" / "eval_000001.json").read_text())
    assert saved[0]["judged"] == 4
    assert saved[0]["correct"] == outcome.after[0].correct
