"""The command `rollforward sandbox layers list|make|gc`: the layers of sandboxes' images on this machine.

Here: words, tables and JSON. Not here: the store (sandbox/layers.py).
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.errors import SandboxError
from rollforward.sandbox.layers import LayerInfo, LayerStore
from rollforward.sandbox.layers_files import probe

_USAGE: Final = (
    "it takes: layers list, layers make SOURCE ..., or layers gc [unused_days=30]; all take dir=DIR for another store"
    " and json=true to print JSON alone."
)
_DAY_S: Final = 86400.0
_UNUSED_DAYS: Final = 30.0


def main(words: Sequence[str]) -> int:
    """Does what the words after `sandbox layers` ask for.

    Returns:
        0.

    Raises:
        UsageError: other words, or a source that is no layer.

    """
    action, *rest = words or [""]
    # A source may hold `=`: only these words are settings.
    known = {"dir", "json", "unused_days"}
    settings = dict(word.split("=", 1) for word in rest if word.partition("=")[0] in known and "=" in word)
    names = [word for word in rest if not (word.partition("=")[0] in known and "=" in word)]
    wants_json = settings.pop("json", "false")
    config = LayersConfig(dir=settings.pop("dir", LayersConfig().dir))
    days = _days(settings.pop("unused_days")) if action == "gc" and "unused_days" in settings else _UNUSED_DAYS
    is_right = bool(names) if action == "make" else action in ("list", "gc") and not names
    if settings or not is_right or wants_json not in ("true", "false"):
        raise UsageError(f"sandbox layers is followed by {' '.join(words) or 'nothing'}; {_USAGE}")
    with LayerStore(config) as store:
        if action == "make":
            return _make(store, names, wants_json == "true")
        if action == "gc":
            removed = store.collect(unused_s=days * _DAY_S)
            told = {"removed": len(removed), "bytes": sum(info.bytes for info in removed)}
            return _tell(removed, told, wants_json == "true")
        infos = store.infos()
        told = {"layers": len(infos), "bytes": sum(info.bytes for info in infos), "shown_as": probe().report}
        return _tell(infos, {**told, "store": str(store.directory)}, wants_json == "true")


def _make(store: LayerStore, sources: Sequence[str], wants_json: bool) -> int:
    try:
        found = {source: [layer.digest for layer in store.layers(source)] for source in sources}
    except SandboxError as error:
        raise UsageError(f"{error}.") from None
    if not wants_json:
        console.result("\n".join(f"layer:{digest}  {source}" for source, all_ in found.items() for digest in all_))
    console.result(json.dumps({"layers": found}))
    return 0


def _days(word: str) -> float:
    try:
        days = float(word)
    except ValueError:
        days = -1.0
    if not 0.0 <= days < float("inf"):
        raise UsageError(f"unused_days is {word!r}; it must be a number of days, from 0.")
    return days


def _tell(infos: Sequence[LayerInfo], told: Mapping[str, object], wants_json: bool) -> int:
    if not wants_json and infos:
        rows = [("layer", "MiB", "files", "file MiB", "held", "days", "source")]
        now_s = time.time()
        for info in infos:
            ago = f"{max(now_s - info.used_unix_s, 0.0) / _DAY_S:.1f}"
            sizes = (f"{info.bytes / 2**20:.1f}", str(info.files), f"{info.file_bytes / 2**20:.1f}")
            held = "yes" if info.is_held else "no"
            rows.append((info.digest[:16], *sizes, held, ago, Path(info.source).name))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        console.result("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines))
    console.result(json.dumps({**told, "all": [msgspec.to_builtins(info) for info in infos]}))
    return 0
