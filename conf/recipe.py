"""Recipes: complete named runs, or pipelines of runs, each one YAML file in conf/recipe/.

A recipe's runs are executed in order by conf/execute.py. This file reads them and says which run an override is for.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from rollforward.conf.errors import ConfigError, UsageError
from rollforward.conf.load import CONFIG_DIR, decode, read_yaml
from rollforward.conf.schema import nearest

__all__ = ["Recipe", "RecipeRun", "address", "load_recipe", "prefix_of", "recipe_names", "spell_out"]


class RecipeRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a recipe."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*$")]
    """Folder of the run inside the recipe's run_dir, and prefix of the overrides meant for it: `sft.optim.lr=1e-3`."""
    verb: str
    """The command that executes it; its root YAML is the base of the run's configuration."""
    config: dict[str, Any] = {}
    """Settings on top of the root, written like a YAML file of Hydra's: a `defaults` list with `override /algo: grpo`,
    keys, and `${run_dir:NAME}` for the directory of an earlier run."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list of runs under one name."""

    summary: str
    """One line for --help."""
    runs: Annotated[tuple[RecipeRun, ...], msgspec.Meta(min_length=1)]
    """In the order of execution; names are distinct."""
    goal: str | None = None
    """Run that `rollforward train recipe=NAME` ends with, for a pipeline whose last stage is of another verb; null: the
    last run of `train`."""

    def __post_init__(self) -> None:
        """Refuses two runs of one name, and a goal that is none of them."""
        names = [run.name for run in self.runs]
        if twice := sorted({name for name in names if names.count(name) > 1 or name == "all"}):
            raise ValueError(
                f"runs are named {', '.join(names)}; names are distinct and not `all`. Rename {', '.join(twice)}."
            )
        if self.goal is not None and self.goal not in names:
            raise ValueError(f"goal is {self.goal}; it is the name of a run: {', '.join(names)}.")


def recipe_names(config_dir: Path = CONFIG_DIR) -> list[str]:
    """The shipped recipes, in alphabetical order."""
    return sorted(file.stem for file in (config_dir / "recipe").glob("*.yaml"))


def load_recipe(name: str, config_dir: Path = CONFIG_DIR) -> Recipe:
    """The recipe of that name, or the one in the YAML file at that path.

    Raises:
        UsageError: there is no such recipe.
        ConfigError: the file is not a recipe.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else config_dir / "recipe" / f"{name}.yaml"
    if not file.is_file():
        known = recipe_names(config_dir)
        near = nearest(name, known)
        hint = f"Did you mean recipe={near}? " if near else ""
        raise UsageError(
            f"recipe={name}: no such recipe. {hint}Recipes: {', '.join(known)}; or give the path of a YAML file."
        )
    data = read_yaml(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping; a recipe has a summary and a list of runs.")
    try:
        return decode(Recipe, cast("dict[str, Any]", data))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def address(runs: Sequence[RecipeRun], verb: str, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Which overrides go to which run.

    `NAME.key=value` goes to the run NAME, `all.key=value` to every run, anything else to the runs of `verb`.

    Returns:
        run name -> its overrides without the prefix, in the order given.
    """
    addressed: dict[str, list[str]] = {run.name: [] for run in runs}
    for text in overrides:
        sign, prefix, rest = _split(text)
        for run in runs:
            if prefix in (run.name, "all"):
                addressed[run.name].append(sign + rest)
            elif prefix not in (*addressed, "all") and run.verb == verb:
                addressed[run.name].append(text)
    return addressed


def spell_out(runs: Sequence[RecipeRun], verb: str, overrides: Sequence[str]) -> list[str]:
    """The same overrides with every one addressed by name, so that they mean the same behind another verb."""
    spelled: list[str] = []
    for text in overrides:
        if _split(text)[1] in ("all", *(run.name for run in runs)):
            spelled.append(text)
            continue
        sign = text[: len(text) - len(text.lstrip("+~"))]
        spelled += [f"{sign}{run.name}.{text[len(sign) :]}" for run in runs if run.verb == verb]
    return spelled


def prefix_of(override: str) -> str | None:
    """The word before the first dot of an override's key; None where it has no dot."""
    return _split(override)[1] or None


def _split(text: str) -> tuple[str, str, str]:
    found = re.match(r"(\+\+|\+|~|)([a-z][a-z0-9_]*)\.(.*)", text, flags=re.DOTALL)
    return (found[1], found[2], found[3]) if found else ("", "", text)
