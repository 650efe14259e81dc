"""Images of containers: directories that are stacked read-only, and what bubblewrap and the template are told of them.

The image `host` is there without being named: this machine's /usr and its Python, with users, links and mount points of
its own instead of this machine's /etc.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.inside import root

HOST: Final = "host"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_LAYERS: Final = 64
_DEVICES: Final = ("zero", "full", "random")


class Images:
    """The images that containers can be made of.

    Raises:
        SandboxUnavailableError: a name or a layer cannot be used.
    """

    def __init__(self, layers: Mapping[str, tuple[str, ...]]) -> None:
        self._layers = {name: self._checked(name, paths) for name, paths in layers.items()}

    def _checked(self, name: str, paths: tuple[str, ...]) -> list[Path]:
        field = f"sandbox.container.images.{name}"
        if name == HOST or _NAME.fullmatch(name) is None:
            raise SandboxUnavailableError(
                f"{field}: an image's name has lower-case letters, digits, '.', '_' and '-', and is not {HOST!r}."
                " Rename it"
            )
        if not 0 < len(paths) <= _MAX_LAYERS:
            raise SandboxUnavailableError(
                f"{field} has {len(paths)} layers; an image has 1 to {_MAX_LAYERS}. Merge or name some"
            )
        found = [Path(path).expanduser() for path in paths]
        if absent := [str(path) for path in found if not path.is_dir()]:
            raise SandboxUnavailableError(f"{field}: {', '.join(absent)} is no directory. Correct the path")
        return [path.resolve() for path in found]

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
        count = len(self._layers[name])
        return {"image": [*(f"/images/{name}/{i}" for i in reversed(range(count))), root.FRAME], "binds": []}

    def options(self) -> Iterator[str]:
        """Options of bubblewrap that show the layers, devices and mount points to the template."""
        for device in _DEVICES:
            yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
        for target, name in (("/proc/self/fd", "fd"), *((f"/proc/self/fd/{n}", s) for n, s in enumerate(_STREAMS))):
            yield from ("--symlink", target, f"/dev/{name}")
        yield from ("--perms", "0755", "--dir", "/dev/shm", "--perms", "0755", "--dir", root.BOX)
        yield from ("--proc", "/proc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives")
        yield from ("--perms", "0755", "--dir", "/images")
        for name, paths in self._layers.items():
            yield from ("--perms", "0755", "--dir", f"/images/{name}")
            for index, path in enumerate(paths):
                yield from ("--ro-bind", str(path), f"/images/{name}/{index}")


_STREAMS: Final = ("stdin", "stdout", "stderr")


def host_directories() -> list[str]:
    """Directories of this machine that the image `host` shows."""
    found = ["/usr", *(name for name in ("/bin", "/lib", "/lib64", "/sbin") if _is_directory(name))]
    prefix = os.path.realpath(sys.base_prefix)
    return found if Path(prefix).is_relative_to("/usr") else [*found, prefix]


def _is_directory(name: str) -> bool:
    return os.path.isdir(name) and not os.path.islink(name)
