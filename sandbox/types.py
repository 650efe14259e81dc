"""Records of calls and commands: what is asked of a sandbox and what comes back. Their bytes are the substrates'."""

from enum import StrEnum
from typing import Any

import msgspec

from rollforward.sandbox.config import KeptSubstrate, Limits, ToolConfig


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is told about a tool."""

    name: str
    """Name to call it by."""
    description: str
    """What it does, in prose."""
    parameters: dict[str, Any]
    """JSON schema of its arguments, of type object."""
    is_final: bool = False
    """Whether a completion ends with its call: nothing answers it."""


class CallStatus(StrEnum):
    """How a call ended. Every status but INFRA is the caller's own doing and an answer to it."""

    OK = "ok"
    """The function returned."""
    ERROR = "error"
    """The function raised, or the call named no tool or had arguments that it does not take."""
    TIMEOUT = "timeout"
    """It was killed at its deadline."""
    OOM = "oom"
    """It asked for more memory than a call has."""
    KILLED = "killed"
    """Its process ended without an answer: it left, crashed, or was killed by something that it did."""
    INFRA = "infra"
    """The sandbox failed, more than once. The call says nothing about who made it and must never be scored."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool."""

    tool: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Keyword arguments, values as JSON has them."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended and what it said."""

    status: CallStatus
    """How it ended."""
    text: str
    """What the caller is told: the answer, or why there is none. The same for every run of a call that ends the same
    way: no times, no paths, no process ids. Empty where status is INFRA.
    """
    truncated: bool = False
    """Whether the middle of the text was left out."""
    total_bytes: int = 0
    """UTF-8 bytes of the text before that."""
    seconds: float = 0.0
    """Wall time from the start of the call to its result, without waiting for a worker."""
    detail: str = ""
    """For logs, never for the caller: the cause of a KILLED or INFRA."""


class ExecStatus(StrEnum):
    """How a command ended. SANDBOX_DEAD and INFRA say nothing about who gave it."""

    OK = "ok"
    """Exit status 0."""
    EXIT = "exit"
    """Another exit status, or a signal of its own doing."""
    TIMEOUT = "timeout"
    """Killed at its deadline, or for the computing time that it used."""
    OOM = "oom"
    """Killed because the sandbox was out of memory."""
    DISK_FULL = "disk_full"
    """It failed, and the sandbox has no room for files."""
    KILLED = "killed"
    """Ended together with its sandbox, because somebody closed that."""
    SANDBOX_DEAD = "sandbox_dead"
    """The sandbox was gone before the command reached it: it did not run."""
    INFRA = "infra"
    """The platform failed it; whether it ran is unknown unless `detail` says so."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command. The sandbox's user runs it in a process group, a PID namespace and a session of its own."""

    argv: tuple[str, ...]
    """Program, looked up in PATH, and its arguments; at least the program. Surrogates stand for bytes that are no
    UTF-8."""
    stdin: bytes = b""
    """Its standard input; empty: the end of file at once."""
    env: dict[str, str] = {}
    """Variables beside PATH, HOME, USER, LANG and TERM; nothing comes from the host."""
    cwd: str = "/workspace"
    """Where it starts."""
    wall_s: float | None = None
    """Seconds of wall time; None: the sandbox's."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended and what it wrote. Bytes are exact; text is asked for by `.text()`."""

    status: ExecStatus
    """How it ended."""
    exit_code: int | None = None
    """0 to 255; negative: the signal that ended it; None where it has none."""
    stdout: bytes = b""
    """The first and last bytes, `Limits.output_bytes` at most."""
    stderr: bytes = b""
    """Likewise."""
    stdout_bytes: int = 0
    """Bytes that it wrote in all."""
    stderr_bytes: int = 0
    """Likewise."""
    seconds: float = 0.0
    """Wall time from its start to its end."""
    cpu_s: float = 0.0
    """Computing time of it and of what it waited for; of one that was killed at its deadline, also of what it had
    started and still ran."""
    detail: str = ""
    """For logs, never for the model."""

    @property
    def is_truncated(self) -> bool:
        """Whether some of the output is left out."""
        return len(self.stdout) < self.stdout_bytes or len(self.stderr) < self.stderr_bytes

    def text(self, errors: str = "replace") -> str:
        """Standard output as UTF-8."""
        return self.stdout.decode("utf-8", errors)


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is made of. Two that are equal are as good as each other."""

    substrate: KeptSubstrate = "container"
    """What isolates it; `substrate.py` says how."""
    image: str = "host"
    """Name of an image of the configuration; `host` is this machine's /usr, read-only, and its Python."""
    limits: Limits = Limits()
    """What it may use up."""
    tools: tuple[ToolConfig, ...] = ()
    """Functions that `call` runs inside, as the sandbox's user."""
    labels: dict[str, str] = {}
    """For people and for `list`: run, task, trajectory."""


