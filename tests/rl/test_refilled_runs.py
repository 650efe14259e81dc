"""Proves: with dynamic sampling the loop draws further prompts until its groups teach, and a run that was killed around
such a draw ends with the same weights.

Real learner, replicas, log and checkpoints in one process. Which groups teach, and how many are drawn, is in
test_refill.py.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollforward.rl.controller import RunOutcome
from rollforward.rl.samples import open_step
from rollforward.rl.tasks.types import Example, Score, ScoreReason
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import read_published, version_directory
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.runs import HashScored, LocalRollout, build_controller, small_run, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


REFILLING = {
    "algo": {"type": "dapo", "group_size": 2, "dynamic_sampling": {"max_rounds": 3}},
    "keep_samples": True,
    "steps": 2,
    "eval": {"prompts": 4, "every_steps": 2},
}


def _half_right(_self: HashScored, _example: Example, text: str, _submission: object = None) -> Score:
    """0 or 1 by a hash of the text, so that half of the groups of two are of equal rewards."""
    right = hashlib.blake2b(text.encode()).digest()[1] % 2
    return Score(value=float(right), reason=ScoreReason.CORRECT if right else ScoreReason.WRONG)


@pytest.fixture
def half_of_groups_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashScored, "score", _half_right)


class _NotingRollout(LocalRollout):
    """Replicas that note the prompts of every request for training: (step, numbers) for each call."""

    def __init__(self, rollout: LocalRollout) -> None:
        super().__init__(rollout.replicas)
        self.draws: list[tuple[int, list[int]]] = []
        self.texts: dict[tuple[int, int], bytes] = {}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if not requests[0].id.is_eval:
            numbers = sorted({request.id.prompt for request in requests})
            assert [request.id.prompt for request in requests] == [number for number in numbers for _ in range(2)]
            self.draws.append((requests[0].id.step, numbers))
            self.texts |= {(one.id.step, one.id.prompt): one.prompt_ids.tobytes() for one in requests}
        return super().generate(requests)


Refilled = tuple[RunOutcome, dict[str, str], _NotingRollout]


def _refilling(run_dir: Path, model_dir: Path, **changes: object) -> Refilled:
    """A run with dynamic sampling to its end: outcome, hashes of the final weights, what was asked."""
    run = small_run(run_dir, model_dir, **{**REFILLING, **changes})
    controller, _, rollout = build_controller(run)
    noting = _NotingRollout(rollout)
    controller._rollout = noting
    outcome = controller.run()
    noting.close()
    manifest, _, _ = read_published(version_directory(run_dir / "weights", run.steps))
    return outcome, manifest.tensors, noting


@pytest.fixture(scope="module")
def refilled(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Refilled]:
    run_dir = tmp_path_factory.mktemp("refilled") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HashScored, "score", _half_right)
        return run_dir, _refilling(run_dir, model_dir)


def _lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _trained_prompts(run_dir: Path, step: int) -> list[int]:
    rows = open_step(run_dir / "samples" / f"step_{step:06d}").rows
    by_prompt: dict[int, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(row.id.prompt, []).append(row.reward)
    assert all(sorted(rewards) == [0.0, 1.0] for rewards in by_prompt.values()), "only groups that teach"
    return list(by_prompt)


@pytest.mark.usefixtures("half_of_groups_teach")
def test_a_step_draws_further_prompts_from_the_same_cursor_until_its_groups_teach(
    refilled: tuple[Path, Refilled], model_dir: Path, tmp_path: Path
) -> None:
    run_dir, (outcome, _, noting) = refilled
    assert outcome.rollout_probs_diff_max == 0.0
    lines = _lines(run_dir)
    drawn_of_run = 0
    for step in range(2):
        draws = [numbers for one, numbers in noting.draws if one == step]
        numbers = [number for draw in draws for number in draw]
        assert numbers == list(range(len(numbers))), "prompt numbers of a step go on"
        trained = _trained_prompts(run_dir, step)
        assert len(draws) <= 3
        assert len(trained) == 4 or len(draws) == 3
        taught = 0
        for draw in draws:
            assert len(draw) == 4 - taught, "as many as are missing"
            taught += sum(number in draw for number in trained)
        line = lines[step]
        assert line["train/num_gen_batches"] == len(draws)
        assert line["training/dropped_groups"] == len(numbers) - len(trained)
        assert line["training/no_group_teaches"] == 0
        assert line["training/zero_variance_groups"] == (len(numbers) - len(trained)) / len(numbers)
        drawn_of_run += len(numbers)
    assert len(noting.draws) > 2
    # All prompts of the run are the first ones of one stream, in order.
    fresh, _, rollout = build_controller(small_run(tmp_path / "fresh", model_dir, **REFILLING))
    examples, _ = fresh._prompts.draw(fresh._prompts.start(), drawn_of_run)
    rollout.close()
    expected = [fresh._encoder.prompt_ids(example).tobytes() for example in examples]
    assert [noting.texts[key] for key in sorted(noting.texts)] == expected
    state = json.loads((run_dir / "checkpoints" / "step_000002" / "state.json").read_bytes())["state"]
    assert state["cursor"]["position"] == drawn_of_run


@pytest.mark.usefixtures("half_of_groups_teach")
@pytest.mark.parametrize(("step", "when"), [(0, "before"), (0, "within"), (1, "within"), (1, "after")])
def test_a_run_killed_around_a_further_draw_ends_with_the_same_weights(
    refilled: tuple[Path, Refilled], model_dir: Path, tmp_path: Path, step: int, when: str
) -> None:
    undisturbed_dir, (outcome, tensors, undisturbed) = refilled
    steps = [one for one, _ in undisturbed.draws]
    second = steps.index(step) + 1
    assert steps[second] == step
    controller, _, rollout = build_controller(small_run(tmp_path / "run", model_dir, **REFILLING))
    noting = _NotingRollout(rollout)
    generate = noting.generate

    def die_at_the_second_draw(requests: Sequence[Request]) -> list[Completion]:
        if len(noting.draws) == second and not requests[0].id.is_eval:
            if when == "before":
                raise CrashError
            if when == "within":
                crash_at(noting.replicas[0]._log, 5)
            generate(requests)
            raise CrashError
        return generate(requests)

    noting.generate = die_at_the_second_draw  # type: ignore[method-assign]
    controller._rollout = noting
    with pytest.raises(CrashError):
        controller.run()
    noting.replicas[0]._log.abandon()
    resumed, tensors_again, _ = _refilling(tmp_path / "run", model_dir)
    assert tensors_again == tensors
    assert (resumed.after, resumed.trained_tokens) == (outcome.after, outcome.trained_tokens)
    log = recover(tmp_path / "run" / "wal" / "engine-0")
    assert sorted(map(str, log.requests)) == sorted(map(str, recover(undisturbed_dir / "wal" / "engine-0").requests))
    assert all(request.attempt == 0 for request in log.requests.values()), "nothing was begun again"


def test_steps_in_which_no_group_teaches_go_on_and_say_so(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HashScored, "score", lambda *_: Score(value=0.0, reason=ScoreReason.WRONG))
    outcome, _, noting = _refilling(tmp_path / "run", model_dir, steps=1)
    assert [numbers for _, numbers in noting.draws] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    (line,) = _lines(tmp_path / "run")
    assert line["training/no_group_teaches"] == 1
    assert line["training/dropped_groups"] == 8
    assert line["actor/grad_norm"] == 0.0
    assert line["critic/advantages/max"] == line["critic/advantages/min"] == 0.0
    assert "step 1: not one of 12 groups from 3 draws teaches" in capsys.readouterr().err
    rows = open_step(tmp_path / "run" / "samples" / "step_000000").rows
    assert sorted({row.id.prompt for row in rows}) == [0, 1, 2, 3]
    assert outcome.steps == 1


@pytest.mark.usefixtures("half_of_groups_teach")
def test_shuffled_rewards_are_drawn_until_they_teach_too(model_dir: Path, tmp_path: Path) -> None:
    _, _, noting = _refilling(tmp_path / "run", model_dir, shuffle_rewards=True, steps=1)
    assert len(_trained_prompts(tmp_path / "run", 0)) == 4 or len(noting.draws) == 3
    assert len(noting.draws) > 1
