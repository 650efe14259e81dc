"""The drain file, whatever lies at its path: nothing raises, nothing is waited for, and nonsense is said."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollforward.rollout.drain_file import DrainFile


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_drain_file_that_cannot_be_read_is_said_once_and_tells_nobody(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    said: list[str] = []
    drain = DrainFile(tmp_path / "drain", ["engine-0"], announce=said.append)
    make(tmp_path / "drain")
    assert [drain.read(), drain.read()] == [{}, {}]
    (line,) = said
    assert "tells nobody to leave, since it cannot be read and removed" in line


@pytest.mark.parametrize("seconds", ["inf", "1e300", "9" * 400])
def test_more_seconds_than_a_clock_holds_are_as_good_as_many(tmp_path: Path, seconds: str) -> None:
    drain = DrainFile(tmp_path / "drain", ["engine-0"], announce=pytest.fail)
    (tmp_path / "drain").write_text(f"engine-0 {seconds}")
    deadline_s = drain.read()["engine-0"]
    assert deadline_s is not None
    assert threading.Lock().acquire(timeout=deadline_s)
