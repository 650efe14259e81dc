"""States that several trajectories begin with: made once, by one of many; again after a kill; or failed for all."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from rollforward.sandbox import prepared
from rollforward.sandbox.client import SandboxClient, SocketTransport
from rollforward.sandbox.command_log import read_log
from rollforward.sandbox.command_records import SnapshotRecord
from rollforward.sandbox.errors import SandboxBusyError, SandboxConnectionError
from rollforward.sandbox.homes import Home
from rollforward.sandbox.prepared import Preparation
from rollforward.sandbox.types import CallStatus, SandboxSpec
from tests.helpers.sandboxes import wait_for
from tests.helpers.trajectories import CONFIG, FILES, Trajectory, mark, spec_in, supervised

T = TypeVar("T")
COMMANDS = (
    ("sh", "-c", "cat given.txt > effects; echo >> effects"),
    ("sh", "-c", "head -c 90000 /dev/urandom | od > noise; sleep 0.2"),
)


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step_000012"
    made.mkdir()
    return made


def preparation(client: SandboxClient, folder: Path, commands: Sequence[Sequence[str]] = COMMANDS) -> Preparation:
    return Preparation(
        client, folder / "prepared", spec=spec_in(folder), files=FILES, commands=commands, config=CONFIG, sync=False
    )


def asked(home: Home, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
    async def go() -> T:
        async with SandboxClient([SocketTransport(home.socket)], CONFIG, owner="test") as client:
            return await asyncio.wait_for(work(client), 200)

    return asyncio.run(go())


def members(
    home: Home, folder: Path, commands: Sequence[Sequence[str]], names: Sequence[str]
) -> list[tuple[str, bytes]]:
    """What trajectories say and leave that begin alike, all at once."""

    async def whole(client: SandboxClient, name: str) -> tuple[str, bytes]:
        trajectory = Trajectory(home, folder, name)
        session = await trajectory.open(client, begin=preparation(client, folder, commands))
        told = (await session.call("t1c0", mark(name))).result
        assert told.status is CallStatus.OK, session.failure
        collected = await session.collect(["effects", "noise"], max_bytes=1 << 20)
        await session.close()
        assert collected.files["effects"] == b"given\n%s\n" % name.encode()
        return told.text.split()[0], collected.files["noise"]

    async def work(client: SandboxClient) -> list[tuple[str, bytes]]:
        return await asyncio.gather(*(whole(client, name) for name in names))

    return asked(home, work)


def test_members_begin_with_one_state_that_was_made_once(home: Home, folder: Path) -> None:
    names = [f"s12-p{p}-m{m}" for p in range(2) for m in range(3)]
    found = members(home, folder, COMMANDS, names)
    assert {count for count, _ in found} == {"2"}
    assert len({noise for _, noise in found}) == 1, "the random bytes of one preparation"
    assert members(home, folder, COMMANDS, ["s12-p9-m0"])[0] == found[0], "and in a later life too"
    other = members(home, folder, COMMANDS[::-1], ["s12-p8-m0"])
    assert other[0][1] != found[0][1]
    assert len(list((folder / "prepared").glob("*.state"))) == 2
    begin = read_log(folder / "s12-p0-m0.log").history.begin
    assert begin is not None
    assert begin.is_shared


def test_a_later_life_must_begin_alike(home: Home, folder: Path) -> None:
    trajectory = Trajectory(home, folder)

    async def life(client: SandboxClient, commands: Sequence[Sequence[str]] | None, key: str) -> str:
        begin = None if commands is None else preparation(client, folder, commands)
        session = await trajectory.open(client, begin=begin)
        result = (await session.call(key, mark("m"))).result
        await session.detach()
        return result.detail

    assert asked(home, lambda client: life(client, COMMANDS, "t1c0")) == ""
    assert "began" in asked(home, lambda client: life(client, None, "t2c0"))
    assert "began" in asked(home, lambda client: life(client, COMMANDS[:1], "t3c0"))
    assert asked(home, lambda client: life(client, COMMANDS, "t2c0")) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("sh", "-c", "echo no such thing >&2; exit 3"), "ended with status 3: no such thing"),
        (("absent-program",), "ended with status 127"),
    ],
)
def test_a_command_that_fails_is_the_datas_fault_for_all_alike(
    home: Home, folder: Path, command: tuple[str, ...], said: str
) -> None:
    spec = spec_in(folder)

    async def life(client: SandboxClient, name: str) -> tuple[str, bool]:
        begin = Preparation(
            client, folder / "prepared", spec=spec, files={}, commands=[command], config=CONFIG, sync=False
        )
        trajectory = Trajectory(home, folder, name)
        trajectory.spec = spec
        session = await trajectory.open(client, begin=begin)
        result = (await session.call("t1c0", mark("m"))).result
        assert (result.status, result.text) == (CallStatus.INFRA, "")
        await session.close()
        return result.detail, session.is_data_fault

    async def work(client: SandboxClient) -> list[tuple[str, bool]]:
        return await asyncio.gather(*(life(client, f"s12-p0-m{m}") for m in range(3)))

    found = asked(home, work)
    assert len(set(found)) == 1
    assert said in found[0][0]
    assert found[0][1]


def test_a_command_that_is_out_of_time_is_asked_again_and_then_lost_with_nothing_written(
    home: Home, folder: Path
) -> None:
    spec = spec_in(folder)
    spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, wall_s=0.5))
    config = msgspec.structs.replace(CONFIG, attempts=2)

    async def life(client: SandboxClient, name: str) -> tuple[str, bool]:
        commands = [("sh", "-c", "exec sleep 60")]
        begin = Preparation(
            client, folder / "prepared", spec=spec, files={}, commands=commands, config=config, sync=False
        )
        trajectory = Trajectory(home, folder, name)
        trajectory.spec = spec
        session = await trajectory.open(client, begin=begin)
        result = (await session.call("t1c0", mark("m"))).result
        assert (result.status, result.text) == (CallStatus.INFRA, "")
        await session.close()
        return result.detail, session.is_data_fault

    detail, is_data_fault = asked(home, lambda client: life(client, "s12-p0-m0"))
    assert "ended with timeout" in detail
    assert not is_data_fault
    assert not list((folder / "prepared").glob("*.state"))


class Failing:
    """A client, and its sandboxes, of whom nobody answers the first time that each thing is asked."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client
        self.asked: list[str] = []
        self.sandboxes: set[str] = set()

    def _fail_first(self, what: str) -> None:
        self.asked.append(what)
        if self.asked.count(what) == 1:
            raise (SandboxBusyError if what == "create" else SandboxConnectionError)(what)

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Any:
        self.sandboxes.add(sandbox_id)
        self._fail_first("create")
        sandbox = await self._client.create(sandbox_id, spec)

        def asking(name: str) -> Callable[..., Awaitable[Any]]:
            async def ask(*args: Any, **named: Any) -> Any:
                answer = await getattr(sandbox, name)(*args, **named)
                self._fail_first(f"{name} {named.get('key', '')}")  # it has happened, and nobody hears of it
                return answer

            return ask

        names = ("upload", "exec", "snapshot")
        return SimpleNamespace(close=sandbox.close, **{name: asking(name) for name in names})


