"""The command `rollforward`: which verb, which recipe, which settings; then the verb's own main.

A verb is one line in VERBS. Its schema is imported to validate, its module only to run, so that help and a wrong key
answer without torch or ray. Configurations are composed in conf/load.py, recipes read in conf/recipe.py.
"""

import contextlib
import errno
import importlib
import importlib.metadata
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.conf.load import (
    compose_data,
    config_groups,
    load_config,
    set_library_environment,
    to_yaml,
    write_resolved,
)
from rollforward.conf.recipe import RecipeRun, address, load_recipe, recipe_names
from rollforward.conf.run_dir import CONFIG_NAME, check_settings, finish, held, is_finished
from rollforward.conf.schema import Field, element_fields, has_parts, nearest, schema_fields, value_at

__all__ = ["VERBS", "Job", "Verb", "execute", "main", "plan_jobs"]


class Verb(NamedTuple):
    """One command."""

    module: str
    """Module whose `main(config) -> int | None` does the work."""
    schema: str
    """`module:class` of the configuration; importing it must cost neither torch nor ray."""
    summary: str
    """One line for --help."""


VERBS: dict[str, Verb] = {
    "sft": Verb("rollforward.rl.sft", "rollforward.rl.config:SFTRun", "teach a model from conversations"),
    "train": Verb("rollforward.rl.train", "rollforward.rl.config:RLRun", "improve a model by reinforcement learning"),
    "eval": Verb(
        "rollforward.rl.evaluate", "rollforward.rl.config:EvalRun", "measure a checkpoint on held-out prompts"
    ),
    "plan": Verb(
        "rollforward.model.plan", "rollforward.model.plan:PlanRun", "sizes of a model, before anything is allocated"
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
    again: Path | None = None
    """What `run_dir=` names when the command is to go on with this run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        0 done; 2 a mistake that the user can put right, told in a line or two; 130 interrupted; otherwise what the
        verb's main returned.
    """
    set_library_environment()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        console.fail("interrupted")
        return 130
    except Exception as error:
        told = _user_error(error)
        if told is None:
            raise
        console.fail(str(told))
        return 2


_DISK_ERRORS = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)
"""What a disk says that is full or may not be written: no bug of ours, and the user's to change."""


def _user_error(error: BaseException) -> BaseException | None:
    """The error to tell without a traceback: a ValueError of some folder's errors.py or a disk that refuses, also when
    Ray wrapped it."""
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(candidate, OSError) and candidate.errno in _DISK_ERRORS:
            return candidate
        if isinstance(candidate, ValueError):
            modules = [base.__module__.split(".") for base in type(candidate).__mro__]
            if any(parts[0] == "rollforward" and parts[-1] == "errors" for parts in modules):
                return candidate
    return None


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.result(_help_text())
        return 0
    if arguments[0] == "--version":
        console.result(importlib.metadata.version("rollforward"))
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        near = nearest(verb, list(VERBS))
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(
            f"{verb} is not a command. {hint}Commands: {', '.join(VERBS)}; rollforward --help explains them."
        )
    if "-h" in rest or "--help" in rest:
        console.result(_verb_help_text(verb))
        return 0
    overrides, print_only = _options(rest)
    jobs = plan_jobs(verb, overrides)
    if print_only:
        texts = [to_yaml(job.config) for job in jobs]
        heads = [f"# {job.name} (rollforward {job.verb})\n" for job in jobs] if len(jobs) > 1 else [""]
        console.result("---\n".join(head + text for head, text in zip(heads, texts, strict=True)).rstrip())
        return 0
    return execute(jobs)


def _options(arguments: list[str]) -> tuple[list[str], bool]:
    """(overrides, whether only to print the configuration)."""
    rest = list(arguments)
    print_only = False
    if "--cfg" in rest:
        at = rest.index("--cfg")
        if rest[at + 1 : at + 2] != ["job"]:
            raise UsageError(
                f"--cfg is followed by {' '.join(rest[at + 1 : at + 2]) or 'nothing'}; it takes: --cfg job."
            )
        del rest[at : at + 2]
        print_only = True
    if options := [text for text in rest if text.startswith("-")]:
        raise UsageError(f"{options[0]} is not an option. Options: --help, --cfg job; settings are written key=value.")
    return rest, print_only


def _schema_of(verb: str) -> type[msgspec.Struct]:
    module, _, name = VERBS[verb].schema.partition(":")
    return cast("type[msgspec.Struct]", getattr(importlib.import_module(module), name))


def _has_run_dir(schema: type[msgspec.Struct]) -> bool:
    return any(field.encode_name == "run_dir" for field in msgspec.structs.fields(schema))


def _take(overrides: list[str], key: str) -> str | None:
    """Removes `key=value` from the overrides; the last one counts."""
    values = [text.partition("=")[2].strip("'\"") for text in overrides if text.partition("=")[0].lstrip("+") == key]
    overrides[:] = [text for text in overrides if text.partition("=")[0].lstrip("+") != key]
    return values[-1] if values else None


def plan_jobs(verb: str, overrides: Sequence[str]) -> list[Job]:
    """Composes and validates every run that the command line asks for. Nothing is allocated or written.

    With recipe=NAME these are the recipe's runs up to and including the last one of `verb`.

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
    if any(_has_run_dir(_schema_of(run.verb)) for run in runs):
        base = Path(_take(rest, "run_dir") or f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    addressed = address(runs, verb, rest) if recipe is not None else {verb: rest}
    run_dirs: dict[str, str] = {}
    jobs: list[Job] = []
    for run in runs:
        schema = _schema_of(run.verb)
        run_dir: Path | None = None
        settings = addressed[run.name]
        if base is not None and _has_run_dir(schema):
            run_dir = base if recipe is None else base / run.name
            settings = [*settings, f"run_dir={_quoted(str(run_dir))}"]
        config = load_config(schema, run.verb, settings, layer=run.config, run_dirs=run_dirs)
        jobs.append(Job(run.name, run.verb, config, run_dir, again=base if run_dir is not None else None))
        if run_dir is not None:
            run_dirs[run.name] = str(run_dir)
    return jobs


def _has_verb(recipe: str, verb: str) -> bool:
    return any(run.verb == verb for run in load_recipe(recipe).runs)


def _runs_until(verb: str, recipe: str) -> list[RecipeRun]:
    runs = load_recipe(recipe).runs
    for run in runs:
        if run.verb not in VERBS:
            raise UsageError(f"recipe={recipe}: run {run.name} has verb {run.verb}; commands are {', '.join(VERBS)}.")
        fields = [field.encode_name for field in msgspec.structs.fields(_schema_of(run.verb))]
        if clash := [other.name for other in runs if other.name in fields]:
            raise UsageError(
                f"recipe={recipe}: a run is named {clash[0]}, which is also a setting of {run.verb}, so that "
                f"{clash[0]}.KEY would mean two things. Rename the run."
            )
    last = max((index for index, run in enumerate(runs) if run.verb == verb), default=None)
    if last is None:
        had = ", ".join(f"{run.name} ({run.verb})" for run in runs)
        raise UsageError(
            f"recipe={recipe} has no run of {verb}; it has {had}. Call rollforward {runs[-1].verb} recipe={recipe}."
        )
    return list(runs[: last + 1])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def execute(jobs: Sequence[Job]) -> int:
    """Runs the jobs in order. One that finished earlier in its run_dir is kept; the first that fails ends the rest.

    Raises:
        RunDirError: a run_dir holds a run with other settings, is in use by another process, or cannot be written.
    """
    for job in jobs:
        if job.run_dir is not None:
            check_settings(job.run_dir, job.config)
    for index, job in enumerate(jobs):
        place = f"{index + 1} of {len(jobs)}: {job.name}"
        with contextlib.nullcontext() if job.run_dir is None else held(job.run_dir):
            code = _execute(job, place)
        if code != 0:
            return code
    return 0


def _execute(job: Job, place: str) -> int:
    """Runs one job, which has its run_dir for itself."""
    if job.run_dir is not None:
        if is_finished(job.run_dir):
            console.say(f"run {place} was finished earlier, kept: {job.run_dir}")
            return 0
        console.say(f"run {place} in {job.run_dir}")
        write_resolved(job.config, job.run_dir / CONFIG_NAME)
    start_s = time.monotonic()
    work = cast("Callable[[msgspec.Struct], int | None]", importlib.import_module(VERBS[job.verb].module).main)
    try:
        code = work(job.config) or 0
    except BaseException as error:
        if job.again is not None and _user_error(error) is None:
            console.say(f"{job.name} has not finished; the same command with run_dir={job.again} goes on")
        raise
    if code == 0 and job.run_dir is not None:
        finish(job.run_dir, name=job.name, verb=job.verb, seconds=time.monotonic() - start_s)
    return code


def _help_text() -> str:
    width = max(len(name) for name in (*VERBS, *recipe_names()))
    recipes = [f"  {name:<{width}}  {load_recipe(name).summary}" for name in recipe_names()]
    return "\n".join(
        [
            "rollforward VERB [recipe=NAME] [key=value ...] [--cfg job] [--help]",
            "",
            "verbs",
            *(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()),
            "",
            "recipes",
            *recipes,
            "",
            "A recipe is a list of runs: VERB recipe=NAME executes it up to its last run of that verb. key=value sets",
            "what that verb's runs read, RUN.key=value what one run reads, all.key=value what all read. run_dir=DIR is",
            "where they write; naming the same DIR again goes on where it stopped. --cfg job prints the whole",
            "configuration and does nothing. rollforward VERB --help lists the settings.",
        ]
    )


def _verb_help_text(verb: str) -> str:
    schema = _schema_of(verb)
    set_elsewhere = {"run_dir": f"runs/{verb}-DATE, or runs/RECIPE-DATE/RUN in a recipe"}
    base = compose_data(verb)
    for field in schema_fields(schema):
        with contextlib.suppress(KeyError, TypeError):
            set_elsewhere[field.path] = str(value_at(base, tuple(field.path.split("."))))
    inside = [_field_text(field, {}) for field in element_fields(schema)]
    groups = [
        f"  {group}={'|'.join(options)}" for group, options in config_groups().items() if has_parts(schema, group)
    ]
    return "\n".join(
        [
            f"rollforward {verb}: {VERBS[verb].summary}",
            "",
            "settings (KEY=DEFAULT; what is required is set by a recipe or by you)",
            *(_field_text(field, set_elsewhere) for field in schema_fields(schema)),
            *(["", "inside a list, which is set as a whole", *inside] if inside else []),
            *(["", "groups", *groups] if groups else []),
        ]
    )


def _field_text(field: Field, set_elsewhere: Mapping[str, str]) -> str:
    """A setting for --help: its default, its type, and below what it does."""
    default = set_elsewhere.get(field.path, field.default)
    doc = textwrap.fill(field.doc, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {field.path}={default}  ({field.type})" + (f"\n{doc}" if doc else "")


if __name__ == "__main__":
    sys.exit(main())
