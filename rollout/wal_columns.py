"""Optional columns of STEP records on their way to requests: for each token any number of values (routes, kept sets).

Here: arrays only. Not here: which request asked for what and what a missing column means (rollout/wal_recovery.py,
rollout/wal_runs.py).

Letters: T tokens.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import Int32Array

Int64Array = npt.NDArray[np.int64]


class Ragged:
    """For each of T tokens any number of values. Immutable.

    Example: counts_T [2, 0, 1], values [a, b, c]: the first token has a and b, the third c.
    """

    def __init__(self, counts_T: Int32Array, values: npt.NDArray[Any]) -> None:
        """Args:
        counts_T: [T] int32, >= 0.
        values: [sum of counts, ...].
        """
        self.counts_T = counts_T
        self.values = values
        self._starts: Int64Array = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_T, dtype=np.int64)])

    def part(self, start: int, stop: int) -> "Ragged":
        """Returns the tokens [start, stop)."""
        return Ragged(self.counts_T[start:stop], self.values[self._starts[start] : self._starts[stop]])

    def then(self, later: "Ragged") -> "Ragged":
        """Returns these tokens and then the later ones."""
        if not len(self.counts_T):
            return later
        if not len(later.counts_T):
            return self
        return Ragged(np.concatenate([self.counts_T, later.counts_T]), np.concatenate([self.values, later.values]))

    def is_same(self, other: "Ragged") -> bool:
        """Whether counts and values are equal."""
        return np.array_equal(self.counts_T, other.counts_T) and np.array_equal(self.values, other.values)


class RaggedColumn:
    """Collects one optional column over frames; `finish` puts it in order in one pass."""

    def __init__(self) -> None:
        """Starts with nothing collected."""
        self._parts: list[tuple[npt.NDArray[np.int32], Int64Array, Int32Array, npt.NDArray[Any]]] = []

    def check(self, values: npt.NDArray[Any]) -> None:
        """Raises WalUsageError when a frame's values have another width than those before."""
        if self._parts and self._parts[0][3].shape[1:] != values.shape[1:]:
            raise WalUsageError(
                f"STEP has values of shape {list(values.shape[1:])} in a column of {list(self._parts[0][3].shape[1:])}"
            )

    def add(
        self,
        runs: npt.NDArray[np.int32],
        positions: Int64Array,
        counts: Int32Array,
        values: npt.NDArray[Any],
        known: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Takes a frame's column.

        Args:
            runs, positions: [n], of each row that counts its run and its token's number in the run.
            counts: [m], of every row.
            values: [sum of counts, ...].
            known: [m], which rows count; None for all.
        """
        if known is not None:
            values = values[np.repeat(known, counts)]
            counts = counts[known]
        self._parts.append((runs, positions, counts, values))

    def finish(self, starts: Int64Array, num_tokens: int) -> Ragged | None:
        """Returns the column over all tokens, or None when no frame had it.

        Args:
            starts: number of each run's first token.
            num_tokens: of all runs.
        """
        if not self._parts:
            return None
        counts_T = np.zeros(num_tokens, np.int32)
        for runs, positions, counts, _ in self._parts:
            counts_T[starts[runs] + positions] = counts
        first_T = np.cumsum(counts_T, dtype=np.int64) - counts_T
        sample = self._parts[0][3]
        values = np.empty((int(counts_T.sum(dtype=np.int64)), *sample.shape[1:]), sample.dtype)
        for runs, positions, counts, part in self._parts:
            before = np.cumsum(counts, dtype=np.int64) - counts
            target = np.repeat(first_T[starts[runs] + positions] - before, counts) + np.arange(len(part))
            values[target] = part
        self._parts.clear()
        return Ragged(counts_T, values)
