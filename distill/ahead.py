"""What can be known of a distillation while earlier runs of its recipe have yet to make student and teachers: as in
`rl/ahead.py`, and whether the teachers that nobody has to make are there."""

from collections.abc import Sequence
from pathlib import Path

from rollforward.distill.config import DistillRun
from rollforward.distill.teacher_files import check_present, check_store
from rollforward.distill.train import teacher_urls
from rollforward.rl import ahead


def check(run: DistillRun, unmade: Sequence[Path]) -> None:
    """Refuse a run that could not work; nothing is allocated, fetched or written.

    Args:
        run: the configuration.
        unmade: directories of runs that are still to be done; what lies there is not looked for.

    Raises:
        TeacherError, TeacherReadError: a teacher is not where it should be; or as in ``rl.ahead.check``.
    """
    check_store(run.teachers, run.teacher_store)
    for name, url in teacher_urls(run).items():
        if "://" in url or not ahead.is_below(Path(url), unmade):
            check_present(url, f"teachers.{name}")
    ahead.check(run, unmade)
