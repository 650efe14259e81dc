"""An environment whose answers are a function of the turn's tokens, in any order and after any delay."""

import hashlib
import random
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np

from rollforward.rollout.environment import Ending, Observation, SandboxCounts, failed_observation
from rollforward.rollout.types import Int32Array, Request, RequestId


class ScriptedEnvironment:
    """Three of four turns call; the answer is 1 to 5 tokens from a hash of the turn.

    Args:
        vocab_size: answers are ids in [2, vocab_size).
        order: None answers at once and in order; a number seeds delays and orders.
        broken: requests whose answers fail.
    """

    def __init__(self, vocab_size: int, *, order: int | None = None, broken: Collection[RequestId] = ()) -> None:
        self._vocab_size = vocab_size
        self._random = None if order is None else random.Random(order)
        self._broken = broken
        self._pending: list[Observation] = []
        self.begun: list[tuple[RequestId, int]] = []
        self.ended: list[tuple[RequestId, int]] = []
        self.num_waits = 0

    def is_call(self, request: Request, turn_ids: Int32Array) -> bool:
        return _digest(turn_ids)[0] % 4 != 0

    def resume(self, request: Request, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        """Nothing is left by an earlier life."""
        assert position == turn - 1, "that of the last answer"

    def end(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        assert position == turn - 1, "that of the last answer"
        self.ended.append((request.id, turn))

    def results(self, identities: Sequence[RequestId]) -> dict[RequestId, Ending]:
        return {}

    def keep(self, within_s: float) -> Future[int]:
        nothing: Future[int] = Future()
        nothing.set_result(0)
        return nothing

    def counts(self) -> SandboxCounts:
        return SandboxCounts()

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        assert self.is_call(request, turn_ids)
        assert position == turn - 1, "that of the last answer, also where an earlier life had it"
        assert all(waiting.id != request.id for waiting in self._pending)
        self.begun.append((request.id, turn))
        if request.id in self._broken:
            self._pending.append(failed_observation(request.id, "scripted"))
            return
        self._pending.append(Observation(id=request.id, token_ids=self.answer(turn_ids), command_position=turn))

    def answer(self, turn_ids: Int32Array) -> Int32Array:
        digest = _digest(turn_ids)
        length = 1 + digest[1] % 5
        return np.array([2 + byte % (self._vocab_size - 2) for byte in digest[2 : 2 + length]], dtype=np.int32)

    def collect(self, *, block: bool) -> list[Observation]:
        self.num_waits += block
        if block:
            assert self._pending, "nothing to wait for"
        if self._random is None:
            answers, self._pending = self._pending, []
            return answers
        self._random.shuffle(self._pending)
        count = self._random.randint(1 if block else 0, len(self._pending))
        answers, self._pending = self._pending[:count], self._pending[count:]
        return answers

    def wake(self) -> None:
        """Nobody ever waits here."""

    def close(self) -> None:
        self._pending.clear()


def _digest(turn_ids: Int32Array) -> bytes:
    return hashlib.blake2b(turn_ids.tobytes(), digest_size=16).digest()
