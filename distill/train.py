"""Entry point of `rollforward distill`: find and check the teachers, then the loop of `rl/train.py` with stages of its
own (stages.py)."""

from collections.abc import Mapping
from pathlib import Path

from rollforward.conf.console import say
from rollforward.distill.actors import DistillActor, DistillPool
from rollforward.distill.compatibility import check_teacher
from rollforward.distill.config import DistillRun
from rollforward.distill.errors import HiddenRoomError, TeacherError
from rollforward.distill.hidden_cache import HIDDEN_NAME
from rollforward.distill.hidden_shard import worst_case_bytes
from rollforward.distill.learner import DistillSettings, check_students
from rollforward.distill.stages import DistillStages, max_hidden_bytes
from rollforward.distill.teacher_files import check_present, check_store, fetch, locate, naming
from rollforward.distill.teacher_source import TeacherSource, describe_teacher
from rollforward.model.backends import check_model, check_programs
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.config import ModelConfig, load_model_config
from rollforward.rl.kept_versions import keep_versions
from rollforward.rl.setup import Parts
from rollforward.rl.train import Place, patience_of, policy_settings, rank_actors, run_loop, works_here

TEACHERS_NAME = "teachers.json"
"""File of a run directory with the version of each teacher that the run began with."""


def main(run: DistillRun) -> int:
    """Run the loop to its end; a run directory that holds a checkpoint is continued.

    Returns:
        0. Errors are raised: user mistakes as ValueError, the world's failures as RuntimeError.
    """

    def prepare(_parts: Parts) -> Place:
        urls = teacher_urls(run)
        teachers = find_teachers(run, urls)

        def place() -> tuple[DistillPool, DistillStages]:
            settings = learner_settings(run, urls, teachers)
            learner = DistillPool(rank_actors(DistillActor, run), settings, *patience_of(run))
            return learner, DistillStages(run, learner, teachers)

        return place

    return run_loop(run, prepare)


def learner_settings(
    run: DistillRun, urls: Mapping[str, str], teachers: Mapping[str, TeacherSource]
) -> DistillSettings:
    """Return what every rank is told of a run, whose teachers are from ``teacher_urls`` and ``find_teachers``."""
    return DistillSettings(
        loss=run.loss,
        keep_routing=run.keep_routing,
        teachers=dict(teachers),
        teacher_configs={name: load_model_config(source.directory) for name, source in teachers.items()},
        teacher_urls=dict(urls),
        teacher_cache_dir=str(_cache_dir(run)),
        hidden_root=str(Path(run.run_dir).resolve() / HIDDEN_NAME),
        max_hidden_bytes=max_hidden_bytes(run),
        **policy_settings(run),
    )


def teacher_urls(run: DistillRun) -> dict[str, str]:
    """Return where each teacher is, by name: a URL, or a path that means the same to processes that work elsewhere."""
    return {name: locate(name, teacher, run.teacher_store) for name, teacher in run.teachers.items()}


def find_teachers(run: DistillRun, urls: Mapping[str, str]) -> dict[str, TeacherSource]:
    """Fetch the teachers that are elsewhere, see that they speak of the student's tokens and that what they say has
    room, read each once, and see that it is the teacher that the run began with. Tensors are fetched only when no
    teacher is refused.

    Raises:
        TeacherError, TeacherMismatchError, TeacherReadError: names the teacher.
        BackendError: an op's form has no program for it; names the teacher.
        HiddenRoomError: see ``check_room``.
        CheckpointError, ConfigError: its files are no model's.
    """
    longest = run.max_prompt_tokens + max(
        task.budget(run.sampling.max_new_tokens) + task.max_observed_tokens for task in run.tasks
    )
    check_store(run.teachers, run.teacher_store)
    for name, url in urls.items():
        if "://" not in url:  # a remote is asked below
            check_present(url, f"teachers.{name}")
    directories: dict[str, Path] = {}
    for with_tensors in (False, True):  # checked again with them: what a URL stands for may have changed meanwhile
        for name in sorted(urls):
            with naming(f"teachers.{name}"):
                directories[name] = fetch(urls[name], _cache_dir(run), with_tensors=with_tensors)
            check_teacher(name, directories[name], student_dir=Path(run.model_dir), longest_tokens=longest)
            _check_kernels(run, name, load_model_config(directories[name]))
        check_room(run, width=max(load_model_config(directory).hidden_size for directory in directories.values()))
    # Reading all of them takes a while, so it comes last.
    found: dict[str, TeacherSource] = {}
    for name, directory in directories.items():
        found[name] = describe_teacher(name, directory, _cache_dir(run))
        say(f"teacher {name}: {directory}, version {found[name].version[:12]}")
    versions = {name: source.version for name, source in found.items()}
    keep_versions(Path(run.run_dir) / TEACHERS_NAME, versions, what="teacher", error=TeacherError)
    return found


def _check_kernels(run: DistillRun, name: str, teacher: ModelConfig) -> None:
    """Refuse forms of ops that have no program for a teacher, or for the student beside it."""
    check_model(run.kernels, teacher, f"teacher {name}")
    if works_here(run):
        check_programs(run.kernels, teacher, f"teacher {name}")
        student = load_checkpoint_config(Path(run.model_dir), is_announced=False)
        check_students(run.kernels, student, {name: teacher}, run.model_dir)


def check_room(run: DistillRun, *, width: int) -> None:
    """Refuse a run one of whose steps may need more room for hidden vectors than it has.

    Args:
        run: the configuration. width: of the widest teacher.

    Raises:
        HiddenRoomError: names what a step may need, what it has, and the ways out.
    """
    needed = worst_case_bytes(
        num_sequences=run.prompts_per_step * run.samples_per_prompt,
        max_new_tokens=max(task.budget(run.sampling.max_new_tokens) for task in run.tasks),
        width=width,
        precision=run.precision,
        passes=run.num_shares,
    )
    if needed > max_hidden_bytes(run):
        raise HiddenRoomError(
            f"a step may need {needed / 2**30:.3g} GiB of hidden vectors (prompts_per_step x samples_per_prompt x the"
            f" longest completion x the width of a teacher x teachers of a token);"
            f" teacher_cache.max_hidden_gib is {run.teacher_cache.max_hidden_gib:g}. Raise it if the disk of run_dir"
            " has the room, or sample less in a step"
        )


def _cache_dir(run: DistillRun) -> Path:
    return Path(run.teacher_cache.directory).expanduser().absolute()
