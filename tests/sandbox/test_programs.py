"""Proves: a program that makes something for sandboxes and does not end is ended in time, with all that it has started,
and the error names it, the time and the way out; what it says and how it ends is told; and nothing in the sandbox
package runs a program in another way, or waits for one without an end, a supervisor that starts among them.
"""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox import bubblewrap, launch, layers_files, programs, vm, vm_cache, vm_image, vm_kernel
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.homes import Home
from rollforward.sandbox.programs import run_program
from rollforward.sandbox.vm import Layout
from tests.helpers.sandboxes import wait_for
from tests.helpers.supervisors import command, pids

pytestmark = pytest.mark.timeout(120)
HANGS = "#!/bin/sh\nsleep {mark} &\nwait\n"


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has programs of these names hang, with another process that holds their output open; what it is known by."""
    folder, mark = tmp_path / "programs", f"1000.{time.time_ns()}"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for module in (vm_cache, vm_kernel):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")

    def have(name: str) -> str:
        (folder / name).write_text(HANGS.format(mark=mark))
        (folder / name).chmod(0o755)
        return mark

    return have


def mke2fs(_: Path) -> object:
    return vm_image.build_empty(1 << 20, 16)


def layer(kind: layers_files.FileKind) -> Any:
    def make(folder: Path) -> object:
        (folder / "tree").mkdir()
        return layers_files.write_file(folder / "tree", folder / "file", kind)

    return make


def kernel(folder: Path) -> object:
    (folder / "cache").mkdir()
    (folder / "cache" / "linux-image-6.1.0-1-cloud-amd64_6.1_amd64.deb").touch()
    return vm_kernel.find_kernel()


def download(_: Path) -> object:
    return vm_kernel.find_kernel()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("g++", lambda _: vm_image.build_native()),
        ("mke2fs", mke2fs),
        ("ldd", lambda _: vm_image.build_system()),
        ("dpkg-deb", kernel),
        ("apt-cache", download),
        ("mke2fs", layer("ext4")),
        ("mkfs.erofs", layer("erofs")),
        ("mksquashfs", layer("squashfs")),
        ("QEMU", lambda folder: Layout(str(folder / "programs" / "QEMU"), "tcg", 1 << 20, (), "").key()),
    ],
)
def test_one_that_hangs_is_ended_with_all_that_it_started_and_named(
    name: str, make: Any, hanging: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = hanging(name)
    for module, limit in (
        (programs, "_WITHIN_S"),
        (vm_image, "_FORMAT_S"),
        (layers_files, "_MAKE_S"),
        (vm, "_VERSION_S"),
    ):
        monkeypatch.setattr(module, limit, 2.0)
    begin_s = time.monotonic()
    with pytest.raises(SandboxUnavailableError, match=rf"{re.escape(name)} has not come to its end within 2 s.*dmesg"):
        make(tmp_path)
    assert time.monotonic() - begin_s < 5.0, "tried once more"
    wait_for(lambda: not any(mark in command(pid) or str(tmp_path) in command(pid) for pid in pids()))


def test_how_one_ends_and_what_it_says_is_told(tmp_path: Path) -> None:
    done = run_program("a shell", ["sh", "-c", "echo said; pwd; cat; echo $A; exit 3"], cwd=tmp_path, env={"A": "b"})
    assert (done.code, done.output, done.said) == (3, f"said\n{tmp_path}\nb\n".encode(), "b")
    done = run_program("a shell", ["sh", "-c", "echo said; echo one >&2; echo two >&2"])
    assert (done.code, done.errors, done.said) == (0, "one\ntwo", "two")
    assert run_program("false", ["false"]).said == "it ended with 1 and said nothing"
    with (tmp_path / "out").open("wb") as out:
        assert run_program("echo", ["echo", "said"], output=out).output == b""
    assert (tmp_path / "out").read_text() == "said\n"
    with pytest.raises(SandboxUnavailableError, match=r"tool cannot be started: No such file.*Install it.*/nowhere"):
        run_program("tool", ["/nowhere/tool"])


def test_bubblewrap_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "_START_S", 0.1)
    silent, end = os.pipe()
    try:
        with pytest.raises(OSError, match=r"said nothing within 0\.1 s"):
            bubblewrap._map_users(silent, 1, 1)  # pyright: ignore[reportPrivateUsage]
    finally:
        os.close(silent)
        os.close(end)


def test_a_supervisor_that_never_leaves_whoever_starts_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"1000.{time.time_ns()}"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec sleep {mark}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    start = launch._start  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(SandboxUnavailableError, match="did not come up: it said nothing"):
        start(Home(tmp_path / "home"), ContainerConfig(), time.monotonic() + 1.0)
    wait_for(lambda: not any(mark in command(pid) for pid in pids()))


def test_programs_are_run_in_one_place_and_nothing_waits_for_one_without_an_end() -> None:
    ways = re.compile(r"subprocess\.(?:run|call|check_call|check_output|getoutput)\(|os\.(?:system|popen|spawn)")
    folder = Path(programs.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in folder.glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if ways.search(line) or re.search(r"process\.wait\(\)|communicate\(\)", line)
    ]
    # Those two have killed it.
    assert set(found) <= {"bubblewrap.py: process.wait()", "function.py: process.wait()"}
