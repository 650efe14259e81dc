"""This project's source as a wheel, for machines on which another version of it is installed, or none.

Built from a copy, so that the source tree is not written to. It names no dependencies: Ray installs it with pip into a
folder of its own, and pip would fetch every dependency into that folder anew. Its version ends with a hash of the
sources: Ray tells wheels apart by file name alone, and would go on with the one that it was given first.
"""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from rollforward.conf.errors import SubmitError
from rollforward.conf.load import CONFIG_DIR

__all__ = ["build_wheel", "source_root"]

_SETUP = "from setuptools import setup\nsetup(**{arguments!r})\n"


def source_root(here: Path = CONFIG_DIR) -> Path:
    """The source tree that `here` lies in; by default the one that this process runs from.

    Raises:
        SubmitError: it runs from an installed package.
    """
    root = here.parent
    if not (root / "pyproject.toml").is_file():
        raise SubmitError(
            f"{here} lies in no source tree, so that there is nothing to build a wheel from. Submit from a clone, in"
            " which `make setup` was called."
        )
    return root


def build_wheel(root: Path, directory: Path) -> Path:
    """Builds the wheel of a source tree, without network.

    Args:
        root: holds pyproject.toml.
        directory: takes the wheel and what the build leaves; must exist and be empty.

    Returns:
        The wheel.

    Raises:
        SubmitError: the build failed, with what it said.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools: dict[str, Any] = project["tool"]["setuptools"]
    folders: dict[str, str] = setuptools["package-dir"]
    copy = directory / "source"
    for folder in folders.values():
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = {
        "name": project["project"]["name"],
        "version": f"{project['project']['version']}+{_digest(copy)}",
        "packages": setuptools["packages"],
        "package_dir": folders,
        "package_data": setuptools.get("package-data", {}),
    }
    (copy / "setup.py").write_text(_SETUP.format(arguments=arguments), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "-w", str(directory), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise SubmitError(f"the wheel of {root} cannot be built: {said}\n`make setup` installs what the build needs.")
    return wheels[0]


def _digest(directory: Path) -> str:
    """Hash of the names and bytes of all files, which a version number may hold."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name, content = path.relative_to(directory).as_posix().encode(), path.read_bytes()
        digest.update(f"{len(name)}:{len(content)}:".encode() + name + content)
    return f"g{digest.hexdigest()}"
