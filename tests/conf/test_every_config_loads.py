"""Proves: every YAML file that ships loads by its real schema: each run of each recipe, each option of each group."""

import importlib

import msgspec
import pytest

from rollforward.conf.cli import VERBS, plan_jobs
from rollforward.conf.load import CONFIG_DIR, compose_data, config_groups
from rollforward.conf.recipe import load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name: str) -> None:
    recipe = load_recipe(name)
    jobs = plan_jobs(recipe.runs[-1].verb, [f"recipe={name}"])
    assert [job.name for job in jobs] == [run.name for run in recipe.runs]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_root_that_composes(verb: str) -> None:
    assert isinstance(compose_data(verb), dict)


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group, options in config_groups().items() for option in options]
)
def test_every_option_of_a_group_loads_in_a_recipe(group: str, option: str) -> None:
    fitting = [
        (run.verb, name)
        for name in recipe_names()
        for run in load_recipe(name).runs
        if f"- {group}:" in (CONFIG_DIR / f"{run.verb}.yaml").read_text()
    ]
    assert fitting, f"no recipe's root has the group {group}"
    verb, name = fitting[0]
    config = plan_jobs(verb, [f"recipe={name}", f"{group}={option}"])[-1].config
    assert msgspec.to_builtins(getattr(config, group))["type"] == option, "the recipe's own choice gives way"


def test_no_other_yaml_lies_about() -> None:
    known = {f"{verb}.yaml" for verb in VERBS} | {f"recipe/{name}.yaml" for name in recipe_names()}
    known |= {f"{group}/{option}.yaml" for group, options in config_groups().items() for option in options}
    assert {file.relative_to(CONFIG_DIR).as_posix() for file in CONFIG_DIR.rglob("*.yaml")} == known


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.ahead is not None])
def test_what_a_verb_asks_ahead_is_there(verb: str) -> None:
    assert callable(importlib.import_module(str(VERBS[verb].ahead)).check)
