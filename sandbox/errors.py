"""Errors of the sandbox folder and of the log codec that lives in it.

What is not here: rollout's log errors (rollout/errors.py). Every class is picklable, because errors cross process
borders.
"""


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


class SandboxUnavailableError(SandboxError, RuntimeError):
    """This machine cannot isolate calls as the substrate promises.

    Stop: nothing runs with less isolation instead. The message says what the machine lacks.
    """


class SandboxClosedError(SandboxError, RuntimeError):
    """A call was made of a sandbox that is closed, or was still waiting when it closed.

    Make the call of a new sandbox.
    """
