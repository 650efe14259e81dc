"""Proves: no file names a place of one machine or the host of a package registry, and no code has a nameless drawer."""

import re
import subprocess

import pytest

from tests.helpers.source import ROOT, modules

# Written in pieces, so that this file passes its own test.
PLACES = re.compile(
    "|".join(
        [
            r"(?<![\w.])/(?:root|work|opt)/" + r"[\w.]",
            r"(?<![\w.])/ho" + r"me/\w",
            r"/tmp/" + r"[\w.]",
            r"py" + r"pi\.org",
            r"files\.python" + r"hosted",
            r"download\.py" + r"torch",
            r"registry\.npm" + r"js",
        ]
    )
)
DRAWERS = ("utils.py", "common.py", "helpers.py", "misc.py")


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    # Not a git checkout: everything but what set-up and the tools make.
    made = re.compile(r"(^|/)(\.(?!ci/|gitignore)[^/]+|build|runs|wandb|__pycache__|[^/]+\.egg-info)(/|$)")
    names = (file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*") if file.is_file())
    return [name for name in names if not made.search(name)]


def places(text: str) -> list[str]:
    return [found.group() for found in PLACES.finditer(text)]


def test_no_file_names_a_place_of_one_machine() -> None:
    found: list[str] = []
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            found += [f"{name}: {place}" for place in places(data.decode("utf-8", errors="replace"))]
    assert found == []


@pytest.mark.parametrize("text", ["x = '/ro" + "ot/x'", "/ho" + "me/me/x", "https://py" + "pi.org/simple"])
def test_a_planted_place_is_found(text: str) -> None:
    assert places(text)


def test_no_module_is_a_drawer() -> None:
    assert [
        module.path for module in modules() if module.path.endswith(tuple("/" + drawer for drawer in DRAWERS))
    ] == []


def test_tracked_files_are_small() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked()}
    assert {name: size for name, size in sizes.items() if size > 2_000_000} == {}
