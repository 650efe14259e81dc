"""Errors of `rl/`. Each says what its catcher should do; all pickle, because they cross Ray.

What an error of another folder means is in that folder's `errors.py`. A wrong configuration is a plain `ValueError`
from the schema class, which `conf/load.py` turns into a message with the dotted path.
"""


class RLError(Exception):
    """Base of every error of this folder."""


class BatchError(RLError, ValueError):
    """Trajectories or limits from which no correct training batch can be made. Stop: the caller has a bug or a wrong
    limit."""


class LossInputError(RLError, ValueError):
    """Inputs of a loss that do not fit each other or the algorithm. Stop: training on them would be silently wrong."""


class NoTrainableTrajectoriesError(RLError, RuntimeError):
    """Every trajectory of the step was lost to failures. Don't step the optimizer; stop, or sample the step again."""


class TaskError(RLError, ValueError):
    """A task that cannot be built or asked as configured. Stop before anything is allocated; the message has the way
    out."""


class RewardError(RLError, ValueError):
    """A verifier of the user's that is absent, cannot be called, or returns what is no score. Stop: training on it
    would be wrong; a stopped run goes on after the correction."""


class CursorError(RLError, ValueError):
    """A cursor that belongs to other data than the source at hand. Stop: going on would repeat and skip prompts."""


class ModelDirectoryError(RLError, ValueError):
    """A directory whose model and tokenizer do not belong together or do not fit the run. Stop before anything is
    allocated."""


class SampleFileError(RLError, RuntimeError):
    """A step's sample file is absent, torn, damaged or of another format. Stop; the same command with the same run_dir
    writes it anew from the token log."""


class QuantisationError(RLError, RuntimeError):
    """A learner rank does not take every tensor through its published format. Stop before the first step: it would
    train other weights than the engines sample with."""


class CheckpointWriteError(RLError, RuntimeError):
    """A checkpoint cannot be written, or does not read back as it was: the disk is full, or it, its path or the memory
    is faulty. Stop; the run goes on from the checkpoint before, with more room or on another machine or disk."""


class ClusterError(RLError, ValueError):
    """The cluster that the configuration names cannot be joined, or a local one cannot have what is asked of it. Stop
    before anything is trained; the message has the way out."""


class LostProcessError(RLError, RuntimeError):
    """A process of the run died or hangs. The run ends with a non-zero exit code; the same command goes on."""


class ProbabilityMismatchError(RLError, RuntimeError):
    """Training and sampling give a token of the step different probabilities. Stop: the run would be off-policy without
    knowing it."""


class TrackerError(RLError, ValueError):
    """W&B does not start as configured. Stop before anything is trained; the message has the way out."""


class EvaluationError(RLError, RuntimeError):
    """Not one answer of a task could be judged in a run that does nothing else: an accuracy of 0 would be a claim about
    the model. A run that trains goes on without the accuracy."""


class DrillError(RLError, RuntimeError):
    """A run of a drill failed by itself, or was over before anything was killed: nothing is proved."""


class InfraFailureError(RLError, RuntimeError):
    """The platform failed more of a step's completions than `rollout.max_infra_share` allows.

    Mend what the message names, then resume the run.
    """