class SnapshotKind(StrEnum):
    """What of a sandbox a snapshot holds."""

    FILES = "files"
    """What was written into it, but for /dev/shm; no process. Between two commands of a container there is none."""
    MACHINE = "machine"
    """Its disk, memory and processors: what runs in it goes on where it was."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's state, from which any number of others of the same spec can begin."""

    kind: SnapshotKind
    """What it holds."""
    image: str
    """Digest of what it lies on: only a sandbox of the same image can begin with it."""
    data: bytes
    """The substrate's own; of a container an uncompressed tar (`inside/snapshots.py`)."""


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call."""

    result: CallResult
    """What it said; the same in every life of the trajectory. Status INFRA: it says nothing about the policy."""
    position: int
    """Sequence number of the record that it rests on."""
    is_replayed: bool
    """Whether the log answered, and not the sandbox."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Files that were taken out of a sandbox."""

    files: dict[str, bytes]
    """Path, as it was asked for, -> content; those at which there is nothing, or what cannot be taken, are left out."""
    problem: str
    """Why some cannot be taken, or none, by the doing of what ran in the sandbox; empty where nothing was wrong."""
    failure: str
    """Why there are none, by the platform's: an infra failure. Empty where nothing was wrong."""
    position: int
    """Sequence number of the record that it rests on."""
    is_replayed: bool
    """Whether the log answered, and not the sandbox."""


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as its supervisor sees it."""

    sandbox_id: str
    """Its identity."""
    instance: str
    """Names this incarnation: 16 hexadecimal digits."""
    owner: str
    """Who created or adopted it last."""
    spec: SandboxSpec
    """What it was made of."""
    platform: str
    """What isolates it here: its substrate, and of a virtual machine what runs its processor, kvm or tcg."""
    age_s: float
    """Seconds since it was created."""
    lease_s: float
    """Seconds until it is ended, if nobody renews it."""


CREATE_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes of `PoolStats.create_s`; one more class holds what took longer."""


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a supervisor since it started, and what it has now. Those of several add up."""

    held: int = 0
    """Sandboxes that somebody has now."""
    warm: int = 0
    """Sandboxes that are ready and nobody's."""
    waiting: int = 0
    """Questions for one that wait for room now."""
    ending: int = 0
    """Sandboxes that are being taken down now."""
    stuck: int = 0
    """Sandboxes that could not be ended within their time; it is tried again."""
    created: int = 0
    """Sandboxes that were handed out."""
    warm_hits: int = 0
    """Of these, those that had been ready."""
    failed: int = 0
    """Sandboxes that could not be made."""
    busy: int = 0
    """Questions for one that found no room in time."""
    adopted: int = 0
    """Sandboxes that a successor took over."""
    closed: int = 0
    """Sandboxes whose owner closed them."""
    expired: int = 0
    """Sandboxes whose lease ran out."""
    oom: int = 0
    """Sandboxes that ran out of memory and ended."""
    lost: int = 0
    """Sandboxes that died for another reason."""
    unfresh: int = 0
    """Warm sandboxes that were no longer as new and were thrown away."""
    create_s: tuple[int, ...] = (0,) * (len(CREATE_BOUNDS_S) + 1)
    """How many were handed out within each of CREATE_BOUNDS_S seconds of the question, the wait for room included."""

    def __add__(self, other: "PoolStats") -> "PoolStats":
        """Both together."""
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__ if name != "create_s"
        }
        return PoolStats(**sums, create_s=tuple(a + b for a, b in zip(self.create_s, other.create_s, strict=True)))
