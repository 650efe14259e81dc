"""Which runs a command line asks for: the verbs, and the composition of every run's configuration.

Nothing is allocated, written or imported but schemas. The runs are executed in conf/execute.py, written down for a
later `rollforward resume` in conf/resume.py.
"""

import importlib
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from rollforward.conf.errors import ConfigError, UsageError
from rollforward.conf.load import is_ray_job, load_config
from rollforward.conf.recipe import RecipeRun, address, load_recipe, prefix_of, recipe_names, spell_out
from rollforward.conf.schema import nearest

__all__ = ["VERBS", "Job", "Verb", "addressed_keys", "last_value", "plan_jobs", "schema_of", "works_in_run_dir"]


class Verb(NamedTuple):
    """One command."""

    module: str
    """Module whose `main(config) -> int | None` does the work."""
    schema: str
    """`module:class` of the configuration; importing it must cost neither torch nor ray."""
    summary: str
    """One line for --help."""
    ahead: str | None = None
    """Module whose `check(config, unmade)` refuses what can be known to be wrong before an earlier run of the recipe
    begins; `unmade` are the directories of runs that are still to be done, where nothing is looked for. None: nothing
    is asked of a machine."""


_AHEAD = "rollforward.rl.ahead"

VERBS: dict[str, Verb] = {
    "sft": Verb("rollforward.rl.sft", "rollforward.rl.config:SFTRun", "teach a model from conversations", _AHEAD),
    "train": Verb(
        "rollforward.rl.train", "rollforward.rl.config:RLRun", "improve a model by reinforcement learning", _AHEAD
    ),
    "distill": Verb(
        "rollforward.distill.train",
        "rollforward.distill.config:DistillRun",
        "merge teachers into a model by distillation on its own trajectories",
        "rollforward.distill.ahead",
    ),
    "eval": Verb(
        "rollforward.rl.evaluate", "rollforward.rl.config:EvalRun", "measure a checkpoint on held-out prompts", _AHEAD
    ),
    "drill": Verb(
        "rollforward.rl.drill",
        "rollforward.rl.drill_config:DrillRun",
        "kill a short run's processes and compare it with an undisturbed one",
    ),
    "plan": Verb(
        "rollforward.model.plan",
        "rollforward.model.plan_config:PlanRun",
        "sizes of a model, memory, traffic and what fits on given GPUs",
    ),
    "export": Verb(
        "rollforward.rl.export", "rollforward.rl.export_config:ExportRun", "a run's weights as an official checkpoint"
    ),
    "convert": Verb(
        "rollforward.model.convert", "rollforward.model.convert_config:ConvertRun", "a checkpoint in another layout"
    ),
}
"""The commands, in the order that --help lists them. The root YAML of a verb has the verb's name."""


class Job(NamedTuple):
    """One validated run."""

    name: str
    """Name within its recipe; the verb where there is no recipe."""
    verb: str
    """Key of VERBS."""
    config: msgspec.Struct
    """Decoded by the verb's schema."""
    run_dir: Path | None
    """Where it writes; None for a verb without a run_dir."""
    base: Path | None = None
    """What `run_dir=` named: the run's own directory, or the one above it that all runs of its recipe share."""
    then: str | None = None
    """Command for what comes after it in its recipe; of the last run alone."""
    directory: Path | None = None
    """Where the work is done: what relative paths in its settings are relative to. None: where this process is, which
    for a Ray job is a copy of the user's directory."""


def schema_of(verb: str) -> type[msgspec.Struct]:
    """The configuration class of a verb; importing it costs neither torch nor ray."""
    module, _, name = VERBS[verb].schema.partition(":")
    return cast("type[msgspec.Struct]", getattr(importlib.import_module(module), name))


def works_in_run_dir(schema: type[msgspec.Struct]) -> bool:
    """Whether a verb writes into a run_dir of its own; `export` only reads another's."""
    return not getattr(schema, "reads_run_dir", False) and any(
        field.encode_name == "run_dir" for field in msgspec.structs.fields(schema)
    )


def last_value(overrides: Sequence[str], key: str) -> str | None:
    """What the overrides set a key to, without quotes; the last one counts. None where none does."""
    values = [text.partition("=")[2].strip("'\"") for text in overrides if _sets(text, key)]
    return values[-1] if values else None


def _sets(override: str, key: str) -> bool:
    return "=" in override and override.partition("=")[0].lstrip("+") == key


def _take(overrides: list[str], key: str) -> str | None:
    """Removes `key=value` from the overrides; see `last_value`."""
    value = last_value(overrides, key)
    overrides[:] = [text for text in overrides if not _sets(text, key)]
    return value


