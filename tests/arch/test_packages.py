"""Proves: pyproject names every package and every library that is imported, and the locks hold what it asks for."""

import importlib.metadata
import itertools
import re
import sys
import tomllib

import pytest

from tests.helpers.source import FOLDERS, ROOT, imports, modules, parse

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


def test_every_library_that_is_imported_is_asked_for() -> None:
    """By the product or, in `dev`, by its tests."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *itertools.chain.from_iterable(extras)]
    asked = {_name(requirement) for requirement in wanted} | {"aiohttp", "pyyaml"}  # of ray[default], of omegaconf
    owners = importlib.metadata.packages_distributions()
    tests = [
        parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        for file in (ROOT / "tests").rglob("*.py")
    ]
    missing: list[str] = []
    for module in (*modules(), *tests):
        for found in imports(module):
            top = found.name.split(".")[0]
            if top in sys.stdlib_module_names or top in ("rollforward", "tests"):
                continue
            if not asked & {top.lower().replace("_", "-"), *map(_name, owners.get(top, ()))}:
                missing.append(f"{module.path}:{found.line} {top}")
    assert missing == []


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
