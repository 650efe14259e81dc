"""Proves: what a dataset's answer is worth by rubric and by several rewards together, by hand; a judge's failure is the
platform's and never a 0; every part keeps its own failure and its own mean.

The task, its verifiers and the judging are real; engines are scripted (`test_judging.py`).
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.metrics import metric_values
from rollforward.rl.errors import RewardError
from rollforward.rl.judge.config import ActorJudge, Criterion, Panel, Points
from rollforward.rl.judge.judging import Judging, Seat
from rollforward.rl.judge.metrics import judge_metrics, reward_metrics
from rollforward.rl.judge.scoring import aggregate, length_value
from rollforward.rl.judge.types import Verdict
from rollforward.rl.sampling import PromptEncoder, score_completions
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.reward_config import LengthReward
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rollout.types import Completion, FailureType, Request, RequestId, StopReason
from tests.helpers.judging import ENCODING, Engines, Script, said, verdict

RUBRIC: dict[str, Any] = {
    "type": "rubric",
    "criteria": [{"name": "right", "text": "It is even."}],
    "judgements": 3,
    "retries": 1,
}


def dataset(directory: Path, reward: dict[str, Any], **changes: Any) -> Any:
    path = directory / "rows.jsonl"
    rows = [{"question": f"Even, not {n}:", "answer": str(2 * n)} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    values = {"type": "dataset", "name": "evens", "path": str(path), "heldout_size": 2, "reward": reward}
    return build_task(msgspec.convert(values | changes, TaskConfig))


def answered(text: str, member: int = 0, **changes: Any) -> Completion:
    request = Request(
        id=RequestId(0, 0, member),
        prompt_ids=np.zeros(1, np.int32),
        seed=0,
        sampling=None,
        policy_version=0,  # type: ignore[arg-type]
    )
    return said(request, text, **changes)


def score(task: Any, *texts: str | Completion, script: Script | None = None) -> tuple[list[Score | Unscored], Engines]:
    engines = Engines(script or (lambda request, _: verdict(request)))
    seats = {ActorJudge(): Seat(encoding=ENCODING, generate=engines.generate, max_tokens=4096)}
    completions = [answered(one, index) if isinstance(one, str) else one for index, one in enumerate(texts)]
    found = score_completions(
        [task.example(0)],
        completions,
        PromptEncoder(ENCODING, max_prompt_tokens=256),
        {"evens": task},
        judging=Judging(seats, run_seed=0),
    )
    return found, engines


def by_number(*values: str) -> Script:
    """Verdicts by number of the judgement; another text is said as it is."""
    return lambda request, _: (
        verdict(request, value)
        if (value := values[request.id.judgement - 1]) in ("pass", "fail")
        else said(request, value)
    )


def test_the_mean_of_verdicts(tmp_path: Path) -> None:
    (one,), engines = score(dataset(tmp_path, RUBRIC), "4", script=by_number("pass", "fail", "pass"))
    assert isinstance(one, Score)
    assert one.value == pytest.approx(2 / 3)
    assert one.reason is ScoreReason.PARTIAL
    assert not one.is_correct
    assert len(engines.rounds[0]) == 3


def test_the_majority_of_verdicts_and_what_counts_as_right(tmp_path: Path) -> None:
    for reward in (RUBRIC | {"aggregate": "majority"}, RUBRIC | {"correct_from": 0.6}):
        (one,), _ = score(dataset(tmp_path, reward), "4", script=by_number("pass", "fail", "pass"))
        assert isinstance(one, Score)
        assert one.is_correct


def test_a_failed_judgement_is_left_out_and_not_counted_as_0(tmp_path: Path) -> None:
    (one,), _ = score(dataset(tmp_path, RUBRIC), "4", script=by_number("pass", "?", "pass", "?"))
    assert isinstance(one, Score)
    assert one.value == 1.0
    values = metric_values(judge_metrics([one]))
    assert values["failure/judge/rate"] == 0.5
    assert values["failure/judge_no_object/rate"] == 0.5
    assert values["failure/judge_cut_short/rate"] == 0.0
    assert values["judge/judgements/mean"] == 4.0
    assert values["judge/retries/mean"] == 1.0


def test_without_enough_verdicts_there_is_no_score_and_the_platform_failed(tmp_path: Path) -> None:
    (lost, scored), _ = score(
        dataset(tmp_path, RUBRIC | {"min_valid": 2}),
        "4",
        "6",
        script=lambda request, _: (
            verdict(request) if request.id.judgement == 1 or request.id.member else said(request, "?")
        ),
    )
    assert isinstance(lost, Unscored)
    assert lost.failure is FailureType.INFRA
    assert "1 of 4 judgements gave a verdict, min_valid is 2; the last did not: no_object" in lost.detail
    assert isinstance(scored, Score)
    values = metric_values((*judge_metrics([lost, scored]), *reward_metrics([lost, scored])))
    assert values["reward/rubric/mean"] == 1.0  # of the one that has a value
    assert values["failure/reward_rubric/rate"] == 0.5
    assert values["failure/judge/rate"] == 3 / 7
    assert values["failure/judge_no_opinion/rate"] == 0.0


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dataset(tmp_path_factory.mktemp("judged"), RUBRIC | {"retries": 2})


@given(st.lists(st.sampled_from(["pass", "fail", "?", "", "lost", '{"right": "fail"}']), min_size=5, max_size=5))
def test_no_failure_of_a_judge_moves_a_score(judged: Any, values: list[str]) -> None:
    """The score is the mean of the first three verdicts there are among the judgements, and without one there is none:
    never a 0 for a judge that failed."""

    def script(request: Request, _: str) -> Completion:
        value = values[request.id.judgement - 1]
        if value == "lost":
            return said(request, "", stop_reason=StopReason.ABORTED, failure=FailureType.INFRA)
        return verdict(request, value) if value in ("pass", "fail") else said(request, value)

    (one,), _ = score(judged, "4", script=script)
    expected = [value == "pass" for value in values if value in ("pass", "fail")][:3]
    if not expected:
        assert isinstance(one, Unscored)
        assert one.failure is FailureType.INFRA
    else:
        assert isinstance(one, Score)
        assert one.value == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize(("text", "reason"), [("  ", ScoreReason.EMPTY), ("4" * 70_000, ScoreReason.TOO_LONG)])
def test_what_cannot_be_judged_is_0_without_asking(tmp_path: Path, text: str, reason: ScoreReason) -> None:
    (one,), engines = score(dataset(tmp_path, RUBRIC), text)
    assert isinstance(one, Score)
    assert (one.value, one.reason) == (0.0, reason)
    assert engines.rounds == []


def test_an_answer_too_long_for_one_rubric_is_judged_by_the_other(tmp_path: Path) -> None:
    parts = [
        {"name": "short", "weight": 0.25, "reward": RUBRIC | {"max_answer_chars": 8}},
        {"name": "long", "weight": 0.75, "reward": RUBRIC | {"max_answer_chars": 9}},
    ]
    task = dataset(tmp_path, {"type": "composite", "parts": parts})
    (beyond, fits, far_beyond), engines = score(task, "4" * 9, "4" * 8, "4" * 10)
    assert isinstance(beyond, Score)
    assert isinstance(fits, Score)
    assert isinstance(far_beyond, Score)
    assert [one.value for one in (beyond, fits, far_beyond)] == [0.75, 1.0, 0.0]
    assert [part.value for part in beyond.parts] == [0.0, 1.0]
    assert [one.part for one in beyond.opinions] == ["long"]
    assert [(one.id.member, one.id.judgement) for one in engines.rounds[0]] == [
        *((0, number) for number in (5, 6, 7)),
        *((1, number) for number in (1, 2, 3, 5, 6, 7)),
    ]


def test_reasoning_is_not_shown_to_the_judge(tmp_path: Path) -> None:
    task = dataset(tmp_path, RUBRIC, effort="high")
    (one, unclosed), engines = score(task, "so </think> 4", "and so on")
    assert isinstance(one, Score)
    assert isinstance(unclosed, Score)
    assert unclosed.reason is ScoreReason.UNCLOSED_THINKING
    prompt = ENCODING.tokenizer.decode(engines.rounds[0][0].prompt_ids.tolist())
    assert ">\n4\n</answer" in prompt


def test_what_sampling_lost_is_not_judged(tmp_path: Path) -> None:
    lost = answered("", stop_reason=StopReason.ABORTED, failure=FailureType.INFRA)
    (one,), engines = score(dataset(tmp_path, RUBRIC), lost)
    assert isinstance(one, Unscored)
    assert engines.rounds == []


def test_without_judges_a_rubric_is_an_error_that_says_so(tmp_path: Path) -> None:
    task = dataset(tmp_path, RUBRIC)
    encoder = PromptEncoder(ENCODING, max_prompt_tokens=256)
    with pytest.raises(RewardError, match="there are no judges here"):
        score_completions([task.example(0)], [answered("4")], encoder, {"evens": task})


def test_an_audit_is_the_truth_and_not_the_reward(tmp_path: Path) -> None:
    task = dataset(tmp_path, RUBRIC | {"audit": {"type": "exact"}})
    right = task.example(0).answer
    (agreed, refused), _ = score(
        task, right, "5", script=lambda request, _: verdict(request, "fail" if request.id.member == 0 else "pass")
    )
    assert isinstance(agreed, Score)
    assert isinstance(refused, Score)
    assert (agreed.value, refused.value) == (0.0, 1.0)
    assert [one.opinions[0].truth for one in (agreed, refused)] == [1.0, 0.0]
    values = metric_values(judge_metrics([agreed, refused]))
    assert (values["judge/agreement/rate"], values["judge/brier/mean"]) == (0.0, 1.0)


COMPOSITE: dict[str, Any] = {
    "type": "composite",
    "parts": [
        {"name": "exact", "weight": 0.75, "reward": {"type": "exact"}},
        {"name": "style", "weight": 0.25, "reward": RUBRIC},
        {"name": "length", "weight": 0.5, "reward": {"type": "length", "free_tokens": 2, "max_tokens": 6}},
    ],
}


def test_a_composite_by_hand(tmp_path: Path) -> None:
    task = dataset(tmp_path, COMPOSITE)
    right = task.example(0).answer
    (one, other, long), _ = score(
        task,
        right,
        "5",
        "12345",
        script=lambda request, _: verdict(request, "fail" if request.id.member == 1 else "pass"),
    )
    assert isinstance(one, Score)
    assert isinstance(other, Score)
    assert isinstance(long, Score)
    assert (one.value, one.reason) == (1.0, ScoreReason.CORRECT)
    assert (other.value, other.reason) == (0.0, ScoreReason.WRONG)
    # Five digits and the end are six tokens: the whole punishment.
    assert long.value == pytest.approx(0.25 - 0.5)
    assert long.reason is ScoreReason.WRONG
    assert [(part.name, part.weight, part.value) for part in long.parts] == [
        *(("exact", 0.75, 0.0), ("style", 0.25, 1.0), ("length", 0.5, -1.0))
    ]
    values = metric_values(reward_metrics([one, other, long]))
    assert values["reward/exact/mean"] == pytest.approx(1 / 3)
    assert values["reward/style/mean"] == pytest.approx(2 / 3)
    assert values["reward/length/mean"] == pytest.approx(-1 / 3)
    assert values["failure/reward_style/rate"] == 0.0


def test_parts_of_full_marks_are_full_marks_whatever_the_weights(tmp_path: Path) -> None:
    parts = [
        {"name": f"p{i}", "weight": weight, "reward": {"type": "exact"}} for i, weight in enumerate((0.1, 0.2, 0.7))
    ]
    task = dataset(tmp_path, {"type": "composite", "parts": parts})
    (one,), _ = score(task, task.example(0).answer)
    assert isinstance(one, Score)
    assert one.value == 1.0
    assert one.is_correct


def test_a_part_that_fails_leaves_the_answer_without_a_score_under_its_own_failure(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(question, answer, text):\n    raise KeyError(text)\n")
    broken = {"name": "mine", "weight": 0.5, "reward": {"type": "python", "file": str(tmp_path / "broken.py")}}
    style = {"name": "style", "weight": 0.5, "reward": RUBRIC}
    task = dataset(tmp_path, {"type": "composite", "parts": [style, broken]})
    (one,), engines = score(task, "4")
    assert isinstance(one, Unscored)
    assert one.failure is FailureType.DATA
    assert one.detail.startswith("mine: ")
    assert engines.rounds == []  # nobody is asked about an answer whose score is lost anyway
    assert [part.failure for part in one.parts] == [None, FailureType.DATA]
    values = metric_values(reward_metrics([one]))
    assert values == {"failure/reward_style/rate": 0.0, "failure/reward_mine/rate": 1.0}


def test_a_part_that_ran_into_its_deadline_is_0_and_a_timeout(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("def score(question, answer, text):\n    while True:\n        pass\n")
    slow = {"type": "python", "file": str(tmp_path / "slow.py"), "timeout_s": 0.3}
    parts = [
        {"name": "slow", "weight": 0.5, "reward": slow},
        {"name": "exact", "weight": 0.5, "reward": {"type": "exact"}},
    ]
    task = dataset(tmp_path, {"type": "composite", "parts": parts})
    (one,), _ = score(task, task.example(0).answer)
    assert isinstance(one, Score)
    assert (one.value, one.failure) == (0.5, FailureType.TIMEOUT)


def test_two_rubrics_of_one_answer_are_judged_apart(tmp_path: Path) -> None:
    parts = [{"name": name, "weight": 0.5, "reward": RUBRIC} for name in ("one", "two")]
    task = dataset(tmp_path, {"type": "composite", "parts": parts})
    (one,), engines = score(
        task, "4", script=lambda request, _: verdict(request, "pass" if request.id.judgement < 5 else "fail")
    )
    assert isinstance(one, Score)
    assert [request.id.judgement for request in engines.rounds[0]] == [1, 2, 3, 5, 6, 7]
    assert [part.value for part in one.parts] == [1.0, 0.0]


def test_aggregates_by_hand() -> None:
    criteria = (
        Criterion(name="a", text="x"),
        Criterion(name="b", text="x", scale=Points(lowest=0, highest=4), weight=3.0),
    )
    verdicts = [Verdict(values=(1.0, 4.0)), Verdict(values=(0.0, 2.0))]
    assert aggregate(verdicts, Panel(criteria=criteria)) == pytest.approx((1.0 + 0.375) / 2)
    two = (Criterion(name="a", text="x"), Criterion(name="b", text="x"))
    panel = Panel(criteria=two, aggregate="majority")
    assert aggregate([Verdict(values=(1.0, 1.0)), Verdict(values=(1.0, 0.0))], panel) == 0.5  # a tie is not met
    assert aggregate([Verdict(values=(1.0, 0.0))] * 3, panel) == 0.5


@given(st.permutations([0.1, 0.2, 0.3, 0.7, 1.0, 1e-9]))
def test_the_order_of_verdicts_has_no_say(values: list[float]) -> None:
    panel = msgspec.convert({"criteria": [{"name": "a", "text": "x", "scale": {"type": "probability"}}]}, Panel)
    expected = aggregate([Verdict(values=(value,)) for value in sorted(values)], panel)
    assert aggregate([Verdict(values=(value,)) for value in values], panel) == expected


def test_punishment_of_length_by_hand() -> None:
    reward = LengthReward(free_tokens=10, max_tokens=20)
    assert [length_value(n, reward) for n in (0, 10, 11, 15, 20, 30)] == [0.0, 0.0, -0.1, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (RUBRIC | {"min_valid": 4}, "Set min_valid to that"),
        (
            RUBRIC | {"aggregate": "majority", "criteria": [{"name": "a", "text": "x", "scale": {"type": "points"}}]},
            "no majority",
        ),
        (RUBRIC | {"judgement": 3}, "unknown field `judgement`"),
        (RUBRIC | {"judge": {"type": "model"}}, "missing required field `model_dir`"),
        ({"type": "composite", "parts": COMPOSITE["parts"][:1]}, "length >= 2"),
        ({"type": "composite", "parts": COMPOSITE["parts"][1:]}, "add up to 0.25"),
        (
            {"type": "composite", "parts": [COMPOSITE["parts"][0], {**COMPOSITE["parts"][1], "name": "exact"}]},
            "Rename all but one",
        ),
        (
            {
                "type": "composite",
                "parts": [COMPOSITE["parts"][0], {"name": "more", "weight": 0.25, "reward": COMPOSITE}],
            },
            "composite",
        ),
        ({"type": "length", "free_tokens": 1, "max_tokens": 2}, "length"),
        (RUBRIC | {"audit": {"type": "rubric", "criteria": []}}, "rubric"),
    ],
)
def test_a_wrong_reward_is_refused(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        dataset(tmp_path, reward)


def test_what_a_reward_compares_with_must_be_there(tmp_path: Path) -> None:
    dataset(tmp_path, RUBRIC, answer_column=None)
    for reward in (RUBRIC | {"audit": {"type": "exact"}}, COMPOSITE):
        with pytest.raises(msgspec.ValidationError, match="compares with a right answer"):
            dataset(tmp_path, reward, answer_column=None)
