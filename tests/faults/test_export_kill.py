"""Proves: whenever an export is killed, no directory by its name can be loaded but a whole one, what was exported
before is untouched, and the next export of the same name succeeds.

Real SIGKILL: children that the kernel ends in the middle of a write, around each fsync, removal and the rename.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollforward.model.checkpoint import read_packed, write_checkpoint
from rollforward.model.errors import ModelError
from tests.model.test_checkpoint import CONFIG, random_masters

CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from rollforward.model.export import export_checkpoint
from rollforward.model.convert import convert_checkpoint

weights, base, root = (Path(word) for word in sys.argv[1:4])
torch.set_num_threads(1)
counts = {"events": 0, "at": 0}

def event():
    counts["events"] += 1
    return counts["events"] == counts["at"]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def around(real):
    def call(*arguments, **named):
        if event():
            die()
        result = real(*arguments, **named)
        if event():
            die()
        return result
    return call

real_pwrite = os.pwrite

def half_write(descriptor, raw, offset):
    if event():
        real_pwrite(descriptor, raw[: len(raw) // 2], offset)
        die()
    return real_pwrite(descriptor, raw, offset)

os.pwrite = half_write
for name in ("fsync", "mkdir", "rename", "unlink", "rmdir"):
    setattr(os, name, around(getattr(os, name)))

def work():
    export_checkpoint(weights, base, root / "to", files={"tokenizer.json": b"{}"}, max_shard_bytes=60_000)

def run(at):
    pid = os.fork()
    if pid == 0:
        counts.update(events=0, at=at)
        work()
        sys.stdout.write(f"{counts['events']}\\n")
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for line in sys.stdin:
    code = run(int(line))
    sys.stdout.write(f"code {code}\\n")
    sys.stdout.flush()
"""


class Exporter:
    """A process that forks an export at each request, to be killed at its n-th event; 0 lets it finish."""

    def __init__(self, weights: Path, base: Path, root: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(weights), str(base), str(root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def export(self, at: int) -> tuple[int, int]:
        """(exit code, events of an export that finished)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{at}\n")
        self._process.stdin.flush()
        events = 0
        while not (line := self._process.stdout.readline()).startswith("code"):
            assert line, "the exporter died"
            events = int(line)
        return int(line.split()[1]), events

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and `weights` that were trained from it."""
    root = tmp_path_factory.mktemp("models")
    config = msgspec.structs.replace(CONFIG, num_hidden_layers=2, compress_ratios=(0, 4, 0))
    write_checkpoint(root / "base", config, random_masters(config))
    start, moved = read_packed(root / "base"), read_packed(root / "base")
    moved["norm.weight"] = msgspec.structs.replace(start["norm.weight"], data=start["norm.weight"].data * 2)
    write_checkpoint(root / "weights", config, moved)
    return root


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_anywhere_no_half_of_an_export_can_be_loaded(models: Path, tmp_path: Path) -> None:
    target = tmp_path / "to"
    exporter = Exporter(models / "weights", models / "base", tmp_path)
    try:
        code, events = exporter.export(0)
        assert code == 0
        whole = _digest(target)
        target.rename(tmp_path / "previous")
        # Every event of the end, where names change, and a spread of those before. What one left, the next removes,
        # which has events of its own; at the end they are counted from an empty folder.
        end = events - 16
        moments = [*range(1, end, max(events // 24, 1)), *range(end, events + 1)]
        outcomes = {"absent": 0, "whole": 0}
        for at in moments:
            if at >= end:
                shutil.rmtree(tmp_path / ".to.partial", ignore_errors=True)
            code, _ = exporter.export(at)
            assert code == -signal.SIGKILL, f"event {at} of {events}"
            if target.exists():
                assert _digest(target) == whole, f"half an export after event {at} of {events}"
                read_packed(target)
                outcomes["whole"] += 1
                shutil.rmtree(target)
            else:
                outcomes["absent"] += 1
                with pytest.raises(ModelError):
                    read_packed(target)
            assert _digest(tmp_path / "previous") == whole
        assert outcomes["absent"] > 30
        assert outcomes["whole"] >= 2, "killed after the rename too"
        assert exporter.export(0)[0] == 0, "what they left is in nobody's way"
        assert _digest(target) == whole
        assert sorted(path.name for path in tmp_path.iterdir()) == ["previous", "to"]
        assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 2
    finally:
        exporter.close()
