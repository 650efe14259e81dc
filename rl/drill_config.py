"""The schema of `rollforward drill`: which recipe, and what is killed how often."""

from typing import Annotated, Literal

import msgspec

DrillKind = Literal["engine", "driver", "learner", "sandbox"]
"""Kinds of processes of a run: a replica, the command itself, a rank of the learner, a warm process for tools."""

KINDS: tuple[DrillKind, ...] = ("engine", "driver", "learner", "sandbox")


DrillMoment = Literal["any", "commit", "publish", "checkpoint"]
"""What a run is at when it is hit: whatever it is, a commit to a token log, new weights on their way from the learner
to the engines, a checkpoint being written."""

MOMENTS: tuple[DrillMoment, ...] = ("any", "commit", "publish", "checkpoint")


class DrillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is killed, and how far the recipe is shortened."""

    kills: Annotated[int, msgspec.Meta(ge=1)] = 6
    """Processes that are killed. A run that ends before is followed by another one."""
    kinds: tuple[DrillKind, ...] | None = None
    """Who is killed: engine, driver, learner, sandbox; each at each of the moments, in a drawn order, over and over.
    null is all that the recipe has."""
    moments: tuple[DrillMoment, ...] = MOMENTS
    """What the run is at when a process is killed, combined with the kinds: any, commit, publish, checkpoint."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Chooses order and instants of the kills. Processes are no clockwork, so equal seeds are alike, not the same."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=6)] = 4
    """Optimizer steps of every run of the recipe, at most."""
    prompts: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Prompts of a step, and of each task in an evaluation, at most."""

    def __post_init__(self) -> None:
        """Refuse a list of nothing."""
        for name, given, known in (("kinds", self.kinds, KINDS), ("moments", self.moments, MOMENTS)):
            if given is not None and not given:
                raise ValueError(f"drill.{name} is empty; name some of {', '.join(known)}, or leave it out")


class DrillRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of `drill`: a shortened recipe, undisturbed and with its processes killed."""

    run_dir: str
    """Directory of the drill; its runs lie in it."""
    recipe: str
    """Name of the recipe, or a YAML file; it is run up to its last run of `train`."""
    settings: tuple[str, ...] = ()
    """Settings of the recipe's runs: those that shorten them, and behind them what else stands on the command line."""
    drill: DrillConfig = DrillConfig()
    """What is killed."""
