"""The command `rollforward`: what the words of a command line ask for, and help.

A verb is one line in VERBS (conf/jobs.py). Its schema is imported to validate, its module only to run, so that help and
a wrong key answer without torch or ray. `resume` and `submit` are no verbs: they run verbs, later or elsewhere. Nor
are `wal`, `sandbox` and `judge`, which only look at what a run wrote, and `kernels`, which compiles.
"""

import contextlib
import importlib
import importlib.metadata
import itertools
import signal
import sys
import textwrap
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import cast

from rollforward.conf import console
from rollforward.conf.drill import plan_drill
from rollforward.conf.errors import UsageError, told, user_error, world_error
from rollforward.conf.execute import execute
from rollforward.conf.jobs import VERBS, Job, Verb, plan_jobs, schema_of, works_in_run_dir
from rollforward.conf.load import compose_data, config_groups, set_library_environment, to_yaml
from rollforward.conf.recipe import load_recipe, recipe_names
from rollforward.conf.resume import moved, recorded_jobs
from rollforward.conf.schema import Field, element_fields, has_parts, nearest, schema_fields, value_at

__all__ = ["VERBS", "Job", "Verb", "execute", "main", "plan_jobs"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        0 done; 2 a mistake that the user can put right, 1 what the world did, both told in a line or two; 130
        interrupted, by Ctrl-C or SIGTERM; otherwise what the verb's main returned.
    """
    set_library_environment()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ended_like_interrupted():
            return _dispatch(arguments)
    except KeyboardInterrupt:
        console.fail("interrupted")
        return 130
    except Exception as error:
        mistake = user_error(error)
        if mistake is not None:
            console.fail(told(mistake))
            return 2
        happened = world_error(error)
        if happened is None:
            raise
        console.fail(str(happened))
        return 1


@contextlib.contextmanager
def _ended_like_interrupted() -> Generator[None]:
    """Makes SIGTERM, which the end of a pod or a job is told by, an interruption: what is open is closed, and what goes
    on is said."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.result(_help_text())
        return 0
    if arguments[0] == "--version":
        console.result(importlib.metadata.version("rollforward"))
        return 0
    verb, *rest = arguments
    if verb not in VERBS and verb not in _OTHERS:
        known = [*VERBS, *_OTHERS]
        near = nearest(verb, known)
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(
            f"{verb} is not a command. {hint}Commands: {', '.join(known)}; rollforward --help explains them."
        )
    if "-h" in rest or "--help" in rest:
        console.result(_verb_help_text(verb) if verb in VERBS else _OTHERS[verb])
        return 0
    if verb == "submit":
        from rollforward.conf.submit import submit

        return submit(rest)
    if verb in _APART:
        return cast("Callable[[Sequence[str]], int]", importlib.import_module(_APART[verb]).main)(rest)
    settings, print_only = _options(rest)
    plan = {"resume": _resumed, "drill": plan_drill}.get(verb)
    jobs = plan_jobs(verb, settings) if plan is None else plan(settings)
    if print_only:
        texts = [to_yaml(job.config) for job in jobs]
        heads = [f"# {job.name} (rollforward {job.verb})\n" for job in jobs] if len(jobs) > 1 else [""]
        console.result("---\n".join(head + text for head, text in zip(heads, texts, strict=True)).rstrip())
        return 0
    return execute(jobs)


def _resumed(words: Sequence[str]) -> list[Job]:
    """The runs of the directory after `resume`, which work where the settings behind it say."""
    directory, *overrides = words or [""]
    if not directory or any("=" not in word for word in overrides):
        given = " ".join(words) or "nothing"
        raise UsageError(
            f"resume is followed by {given}; it takes one directory, what run_dir named or a run in it, and goes on"
            " with the settings that lie there. Only where it works may be said anew: cluster.learner_ranks=2."
        )
    return moved(recorded_jobs(Path(directory.removeprefix("run_dir=")).resolve()), overrides)


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


_APART = {
    "wal": "rollforward.rollout.wal_verb",
    "sandbox": "rollforward.rollout.sandbox_verb",
    "kernels": "rollforward.model.kernels_verb",
    "judge": "rollforward.rl.judge.report_verb",
}
"""Commands that read their words themselves -> their module."""

_OTHERS: dict[str, str] = {
    "resume": """rollforward resume RUN_DIR [cluster.KEY=VALUE ...] [--cfg job]: go on with an interrupted run

It goes on with exactly its settings; only where it works may change: all of cluster but
learner_threads, and optim.zero_size and optim.max_padding of hybrid_muon. NAME.cluster.KEY is for one run of a recipe.
The weights at the end are the same.

RUN_DIR is what run_dir named, a recipe's directory too; runs that are finished are kept, the rest is done in order.
A run's own directory inside a recipe's goes on up to that run. --cfg job prints the settings and does nothing.""",
    "submit": """rollforward submit VERB ... address=URL [settings]: the same command as a job on a Ray cluster

VERB ... is any command but drill, with its arguments: train recipe=tiny run_dir=/shared/runs/a, or resume
/shared/runs/a. Settings of the submission itself:
  address=required        the cluster's dashboard: http://HEAD:8265
  working_dir=null        directory that is uploaded and in which the job works; relative paths are relative to it
  submission_id=null      name of the job; Ray draws one
  wait=true               follow the job's log; the exit code is the job's. false returns when the job is accepted
The code here is built into a wheel and sent along. The cluster's Python needs the packages that it depends on, and
run_dir a file system that all its machines see.

Ray asks for a token: ~/.ray/auth_token of the machine that started the cluster, copied to the same place here (or
RAY_AUTH_TOKEN=...). For a cluster that was started with RAY_AUTH_MODE=disabled set the same here.""",
    "wal": """rollforward wal inspect|verify DIR [json=true] [mirror_dir=DIR]: what token logs hold

DIR is a run's directory, a recipe's, or that of one log (run_dir/wal/engine-0). A table, one finding a line, and as the
last line JSON: records, requests, tokens, torn_bytes (a write that was cut short; nobody had been told of it), damaged
(findings that are damage) and the same by stream. json=true prints that line alone. verify exits with 1 where something
is damaged. Both only read, and may look at a run that is working.
  mirror_dir=null         where second copies lie; null: what the run's settings say""",
    "sandbox": """rollforward sandbox list DIR | replay TRAJECTORY run_dir=DIR | layers ...: what was done in sandboxes

list: the command logs of a run's directory, a recipe's, or of one step (run_dir/commands/step_000012). A table of
trajectories: commands that were sent, answered (they have a result), epochs (how often a process got hold of the
sandbox), sandboxes, files that were collected, and the outcome: open, closed, oom (it ran out of memory), unknown (the
sandbox was lost inside a command, which is never done again), infra, damaged. As the last line JSON. It only reads.

replay: does the commands of a trajectory (s12-p3-m0) again in a fresh sandbox of this machine and compares results and
collected files with the log. same: bit for bit; masked: but for times, dates, durations, process ids, addresses, names
of temporary files and what mask= names; differs; unknown: the log has no result; lost: this sandbox failed. It exits
with 1 where something differs. The run is left as it is.
  mask=REGEX              also masked before texts are compared; may be given several times
  trusted_code=null       true: go on where this machine cannot enforce every limit; null: what the run's settings say
  json=false              true prints the last line alone

layers list | make SOURCE ... | gc: the layers that images of sandboxes are stacked of, in this machine's store
(sandbox.container.layers.dir). make adds what a directory, a tar archive or an OCI layout (DIR, DIR#NAME) holds and
prints layer:DIGEST for each, a name for it that never means anything else. gc removes what no process uses and nobody
has used for unused_days, and what killed processes left.
  dir=DIR                 another store
  unused_days=30          0: everything that is not in use
  json=false              true prints the last line alone""",
    "kernels": """rollforward kernels warm model=NAME [teacher=NAME] [jobs=N]: compile a model's GPU programs once

NAME is flash, pro, mini, tiny or a model directory. Needs the extra `tile` and no GPU: the programs are for sm_90a.
They lie in $ROLLFORWARD_KERNEL_CACHE, or rollforward/kernels of the user's cache, which processes and machines may
share; a run compiles nothing.
  teacher=NAME            whose teacher's width differs: the model that is distilled from
  jobs=N                  programs compiled at the same time; null: as many as there are processors""",
    "judge": """rollforward judge report DIR [json=true]: how good the judges of a run are

DIR is a run's directory or a recipe's; the newest evaluation of each run is read. For every task of type judge, and
every reward of type rubric: verdicts and why others gave none, agreement with the truth and Cohen's kappa, good and bad
answers by what was said of them, Brier score, expected calibration error and the bins behind it, how far verdicts of
one answer agree, and whether length or the place of a criterion moves a verdict. The truth of a rubric's answers is
its audit's word. The last line is the same as JSON; json=true prints that line alone. It only reads.""",
}
"""Commands that run verbs -> their help, of which the first line is the summary."""


def _help_text() -> str:
    others = {name: text.splitlines()[0].partition(": ")[2] for name, text in _OTHERS.items()}
    width = max(len(name) for name in (*VERBS, *others, *recipe_names()))
    recipes = [f"  {name:<{width}}  {load_recipe(name).summary}" for name in recipe_names()]
    return "\n".join(
        [
            "rollforward VERB [recipe=NAME] [key=value ...] [--cfg job] [--help]",
            "",
            "verbs",
            *(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()),
            *(f"  {name:<{width}}  {summary}" for name, summary in others.items()),
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
    schema = schema_of(verb)
    set_elsewhere: dict[str, str] = {}
    if works_in_run_dir(schema):
        set_elsewhere["run_dir"] = f"runs/{verb}-DATE, or runs/RECIPE-DATE/RUN in a recipe"
    base = compose_data(verb)
    for field in schema_fields(schema):
        with contextlib.suppress(KeyError, TypeError):
            set_elsewhere[field.path] = str(value_at(base, tuple(field.path.split("."))))
    inside = _field_texts(list(element_fields(schema)), {})
    groups = [
        f"  {group}={'|'.join(options)}" for group, options in config_groups().items() if has_parts(schema, group)
    ]
    return "\n".join(
        [
            f"rollforward {verb}: {VERBS[verb].summary}",
            "",
            "settings (KEY=DEFAULT; what is required is set by a recipe or by you; [type=A]: so of that choice only)",
            *_field_texts(list(schema_fields(schema)), set_elsewhere),
            *(["", "inside a list, which is set as a whole, or a mapping", *inside] if inside else []),
            *(["", "groups", *groups] if groups else []),
        ]
    )


def _field_texts(fields: Sequence[Field], set_elsewhere: Mapping[str, str]) -> list[str]:
    """Each setting for --help: its default, its type, the choices that have it, and below what it does. Words that
    several choices share are said once, below the last of them."""
    lines: list[str] = []
    for field, following in itertools.zip_longest(fields, fields[1:]):
        default = set_elsewhere.get(field.path, field.default)
        choices = f"  [{field.choices_text}]" if field.choices else ""
        lines.append(f"  {field.path}={default}  ({field.type}){choices}")
        if field.doc and (following is None or (following.path, following.doc) != (field.path, field.doc)):
            lines.append(textwrap.fill(field.doc, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines


if __name__ == "__main__":
    sys.exit(main())
