"""The command `rollforward kernels warm model=NAME`: the TileLang programs that a model runs, compiled once.

Here: which programs, from a model's sizes. Not here: compiling and where they lie (kernels/dispatch.py).
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.kernels import dispatch
from rollforward.model.backends import programs_of
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.config import ModelConfig, preset
from rollforward.model.presets import PRESETS

_RULE = "it takes: warm model=NAME [teacher=NAME] [jobs=N], NAME being a model directory or one of"


def programs(model: ModelConfig, teacher: ModelConfig) -> list[dispatch.Program]:
    """Return every program that a model runs, with itself as a teacher and one that may be another."""
    return list(dict.fromkeys(one for of_op in programs_of(model, [model, teacher]).values() for one in of_op))


def _config(name: str) -> ModelConfig | None:
    """The sizes of a preset or of a model directory; None where the name is neither."""
    if name in PRESETS:
        return preset(name)
    return load_checkpoint_config(Path(name)) if (Path(name) / "config.json").is_file() else None


def main(words: Sequence[str]) -> int:
    """Does what the words after `kernels` ask for.

    Returns:
        0.

    Raises:
        UsageError: other words.
        ConfigError: a model directory whose configuration is refused.
    """
    settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    model = settings.pop("model", "")
    config, teacher = _config(model), _config(settings.pop("teacher", model))
    jobs = settings.pop("jobs", str(os.cpu_count() or 1))
    is_understood = not settings and jobs.isdecimal() and int(jobs) > 0 and all("=" in word for word in words[1:])
    if words[:1] != ["warm"] or config is None or teacher is None or not is_understood:
        given = " ".join(words) or "nothing"
        raise UsageError(f"kernels is followed by {given}; {_RULE} {', '.join(PRESETS)}.")
    start_s = time.monotonic()
    compiled, kept = dispatch.warm(programs(config, teacher), jobs=int(jobs))
    seconds = time.monotonic() - start_s
    console.result(f"{compiled} programs compiled in {seconds:.0f} s, {kept} there: {dispatch.cache_directory()}")
    return 0
