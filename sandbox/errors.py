"""Errors of the sandbox folder and of the log codec that lives in it.

What is not here: rollout's log errors (rollout/errors.py). Every class is picklable, because errors cross process
borders.
"""

from enum import StrEnum


class SandboxError(Exception):
    """Base of every error that this folder raises.

    Callers catch a subclass; the base is for "anything from the sandbox".
    """


class CodecUsageError(SandboxError, ValueError):
    """A frame or segment header was asked for that the format cannot hold.

    The caller is wrong: fix the value, do not retry.
    """


class ToolError(SandboxError, ValueError):
    """A tool's file is missing or does not hold a function that can be offered to a model.

    The user is wrong: correct the file or its configuration, do not retry.
    """


class SandboxUnavailableError(SandboxError, ValueError):
    """This machine cannot isolate calls as the substrate promises.

    Stop: nothing runs with less isolation instead. The message says what the machine lacks.
    """


class LayerError(SandboxUnavailableError):
    """What an image is to be made of cannot be used: it is absent, no directory, archive or OCI layout, damaged, too
    large, or holds what a layer may not.

    The user, or whoever made the archive, is wrong: correct it, do not retry.
    """


class SandboxClosedError(SandboxError, RuntimeError):
    """A call was made of a sandbox that is closed, or was still waiting when it closed.

    Make the call of a new sandbox.
    """


class SandboxGoneError(SandboxError, RuntimeError):
    """The sandbox does not exist any more, or never did.

    What it had done is lost; make a new one where nothing depended on that. `cause` says whose doing it was.
    """

    def __init__(self, message: str, cause: "GoneCause") -> None:
        """Keep the cause beside the sentence."""
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        """The sentence."""
        return str(self.args[0])


class GoneCause(StrEnum):
    """Why a sandbox is gone."""

    CLOSED = "closed"
    """Its owner closed it."""
    EXPIRED = "expired"
    """Its lease ran out: its owner gave no sign of life."""
    OOM = "oom"
    """Its memory ran out and the kernel ended it: the doing of what ran in it."""
    LOST = "lost"
    """It died for another reason, its supervisor died, or nobody knows of it: an infra failure."""


class SandboxBusyError(SandboxError, RuntimeError):
    """There was no room for another sandbox in time.

    Wait and try again, or raise `sandbox.container.max_sandboxes` or `actors`.
    """


class SandboxIdentityError(SandboxError, ValueError):
    """An identity is no identity, or names a sandbox that is made of something else.

    The caller is wrong: an identity is chosen once, for one sandbox.
    """


class SandboxFileError(SandboxError, ValueError):
    """A file could not be written into or read from a sandbox: it is absent, no regular file, too large, its path
    leaves the sandbox or passes a link, or the sandbox has no room.

    The caller or what runs inside is wrong; the sandbox is well.
    """


class SandboxConnectionError(SandboxError, ConnectionError):
    """Whoever answers for the sandbox could not be reached or went away; what was asked may have happened.

    Ask again what is safe to repeat (see `client.py`); the sandbox may live on.
    """


class CommandLogError(SandboxError, RuntimeError):
    """Base of what can be wrong with a command log. Whose log it is fails as infra; the message says why."""


class CommandLogDamagedError(CommandLogError):
    """The file is no command log, is another trajectory's, or holds bytes or records that no writer left there.

    Nothing of it is believed and nothing was changed. Look at the disk; remove the file to do without it.
    """


class CommandLogLockedError(CommandLogError):
    """Another live process, or another session of this one, writes the log. Wait for its end."""


class CommandLogWriteError(CommandLogError):
    """A write or sync failed; the log is dead for good, and nothing that is not on disk may be handed out.

    The failed call is never repeated on its descriptor. A new opening goes on with what is on disk.
    """


class CommandDivergenceError(CommandLogError):
    """What is asked for is not what the log says was asked for at this place: two histories of one trajectory.

    The caller or its inputs changed between two runs; nothing was executed.
    """


class SandboxKeyError(SandboxError, ValueError):
    """A command came under a key that another one of the sandbox has.

    The caller has a bug, or is not who it takes itself for; nothing was run.
    """
