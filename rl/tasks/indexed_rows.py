"""The rows of a task's source with a hash of every question: by them questions are held out, and a row that is read
again is proved to be the one that was checked.

Which rows are trained on and which are held out is for the task to say.
"""

import hashlib
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.rows import Row, Rows


class IndexedRows:
    """Rows of one source. States: made, then, once `scan` has come to its end, read. 8 bytes a row."""

    def __init__(self, rows: Rows, place: str, *, seed: int, owner: str) -> None:
        """Nothing is read yet.

        Args:
            rows: of the source.
            place: names it in errors.
            seed: keys the hashes.
            owner: begins every message, such as `task sums`.
        """
        self._rows, self.place, self._seed, self._owner = rows, place, seed, owner
        self.hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """[rows] uint64. Of every question: text and files, runs of white space as one space, so that copies have the
        same."""

    def scan(self) -> Iterator[Row]:
        """All rows, checked, in order; see `Rows.scan`. Their hashes are there at its end."""
        hashes = array("Q")
        for row in self._rows.scan():
            hashes.append(self._hash(row))
            yield row
        self.hashes = np.frombuffer(hashes, np.uint64) if hashes else np.zeros(0, np.uint64)

    def row(self, index: int) -> Row:
        """One row, proved to be the one that was checked.

        Raises:
            TaskError: it is not.
        """
        try:
            row = self._rows.row(index)
        except (OSError, TaskError) as error:
            raise self._changed(index) from error
        if self._hash(row) != int(self.hashes[index]):
            raise self._changed(index)
        return row

    def _hash(self, row: Row) -> int:
        said = [(message.role, message.content) for message in row.messages] + sorted((row.files or {}).items())
        text = "\0".join(f"{name}\0{' '.join(content.split())}" for name, content in said)
        salt = self._seed.to_bytes(16, "little")
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"heldout", salt=salt)
        return int.from_bytes(digest.digest(), "little")

    def _changed(self, index: int) -> TaskError:
        return TaskError(
            f"{self._owner}: {self.place} has changed since the run began: row {index + 1} is another. Put the file"
            " back and go on, or start a new run"
        )
