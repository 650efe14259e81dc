"""Proves: a checkpoint is read, written and converted in memory that does not grow with it. What counts is memory that
no file holds (RssAnon), of which torch alone is most.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed at once: gigabytes are not kept for the last three sessions."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def _report(folder: Path, layers: int, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.helpers.big_checkpoint", str(folder), str(layers), mode]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return json.loads(done.stdout)


@pytest.mark.timeout(900)  # of a disk that others write to
def test_one_gigabyte_under_200_megabytes(folder: Path) -> None:
    report = _report(folder, 3, "convert")
    assert report["bytes"] > 10**9
    assert report["largest_bytes"] < 200 * 10**6, report
    assert report["changed_bytes"] > 10**6, "the bytes were not canonical"
    assert (report["other_values"], report["changed_again"], report["other_files"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_gigabytes_under_a_limit_of_two(folder: Path) -> None:
    """The kernel refuses memory beyond the limit (RLIMIT_DATA)."""
    report = _report(folder, 58, "read")
    assert report["bytes"] > 20 * 10**9
    assert report["largest_bytes"] < 200 * 10**6, report
    assert report["other_values"] == 0
