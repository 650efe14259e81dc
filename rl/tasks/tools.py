"""The tools of a task, read from their files: what prompts list, and a digest by which a changed file is noticed.

Nothing of a tool runs here; calls are `sandbox/`'s.
"""

import hashlib

import msgspec

from rollforward.rl.tasks.config import TaskOptions
from rollforward.sandbox.toolset import load_tool, tool_source
from rollforward.sandbox.types import ToolSpec


class Toolset(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one task."""

    specs: tuple[ToolSpec, ...]
    """What a model is told about each, in the order of the configuration."""
    listed: tuple[ToolSpec, ...]
    """Those that prompts list: all or none."""
    digest: bytes
    """Of the sources; empty where there are no tools."""


def load_toolset(options: TaskOptions) -> Toolset:
    """Read the tools that a task names.

    Raises:
        ToolError: a file or its function cannot be a tool.
    """
    specs = tuple(load_tool(tool) for tool in options.tools)
    digest = b""
    for tool in options.tools:
        digest = hashlib.blake2b(digest + tool_source(tool).encode(), digest_size=16).digest()
    return Toolset(specs=specs, listed=specs if options.list_tools else (), digest=digest)