def test_who_does_not_answer_is_asked_again(home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_PAUSE_S", 0.01)

    async def work(client: SandboxClient) -> tuple[Failing, SnapshotRecord]:
        failing = Failing(client)
        return failing, await preparation(failing, folder).record()  # type: ignore[arg-type]

    failing, record = asked(home, work)
    asks = ["create", "upload ", "exec prepare0", "exec prepare1", "snapshot "]
    assert failing.asked == [one for one in asks for _ in range(2)]
    assert len(failing.sandboxes) == 1
    assert record.is_shared
    assert members(home, folder, COMMANDS, ["s12-p0-m0"])[0][0] == "2", "the first command ran once"


def test_a_state_that_is_too_large_is_the_datas_fault(home: Home, folder: Path) -> None:
    config = msgspec.structs.replace(CONFIG, max_snapshot_bytes=4096)

    async def work(client: SandboxClient) -> tuple[str, bool]:
        begin = Preparation(
            client,
            folder / "prepared",
            spec=spec_in(folder),
            files={},
            commands=COMMANDS[1:],
            config=config,
            sync=False,
        )
        session = await Trajectory(home, folder).open(client, begin=begin)
        result = (await session.call("t1c0", mark("m"))).result
        await session.close()
        return result.detail, session.is_data_fault

    detail, is_data_fault = asked(home, work)
    assert "4096" in detail
    assert is_data_fault


def test_who_is_killed_while_it_prepares_leaves_it_to_the_next(home: Home, folder: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.sandbox.test_prepared import *\n"
        "home, folder = Home(Path(sys.argv[1])), Path(sys.argv[2])\n"
        "members(home, folder, COMMANDS, ['s12-p0-m0'])\n"
    )
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", program, str(home.path), str(folder)], cwd=Path.cwd())
        wait_for(lambda: bool(list((folder / "prepared").glob("*.lock"))))
        time.sleep(0.3)
        child.kill()
        child.wait()
        for path in (folder / "prepared").glob("*.state"):
            path.unlink()  # it was too quick
        for path in folder.glob("*.log"):
            path.unlink()
    found = members(home, folder, COMMANDS, ["s12-p0-m0", "s12-p0-m1"])
    assert len({noise for _, noise in found}) == 1


def test_a_state_that_cannot_be_read_is_made_again(home: Home, folder: Path) -> None:
    members(home, folder, COMMANDS, ["s12-p0-m0"])
    (state,) = (folder / "prepared").glob("*.state")
    state.write_bytes(os.urandom(50))
    members(home, folder, COMMANDS, ["s12-p0-m1"])
