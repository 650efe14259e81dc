"""Proves: a command runs as a job on a real cluster, which the test starts and ends by process id; its log and exit
code come back; a stopped job goes on elsewhere to the same weights.

The cluster has a token and ports of its own. Not here: what is assembled and refused before anything is sent
(tests/conf/test_submit.py).
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from rollforward.rollout.weights import read_published
from tests.helpers.commands import command, write_recipe

RAY = (sys.executable, "-m", "ray.scripts.scripts")


class Head(NamedTuple):
    """A cluster of one machine."""

    address: str
    environment: dict[str, str]

    def run(self, *words: str, timeout_s: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
        """`rollforward WORDS address=...`."""
        return subprocess.run(
            command(*words, f"address={self.address}"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment | changes,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    directory = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))  # a short path: Ray puts sockets below it
    port, dashboard = _free_port(), _free_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    options = f"--num-cpus=2 --node-ip-address=127.0.0.1 --port={port} --dashboard-host=127.0.0.1"
    options += f" --dashboard-port={dashboard} --temp-dir={directory} --object-store-memory=100000000"
    options += f" --dashboard-agent-listen-port={_free_port()}"  # of its own: jobs are begun there
    started = subprocess.Popen(
        [*RAY, "start", "--head", "--block", "--disable-usage-stats", *options.split()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", dashboard), timeout=1).close()
                break
            except OSError:
                assert started.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
        yield Head(f"http://127.0.0.1:{dashboard}", environment)
    finally:
        family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
        for process in family:
            process.kill()
        started.wait()
        psutil.wait_procs(family, timeout=30)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.timeout(240)
def test_a_job_and_its_exit_code(head: Head, tmp_path: Path) -> None:
    done = head.run("submit", "plan", "model=tiny", "submission_id=first")
    assert done.returncode == 0, done.stderr
    assert "KV cache" in done.stdout
    assert "stop it: RAY_AUTH_MODE=token ray job stop --address" in done.stderr
    again = head.run("submit", "plan", "model=tiny", "submission_id=first")
    assert again.returncode == 2
    assert "refuses the job" in again.stderr
    failed = head.run("submit", "resume", str(tmp_path))
    assert failed.returncode == 2, "what the command in the job returned"
    assert "holds no runs.json" in failed.stdout


@pytest.mark.timeout(120)
def test_a_wrong_token_and_a_wrong_address_are_explained(head: Head) -> None:
    wrong = head.run("submit", "plan", "model=tiny", RAY_AUTH_TOKEN="f" * 64)
    assert wrong.returncode == 2
    assert "does not accept the token sent" in wrong.stderr
    assert "Copy ~/.ray/auth_token" in wrong.stderr
    none = head.run("submit", "plan", "model=tiny", RAY_AUTH_MODE="disabled")
    assert none.returncode == 2
    assert "Missing authentication token" in none.stderr
    nobody = Head(f"http://127.0.0.1:{_free_port()}", head.environment).run("submit", "plan", "model=tiny")
    assert nobody.returncode == 2
    assert "does not answer as a Ray cluster" in nobody.stderr


def _steps(run_dir: Path) -> int:
    path = run_dir / "grpo" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_training_job_goes_on_in_another_and_ends_like_a_local_run(head: Head, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    local: Any = subprocess.run(
        command("train", f"recipe={recipe}", f"run_dir={tmp_path / 'local'}"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert local.returncode == 0, local.stderr
    run_dir = tmp_path / "job"
    words = ("train", "recipe=few.yaml", f"working_dir={tmp_path}", f"run_dir={run_dir}", "submission_id=training")
    sent = head.run("submit", *words, "wait=false")
    assert sent.returncode == 0, sent.stderr
    deadline_s = time.monotonic() + 300
    while _steps(run_dir) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    stop = [*RAY, "job", "stop", "--address", head.address, "training"]
    subprocess.run(stop, env=head.environment, capture_output=True, timeout=60, check=True)
    assert not (run_dir / "grpo" / "finished.json").exists()
    resumed = head.run("submit", "resume", str(run_dir), timeout_s=400)
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    assert json.loads(resumed.stdout.strip().splitlines()[-1])["steps"] == 6
    ours, theirs = (
        read_published(directory / "grpo" / "model")[0].tensors for directory in (run_dir, tmp_path / "local")
    )
    assert ours == theirs
