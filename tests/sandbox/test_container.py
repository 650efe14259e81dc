"""Proves: a container keeps its files between commands, each command's end has its status, and nothing is left of one.

Does not prove: what a command can reach.
"""

from collections.abc import Iterator

import pytest

from rollforward.sandbox.container import Container
from rollforward.sandbox.errors import GoneCause
from rollforward.sandbox.types import CallStatus, ExecStatus
from tests.helpers.containers import World
from tests.helpers.sandboxes import is_gone, tools_in


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tools_in(tmp_path_factory.mktemp("tools"))) as world:
        yield world


@pytest.fixture
def container(world: World) -> Iterator[Container]:
    container = world.create()
    yield container
    world.do(container.kill())


def test_files_stay_from_one_command_to_the_next_and_calls_see_them(world: World, container: Container) -> None:
    assert world.sh(container, "echo one > file; mkdir -p a/b; echo $((1 + 1))").stdout == b"2\n"
    assert world.sh(container, "cat file").stdout == b"one\n"
    assert world.call(container, "run", code="answer = open('file').read() + os.getcwd()").text == "one\n/workspace"
    assert world.call(container, "calculator", expression="6 * 7").text == "42"


def test_a_killed_container_is_gone_with_all_that_belonged_to_it(world: World) -> None:
    container = world.create()
    pid, groups = container.pid, container.cgroup
    assert not is_gone(pid)
    assert groups
    world.do(container.kill())
    world.do(container.kill())
    assert is_gone(pid)
    assert [path for path in groups if path.exists()] == []
    assert container.died.result() == GoneCause.CLOSED
    assert world.sh(container, "true").status == ExecStatus.SANDBOX_DEAD
    assert world.call(container, "calculator", expression="1").status == CallStatus.INFRA
