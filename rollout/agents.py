"""Who runs the calls of completions that keep a sandbox: a protocol, and the one in the replica's own process.

    ToolEnvironment --AgentTurn--> Agents.answer --> TurnAnswer      replica | AgentActor (placement.py)
                    --AgentTurn--> Agents.finish --> Ending

Both may be asked again with the same turn, by the same process or a successor: what ran is answered from memory or from
the command log and runs once. Not here: what an answer is made of (agent_sessions.py), tokens (tool_environment.py).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from rollforward.rollout.agent_sessions import AgentSessions, AgentSettings, AgentTurn, TurnAnswer
from rollforward.rollout.environment import Ending

_T = TypeVar("_T")


class Agents(Protocol):
    """Runs calls. Any thread; a future never raises for what a call, a sandbox or a process did, but is cancelled by
    ``close``."""

    def resume(self, turn: AgentTurn) -> None:
        """Hold what an earlier process left of a completion; returns at once."""
        ...

    def answer(self, turn: AgentTurn) -> Future[TurnAnswer]:
        """Run a turn's calls, in order."""
        ...

    def finish(self, turn: AgentTurn) -> Future[Ending]:
        """Run the calls of the last turn, if it has some, take what is submitted, and give the sandbox back."""
        ...

    def keep(self, within_s: float) -> Future[int]:
        """Keep the states of the sandboxes that are held, as far as settings and time allow; how many are kept."""
        ...

    def close(self) -> None:
        """Let go: what runs is cut off here and goes on for a successor. Safe to call twice."""
        ...


class AgentsAccess(Protocol):
    """How a replica comes to its agents; it crosses processes."""

    def connect(self, owner: str) -> Agents:
        """Return them, for an owner of that name."""
        ...


class LocalAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Agents in the process that asks. Implements ``AgentsAccess``."""

    settings: AgentSettings
    """What they need."""

    def connect(self, owner: str) -> Agents:
        """See ``AgentsAccess``."""
        return LocalAgents(self.settings, owner=owner)


class LoopThread:
    """An event loop in a thread of its own. Any thread may use it. States: running -> closed."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> Future[_T]:
        """Start a coroutine there."""
        return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._loop.is_closed()

    def close(self) -> None:
        """End it; nothing may run there any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LocalAgents:
    """Agents on an event loop in a thread of this process. Implements ``Agents``."""

    def __init__(self, settings: AgentSettings, *, owner: str) -> None:
        """Start the thread."""
        self._loop = LoopThread("agents")
        self._sessions = AgentSessions(settings, owner=owner)

    def resume(self, turn: AgentTurn) -> None:
        """See ``Agents``."""
        self._loop.run(self._sessions.resume, turn)

    def answer(self, turn: AgentTurn) -> Future[TurnAnswer]:
        """See ``Agents``."""
        return self._loop.run(self._sessions.answer, turn)

    def finish(self, turn: AgentTurn) -> Future[Ending]:
        """See ``Agents``."""
        return self._loop.run(self._sessions.finish, turn)

    def keep(self, within_s: float) -> Future[int]:
        """See ``Agents``."""
        return self._loop.run(self._sessions.keep, within_s)

    def close(self) -> None:
        """See ``Agents``."""
        if not self._loop.is_closed:
            self._loop.run(self._sessions.close).result()
            self._loop.close()
