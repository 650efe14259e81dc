"""Proves: killing a sandbox actor is seen by no command, and of a killed driver nothing is left after the lease.

Does not prove: that sandboxes of a lost node are reported (a node's supervisor is lost with it).
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox.homes import supervisor_id
from tests.helpers.supervisors import Stage

LEASE_S = 5.0
MAIN = Path(__file__).parents[1] / "helpers" / "sandbox_driver_main.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True) as made:
        yield Path(made)


def test_killed_actors_are_seen_by_nobody_and_a_killed_driver_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(folder, monkeypatch, supervisor_id(str(folder / "run"), 0, []))
    command = [sys.executable, MAIN, folder / "run", str(LEASE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        try:
            assert driver.stdout is not None
            said = (line for line in driver.stdout if line.startswith("{"))  # Ray says things there too
            facts = [json.loads(next(said)) for _ in range(4)]
            assert facts == [
                {"stdout": "x\n", "missing": []},
                {"is_same": True, "instance": True, "killed": 2},
                {"held": 1},
                {"held": 1},
            ]
            assert os.getsid(stage.supervisor()) not in (os.getsid(0), driver.pid)
            stage.look()
        finally:
            driver.kill()
    asyncio.run(stage.gone(45.0))  # the lease that it had before would have lasted for longer
    assert driver.returncode == -signal.SIGKILL
