"""What a supervisor asks of processes and of whoever makes them; rollout/placement.py has Ray's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollforward.rollout.drain_file import Notices
from rollforward.rollout.replica import Beat
from rollforward.rollout.types import Request


class Worker(Protocol):
    """A process that holds a replica, as its supervisor sees it: a call returns at once what can be waited for.

    ``beat`` and ``drain`` are answered while another call works. The others are asked one after another.
    """

    def beat(self) -> object:
        """Ask for a ``Beat``; the first one is answered when the process is up."""
        ...

    def open(self) -> object:
        """Ask to open the replica: its log is recovered, older processes are fenced."""
        ...

    def log_problems(self) -> object:
        """Ask for ``Replica.log_problems``."""
        ...

    def load_weights(self, directory: Path) -> object:
        """Ask for ``Replica.load_weights``."""
        ...

    def acknowledge(self) -> object:
        """Ask for ``Replica.acknowledge``."""
        ...

    def generate(self, requests: Sequence[Request]) -> object:
        """Ask for ``Replica.generate``."""
        ...

    def log_stats(self) -> object:
        """Ask for ``Replica.log_stats``."""
        ...

    def retire(self, before_step: int) -> object:
        """Ask for ``Replica.retire``."""
        ...

    def drain(self, deadline_s: float) -> object:
        """Ask for ``Replica.drain``."""
        ...

    def close(self) -> object:
        """Ask for ``Replica.close``."""
        ...

    def met(self, beat: Beat) -> None:
        """Learn from its first sign of life where the process is."""
        ...

    def kill(self) -> None:
        """End the process as surely as can be done from here; it may be gone already."""
        ...


class Host(Protocol):
    """Where processes come from and how answers are waited for."""

    def start(self, index: int) -> Worker:
        """Begin a new process for a replica and return at once."""
        ...

    def wait(self, calls: Sequence[object], timeout_s: float) -> Sequence[object]:
        """Return the calls that have an answer, as soon as one has; none after the timeout."""
        ...

    def result(self, call: object) -> Any:
        """Return the answer of a call that has one.

        Raises:
            WorkerLostError: the process, its node or the answer is gone.
            RolloutLostError: there is no place for the process.
        """
        ...

    def lacking(self) -> str | None:
        """Return what no place that is left has and a process needs, with the way out; None where one has it."""
        ...

    def notices(self, workers: Mapping[str, Worker]) -> Notices:
        """Return which of these processes are somewhere that is being taken away."""
        ...
