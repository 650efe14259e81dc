"""Sources of tools as a supervisor keeps them: they come with questions, from machines whose files it may not have."""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.types import SandboxSpec


class ToolFiles:
    """A directory of sources named by their hash, so that equal specs have equal tools. One thread."""

    def __init__(self, directory: Path) -> None:
        """Keep where files go; the directory is made with the first."""
        self._directory = directory

    def local(self, spec: SandboxSpec, sources: Mapping[str, str]) -> SandboxSpec:
        """Return the spec with each tool's file at a place of this directory.

        Args:
            spec: as its owner wrote it.
            sources: Python source of its tools by name; a tool without one keeps its file.

        Raises:
            SandboxUnavailableError: there is no room for a file.
        """
        tools = tuple(
            msgspec.structs.replace(tool, file=str(self._keep(sources[tool.name]))) if tool.name in sources else tool
            for tool in spec.tools
        )
        return msgspec.structs.replace(spec, tools=tools)

    def _keep(self, source: str) -> Path:
        data = source.encode("utf-8", "surrogatepass")
        path = self._directory / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.py"
        if path.exists():
            return path
        new = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            new.write_bytes(data)
            os.replace(new, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise SandboxUnavailableError(
                f"a tool's source cannot be kept at {path} ({error.strerror}). Make room there"
            ) from None
        return path
