"""From a task's configuration to the task. The one place that lists the kinds."""

from collections.abc import Sequence

from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.config import DatasetConfig, ReasoningGymConfig, TaskConfig
from rollforward.rl.tasks.types import Task


def build_task(config: TaskConfig) -> Task:
    """The task that `config` describes, its held-out questions chosen.

    Raises:
        TaskError: the configuration names something that does not exist, or asks for more questions than there are.
    """
    match config:
        case ReasoningGymConfig():
            from rollforward.rl.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config)
        case DatasetConfig():
            from rollforward.rl.tasks.dataset import DatasetTask

            return DatasetTask(config)


def build_tasks(configs: Sequence[TaskConfig]) -> tuple[Task, ...]:
    """All tasks of a run.

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
    return tuple(build_task(config) for config in configs)
