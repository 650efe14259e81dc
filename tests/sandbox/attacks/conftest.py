"""Where attacks run: for each file of tests a sandbox of functions, a world of containers, one of gVisor, and worlds of
machines.
"""

import os
from collections.abc import Iterator

import pytest

from rollforward.sandbox.function import FunctionSandbox
from tests.helpers.attacks import CALLS, SECRET, InContainer, InFunction, Way, attacked_tools
from tests.helpers.containers import GVISOR, World
from tests.helpers.machines import MachineWorld

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def secret() -> Iterator[str]:
    """The name of a variable of the environment from which the sandboxes are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "canary")
        yield SECRET


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, secret: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World | MachineWorld]:
    """Containers; machines where a test is marked `everywhere`."""
    assert os.environ[secret]
    tools, substrate = list(attacked_tools(tmp_path_factory.mktemp("tools"))), getattr(request, "param", "container")
    is_machine = substrate in ("microvm", "fullvm")
    with MachineWorld(substrate, tools) if is_machine else World(tools, substrate=substrate) as world:
        yield world


@pytest.fixture(scope="module")
def function(secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InFunction]:
    assert os.environ[secret]
    with FunctionSandbox(CALLS, attacked_tools(tmp_path_factory.mktemp("tools"))) as sandbox:
        yield InFunction(sandbox)


@pytest.fixture(scope="module")
def call(world: World) -> Iterator[InContainer]:
    way = InContainer(world, is_call=True)
    yield way
    way.renew()


@pytest.fixture(scope="module")
def command(world: World) -> Iterator[InContainer]:
    way = InContainer(world, is_call=False)
    yield way
    way.renew()


@pytest.fixture(scope="module")
def gvisor(secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InContainer]:
    """A command in a container that gVisor isolates: a call is a process of the agent's, which is the same."""
    assert os.environ[secret]
    with World(list(attacked_tools(tmp_path_factory.mktemp("tools"))), substrate="gvisor") as world:
        yield InContainer(world, is_call=False)


@pytest.fixture(scope="module")
def microvm(secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InContainer]:
    """A call in a microVM. A command there is as different from it as in a container: the agent is the same."""
    assert os.environ[secret]
    with MachineWorld("microvm", attacked_tools(tmp_path_factory.mktemp("tools"))) as world:
        yield InContainer(world, is_call=True)


@pytest.fixture(scope="module")
def fullvm(secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InContainer]:
    """A call in a full VM."""
    assert os.environ[secret]
    with MachineWorld("fullvm", attacked_tools(tmp_path_factory.mktemp("tools"))) as world:
        yield InContainer(world, is_call=True)


@pytest.fixture(params=["function", "call", "command", *GVISOR, "microvm", "fullvm"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each of the ways in which a policy's code runs."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["call", "command", *GVISOR, "microvm", "fullvm"])
def inside(request: pytest.FixtureRequest) -> InContainer:
    """Those of them that are in a sandbox that lasts."""
    return request.getfixturevalue(request.param)
