"""What a completion's sandbox begins with, and what is left of it at the end: files, named from `/workspace`.

Not here: how they get in and out (rollout/agent_sessions.py), what a score makes of them (rl/tasks).
"""

import hashlib

import msgspec

from rollforward.sandbox.command_records import SnapshotRecord


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """What the sandbox of one completion holds before its first call."""

    files: dict[str, bytes] = {}
    """Contents by path, relative to /workspace or absolute."""
    image: str = "host"
    """Name of an image of the configuration."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that have run in it before, once for all completions of a step that begin alike: each begins with the
    state that they left."""

    @property
    def digest(self) -> str:
        """Hex digest by which another workspace is noticed."""
        entries: tuple[object, ...] = (self.image, sorted(self.files.items()))
        if self.prepare:
            entries = (*entries, self.prepare)
        return hashlib.blake2b(msgspec.msgpack.encode(entries), digest_size=16).hexdigest()


class BegunWith(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared state that a completion's sandbox began with."""

    directory: str
    """Of prepared states, where it lies; the same on every node."""
    record: SnapshotRecord
    """Which it is."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What was left in the sandbox of a completion at the paths that its task names."""

    files: dict[str, bytes] = {}
    """Contents by path, as the task names them; what was not there, or could not be taken, is left out."""
    problem: str = ""
    """Of each path at which something was that could not be taken, why: the policy's doing, for a person."""
    begun_with: BegunWith | None = None
    """Where its task has `prepare`."""
