"""Images of sandboxes: layers that are stacked read-only, and what bubblewrap and the template are told of them.

The image `host` is there without being named: this machine's /usr and its Python, with users, links and mount points of
its own instead of this machine's /etc. Layers are in the machine's store (`layers.py`), where each is once.
"""

import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.errors import LayerError, SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.inside import root
from rollforward.sandbox.layers import Layer, LayerStore
from rollforward.sandbox.layers_files import mounting_command, probe
from rollforward.sandbox.types import SandboxSpec, Snapshot, SnapshotKind

HOST: Final = "host"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_LAYERS: Final = 64
_DEVICES: Final = ("zero", "full", "random")
_MOUNT_POINTS: Final = ("dev", "proc")
"""Where a sandbox mounts something over what its image has."""
_DEFAULT: Final = LayersConfig()
_SHOWN_DIGITS: Final = 16


class Images:
    """The images that sandboxes can be made of. Their layers are made, where they are not there, by the constructor,
    which may take minutes; they stay while this process lives.

    Attributes:
        store: where they are.

    Raises:
        SandboxUnavailableError: a name or a layer cannot be used.
    """

    def __init__(self, layers: Mapping[str, tuple[str, ...]], config: LayersConfig = _DEFAULT) -> None:
        self.store = LayerStore(config)
        try:
            self._layers = {name: self._checked(name, sources) for name, sources in layers.items()}
        except BaseException:
            self.store.close()
            raise
        unique = {layer.digest: layer for stack in self._layers.values() for layer in stack}
        self._unique = [unique[digest] for digest in sorted(unique)]

    def _checked(self, name: str, sources: tuple[str, ...]) -> list[Layer]:
        field = f"sandbox.container.images.{name}"
        if name == HOST or _NAME.fullmatch(name) is None:
            raise SandboxUnavailableError(
                f"{field}: an image's name has lower-case letters, digits, '.', '_' and '-', and is not {HOST!r}."
                " Rename it"
            )
        try:
            found = [layer for source in sources for layer in self.store.layers(source)]
        except LayerError as error:
            raise LayerError(f"{field}: {error}") from None
        if not 0 < len(found) <= _MAX_LAYERS:
            raise SandboxUnavailableError(
                f"{field} has {len(found)} layers; an image has 1 to {_MAX_LAYERS}. Merge or name some"
            )
        for layer in found:
            for point in _MOUNT_POINTS:
                if _is_odd(layer.directory / point):
                    raise LayerError(
                        f"{field}: in layer {layer.digest} /{point} is no directory, and a sandbox has one of its own"
                        " there. Leave it out of the layer"
                    )
        return found

    def names(self) -> list[str]:
        """All names, `host` among them."""
        return sorted({HOST, *self._layers})

    def request(self, name: str) -> dict[str, Any]:
        """What the template is told of an image.

        Raises:
            SandboxUnavailableError: there is none of this name.
        """
        if name == HOST:
            return {"image": [root.HOST], "binds": host_directories()}
        if name not in self._layers:
            raise SandboxUnavailableError(
                f"there is no image {name!r}; there are {', '.join(self.names())}. Name one of them, or add it to"
                " sandbox.container.images"
            )
        return {"image": [*(_place(layer) for layer in reversed(self._layers[name])), root.FRAME], "binds": []}

    def layers(self, name: str) -> list[Layer]:
        """An image's layers, the lowest first; none of `host`.

        Raises:
            SandboxUnavailableError: there is none of this name.
        """
        self.request(name)
        return list(self._layers.get(name, ()))

    def digest(self, name: str) -> str:
        """What a snapshot of a sandbox of the image lies on: equal for equal layers, in whatever run and on whatever
        machine. Of `host` it is that word, for this machine's /usr is not looked at.

        Raises:
            SandboxUnavailableError: there is none of this name.
        """
        stack = self.layers(name)
        if not stack:
            return HOST
        return hashlib.blake2b(" ".join(layer.digest for layer in stack).encode(), digest_size=16).hexdigest()

    def check_snapshot(self, snapshot: Snapshot, spec: SandboxSpec) -> None:
        """Refuse a snapshot that a sandbox cannot begin with.

        Raises:
            SandboxFileError: it was taken on another image, or is one of a machine and the sandbox is none.
            SandboxUnavailableError: there is no image of that name.
        """
        if snapshot.image != self.digest(spec.image):
            raise SandboxFileError(
                f"sandbox: the snapshot lies on image {snapshot.image}, and {spec.image} is {self.digest(spec.image)}"
                " here; a sandbox begins with a snapshot of its own image alone. Have the same layers there"
            )
        if snapshot.kind is SnapshotKind.MACHINE and spec.substrate in ("container", "gvisor"):
            raise SandboxFileError("sandbox: the snapshot is one of a machine, and a container begins with files alone")

    def report(self) -> str:
        """How containers see layers, for people."""
        return probe().report if self._unique else "none"

    def prefix(self) -> list[str]:
        """Words before the command of bubblewrap, by which it sees layers as mounted files where this machine can."""
        kind = probe().kind if self._unique else None
        if kind is None:
            return []
        return mounting_command([(self.store.layer_file(it, kind), it.directory) for it in self._unique], kind)

    def options(self) -> Iterator[str]:
        """Options of bubblewrap that show the layers, devices and mount points to the template."""
        for device in _DEVICES:
            yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
        for target, name in (("/proc/self/fd", "fd"), *((f"/proc/self/fd/{n}", s) for n, s in enumerate(_STREAMS))):
            yield from ("--symlink", target, f"/dev/{name}")
        yield from ("--perms", "0755", "--dir", "/dev/shm", "--perms", "0755", "--dir", root.BOX)
        yield from ("--proc", "/proc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives")
        yield from ("--perms", "0755", "--dir", "/images")
        for layer in self._unique:
            yield from ("--ro-bind", str(layer.directory), _place(layer))


_STREAMS: Final = ("stdin", "stdout", "stderr")


def host_directories() -> list[str]:
    """Directories of this machine that the image `host` shows."""
    found = ["/usr", *(name for name in ("/bin", "/lib", "/lib64", "/sbin") if _is_directory(name))]
    prefix = os.path.realpath(sys.base_prefix)
    return found if Path(prefix).is_relative_to("/usr") else [*found, prefix]


def _is_directory(name: str) -> bool:
    return os.path.isdir(name) and not os.path.islink(name)


def _place(layer: Layer) -> str:
    """Where the template sees a layer; short, because overlay takes a page of names at most."""
    return f"/images/{layer.digest[:_SHOWN_DIGITS]}"


def _is_odd(path: Path) -> bool:
    try:
        return not stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
