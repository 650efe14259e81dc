"""Proves: a run that was killed while its sandboxes were checked can come again with other limits."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from rollforward.rl import sandboxes
from rollforward.rollout.agent_sessions import AgentSettings
from rollforward.sandbox.client import Sandbox, SocketTransport
from rollforward.sandbox.config import Limits
from rollforward.sandbox.homes import Home
from tests.helpers.agents import TASK
from tests.helpers.trajectories import CONFIG, supervised


@pytest.fixture
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


def test_a_check_that_was_killed_does_not_stand_in_the_way_of_one_with_other_limits(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed_before(sandbox: Sandbox) -> None:
        """Leaves it to its lease, as whoever is killed does."""

    monkeypatch.setattr(Sandbox, "close", killed_before)
    for processes in (20, 21, 20):
        settings = AgentSettings(
            run_dir=str(tmp_path),
            tasks={"files": TASK},
            container=msgspec.structs.replace(CONFIG, limits=Limits(processes=processes)),
            transports=(SocketTransport(home.socket),),
        )
        asyncio.run(sandboxes._check(settings, {"host"}))  # pyright: ignore[reportPrivateUsage]
