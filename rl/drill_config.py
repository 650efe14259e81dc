"""The schema of `rollforward drill`: which recipe, and what is killed how often."""

from typing import Annotated, Literal

import msgspec

DrillKind = Literal["engine", "driver", "learner", "sandbox"]
"""Kinds of processes of a run: a replica, the command itself, a rank of the learner, a warm process for tools."""

KINDS: tuple[DrillKind, ...] = ("engine", "driver", "learner", "sandbox")


class DrillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is killed, and how far the recipe is shortened."""

    kills: Annotated[int, msgspec.Meta(ge=1)] = 6
    """Processes that are killed. A run that ends before is followed by another one."""
    kinds: tuple[DrillKind, ...] | None = None
    """Whose turn it is, over and over in a drawn order: engine, driver, learner, sandbox. null is all that the recipe
    has."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Chooses order and instants of the kills. Processes are no clockwork, so equal seeds are alike, not the same."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=6)] = 4
    """Optimizer steps of every run of the recipe, at most."""
    prompts: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Prompts of a step, and of each task in an evaluation, at most."""

    def __post_init__(self) -> None:
        """Refuse a list of nothing."""
        if self.kinds is not None and not self.kinds:
            raise ValueError(f"drill.kinds is empty; name some of {', '.join(KINDS)}, or leave it out")


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
