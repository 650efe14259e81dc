"""Proves: the numbers of a calibration report, on columns worked by hand; what cannot be known is None, never 0."""

import math
from pathlib import Path

import msgspec
import pytest

from rollforward.conf import cli
from rollforward.rl.evaluation import TaskAccuracy
from rollforward.rl.judge.calibration import Calibration, Confusion, calibrate, correlation
from rollforward.rl.judge.config import Criterion, Points, Rubric
from rollforward.rl.judge.types import Judgement, Opinion, Verdict, VerdictFailure, VerdictProblem

ONE = Rubric(criteria=(Criterion(name="right", text="x"),))


def opinion(*worth: float, truth: float | None = None, chars: int = 1, failures: int = 0) -> Opinion:
    judgements = [Judgement(number=1, order=(0,), said=Verdict(values=(value,))) for value in worth]
    lost = Judgement(number=2, order=(0,), said=VerdictFailure(kind=VerdictProblem.NO_KEY))
    return Opinion(
        part="rubric", judgements=(*judgements, *[lost] * failures), worth=worth, answer_chars=chars, truth=truth
    )


def report(*opinions: Opinion) -> Calibration:
    return calibrate("rubric", opinions, ONE)


def test_agreement_and_kappa_by_hand() -> None:
    """20 good and 30 bad answers; 15 of the good and 10 of the bad are praised: kappa's textbook example."""
    one = report(
        *[opinion(1.0, truth=1.0)] * 15,
        *[opinion(0.0, truth=1.0)] * 5,
        *[opinion(1.0, truth=0.0)] * 10,
        *[opinion(0.0, truth=0.0)] * 20,
    )
    assert one.confusion == Confusion(good_said_good=15, good_said_bad=5, bad_said_good=10, bad_said_bad=20)
    assert one.agreement == pytest.approx(0.7)
    assert one.kappa == pytest.approx((0.7 - 0.5) / 0.5)
    assert one.brier == pytest.approx(0.3)
    assert (one.said_mean, one.true_mean) == (0.5, 0.4)
    assert one.ece == pytest.approx((25 * 10 / 25 + 25 * 5 / 25) / 50)  # of 25 praised 10 are bad, of 25 refused 5 good


def test_a_perfect_judge_and_one_that_always_says_the_same() -> None:
    perfect = report(*[opinion(1.0, truth=1.0)] * 3, *[opinion(0.0, truth=0.0)] * 5)
    assert (perfect.agreement, perfect.kappa, perfect.brier, perfect.ece) == (1.0, 1.0, 0.0, 0.0)
    yes = report(*[opinion(1.0, truth=1.0)] * 3, *[opinion(1.0, truth=0.0)] * 5)
    assert (yes.agreement, yes.kappa) == (0.375, 0.0)
    assert report(*[opinion(1.0, truth=1.0)] * 3).kappa is None


def test_a_calibrated_judge_has_no_calibration_error_and_the_right_brier() -> None:
    one = report(*[opinion(0.75, truth=1.0)] * 3, opinion(0.75, truth=0.0))
    assert one.ece == pytest.approx(0.0)
    assert one.brier == pytest.approx(0.75 * 0.25)
    filled = [bin_ for bin_ in one.bins if bin_.answers]
    assert [(bin_.lowest, bin_.answers, bin_.said, bin_.true) for bin_ in filled] == [(0.7, 4, 0.75, 0.75)]


def test_one_half_is_on_no_side() -> None:
    one = report(opinion(1.0, 0.0, truth=1.0), opinion(1.0, 0.0, truth=0.0))
    assert one.agreement == 0.0
    assert one.confusion == Confusion(good_said_bad=1, bad_said_bad=1)


def test_consistency_counts_pairs_of_verdicts() -> None:
    assert report(opinion(1.0, 1.0, 0.0)).consistency == pytest.approx(1 / 3)
    assert report(opinion(1.0, 1.0, 0.0)).spread == pytest.approx(math.sqrt(2) / 3)
    assert report(opinion(1.0), opinion(0.0)).consistency is None


