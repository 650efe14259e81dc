"""From a task's configuration to the task. The one place that lists the kinds."""

from collections.abc import Sequence

from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.config import DatasetConfig, ErrandsConfig, JudgeConfig, ReasoningGymConfig, TaskConfig
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.types import Task
from rollforward.sandbox.config import ContainerConfig


def build_task(config: TaskConfig, grader: Grader | None = None) -> Task:
    """The task that `config` describes, its held-out questions chosen.

    Args:
        config: which.
        grader: has the sandboxes of hidden tests. None: the task can be asked, and not judged by them.

    Raises:
        TaskError: the configuration names something that does not exist, or asks for more questions than there are.
    """
    grader = Grader(ContainerConfig()) if grader is None else grader
    match config:
        case ReasoningGymConfig():
            from rollforward.rl.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config)
        case DatasetConfig():
            from rollforward.rl.tasks.dataset import DatasetTask

            return DatasetTask(config, grader)
        case ErrandsConfig():
            from rollforward.rl.tasks.errands import ErrandsTask

            return ErrandsTask(config, grader)
        case JudgeConfig():
            from rollforward.rl.tasks.judge import JudgeTask

            return JudgeTask(config)


def build_tasks(configs: Sequence[TaskConfig], grader: Grader | None = None) -> tuple[Task, ...]:
    """All tasks of a run; `grader` as in `build_task`.

    Raises:
        TaskError: there are none, two share a name, or `build_task` refuses one.
    """
    if not configs:
        raise TaskError("tasks is empty; a run needs at least one task. Choose a recipe or set tasks.")
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise TaskError(
                f"tasks: {names.count(name)} tasks are named {name!r}; metrics are told apart by the name. Rename all "
                "but one."
            )
    return tuple(build_task(config, grader) for config in configs)
