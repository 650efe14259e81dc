"""Proves: a submission is told from the command that it submits, what cannot work elsewhere is refused here, and the
wheel is this source, tells its versions apart and names no dependency.

Nothing arrives (tests/e2e/test_submit.py sends jobs).
"""

import asyncio
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
import ray

from rollforward.conf import cli, submit
from rollforward.conf.errors import ConfigError, SubmitError, UsageError
from rollforward.conf.load import CONFIG_DIR, LIBRARY_ENVIRONMENT, library_environment, set_library_environment
from rollforward.conf.submit import parse, runtime_environment
from rollforward.conf.wheel import build_wheel, source_root
from tests.helpers.commands import command

ADDRESS = "address=http://head:8265"


def test_settings_of_the_submission_and_words_of_the_command() -> None:
    asked = parse(["train", "recipe=tiny", ADDRESS, "optim.lr=1e-3", "wait=false", "submission_id=a-1", "run_dir=/x y"])
    assert asked.words == ("train", "recipe=tiny", "optim.lr=1e-3", "run_dir=/x y")
    assert (asked.address, asked.wait, asked.submission_id) == ("http://head:8265", False, "a-1")
    assert asked.entrypoint == "python -m rollforward.conf.cli train recipe=tiny optim.lr=1e-3 'run_dir=/x y'"


def test_the_environment_of_the_job(tmp_path: Path) -> None:
    environment = runtime_environment(tmp_path / "a.whl", working_dir=str(tmp_path))
    assert environment == {
        "py_modules": [str(tmp_path / "a.whl")],
        "working_dir": str(tmp_path),
        "env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"},
    }
    assert "working_dir" not in runtime_environment(tmp_path / "a.whl")


