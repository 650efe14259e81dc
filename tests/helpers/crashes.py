"""A process that ends at a chosen record of its token log."""

from collections.abc import Callable

from rollforward.rollout.wal import WalWriter


class CrashError(Exception):
    """The process ended here."""


def crash_at(log: WalWriter, number: int) -> None:
    """Fail at the record of this number (from 0, versions not counted), before it is appended."""
    left = [number]

    def counted(append: Callable[..., int]) -> Callable[..., int]:
        def wrapped(*args: object, **kwargs: object) -> int:
            if left[0] == 0:
                raise CrashError
            left[0] -= 1
            return append(*args, **kwargs)

        return wrapped

    for name in ("append_open", "append_step", "append_observe", "append_close"):
        setattr(log, name, counted(getattr(log, name)))