def test_problems_are_counted_by_kind() -> None:
    one = report(opinion(1.0, failures=2), opinion(failures=3))
    assert (one.answers, one.without_opinion, one.judgements, one.problems) == (2, 1, 6, {"no_key": 5})
    assert (one.known, one.agreement, one.kappa, one.brier, one.ece) == (0, None, None, None, None)


def test_nothing_is_known_of_nothing() -> None:
    one = report()
    numbers = msgspec.structs.asdict(one)
    for name in ("agreement", "kappa", "brier", "ece", "consistency", "spread", "length_correlation", "verbosity_bias"):
        assert numbers[name] is None
    assert one.bins[0].said is None


def test_length_and_verbosity() -> None:
    """Longer answers are better here, and the judge says so: no bias. Where it praises length itself, there is one."""
    fair = report(*[opinion(value, truth=value, chars=chars) for value, chars in ((0.0, 10), (1.0, 30), (1.0, 30))])
    assert fair.length_correlation == pytest.approx(1.0)
    assert fair.verbosity_bias is None  # says nothing beyond the truth
    vain = report(*[opinion(said, truth=0.0, chars=chars) for said, chars in ((0.0, 10), (0.5, 20), (1.0, 30))])
    assert vain.verbosity_bias == pytest.approx(1.0)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert correlation([1, 1], [1, 2]) is None


def test_position_bias_is_taken_within_a_criterion() -> None:
    rubric = Rubric(
        criteria=(Criterion(name="hard", text="x"), Criterion(name="easy", text="x", scale=Points(lowest=0, highest=4)))
    )

    def judged(hard: float, easy: float, order: tuple[int, ...]) -> Opinion:
        said = Judgement(number=1, order=order, said=Verdict(values=(hard, easy)))
        return Opinion(part="rubric", judgements=(said,), worth=(0.5,), answer_chars=1)

    even = [judged(0.0, 4.0, (0, 1)), judged(0.0, 4.0, (1, 0)), judged(0.0, 4.0, (1, 0))]
    assert calibrate("rubric", even, rubric).position_bias == 0.0
    first = [judged(1.0, 2.0, (0, 1)), judged(0.0, 4.0, (1, 0))]
    assert calibrate("rubric", first, rubric).position_bias == pytest.approx((1.0 + 0.5) / 2)
    assert calibrate("rubric", first[:1], rubric).position_bias is None
    assert report(opinion(1.0)).position_bias is None


def test_the_command_shows_the_newest_evaluation_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(file: Path, *opinions: Opinion) -> None:
        one = TaskAccuracy(task="sums", correct=1, judged=2, samples=(), calibrations=(report(*opinions),))
        plain = TaskAccuracy(task="other", correct=1, judged=2, samples=())
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(msgspec.json.encode((plain, one)))

    write(tmp_path / "grpo" / "eval_000000.json", opinion(0.0, truth=1.0))
    write(tmp_path / "grpo" / "eval_000020.json", opinion(1.0, truth=1.0), opinion(0.0, truth=0.0))
    write(tmp_path / "heldout" / "eval.json", opinion(1.0, failures=1))
    assert cli.main(["judge", "report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "agreement     1.000, kappa 1.000" in shown
    assert "verdicts      1 of 2; not: no_key 1" in shown
    found = msgspec.json.decode(shown.splitlines()[-1])
    assert [Path(one["file"]).name for one in found] == ["eval_000020.json", "eval.json"]
    assert [one["calibration"]["agreement"] for one in found] == [1.0, None]
    assert cli.main(["judge", "report", str(tmp_path), "json=true"]) == 0
    assert capsys.readouterr().out.strip() == shown.splitlines()[-1]


@pytest.mark.parametrize("words", [[], ["report"], ["show", "x"], ["report", "a", "b"], ["report", "a=b"]])
def test_other_words_are_a_mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["judge", *words]) == 2
    assert "it takes: rollforward judge report DIR" in capsys.readouterr().err


def test_a_directory_without_judges_and_a_file_that_is_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["judge", "report", str(tmp_path)]) == 2
    assert "no evaluation in which a model judged" in capsys.readouterr().err
    (tmp_path / "eval.json").write_text("{")
    assert cli.main(["judge", "report", str(tmp_path)]) == 2
    assert "eval.json cannot be read" in capsys.readouterr().err
