"""The schema of `rollforward distill`: teachers, who teaches what, the loss, and the run itself.

What it shares with `train` is `LoopRun` (`rl/config.py`). No torch and no ray: a wrong key must cost milliseconds.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from rollforward.distill.errors import ScheduleError
from rollforward.rl.algorithms import Normalisation
from rollforward.rl.config import LoopRun, PositiveInt

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A teacher's: it names metrics and files."""

Routing = Literal["task", "weights", "all"]
"""Who teaches a trajectory: every teacher that names its task; one teacher drawn for each prompt, as often as its
weight says; or all of them, each with its weight, in additive passes."""


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One teacher: a model in the official layout whose tokens are the student's."""

    model_dir: str | None = None
    """Its directory, or any URL that fsspec knows (s3://, gs://, https://, ...). null: its name below
    `teacher_store`."""
    tasks: tuple[str, ...] = ()
    """(routing `task`) Tasks that it teaches, at least one."""
    weight: Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)] = 1.0
    """Multiplies its divergence (routing `task` and `all`), or says how often it is drawn (`weights`)."""


class ReverseKL(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reverse_kl"
):
    """KL(student || teacher) over the whole vocabulary, exact at every position: DeepSeek-V4's."""


class ForwardKL(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="forward_kl"
):
    """KL(teacher || student) over the whole vocabulary: covers all that the teacher may say."""


class JensenShannon(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="jensen_shannon"
):
    """GKD's generalised Jensen-Shannon divergence over the whole vocabulary (arXiv 2306.13649)."""

    beta: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.5
    """Share of the teacher in the mixture: near 0 it behaves like the forward KL, near 1 like the reverse."""


class SampledToken(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="sampled_token"
):
    """Policy gradient on the log-ratio of the sampled token alone (k1), whose expectation is the reverse KL's gradient:
    for comparison, since it is noisy. Needs tokens drawn at temperature 1 from the whole vocabulary."""

    baseline: bool = False
    """Subtract the exact KL of the position from the log-ratio (vOPD, arXiv 2605.07865); needs the whole vocabulary
    after all."""


DistillLoss = ReverseKL | ForwardKL | JensenShannon | SampledToken
"""Any loss, told apart by `type`."""


class TeacherCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room for what comes from teachers."""

    may_change: ClassVar[frozenset[str]] = frozenset({"directory", "max_hidden_gib"})
    """Fields that may differ when a run directory goes on."""

    directory: str = "~/.cache/rollforward/teachers"
    """Where teachers with a URL, and what was read of any, are kept on every node, for this run and later ones."""
    max_hidden_gib: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 64.0
    """Disk that the hidden vectors of one step may take in run_dir/teacher_hidden. A step whose longest completions
    would not fit is refused before the run begins."""


def check_routing(teachers: Mapping[str, TeacherConfig], routing: Routing, tasks: Sequence[str]) -> None:
    """Refuse teachers that do not fit what a run learns.

    Args:
        teachers: by name, at least one.
        routing: who teaches a trajectory.
        tasks: names of the run's tasks.

    Raises:
        ScheduleError: routing is "task", and a task has no teacher, or a teacher has no task, or one twice, or one that
            is not the run's; or routing is another, and a teacher has tasks; or the weights are not finite numbers that
            have a finite sum.
    """
    weights = {name: teacher.weight for name, teacher in teachers.items()}
    if not math.isfinite(sum(weights.values())):
        raise ScheduleError(
            f"the weights of the teachers are {weights}; every one, and their sum, must be a finite number. Set"
            " teachers.NAME.weight"
        )
    for name, teacher in teachers.items():
        if routing != "task" and teacher.tasks:
            raise ScheduleError(
                f"teachers.{name}.tasks is {list(teacher.tasks)} and routing is {routing!r}, which asks no teacher for"
                " its tasks. Remove them, or set routing=task"
            )
        if routing == "task":
            _check_tasks(name, teacher, tasks)
    untaught = sorted(set(tasks) - {task for teacher in teachers.values() for task in teacher.tasks})
    if routing == "task" and untaught:
        raise ScheduleError(
            f"nobody teaches {', '.join(untaught)}; under routing=task every task needs a teacher. Name it in"
            " teachers.NAME.tasks, remove the task, or set routing=weights or routing=all"
        )


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise ScheduleError(
                f"a teacher is named {name!r}; a name is at most 64 letters, digits, and _ . - behind the first, for it"
                " names metrics and files. Rename it in teachers"
            )
        if len(alike := [other for other in names if other.lower() == name.lower()]) > 1:
            raise ScheduleError(
                f"teachers are named {', '.join(alike)}; on some disks that is one file. Rename one of them"
            )


def _check_tasks(name: str, teacher: TeacherConfig, tasks: Sequence[str]) -> None:
    if not teacher.tasks:
        raise ScheduleError(
            f"teachers.{name}.tasks is empty; under routing=task a teacher without a task teaches nobody. Name at least"
            f" one of {', '.join(tasks)}, or set routing=weights or routing=all"
        )
    unknown = [task for task in teacher.tasks if task not in tasks]
    if unknown:
        raise ScheduleError(
            f"teachers.{name}.tasks names {', '.join(unknown)}; the tasks of this run are {', '.join(tasks)}. Correct"
            " the name, or add the task"
        )
    if len(set(teacher.tasks)) != len(teacher.tasks):
        raise ScheduleError(
            f"teachers.{name}.tasks is {list(teacher.tasks)}; a task stands there once. For more of this teacher raise"
            f" teachers.{name}.weight"
        )


class DistillRun(LoopRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of `distill`: several teachers become one student, on the student's own trajectories."""

    teachers: dict[str, TeacherConfig]
    """The teachers by name; at least one."""
    teacher_store: str | None = None
    """Directory or fsspec URL below which teachers lie by name."""
    routing: Routing = "task"
    """Who teaches a trajectory."""
    loss: DistillLoss = ReverseKL()
    """What is made small."""
    samples_per_prompt: PositiveInt = 1
    """Completions of each prompt; none needs another as a baseline."""
    normalisation: Normalisation = "token_mean"
    """Weight of a token in the step: `token_mean` makes tokens equal, `trajectory_mean` trajectories; `constant` is
    1 / (trained trajectories x sampling.max_new_tokens)."""
    keep_routing: bool = True
    """The student visits in training the experts that it visited when it sampled, as `algo.keep_routing` of `train`."""
    teacher_cache: TeacherCacheConfig = TeacherCacheConfig()
    """Room for what comes from teachers."""

    def __post_init__(self) -> None:
        """Refuse combinations that would fail, or be silently wrong, only later."""
        super().__post_init__()
        if not self.teachers:
            raise ValueError("teachers is empty; there is nobody to learn from. Name one: teachers={NAME: {...}}")
        _check_names(list(self.teachers))
        for name, teacher in self.teachers.items():
            if teacher.model_dir is None and self.teacher_store is None:
                raise ValueError(
                    f"teachers.{name} has no model_dir and teacher_store is not set; nobody knows where it lies. Set"
                    " one of them"
                )
        check_routing(self.teachers, self.routing, [task.name for task in self.tasks])
        if self.balance.is_on and self.keep_routing:
            raise ValueError(
                "balance is on and keep_routing is true; replayed routes are not what the router chooses now. Set"
                " keep_routing=false, or balance.bias_update_speed=0 and balance.loss_weight=0"
            )
        if self.balance.loss_weight > 0 and self.num_shares > 1:
            raise ValueError(
                f"balance.loss_weight is {self.balance.loss_weight} and a trajectory has up to {self.num_shares}"
                " teachers; each is a pass of its own, and would add the balance loss once more. Set"
                " balance.loss_weight=0 (balance.bias_update_speed balances without a loss), or give each task one"
                " teacher"
            )
        if isinstance(self.loss, SampledToken) and (self.sampling.temperature != 1 or self.sampling.cuts_vocabulary):
            raise ValueError(
                "loss is sampled_token and sampling draws from another distribution than the policy's own; the"
                " estimate would be biased. Set sampling.temperature=1 without top_p and top_k, or a loss over the"
                " whole vocabulary, which is exact for any sampling"
            )

    @property
    def num_shares(self) -> int:
        """Teachers that one trajectory may have at most."""
        if self.routing == "task":
            return max(sum(task.name in teacher.tasks for teacher in self.teachers.values()) for task in self.tasks)
        return len(self.teachers) if self.routing == "all" else 1
