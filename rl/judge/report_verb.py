"""The command `rollforward judge report DIR`: how good the judges of a run are, from its newest evaluation.

Reads only, also of a run that is working. Here: finding evaluations, the table, the JSON. Not here: the numbers
(`calibration.py`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.rl.judge.calibration import Calibration

_NAME: Final = re.compile(r"eval(?:_\d{6})?\.json")
_USAGE: Final = "rollforward judge report DIR [json=true], with the directory of a run or of a recipe"


class _Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """What of an evaluation's task is read here; see `TaskAccuracy`."""

    task: str
    calibrations: tuple[Calibration, ...] = ()


class JudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluation tells of one judge."""

    file: str
    """The evaluation."""
    task: str
    """Name of the task."""
    calibration: Calibration
    """The numbers."""


def main(words: Sequence[str]) -> int:
    """Does what the words after `judge` ask for.

    Returns:
        0.

    Raises:
        UsageError: other words, or no evaluation with a judge where they say.
    """
    rest = [word for word in words if word not in ("json=true", "json=false")]
    if len(rest) != 2 or rest[0] != "report" or "=" in rest[1]:
        raise UsageError(f"judge is followed by {' '.join(words) or 'nothing'}; it takes: {_USAGE}.")
    reports = find_reports(Path(rest[1]).resolve())
    if "json=true" not in words:
        for report in reports:
            title = f"{report.task}, {report.calibration.part} ({report.file})"
            console.summary(title, calibration_rows(report.calibration))
            console.result("\n".join(bin_lines(report.calibration)))
    console.result(msgspec.json.encode(reports).decode())
    return 0


def find_reports(directory: Path) -> list[JudgeReport]:
    """Read the newest evaluation of every run below a directory, as far as somebody judged in it.

    Raises:
        UsageError: there is none.
    """
    newest: dict[Path, Path] = {}
    for file in sorted((*directory.glob("eval*.json"), *directory.glob("*/eval*.json"))):
        if _NAME.fullmatch(file.name) is not None:
            newest[file.parent] = file
    reports: list[JudgeReport] = []
    for file in newest.values():
        try:
            found = msgspec.json.decode(file.read_bytes(), type=tuple[_Evaluated, ...])
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"{file} cannot be read: {error}. Name a directory in which no such file lies.") from None
        reports += [
            JudgeReport(file=str(file), task=one.task, calibration=calibration)
            for one in found
            for calibration in one.calibrations
        ]
    if not reports:
        raise UsageError(
            f"{directory} has no evaluation in which a model judged; `eval`, `sft` and `train` make one of a task of"
            f" type judge, or with a reward of type rubric. {_USAGE}."
        )
    return reports


def calibration_rows(one: Calibration) -> dict[str, object]:
    """Return the numbers of a judge for a person: name to text."""
    failed = ", ".join(f"{kind} {count}" for kind, count in one.problems.items())
    rows: dict[str, object] = {
        "verdicts": f"{one.judgements - sum(one.problems.values())} of {one.judgements}"
        + (f"; not: {failed}" if failed else ""),
        "answers": f"{one.answers}, without any verdict {one.without_opinion}, of known worth {one.known}",
        "agreement": f"{_shown(one.agreement)}, kappa {_shown(one.kappa)}",
        "good answers": f"said good {one.confusion.good_said_good}, said bad {one.confusion.good_said_bad}",
        "bad answers": f"said good {one.confusion.bad_said_good}, said bad {one.confusion.bad_said_bad}",
        "calibration": f"Brier {_shown(one.brier)}, ECE {_shown(one.ece)},"
        f" says {_shown(one.said_mean)} in the mean where {_shown(one.true_mean)} is true",
        "consistency": f"{_shown(one.consistency)} of pairs on one side, spread {_shown(one.spread)}",
        "length": f"correlation {_shown(one.length_correlation)}, beyond the truth {_shown(one.verbosity_bias)}",
    }
    if one.position_bias is not None:
        rows["position"] = f"first less last {one.position_bias:+.3f}"
    return rows


def bin_lines(one: Calibration) -> list[str]:
    """Return the bins that hold answers, a line each."""
    filled = [bin_ for bin_ in one.bins if bin_.answers]
    return [f"  said {bin_.lowest:.1f} to {bin_.highest:.1f}: {bin_.answers} answers, mean {_shown(bin_.said)}, true"
            f" {_shown(bin_.true)}" for bin_ in filled]  # fmt: skip


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
