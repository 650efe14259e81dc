"""What `rollforward drill` is asked for: a recipe, shortened until it takes about a minute, and what is killed in it.

The drill's runs have the cluster that they start for themselves, so that their processes are here, where they can be
killed, and nobody else's are. Their token logs keep everything: what had left one would look lost.

Here: composition and checks, before anything is written. Not here: the drill (rl/drill.py), which runs the recipe in
processes of its own, as a user would.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollforward.conf.errors import UsageError
from rollforward.conf.jobs import Job, last_value, plan_jobs, schema_of
from rollforward.conf.load import compose_data, decode, is_ray_job

__all__ = ["plan_drill"]

_VERB = "drill"
_DRILLED = "train"
"""The verb whose run is disturbed: the only one with several processes."""


def plan_drill(overrides: Sequence[str]) -> list[Job]:
    """Composes the drill and, to see that they can be, the runs that it will start.

    Args:
        overrides: recipe=NAME, run_dir=DIR and drill.KEY=VALUE are the drill's; the others are the recipe's, as for
            `rollforward train`, and go before what shortens it.

    Raises:
        UsageError: no recipe; a recipe, a setting or a kind of process that cannot be drilled; a Ray job.
        ConfigError: a setting of the drill or of one of its runs is wrong.
    """
    recipe = last_value(overrides, "recipe")
    if is_ray_job():
        raise UsageError(
            "this is a Ray job, so a drill's runs would join its cluster; a drill kills processes of a cluster of its"
            " own. Log in on the machine and call rollforward drill there."
        )
    if recipe is None:
        raise UsageError("drill needs a recipe: rollforward drill recipe=tiny; rollforward drill --help has more.")
    keys = {text: text.partition("=")[0].lstrip("+~") for text in overrides}
    own = [text for text, key in keys.items() if key.startswith("drill.")]
    rest = [text for text, key in keys.items() if text not in own and key not in ("recipe", "run_dir")]
    given = last_value(overrides, "run_dir")
    run_dir = Path(given or f"runs/drill-{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    schema = schema_of(_VERB)
    data = compose_data(_VERB, own, schema=schema) | {"recipe": recipe, "run_dir": str(run_dir)}
    wanted: Mapping[str, Any] = msgspec.to_builtins(decode(schema, data))["drill"]
    jobs = plan_jobs(_DRILLED, [f"recipe={recipe}"])
    settings = [text for job in jobs for text in _shortened(job, steps=wanted["steps"], prompts=wanted["prompts"])]
    settings += rest
    jobs = plan_jobs(_DRILLED, [f"recipe={recipe}", f"run_dir={run_dir}", *settings])
    for job in jobs:
        _require_whole_logs(msgspec.to_builtins(job.config))
    kinds = _kinds(wanted["kinds"], msgspec.to_builtins(jobs[-1].config))
    data |= {"settings": settings, "drill": {**wanted, "kinds": kinds}}
    return [Job(_VERB, _VERB, decode(schema, data), run_dir, run_dir, directory=Path.cwd())]


def _shortened(job: Job, *, steps: int, prompts: int) -> list[str]:
    """Settings that make a run short and let it checkpoint and keep its logs whole, each addressed to the run."""
    config = msgspec.to_builtins(job.config)
    wanted: dict[str, object] = {"tracker.mode": "disabled"} if "tracker" in config else {}
    if "steps" in config:
        steps = min(steps, config["steps"])
        wanted |= {
            "steps": steps,
            "checkpoint_every_steps": max(1, steps // 2),
            "eval.every_steps": steps,
            "eval.prompts": min(prompts, config["eval"]["prompts"]),
            "optim.warmup_steps": min(steps, config["optim"]["warmup_steps"]),
        }
    if "rollout" in config:
        wanted["rollout.wal.keep_bytes"] = "null"
    for key in ("prompts_per_step", "prompts"):
        if key in config:
            wanted[key] = min(prompts, config[key])
    return [f"{job.name}.{key}={value}" for key, value in wanted.items()]


def _require_whole_logs(config: Mapping[str, Any]) -> None:
    keep_bytes = config["rollout"]["wal"]["keep_bytes"] if "rollout" in config else None
    if keep_bytes is not None:
        raise UsageError(
            f"rollout.wal.keep_bytes is {keep_bytes}; a drill compares whole token logs and would count as lost what"
            " has left one. Leave it out."
        )


def _kinds(asked: Sequence[str] | None, config: Mapping[str, Any]) -> list[str]:
    """What is killed; a run without tools has no sandbox, and one that joins a cluster has processes elsewhere."""
    if config["cluster"]["address"] is not None:
        raise UsageError(
            f"cluster.address is {config['cluster']['address']}; a drill kills processes of the local cluster that its"
            " run starts. Leave cluster.address out."
        )
    has_tools = any(task["tools"] for task in config["tasks"])
    if asked is None:
        return ["engine", "driver", "learner", *(["sandbox"] if has_tools else [])]
    if "sandbox" in asked and not has_tools:
        raise UsageError("drill.kinds names sandbox, but no task of the recipe has tools. Leave it out.")
    return list(asked)
