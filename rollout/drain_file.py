"""How a person or a scheduler tells replicas to leave where they are: a file in the run directory."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollforward.rollout.wal_files import read_regular

DRAIN_NAME = "drain"
"""Name of the file in a run directory."""

_MAX_S = 1e7
"""More seconds than that are as good as these, which every clock can hold."""

Notices = Mapping[str, float | None]
"""Name of a replica that must leave where it is -> seconds that it has; None where nobody said."""


class DrainFile:
    """Each line is a replica's name, or `all`, and may end with the seconds that it has: `engine-1 20`. An empty file
    means all. It is removed when it was read: then the replicas are on their way.
    """

    def __init__(self, path: Path, names: Sequence[str], *, announce: Callable[[str], None]) -> None:
        """Watch a path; `names` are those that may be told."""
        self._path, self._names, self._announce = path, tuple(names), announce
        self._said = ""

    def read(self) -> Notices:
        """Return who was told to leave since the last call. What cannot be read is said and has no effect."""
        try:
            text = read_regular(self._path).decode(errors="replace")
            self._path.unlink(missing_ok=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            # Looked at again and again, so said once. What could not be removed would tell them again and again.
            if self._said != str(error):
                self._said = str(error)
                self._announce(f"{self._path} tells nobody to leave, since it cannot be read and removed: {error}")
            return {}
        told: dict[str, float | None] = {}
        for line in text.splitlines() or ["all"]:
            name, _, seconds = line.strip().partition(" ")
            try:
                deadline_s = min(float(seconds), _MAX_S) if seconds else None
            except ValueError:
                deadline_s = math.nan
            if (name != "all" and name not in self._names) or (deadline_s is not None and not deadline_s > 0):
                self._announce(
                    f"{self._path}: {line.strip()!r} tells nobody to leave; a line is a name ({', '.join(self._names)})"
                    " or all, then the seconds that are left if they are known"
                )
                continue
            told |= dict.fromkeys(self._names if name == "all" else (name,), deadline_s)
        return told
