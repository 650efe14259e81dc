"""Errors of the rollout folder: one base, user mistakes as ValueError, the world's failures as RuntimeError.

Every class is picklable (one message argument), because errors cross Ray. Sampling failures of single requests are no
exceptions: they are `FailureType` values on records (rollout/types.py).
"""


class RolloutError(Exception):
    """Base of every error of this folder."""


class WalUsageError(RolloutError, ValueError):
    """The log was asked for something that it cannot do: wrong slot, wrong lengths, another replica's directory.

    Nothing was appended. The caller is wrong: fix the call or the configuration, do not retry.
    """


class WalLockedError(RolloutError, RuntimeError):
    """Another live process writes this stream.

    Wait for it or end it; `takeover=True` only when a coordinator has declared it dead.
    """


class WalWriteError(RolloutError, RuntimeError):
    """A write or sync of the log failed; the writer is dead for good and publishes nothing more.

    The failed call is never repeated on its descriptor (after a failed sync the kernel may report success for pages
    that never reached the disk). The caller ends the replica; its successor recovers from the directory.
    """


class WalRefusedError(WalWriteError):
    """A write failed because the disk is full or this user may not write there; that stays so until somebody acts.

    A successor that cannot even open the log is not followed by another one: the run ends and names the way out.
    """


class WalFencedError(RolloutError, RuntimeError):
    """A newer epoch owns the stream: this writer is a zombie.

    The caller ends the replica at once and publishes nothing more.
    """


class WalStalledError(RolloutError, RuntimeError):
    """The disk did not keep up within the configured time.

    Nothing was lost or appended by the call; it may be repeated.
    """


class EngineError(RolloutError, RuntimeError):
    """The engine was used in a way that its state does not allow; a bug in the caller, which stops the run."""


class PausedError(RolloutError, RuntimeError):
    """``generate`` stopped because ``pause`` was called: everything drawn is durable, nothing was lost.

    Requests in flight stay unfinished in the log; the caller may save their key-values and then closes the replica. The
    log's next opening goes on with them.
    """


class EngineInputError(RolloutError, ValueError):
    """A request cannot be served by this engine (too long, wrong version); the caller fixes it before sending."""


class WorkerLostError(RolloutError, RuntimeError):
    """The process of a replica died, hangs or cannot be reached; what is durable in its log is kept.

    Whoever supervises it ends what is left of the process and starts another one on the same log.
    """


class RolloutLostError(RolloutError, RuntimeError):
    """A replica was lost more often than allowed, or there is no place for it. Nothing durable is lost.

    The caller ends the run with a non-zero exit code; it goes on from the logs once the cause is removed.
    """


class EnvironmentConfigError(RolloutError, ValueError):
    """Tools are configured so that no turn could be answered; the user changes what the message names."""


class WeightsError(RolloutError, RuntimeError):
    """What a replica holds, or what is to be published, is not what it must be; the replica gets no request."""


class VersionRefusedError(WeightsError):
    """A published version is absent, half, damaged or of another model. Nothing was touched: every engine that had
    weights serves on with them. Publish again."""


class LedgerError(RolloutError, RuntimeError):
    """A replica is told to report what it publishes to a ledger that is not there; nothing leaves it unreported."""
