"""Schema of the sandbox: which functions a model may call, and what one call may use up. Read by `sandbox/`."""

from typing import Annotated, Literal

import msgspec

_MIB = 1 << 20


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Python function that a model may call; it runs in the sandbox and nowhere else.

    Its docstring is what the model reads about it, its annotations (str, int, float, bool, list, dict, and lists of
    these) and defaults are its parameters. What it returns is the answer: a text, or a value that is written as JSON.
    `FINAL = True` in its file makes it one that ends a completion, like `submit`.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
    """Name of the function, which is the name that the model calls it by."""
    file: str | None = None
    """Python file with the function; it may import the standard library. null: the shipped tool of that name
    (`sandbox/tools/<name>.py`).
    """
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 5.0
    """Seconds of wall time for one call; then it is killed, and the model is told so."""
    max_output_chars: Annotated[int, msgspec.Meta(ge=64, le=1 << 20)] = 2000
    """A longer answer loses its middle."""


KeptSubstrate = Literal["container", "gvisor", "microvm", "fullvm"]
"""What isolates a sandbox that lasts (`substrate.py`); `gvisor` is a container with isolation=gvisor."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one sandbox, and one command in it, may use up."""

    wall_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] = 30.0
    """Seconds of wall time of a command that names none; then everything it has started is killed."""
    cpu_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] = 30.0
    """Seconds of computing that each process of a command may use."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=16 * _MIB)] = 512 * _MIB
    """Memory of all processes of the sandbox together, its files not counted."""
    processes: Annotated[int, msgspec.Meta(ge=4, le=4096)] = 64
    """Processes and threads of the sandbox at one time."""
    disk_bytes: Annotated[int, msgspec.Meta(ge=64 << 10)] = 64 * _MIB
    """Everything that it writes, wherever that is. The files lie in memory."""
    files: Annotated[int, msgspec.Meta(ge=64, le=1 << 22)] = 16384
    """Files and directories that it makes."""
    output_bytes: Annotated[int, msgspec.Meta(ge=64, le=16 * _MIB)] = 64 << 10
    """Of each output stream of a command; a longer one loses its middle, is read to its end all the same, and its
    length is told."""


class LayersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the layers of images are kept, and what one may have."""

    dir: str = "~/.cache/rollforward/layers"
    """The store, of each machine: a directory that processes and runs share. `rollforward sandbox layers` lists it and
    makes room.
    """
    max_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 16 << 30
    """Of one layer, unpacked: what has more is refused, whatever it says of itself."""
    max_files: Annotated[int, msgspec.Meta(ge=1)] = 1 << 20
    """Directories, files and links of one layer."""


class ContainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sandboxes that a completion keeps from its first call to its last: where they are, how many, and what one may use
    up.
    """

    limits: Limits = Limits()
    """What one may use up."""
    images: dict[str, tuple[str, ...]] = {}
    """Images by name, each a list of layers that are stacked read-only, the lowest first: a directory, a tar archive
    (plain, gzip or zstd), an OCI layout (`DIR` or `DIR#NAME`, all layers of that image), or `layer:DIGEST` for one that
    is in the store. Base, workspace and toolkit are layers of their own, so that each changes by itself. `host` is
    there without: this machine's /usr and its Python.
    """
    layers: LayersConfig = LayersConfig()
    """Where layers are kept."""
    actors: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Sandbox actors of the run, spread over the nodes; each has a supervisor process that its sandboxes belong to."""
    resources: dict[str, Annotated[float, msgspec.Meta(gt=0.0)]] = {}
    """What a node must have for a sandbox actor, such as `{CPU: 4}`, in Ray's names."""
    max_sandboxes: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    """Sandboxes of one supervisor at one time; further ones wait."""
    warm: Annotated[int, msgspec.Meta(ge=0, le=256)] = 2
    """Sandboxes that are kept ready beyond those in use."""
    lease_s: Annotated[float, msgspec.Meta(ge=1.0, le=86400.0)] = 300.0
    """A sandbox whose owner gave no sign of life for so long is ended with all that belongs to it. A successor of the
    owner finds it until then, so it is longer than a replica takes to come up again.
    """
    create_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    """Seconds that a new sandbox is waited for, room for it included."""
    attempts: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    """How often something that is safe to repeat is tried before it is an infra failure: making a sandbox, asking one
    again. A command whose outcome is unknown is never repeated but in a sandbox that was restored (`on_lost`), where
    nothing of it is left.
    """
    snapshots: Literal["never", "drain", "turn"] = "never"
    """When the state of a completion's sandbox is kept beside its command log. `drain`: when the replica that uses it
    is told to leave. `turn`: after every turn too, while the policy thinks.
    """
    on_lost: Literal["fail", "restore"] = "fail"
    """What becomes of a completion whose sandbox is lost. `fail`: it is an infra failure, but where the last snapshot
    has all that was done. `restore`: the last snapshot, or the beginning, is restored in another sandbox, and the
    commands after it are done again; if one ends otherwise than the first time, it is an infra failure after all.
    """
    max_snapshot_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, lt=1 << 30)] = 256 * _MIB
    """Of one snapshot; a sandbox that has more is not kept."""
    break_after: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """So many infra failures in a row and a supervisor gets no new sandboxes for `break_s` seconds."""
    break_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 30.0
    """Seconds after which it is tried again."""
    runsc: str = ""
    """Path of gVisor's program, for tasks with `isolation: gvisor`. Empty: the `runsc` on PATH."""
    trusted_code: bool = False
    """Whether what runs in the sandboxes means no harm. false: a machine that cannot enforce every limit is an error at
    the start. true: it is said what is not enforced, and the run goes on.
    """
    keep_log_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """Command logs of steps that a checkpoint covers are kept up to so many bytes, the newest first; and as many bytes
    of the states that `prepare` left, without which a log can be read and not be done again."""
    inject_failures: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of completions whose sandbox is killed at a command of theirs, both chosen by the request's seed: a drill
    of what infra failures do to a run. 0 in earnest.
    """


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tools run and what one call may use up. The fields of its own are for tasks whose `substrate` is
    `function`.
    """

    workers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2
    """Calls that run at once in each replica; each has a warm process of its own. The rest wait."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MIB)] = 512 * _MIB
    """Address space of each process of a call, the interpreter included."""
    max_processes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 4
    """Processes and threads of a call, its own included."""
    tmp_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 16 * _MIB
    """Size of a call's /tmp, the only place where it can write."""
    max_argument_bytes: Annotated[int, msgspec.Meta(ge=64, le=64 * _MIB)] = 64 << 10
    """Arguments that are longer as JSON are refused, and the model is told so."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    """Seconds in which a warm process must be ready, its tools imported."""
    container: ContainerConfig = ContainerConfig()
    """Sandboxes of tasks whose `substrate` is `container`, `microvm` or `fullvm`."""
