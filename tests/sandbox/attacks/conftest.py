"""Where attacks run: one sandbox of functions and one world of containers for each file of tests."""

import os
from collections.abc import Iterator

import pytest

from rollforward.sandbox.function import FunctionSandbox
from tests.helpers.attacks import CALLS, SECRET, InContainer, InFunction, Way, attacked_tools
from tests.helpers.containers import World

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def secret() -> Iterator[str]:
    """The name of a variable of the environment from which the sandboxes are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "canary")
        yield SECRET


@pytest.fixture(scope="module")
def world(secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    assert os.environ[secret]
    with World(list(attacked_tools(tmp_path_factory.mktemp("tools")))) as world:
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


@pytest.fixture(params=["function", "call", "command"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each of the three ways in which a policy's code runs."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["call", "command"])
def inside(request: pytest.FixtureRequest) -> InContainer:
    """The two of them that are in a container."""
    return request.getfixturevalue(request.param)
