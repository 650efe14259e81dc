"""Proves: pyproject names every package, and the locks hold every dependency that it asks for."""

import itertools
import re
import tomllib

import pytest

from tests.helpers.source import FOLDERS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_folder_with_an_init_is_listed() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("__init__.py")]
    have = sorted("rollforward." + file.parent.relative_to(ROOT).as_posix().replace("/", ".") for file in files)
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == have


def test_every_folder_with_code_has_an_init() -> None:
    folders = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_top_folder_is_mapped() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {f"rollforward.{folder}": folder for folder in FOLDERS}


@pytest.mark.parametrize("version", ["311", "312"])
def test_the_lock_holds_every_dependency(version: str) -> None:
    lines = (ROOT / "requirements" / f"lock-py{version}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *itertools.chain.from_iterable(extras)]
    assert [requirement for requirement in wanted if _name(requirement) not in pins] == []
    exact = [requirement.split("==") for requirement in wanted if "==" in requirement and "*" not in requirement]
    assert [(name, pin) for name, pin in exact if pins[_name(name)] != pin] == []
    assert "+" not in pins["torch"], "the build of torch is chosen at set-up"
    cuda = {name: pin for name, pin in pins.items() if name.startswith("nvidia-")}
    assert all(pin.startswith("13.0.") for pin in cuda.values()), cuda
