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
