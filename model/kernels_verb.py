"""The command `rollforward kernels warm model=NAME`: the TileLang programs that a model runs, compiled once.

Here: which programs, from a model's sizes. Not here: compiling and where they lie (kernels/dispatch.py).
"""

import os
import time
from collections.abc import Sequence
from typing import Any, cast

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.kernels import dispatch
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.model.config import preset
from rollforward.model.presets import PRESETS, PresetName

_SIZES: dict[str, dict[str, Any]] = {**PRESETS}
_RULE = "it takes: warm model=NAME [teacher=NAME] [jobs=N], NAME being one of"


def programs(model: str, teacher: str) -> list[dispatch.Program]:
    """Return every program that a preset runs, with a teacher that is another."""
    sizes = _SIZES[model]
    width, inner = sizes["hidden_size"], sizes["moe_intermediate_size"]
    wanted = vocab_sweep.programs(sizes["vocab_size"], width, _SIZES[teacher]["hidden_size"])
    if mix_sweep.takes(width):
        wanted += mix_sweep.programs(width, preset(cast("PresetName", model)).hc_sinkhorn_iters)
    if mxfp4_sweep.takes(inner, width):
        wanted += [*mxfp4_sweep.programs(inner, width), *mxfp4_sweep.programs(width, inner)]
    return wanted


def main(words: Sequence[str]) -> int:
    """Does what the words after `kernels` ask for.

    Returns:
        0.

    Raises:
        UsageError: other words.
    """
    settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    model = settings.pop("model", "")
    teacher = settings.pop("teacher", model)
    jobs = settings.pop("jobs", str(os.cpu_count() or 1))
    known = {model, teacher} <= set(_SIZES) and jobs.isdecimal() and int(jobs) > 0
    if words[:1] != ["warm"] or settings or not known or any("=" not in word for word in words[1:]):
        given = " ".join(words) or "nothing"
        raise UsageError(f"kernels is followed by {given}; {_RULE} {', '.join(_SIZES)}.")
    start_s = time.monotonic()
    compiled, kept = dispatch.warm(programs(model, teacher), jobs=int(jobs))
    seconds = time.monotonic() - start_s
    console.result(f"{compiled} programs compiled in {seconds:.0f} s, {kept} there: {dispatch.cache_directory()}")
    return 0
