"""Virtual machines for tests without an event loop of their own; a test that cannot have them says what is missing."""

import asyncio
import os
import shutil
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.errors import GoneCause
from rollforward.sandbox.fullvm import FullVmSubstrate
from rollforward.sandbox.images import Images
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.microvm import MicroVmSubstrate
from rollforward.sandbox.types import Call, CallResult, ExecRequest, ExecResult, SandboxSpec
from tests.helpers.containers import SMALL

T = TypeVar("T")

_NEEDED = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "dpkg-deb": "dpkg"}
_SUBSTRATES = {"microvm": MicroVmSubstrate, "fullvm": FullVmSubstrate}


def need_machines() -> None:
    """A skip that names the package, where a tool is missing that machines need."""
    for tool, package in _NEEDED.items():
        if shutil.which(tool) is None and shutil.which(tool, path="/usr/sbin:/sbin") is None:
            pytest.skip(f"{tool} is not installed (Debian package {package})")


class MachineWorld:
    """A substrate of machines, its event loop, and short words for what tests do with it. A context manager."""

    def __init__(
        self, substrate: str, tools: Sequence[ToolConfig] = (), images: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        need_machines()
        self.loop = asyncio.new_event_loop()
        self.name, self.tools, self.number = substrate, tuple(tools), 0
        self.substrate = _SUBSTRATES[substrate](
            Images(images or {}), label=f"test-{os.getpid()}-{id(self)}", max_sandboxes=64
        )
        self.report = self.do(self.substrate.start())

    def do(self, what: Coroutine[Any, Any, T], within_s: float = 240.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(what, within_s))

    def do_died(self, machine: Instance) -> GoneCause:
        """Why it is gone, once it is."""
        return self.loop.run_until_complete(asyncio.wait_for(asyncio.shield(machine.died), 60.0))

    def create(self, limits: Limits = SMALL, *, image: str = "host", **begin: bytes) -> Instance:
        self.number += 1
        spec = SandboxSpec(substrate=self.name, image=image, limits=limits, tools=self.tools)  # type: ignore[arg-type]
        return self.do(self.substrate.create(f"m-{self.number}", spec, **begin))

    def sh(self, machine: Instance, script: str, **more: Any) -> ExecResult:
        return self.do(machine.exec(ExecRequest(argv=("sh", "-c", script), **more)))

    def python(self, machine: Instance, code: str, **more: Any) -> ExecResult:
        return self.do(machine.exec(ExecRequest(argv=("python3", "-c", code), **more)))

    def call(self, machine: Instance, tool: str, **arguments: Any) -> CallResult:
        return self.do(machine.call(Call(tool=tool, arguments=arguments)))

    def close(self) -> None:
        self.do(self.substrate.close())
        self.loop.close()

    def __enter__(self) -> "MachineWorld":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
