"""Sandboxes that are gone, and why, for whoever asks for one."""

from collections import OrderedDict
from typing import Final

from rollforward.sandbox.errors import GoneCause, SandboxGoneError

_MAX_REMEMBERED: Final = 16384
"""Of older ones nobody knows."""
_WHY: Final = {
    GoneCause.CLOSED: "it was closed",
    GoneCause.EXPIRED: "its lease ran out: its owner gave no sign of life (sandbox.container.lease_s)",
    GoneCause.OOM: "its memory ran out and the kernel ended it",
    GoneCause.LOST: "it died, or its supervisor did, or it never was here",
}


class Graves:
    """The last incarnation of each identity that is gone."""

    def __init__(self) -> None:
        """Nobody is."""
        self._causes: OrderedDict[str, tuple[str, GoneCause]] = OrderedDict()

    def bury(self, sandbox_id: str, instance: str, cause: GoneCause) -> None:
        """Remember why."""
        self._causes[sandbox_id] = instance, cause
        self._causes.move_to_end(sandbox_id)
        while len(self._causes) > _MAX_REMEMBERED:
            self._causes.popitem(last=False)

    def forget(self, sandbox_id: str) -> None:
        """There is one of that identity again."""
        self._causes.pop(sandbox_id, None)

    def error(self, sandbox_id: str, instance: str) -> SandboxGoneError:
        """Say why an incarnation is not there; without one, why none of that identity is."""
        known, cause = self._causes.get(sandbox_id, ("", GoneCause.LOST))
        if instance not in ("", known):
            cause = GoneCause.LOST
        return SandboxGoneError(f"sandbox {sandbox_id} is gone: {_WHY[cause]}", cause)


def was_closed(sandbox_id: str) -> SandboxGoneError:
    """The error of whoever waits for a sandbox that somebody closed."""
    return SandboxGoneError(f"sandbox {sandbox_id} was closed before it was made", GoneCause.CLOSED)
