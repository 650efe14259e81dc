"""Entry point of `rollforward export`: a run's newest weights as a checkpoint that other programs read.

    run_dir/config.json --> where it started      run_dir/model, or the newest of run_dir/weights --> model/export.py

Nothing in the run's directory is written or locked: a run may be at work. It removes a version once it has published
the next; then the next is exported.
"""

import json
from pathlib import Path
from typing import Any, cast

import msgspec

from rollforward.conf import console
from rollforward.model.checkpoint_writer import check_target
from rollforward.model.config import load_model_config
from rollforward.model.convert import companion_files
from rollforward.model.encoding_version import ENCODING_FILE, LATER, encoding_file
from rollforward.model.errors import CheckpointError, ConfigError
from rollforward.model.export import ExportReport, export_checkpoint
from rollforward.rl.errors import ModelDirectoryError
from rollforward.rl.export_config import ExportRun
from rollforward.rollout.weights import WEIGHTS_NAME, check_manifest

_FINAL_NAME = "model"
_FRESH_NAME = "init"
_SETTINGS_NAME = "config.json"
_COMMAND_NAME = "runs.json"


def main(run: ExportRun) -> int:
    """Export, and say what was written. Returns 0."""
    target = Path(run.target)
    check_target(target)
    run_dir = _run_with_weights(Path(run.run_dir))
    base = _start_of(run_dir) if run.base is None else Path(run.base)
    weights, report = _exported(run_dir, base, target)
    rows: dict[str, object] = {
        "model": target,
        "weights": weights,
        "trained": f"{report.trained_tensors:,} tensors, as published",
        "untrained": f"{report.copied_tensors:,} tensors, byte for byte from {base}",
    }
    if report.published_tensors:
        rows["also untrained"] = f"{report.published_tensors:,} tensors, as published"
    if report.plain_tensors:
        rows["plain"] = f"{report.plain_tensors:,} tensors, trained without quantisation and stored so"
    rows["bytes"] = f"{report.written_bytes:,}"
    console.summary(f"exported {run_dir}", rows)
    result = {"model": str(target), "weights": str(weights), "base": str(base), **msgspec.to_builtins(report)}
    console.result(json.dumps(result))
    return 0


def _exported(run_dir: Path, base: Path, target: Path) -> tuple[Path, ExportReport]:
    while True:
        weights = newest_weights(run_dir)
        if weights is None:
            raise ModelDirectoryError(f"{run_dir} holds no weights any more. Look at what became of the run.")
        try:
            check_manifest(weights, load_model_config(weights))
            files = {ENCODING_FILE: encoding_file(LATER), **companion_files(base), **companion_files(weights)}
            return weights, export_checkpoint(weights, base, target, files=files)
        except (CheckpointError, ConfigError):
            if newest_weights(run_dir) == weights:
                raise


def newest_weights(run_dir: Path) -> Path | None:
    """Return a run's final model, else its newest published version; None where it has neither."""
    if (run_dir / _FINAL_NAME).is_dir():
        return run_dir / _FINAL_NAME
    return max((run_dir / WEIGHTS_NAME).glob("v*"), default=None)


def _run_with_weights(directory: Path) -> Path:
    """The directory itself, or the last run in it that has weights.

    Raises:
        ModelDirectoryError: there is none.
    """
    recorded = _command(directory).get("runs", [])
    folders = [str(run["folder"]) for run in recorded if isinstance(run, dict) and "folder" in run]
    runs = [directory, *(directory / folder for folder in reversed(folders))]
    found = next((run for run in runs if newest_weights(run) is not None), None)
    if found is None:
        raise ModelDirectoryError(
            f"{directory} holds neither a model nor published weights. Name the directory of a run of `sft` or `train`"
            " that has taken its first step."
        )
    return found


def _start_of(run_dir: Path) -> Path:
    """The checkpoint that a run started from, by its settings.

    Raises:
        ModelDirectoryError: they do not say, or it is gone.
    """
    settings = _read(run_dir / _SETTINGS_NAME)
    start = settings.get("start")
    start = start if isinstance(start, dict) else {}
    if start.get("type") == "fresh":
        return run_dir / _FRESH_NAME
    stated = settings.get("model_dir") or start.get("model_dir")
    if not isinstance(stated, str):
        raise ModelDirectoryError(
            f"{run_dir / _SETTINGS_NAME} does not say which checkpoint the run started from. Name it: base=DIR"
        )
    # Settings are relative to where the command was typed.
    typed = [_command(folder).get("directory") for folder in (run_dir, run_dir.parent)]
    places = [Path(place) / stated for place in (*typed, ".") if isinstance(place, str)]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        raise ModelDirectoryError(
            f"{stated}, which the run in {run_dir} started from, is no checkpoint any more. If it has moved, name it:"
            " base=DIR"
        )
    return found


def _command(directory: Path) -> dict[str, Any]:
    path = directory / _COMMAND_NAME
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path} cannot be read: {error}. Name the directory of a run.") from error
    if not isinstance(found, dict):
        raise ModelDirectoryError(f"{path} holds no settings. Name the directory of a run.")
    return cast("dict[str, Any]", found)
