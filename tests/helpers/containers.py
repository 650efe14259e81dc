"""Containers for tests without an event loop of their own."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollforward.sandbox.cgroups import Hierarchies
from rollforward.sandbox.config import KeptSubstrate, LayersConfig, Limits, ToolConfig
from rollforward.sandbox.container import Container, ContainerSubstrate
from rollforward.sandbox.gvisor import GVisorSubstrate
from rollforward.sandbox.images import Images
from rollforward.sandbox.types import Call, CallResult, ExecRequest, ExecResult, SandboxSpec

T = TypeVar("T")

GVISOR: tuple[KeptSubstrate, ...] = ("gvisor",) if shutil.which("runsc") else ()
"""Names gVisor, where it is found: what isolates containers beside namespaces, for tests that run on each."""

SMALL = Limits(wall_s=20.0, memory_bytes=128 << 20, processes=32, disk_bytes=4 << 20, files=512, output_bytes=4096)


class World:
    """A substrate, its event loop, and short words for what tests do with it. A context manager."""

    def __init__(
        self,
        tools: list[ToolConfig],
        images: dict[str, tuple[str, ...]] | None = None,
        hierarchies: Hierarchies | None = None,
        layers: LayersConfig = LayersConfig(),  # noqa: B008 - frozen
        substrate: KeptSubstrate = "container",
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.tools = tuple(tools)
        self.number = 0
        self.name: KeptSubstrate = substrate
        self.label = f"test-{os.getpid()}-{id(self)}"
        self.substrate = {"container": ContainerSubstrate, "gvisor": GVisorSubstrate}[substrate](
            Images(images or {}, layers),
            label=self.label,
            max_sandboxes=400,
            hierarchies=hierarchies,
        )
        self.report = self.do(self.substrate.start())

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(what, 240))

    def spec(self, limits: Limits = SMALL, image: str = "host") -> SandboxSpec:
        return SandboxSpec(substrate=self.name, image=image, limits=limits, tools=self.tools)

    def create(self, limits: Limits = SMALL, *, image: str = "host", snapshot: bytes | None = None) -> Container:
        self.number += 1
        return self.do(self.substrate.create(f"c-{self.number}", self.spec(limits, image), snapshot=snapshot))

    def sh(self, container: Container, script: str, **more: Any) -> ExecResult:
        return self.do(container.exec(ExecRequest(argv=("sh", "-c", script), **more)))

    def python(self, container: Container, code: str, **more: Any) -> ExecResult:
        return self.do(container.exec(ExecRequest(argv=("python3", "-c", code), **more)))

    def call(self, container: Container, tool: str, **arguments: Any) -> CallResult:
        return self.do(container.call(Call(tool=tool, arguments=arguments)))

    def close(self) -> None:
        self.do(self.substrate.close())
        self.loop.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