def test_a_job_keeps_its_clusters_authentication() -> None:
    rest = {name: value for name, value in os.environ.items() if name not in LIBRARY_ENVIRONMENT}
    with mock.patch.dict(os.environ, rest, clear=True):
        set_library_environment()
        assert library_environment() == dict(LIBRARY_ENVIRONMENT)
    with mock.patch.dict(os.environ, rest | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, clear=True):
        set_library_environment()
        assert "RAY_AUTH_MODE" not in library_environment()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], UsageError, "submit is followed by nothing"),
        (["fly", ADDRESS], UsageError, "submit is followed by fly"),
        (["drill", "recipe=tiny", ADDRESS, "run_dir=/a"], UsageError, "submit takes no drill: .* cluster of its own"),
        (["drill"], UsageError, "log in on a machine .* rollforward drill"),
        (["train", "recipe=tiny"], UsageError, r"address=http://HEAD:8265"),
        (["train", "recipe=tiny", "address=head:6379"], ConfigError, "address is .head:6379"),
        (["train", "recipe=tiny", ADDRESS, "wait=maybe"], ConfigError, "wait is .maybe"),
        (["train", "--cfg", "job", ADDRESS], UsageError, "--cfg is not an option of submit"),
    ],
)
def test_mistakes_in_the_words(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "recipe=tiny"], "train needs run_dir=DIR here"),
        (["train", "recipe=tiny", "run_dir=runs/a"], "run_dir is runs/a; a job has no directory of yours"),
        (["train", "recipe=tiny", "run_dir=/a", "run_dir='runs/b'"], "run_dir is runs/b; a job has no directory"),
        (["train", "recipe=tiny", "run_dir='/a b'", "steps=x"], "steps is .x"),
        (["train", "recipe=tiny", "recipe='mine.yaml'", "run_dir=/a"], "Set working_dir=DIR"),
        (["train", "recipe=tiny", "run_dir=/a", "algo.grup_size=4"], "Did you mean algo.group_size"),
        (["train", "recipe=mine.yaml", "run_dir=/a"], "Set working_dir=DIR"),
        (["train", "recipe=tiny", "run_dir=/a", "working_dir=/nowhere"], "working_dir=/nowhere is no directory"),
        (["resume", "runs/a"], "run_dir is runs/a"),
        (["resume", "/a", "b"], "and settings of where it works"),
        (["resume"], "takes one directory"),
    ],
)
def test_what_would_fail_there_is_refused_here(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is built or sent: the address has no answer."""
    assert cli.main(["submit", *words, "address=http://127.0.0.1:9"]) == 2
    assert re.search(message, capsys.readouterr().err)


class _Cluster:
    """Answers each question about a job with the next of its answers; errors are raised."""

    def __init__(self, logs: Sequence[Sequence[str | Exception]], statuses: Sequence[str | Exception]) -> None:
        self._logs, self._statuses = iter(logs), iter(statuses)

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for piece in next(self._logs, ()):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def get_job_status(self, job: str) -> str:
        status = next(self._statuses)
        if isinstance(status, Exception):
            raise status
        return status


def test_a_log_that_breaks_off_is_printed_once_and_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_PAUSE_S", 0.0)
    broken = aiohttp.ServerDisconnectedError()
    logs = [["ab", "c", broken], [broken], ["abcd", "ef"]]
    cluster: Any = _Cluster(logs, [ConnectionError("no route"), "RUNNING", "SUCCEEDED"])
    asyncio.run(submit.follow(cluster, "job"))
    assert capsys.readouterr().out == "abcdef"
    silent: Any = _Cluster([], [ConnectionError("no route")] * 30)
    with pytest.raises(SubmitError, match="stopped answering: no route"):
        asyncio.run(submit.follow(silent, "job"))


def _copy(directory: Path) -> Path:
    """The source tree's smallest part that builds."""
    for name in ("conf", "distill", "kernels", "model", "rl", "rollout", "sandbox"):
        shutil.copytree(CONFIG_DIR.parent / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CONFIG_DIR.parent / "pyproject.toml", directory)
    return directory


def test_the_wheel_is_the_source_and_its_name_tells_sources_apart(tmp_path: Path) -> None:
    root = _copy(tmp_path / "root")
    before = sorted(root.rglob("*"))
    names: list[str] = []
    for number, text in enumerate(("A = 1\n", "A = 1\n", "A = 2\n")):
        (root / "conf" / "added.py").write_text(text)
        directory = tmp_path / str(number)
        directory.mkdir()
        wheel = build_wheel(root, directory)
        names.append(wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            assert archive.read("rollforward/conf/added.py").decode() == text
            assert "rollforward/conf/recipe/tiny.yaml" in archive.namelist()
            (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
            assert "Requires-Dist" not in archive.read(metadata).decode()
    assert names[0] == names[1]
    assert names[0] != names[2]
    assert sorted(root.rglob("*")) == sorted([*before, root / "conf" / "added.py"]), "nothing is written there"


def test_an_installed_package_and_a_failed_build_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_root() == CONFIG_DIR.parent
    with pytest.raises(SubmitError, match="lies in no source tree"):
        source_root(tmp_path / "site-packages" / "rollforward" / "conf")
    root = _copy(tmp_path / "root")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SubmitError, match=r"cannot be built.*\n`make setup`"):
        build_wheel(root, tmp_path)


class _GoneAfterHello(http.server.BaseHTTPRequestHandler):
    """A head's dashboard that says its version and then closes every connection without a word."""

    def do_GET(self) -> None:
        if self.path != "/api/version":
            return
        body = json.dumps(
            {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "s"}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_args: object) -> None:
        """Say nothing."""


def test_a_head_that_dies_during_the_submission_is_named() -> None:
    """In a process of its own, since Ray keeps the token that it finds first, and needs one."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _GoneAfterHello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        done = subprocess.run(
            command("submit", "plan", "model=tiny", f"address={address}"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"RAY_AUTH_TOKEN": "f" * 64},
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    assert f"{address} answered and then no longer: " in done.stderr
    assert "submit again" in done.stderr