def plan_jobs(verb: str, overrides: Sequence[str]) -> list[Job]:
    """Composes and validates every run that the command line asks for. Nothing is allocated or written.

    With recipe=NAME these are the recipe's runs up to and including the last one of `verb`; of `train`, up to the
    recipe's goal if it names one.

    Raises:
        UsageError: no such recipe, or it has no run of that verb.
        ConfigError: some run's configuration is wrong.
    """
    rest = list(overrides)
    recipe = _take(rest, "recipe")
    if not overrides and (choices := [name for name in recipe_names() if _has_verb(name, verb)]):
        commands = ", ".join(f"rollforward {verb} recipe={name}" for name in choices)
        raise UsageError(
            f"{verb} needs settings. Start from a recipe: {commands}; rollforward {verb} --help lists the settings."
        )
    runs = [RecipeRun(name=verb, verb=verb)] if recipe is None else _runs_until(verb, recipe)
    stem = verb if recipe is None else Path(recipe).stem
    base: Path | None = None
    if any(works_in_run_dir(schema_of(run.verb)) for run in runs):
        base = Path(_take(rest, "run_dir") or f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    if recipe is not None:
        _check_prefixes(recipe, verb, runs, rest)
    addressed = address(runs, verb, rest) if recipe is not None else {verb: rest}
    directory = None if is_ray_job() else Path.cwd()
    run_dirs: dict[str, str] = {}
    jobs: list[Job] = []
    for run in runs:
        schema = schema_of(run.verb)
        run_dir: Path | None = None
        settings = addressed[run.name]
        if base is not None and works_in_run_dir(schema):
            run_dir = base if recipe is None else base / run.name
            settings = [*settings, f"run_dir={_quoted(str(run_dir))}"]
        try:
            config = load_config(schema, run.verb, settings, layer=run.config, run_dirs=run_dirs)
        except ConfigError as error:
            if recipe is None:
                raise
            raise ConfigError(f"run {run.name}: {addressed_keys(str(error), schema, run.name)}") from error
        shared = base if run_dir is not None else None
        jobs.append(Job(run.name, run.verb, config, run_dir, shared, directory=directory))
        if run_dir is not None:
            run_dirs[run.name] = str(run_dir)
    if recipe is not None and base is not None:
        jobs[-1] = jobs[-1]._replace(then=_command_after(recipe, runs, spell_out(runs, verb, rest), base))
    return jobs


def addressed_keys(text: str, schema: type[msgspec.Struct], run: str) -> str:
    """A message in which every `key=value` that is to be typed names the run of a recipe that it is for."""
    names = "|".join(re.escape(field.encode_name) for field in msgspec.structs.fields(schema))
    return re.sub(rf"(?<![\w.=/'-])(?=(?:{names})(?:\.\w+)*=)", f"{run}.", text)


def _check_prefixes(recipe: str, verb: str, runs: Sequence[RecipeRun], overrides: Sequence[str]) -> None:
    """Refuses `NAME.key=value` where NAME is neither a run that is executed nor a setting of the verb.

    Raises:
        UsageError: names the runs.
    """
    names = [run.name for run in runs]
    settings = [field.encode_name for field in msgspec.structs.fields(schema_of(verb))]
    for text in overrides:
        prefix = prefix_of(text)
        if prefix is None or prefix in (*names, "all", *settings, "hydra"):
            continue
        later = {run.name: run.verb for run in load_recipe(recipe).runs}
        if prefix in later:
            raise UsageError(
                f"{text}: {prefix} is a run of recipe={recipe} that {verb} does not execute; it ends with {names[-1]}."
                f" Set it where it is executed: rollforward {later[prefix]} recipe={recipe} {text}"
            )
        near = nearest(prefix, [*names, "all", *settings])
        if near in settings:
            continue  # what is wrong with a setting is told with those beside it
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(
            f"{text}: {prefix} is no run of recipe={recipe} and no setting of {verb}. {hint}Runs: {', '.join(names)};"
            f" rollforward {verb} --help lists the settings."
        )


def _command_after(recipe: str, done: Sequence[RecipeRun], overrides: Sequence[str], base: Path) -> str | None:
    """What to type for the run that follows those in the recipe, with the same settings for those."""
    rest = load_recipe(recipe).runs[len(done) :]
    if not rest:
        return None
    return shlex.join(["rollforward", rest[0].verb, f"recipe={recipe}", f"run_dir={base}", *overrides])


def _has_verb(recipe: str, verb: str) -> bool:
    return any(run.verb == verb for run in load_recipe(recipe).runs)


def _runs_until(verb: str, recipe: str) -> list[RecipeRun]:
    loaded = load_recipe(recipe)
    runs = loaded.runs
    for run in runs:
        if run.verb not in VERBS:
            raise UsageError(f"recipe={recipe}: run {run.name} has verb {run.verb}; commands are {', '.join(VERBS)}.")
        fields = [field.encode_name for field in msgspec.structs.fields(schema_of(run.verb))]
        if clash := [other.name for other in runs if other.name in fields]:
            raise UsageError(
                f"recipe={recipe}: a run is named {clash[0]}, which is also a setting of {run.verb}, so that "
                f"{clash[0]}.KEY would mean two things. Rename the run."
            )
    ends = {loaded.goal} if verb == "train" and loaded.goal else {run.name for run in runs if run.verb == verb}
    last = max((index for index, run in enumerate(runs) if run.name in ends), default=None)
    if last is None:
        had = ", ".join(f"{run.name} ({run.verb})" for run in runs)
        raise UsageError(
            f"recipe={recipe} has no run of {verb}; it has {had}. Call rollforward {runs[-1].verb} recipe={recipe}."
        )
    return list(runs[: last + 1])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
