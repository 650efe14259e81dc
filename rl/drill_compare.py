"""Compares two runs of one recipe that must have the same bits, from what they left in their directories.

Compared: published weights of every run by their manifests, evaluations and sampled answers, the metrics that are
functions of tokens and weights, and every completion of the token logs, token by token. Not compared: times, counters
of the platform, how often a step was repeated; of a repeated step every repetition must be the same.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollforward.rl.answers import ANSWERS_NAME
from rollforward.rl.tracker import METRICS_NAME
from rollforward.rollout.ledger import Held, held
from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.wal_runs import RecoveredRequest
from rollforward.rollout.weights import MANIFEST_NAME

_METRICS = (
    "critic/",
    "response_length/",
    "training/",
    "num_turns/",
    "tool_call_counts/",
    "actor/",
    "val-core/",
    "sft/",
)
"""Beginnings of the names of metrics that no kill may change."""
_FAILURES = re.compile(r"failure/.*/rate")
"""Those of failures that are of trajectories, and not of the platform's processes."""

_Line = dict[str, Any]

Requests = dict[RequestId, RecoveredRequest]


def logged_requests(run_dir: Path) -> Requests:
    """What the token logs of a run hold of every request; where several do, the one that finished it."""
    found: Requests = {}
    for directory in sorted((run_dir / "wal").glob("*")):
        log = recover(directory)
        for identity, request in log.requests.items():
            if identity not in log.failed and (identity not in found or request.is_finished):
                found[identity] = request
    return found


def held_tokens(run_dir: Path, requests: Requests) -> list[Held]:
    """The same for a ledger."""
    scope = str((run_dir / "wal").resolve())
    return [held(scope, str(identity), one.token_ids, one.behavior_logprobs) for identity, one in requests.items()]


def differences(expected: Path, found: Path, requests: Requests) -> list[str]:
    """What a run has that another has not, in words; empty where they are equal.

    Args:
        expected: directory of the undisturbed run.
        found: of the other.
        requests: what the other's logs hold.
    """
    wrong = [
        f"{name} differs"
        for name in sorted({file.relative_to(expected) for file in _files(expected)})
        if not (found / name).exists() or (found / name).read_bytes() != (expected / name).read_bytes()
    ]
    metrics = _by_step(expected / METRICS_NAME, "step"), _by_step(found / METRICS_NAME, "step")
    wrong += _unequal("metrics of step", *metrics)
    answers = [_by_step(directory / ANSWERS_NAME, "step", "prompt", "member") for directory in (expected, found)]
    wrong += _unequal("answer", answers[0], answers[1])
    for identity, one in logged_requests(expected).items():
        other = requests.get(identity)
        if other is None:
            wrong.append(f"completion {identity} is absent")
        elif field := _differing(one, other):
            wrong.append(f"completion {identity}: {field} differ")
    return wrong


def _files(run_dir: Path) -> list[Path]:
    return [*run_dir.glob(f"model/{MANIFEST_NAME}"), *run_dir.glob("eval_*.json")]


def _differing(one: RecoveredRequest, other: RecoveredRequest) -> str:
    """The first field of a completion that is not the same, or nothing."""
    if one.close is None or other.close is None:
        return "" if one.close is other.close else "ends"
    parts = {
        "tokens": (one.token_ids.tobytes(), other.token_ids.tobytes()),
        "log-probs": (one.behavior_logprobs.tobytes(), other.behavior_logprobs.tobytes()),
        "observations": (one.sequence()[0].tobytes(), other.sequence()[0].tobytes()),
        "ends": (one.close.stop_reason, other.close.stop_reason),
        "routes": (_bytes(one.routes), _bytes(other.routes)),
        "kept sets": (one.kept, other.kept),
    }
    return next((name for name, (left, right) in parts.items() if left != right), "")


def _bytes(array: Any) -> bytes | None:
    return None if array is None else array.tobytes()


def _by_step(path: Path, *keys: str) -> dict[str, list[_Line]]:
    """Key -> the distinct contents of the lines that have it, without what a repetition may change."""
    found: dict[str, list[_Line]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by a kill
        if path.name == METRICS_NAME:
            line = {name: value for name, value in line.items() if name == "step" or _is_compared(name)}
        line.pop("attempt", None)
        lines = found.setdefault("-".join(str(line[key]) for key in keys), [])
        if line not in lines:
            lines.append(line)
    return found


def _is_compared(name: str) -> bool:
    return name.startswith(_METRICS) or _FAILURES.fullmatch(name) is not None


def _unequal(what: str, expected: Mapping[str, list[_Line]], found: Mapping[str, list[_Line]]) -> list[str]:
    return [
        f"{what} {key} differ: {_names(expected[key] + found[key])}"
        if key in found and key in expected
        else f"{what} {key} stands in one run alone"
        for key in sorted({*expected, *found})
        if expected.get(key) != found.get(key)
    ]


def _names(lines: list[_Line]) -> str:
    """The fields that are not the same in all lines."""
    names = sorted({name for line in lines for name in line})
    return ", ".join(name for name in names if any(line.get(name) != lines[0].get(name) for line in lines))
