"""What can go wrong in distillation. The user's mistakes are `ValueError`s, what the world did is a `RuntimeError`."""


class DistillError(Exception):
    """Base of all errors of this folder."""


class TeacherError(DistillError, ValueError):
    """A teacher that is not where its configuration says, or is no model directory. Stop before anything is allocated;
    the message has the way out."""


class TeacherMismatchError(DistillError, ValueError):
    """A teacher that speaks of other tokens than the student: vocabulary, tokenizer or encoding differ. Stop before
    anything is allocated: its distribution would be read at the wrong ids."""


class ScheduleError(DistillError, ValueError):
    """Teachers and tasks that do not fit together: a task that nobody teaches, a teacher of a task that is not there.
    Stop before anything is allocated."""


class TeacherReadError(DistillError, RuntimeError):
    """A teacher's files cannot be fetched or read, or changed during the run. Stop; what was durable is kept."""


class HiddenCacheError(DistillError, RuntimeError):
    """A file of cached hidden vectors is absent, damaged, or not of this step and teacher, or there is no room for
    them. Stop; the same command with the same run_dir scores anew what is missing."""


class HiddenRoomError(DistillError, ValueError):
    """A step may need more room for hidden vectors than it may have. Stop before anything is allocated."""


class CanaryError(DistillError, RuntimeError):
    """The student as its own teacher is not at distance 0 from itself. Stop before the first step: a path that is wrong
    for this teacher is wrong for all."""
