"""What can be known of a run while an earlier run of its recipe has yet to make the model that it starts from.

Asked of every run of a recipe before the first begins: a later one that cannot work here would fail after hours. Not
here: what needs the model (`setup.py`), which a run asks itself when its turn comes.
"""

from collections.abc import Sequence
from pathlib import Path

from rollforward.model.backends import check_machine
from rollforward.rl.config import CheckpointModel, EvalRun, LoopRun, SFTRun
from rollforward.rl.conversations import check_solved
from rollforward.rl.placement import check_cluster
from rollforward.rl.setup import SettingNames, check_judges, check_kernels, check_learner, check_tasks, load_parts
from rollforward.rl.sft import SETTING_NAMES, conversations_of
from rollforward.rl.train import works_here


def check(run: LoopRun | SFTRun | EvalRun, unmade: Sequence[Path]) -> None:
    """Refuse a run that could not work; nothing is allocated or written.

    Args:
        run: the configuration.
        unmade: directories of runs that are still to be done; what lies there is not looked for.

    Raises:
        BackendError, ClusterError: this machine cannot run what is configured; or as in ``load_parts``.
    """
    is_here = not isinstance(run, LoopRun) or works_here(run)
    if is_here:
        check_machine(run.kernels, "the run")
    if isinstance(run, LoopRun):
        check_cluster(run.cluster)
    judges = [judge.model_dir for task in run.tasks for judge in task.judges]
    model_dir = _model_dir(run)
    if model_dir is None or any(is_below(Path(place), unmade) for place in (model_dir, *judges)):
        check_judges(
            [task for task in run.tasks if not any(is_below(Path(one.model_dir), unmade) for one in task.judges)]
        )
        tasks = check_tasks(run.tasks, run.sandbox)
        if isinstance(run, SFTRun):
            check_solved(tasks)
        return
    parts = load_parts(
        Path(model_dir).resolve(),
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.max_answer_tokens if isinstance(run, SFTRun) else run.sampling.max_new_tokens,
        sandbox=run.sandbox,
        asks=("heldout",) if isinstance(run, EvalRun) else ("train", "heldout"),
        names=SETTING_NAMES if isinstance(run, SFTRun) else SettingNames(),
    )
    parts.grader.close()
    check_kernels(run.kernels, parts, model_dir, works_here=is_here)
    if isinstance(run, SFTRun):
        conversations_of(run, parts)
    if isinstance(run, LoopRun):
        check_learner(parts.model_config, run.optim, run.cluster.learner_ranks)


def is_below(path: Path, directories: Sequence[Path]) -> bool:
    """Whether a path is one of the directories or lies in one."""
    resolved = path.expanduser().resolve()
    return any(resolved.is_relative_to(directory.resolve()) for directory in directories)


def _model_dir(run: LoopRun | SFTRun | EvalRun) -> str | None:
    """None: the run makes a model itself."""
    if isinstance(run, SFTRun):
        return run.start.model_dir if isinstance(run.start, CheckpointModel) else None
    return run.model_dir
