"""A fleet of replicas whose model is a table: real logs, the engine's keyed draws, batched requests, kills at random.

The length of a response has the law of `lognormal` or `geometric`; every other token depends on the one before, so a
token lost, doubled or drawn from another key changes all that follow. One policy rolls forward, as the engine does. The
others are broken on purpose, so that checks have something to find: RESTART, DROP and EARLY, which publishes before it
is durable. REDRAW goes on from the log with fresh randomness: other bits, the same law.

A kill is `abandon`, which loses what is queued, or death of the whole process (`serve`). With a lag, what a replica
draws reaches its log that many steps later; a kill loses that too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.rollout.bias import NOT_DELIVERED
from rollforward.rollout.engine.sampler import draw_tokens, signed_seed
from rollforward.rollout.types import FailureType, Request, RequestId, SamplingParams, StopReason, request_seed
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover

EOS = 0
VOCAB = 8
PROCESS = WalConfig(level="process")


class Policy(StrEnum):
    """What a replica does with requests that a kill interrupted."""

    ROLL_FORWARD = "roll_forward"
    REDRAW = "redraw"
    RESTART = "restart"
    DROP = "drop"
    EARLY = "early"


class ToyModel:
    """Next-token distributions from the position and the token before."""

    def __init__(self, end_T: npt.NDArray[Any]) -> None:
        """Take the probability [T] that each sampled token ends the response; T is the budget."""
        self.budget = len(end_T)
        self._log_end_T = torch.from_numpy(np.log(end_T)).float()
        self._log_on_T = torch.from_numpy(np.log1p(-end_T)).float()
        table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB - 1))
        self._next_VV = torch.log_softmax(torch.from_numpy(table), 1).float()

    def draw(
        self, seed_B: npt.NDArray[np.int64], before_B: npt.NDArray[Any], count_B: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Draw each row's next token, number `count`, after a prompt of one token; also its log-prob."""
        count = torch.from_numpy(count_B)
        others = self._next_VV[torch.from_numpy(before_B)] + self._log_on_T[count].unsqueeze(1)
        logits = torch.cat((self._log_end_T[count].unsqueeze(1), others), 1)
        tokens = draw_tokens(logits, torch.from_numpy(seed_B), count + 1, torch.ones(len(count_B)))
        return tokens.numpy().astype(np.int32), token_logprob(logits, tokens, temperature=1.0)[0].numpy()


def lognormal(median: float, budget: int) -> ToyModel:
    """Lengths of a rounded-up lognormal of sigma 1, cut at the budget."""
    survival = np.array([1.0, *(0.5 - 0.5 * _erf(np.log(np.arange(1, budget + 1) / median) / np.sqrt(2)))])
    return ToyModel(1 - survival[1:] / survival[:-1])


def geometric(mean: float, budget: int) -> ToyModel:
    """Every token ends the response with the same probability."""
    return ToyModel(np.full(budget, 1 / mean))


def _erf(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return torch.erf(torch.from_numpy(x)).numpy()


class Toy(NamedTuple):
    """A model and the requests for it."""

    model: ToyModel
    requests: list[Request]


def toy(model: ToyModel, num_requests: int, *, run_seed: int) -> Toy:
    """Requests in groups of 8, each keyed as the trainer keys them."""
    sampling = SamplingParams(max_new_tokens=model.budget)
    return Toy(
        model,
        [
            Request(
                id=RequestId(0, index // 8, index % 8),
                prompt_ids=np.array([1 + index // 8 % 7], np.int32),
                seed=request_seed(run_seed, 0, index // 8, index % 8),
                sampling=sampling,
                policy_version=1,
            )
            for index in range(num_requests)
        ],
    )


@dataclass
class Book:
    """Tokens of all requests, a row each."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    count: npt.NDArray[np.int64]
    delivered: npt.NDArray[np.int64]
    """Length as delivered, or NOT_DELIVERED."""

    @classmethod
    def of(cls, toy: Toy) -> "Book":
        n, budget = len(toy.requests), toy.model.budget
        return cls(
            np.full((n, budget), -1, np.int32),
            np.zeros((n, budget), np.float32),
            np.zeros(n, np.int64),
            np.full(n, NOT_DELIVERED, np.int64),
        )

    def response(self, row: int) -> tuple[bytes, bytes]:
        """Bits of a delivered response."""
        length = max(int(self.delivered[row]), 0)
        return self.tokens[row, :length].tobytes(), self.logprobs[row, :length].tobytes()


def undisturbed(toy: Toy) -> Book:
    """Draw every request alone in its row, all at once, without a log."""
    book = Book.of(toy)
    seeds = np.array([signed_seed(request.seed) for request in toy.requests])
    before = np.array([request.prompt_ids[0] for request in toy.requests])
    rows = np.arange(len(toy.requests))
    for position in range(toy.model.budget):
        tokens, book.logprobs[rows, position] = toy.model.draw(seeds[rows], before[rows], book.count[rows])
        book.tokens[rows, position] = before[rows] = tokens
        book.count[rows] += 1
        over = (tokens == EOS) | (book.count[rows] == toy.model.budget)
        book.delivered[rows[over]] = book.count[rows[over]]
        rows = rows[~over]
        if not rows.size:
            break
    return book


@dataclass
class Outcome:
    """What a fleet delivered, and what its logs tell."""

    book: Book
    kills: int = 0
    num_drawn: int = 0
    published_lost: int = 0
    """Published tokens that the log did not hold after a kill."""
    lengths: list[int] = field(default_factory=list[int])
    is_censored: list[bool] = field(default_factory=list[bool])
    delivered: list[int] = field(default_factory=list[int])

    def columns(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Attempts of the logs as `length_bias` takes them."""
        return np.array(self.lengths), np.array(self.is_censored), np.array(self.delivered)


class _Replica:
    """One log and the rows that it has in flight."""

    def __init__(self, directory: Path, rows: Sequence[int], num_slots: int, lag: int) -> None:
        self.directory, self.rows, self.lag = directory, list(rows), lag
        self.waiting = deque(rows)
        self.row_of_slot = np.full(num_slots, -1, np.int64)
        self.closing: deque[tuple[int, int]] = deque()  # seq of the CLOSE, row
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self.step = 0
        self.last_seq: int
        self.writer: WalWriter
        self.log: RecoveredLog
        self.open()

    def open(self) -> None:
        self.writer, self.log = open_log(self.directory, stream="engine-0", config=PROCESS)
        assert (self.log.problems, self.log.failed) == ((), {})
        self._held.clear()
        self.closing.clear()
        self.row_of_slot[:] = -1
        self.last_seq = 0

    @property
    def is_done(self) -> bool:
        return not (self.waiting or self.closing or self._held or (self.row_of_slot >= 0).any())

    def append(self, append: Callable[[], int], then: Callable[[int], None] | None = None) -> None:
        """Let the log have a record when the lag has passed."""

        def do() -> None:
            self.last_seq = append()
            if then is not None:
                then(self.last_seq)

        self._held.append((self.step + self.lag, do))

    def tick(self) -> None:
        self.step += 1
        while self._held and self._held[0][0] < self.step:
            self._held.popleft()[1]()


class Fleet:
    """Replicas in lockstep; rows are requests."""

    def __init__(
        self,
        root: Path,
        toy: Toy,
        policy: Policy,
        *,
        replicas: int = 1,
        slots: int = 64,
        lag: int = 0,
        done: Sequence[int] = (),
        publish: Callable[[npt.NDArray[Any], npt.NDArray[Any]], None] | None = None,
        deliver: Callable[[int], None] | None = None,
    ) -> None:
        """Open the logs under `root` and go on from what they hold.

        Args:
            root: of one directory a replica.
            toy: model and requests.
            policy: what becomes of interrupted requests.
            replicas, slots: sizes; requests are dealt round.
            lag: steps that a record stays in memory.
            done: rows that an earlier process delivered.
            publish: told rows and counts of tokens when they are published.
            deliver: told rows that are delivered.
        """
        self.toy, self.policy = toy, policy
        self.book, self.outcome = (book := Book.of(toy)), Outcome(book)
        self.published = np.zeros(len(toy.requests), np.int64)
        self._publish, self._on_delivery = publish, deliver
        self._tell = deque[tuple[int, _Replica, npt.NDArray[Any], npt.NDArray[Any]]]()
        self._seeds = np.array([signed_seed(request.seed) for request in toy.requests])
        self._before = np.array([request.prompt_ids[0] for request in toy.requests], np.int64)
        self._attempt, self._lives = np.zeros(len(toy.requests), np.int64), np.zeros(len(toy.requests), np.int64)
        self._is_dropped = np.zeros(len(toy.requests), np.bool_)
        left = [row for row in range(len(toy.requests)) if row not in set(done)]
        self._row_of = {request.id: row for row, request in enumerate(toy.requests)}
        self.replicas = [
            _Replica(root / f"engine-{index}", left[index::replicas], slots, lag) for index in range(replicas)
        ]
        for replica in self.replicas:
            begun = [row for row in replica.rows if toy.requests[row].id in replica.log.requests]
            replica.waiting = deque(row for row in replica.rows if row not in set(begun))
            self._go_on(replica, begun)

    def run(self, *, kill_every: float | None = None, seed: int = 0) -> Outcome:
        """Deliver everything; each replica is killed with probability 1 / kill_every before each of its steps."""
        generator = np.random.default_rng(seed)
        while not all(replica.is_done for replica in self.replicas):
            for replica in self.replicas:
                if kill_every is not None and not replica.is_done and generator.random() < 1 / kill_every:
                    self._kill(replica)
            self._step()
        for replica in self.replicas:
            replica.writer.close()
            self._read(recover(replica.directory))
        self._read_unlogged()
        return self.outcome

    def _step(self) -> None:
        for replica in self.replicas:
            for slot in np.flatnonzero(replica.row_of_slot < 0).tolist():
                if not replica.waiting:
                    break
                self._open(replica, replica.waiting.popleft(), slot)
        slots = [np.flatnonzero(replica.row_of_slot >= 0) for replica in self.replicas]
        rows = np.concatenate([replica.row_of_slot[held] for replica, held in zip(self.replicas, slots, strict=True)])
        if rows.size:
            self._draw(slots, rows)
        for replica in self.replicas:
            replica.tick()
            while replica.closing and replica.closing[0][0] <= replica.writer.durable_seq:
                self._deliver(replica.closing.popleft()[1])
        while self._tell and self._tell[0][0] <= self._tell[0][1].writer.durable_seq:
            _, _, told, counts = self._tell.popleft()
            self._say(told, counts)

    def _draw(self, slots: Sequence[npt.NDArray[Any]], rows: npt.NDArray[Any]) -> None:
        book = self.book
        tokens, logprobs = self.toy.model.draw(self._seeds[rows], self._before[rows], book.count[rows])
        book.tokens[rows, book.count[rows]], book.logprobs[rows, book.count[rows]] = tokens, logprobs
        book.count[rows] += 1
        self._before[rows] = tokens
        self.outcome.num_drawn += len(rows)
        over = (tokens == EOS) | (book.count[rows] == self.toy.model.budget)
        if self.policy is Policy.EARLY:
            self._say(rows, book.count[rows].copy())
        start = 0
        for replica, held in zip(self.replicas, slots, strict=True):
            if not held.size:
                continue
            part = slice(start, start + len(held))
            start += len(held)
            self._append_step(replica, held, rows[part], tokens[part], logprobs[part])
            for slot, row in zip(held[over[part]].tolist(), rows[part][over[part]].tolist(), strict=True):
                self._close(replica, slot, row)

    def _append_step(
        self,
        replica: _Replica,
        slots: npt.NDArray[Any],
        rows: npt.NDArray[Any],
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        columns, counts = (slots.astype(np.uint16), tokens.copy(), logprobs.copy()), self.book.count[rows].copy()

        def tell(seq: int) -> None:
            if self.policy is not Policy.EARLY:
                self._tell.append((seq, replica, rows.copy(), counts))

        replica.append(lambda: replica.writer.append_step(*columns, policy_version=1), tell)

    def _open(self, replica: _Replica, row: int, slot: int) -> None:
        replica.row_of_slot[slot] = row
        request, attempt, count = self.toy.requests[row], int(self._attempt[row]), int(self.book.count[row])
        replica.append(lambda: replica.writer.append_open(request, slot=slot, attempt=attempt, resumed_tokens=count))
        if count and (self.book.tokens[row, count - 1] == EOS or count == self.toy.model.budget):
            self._close(replica, slot, row)  # its end was in the log, its CLOSE was not

    def _close(self, replica: _Replica, slot: int, row: int) -> None:
        replica.row_of_slot[slot] = -1
        reason = StopReason.EOS if self.book.tokens[row, self.book.count[row] - 1] == EOS else StopReason.LENGTH
        if self.policy is Policy.EARLY:
            self._deliver(row)
            replica.append(lambda: replica.writer.append_close(slot, reason))
        else:
            replica.append(
                lambda: replica.writer.append_close(slot, reason), lambda seq: replica.closing.append((seq, row))
            )

    def _deliver(self, row: int) -> None:
        assert self.book.delivered[row] == NOT_DELIVERED, f"row {row} is delivered twice"
        self.book.delivered[row] = self.book.count[row]
        if self._on_delivery is not None:
            self._on_delivery(row)

    def _say(self, rows: npt.NDArray[Any], counts: npt.NDArray[Any]) -> None:
        self.published[rows] = counts
        if self._publish is not None:
            self._publish(rows, counts)

    def _kill(self, replica: _Replica) -> None:
        """Lose what is queued and what lags; go on from the log."""
        if self.policy is not Policy.ROLL_FORWARD and replica.last_seq:
            # What the laws are computed from should not depend on how far the writer's thread is.
            replica.writer.wait_durable(replica.last_seq)
        replica.writer.abandon()
        self._tell = deque(one for one in self._tell if one[1] is not replica)
        replica.open()
        self.outcome.kills += 1
        for row in replica.rows:
            held = replica.log.requests.get(self.toy.requests[row].id)
            num_held = 0 if held is None else len(held.token_ids)
            assert held is None or np.array_equal(held.token_ids, self.book.tokens[row, :num_held])
            self.outcome.published_lost += max(0, int(self.published[row]) - num_held)
            self.published[row] = min(self.published[row], num_held)
        waiting = set(replica.waiting)
        self._go_on(replica, [row for row in replica.rows if row not in waiting])

    def _go_on(self, replica: _Replica, rows: Sequence[int]) -> None:
        """Do with rows that were begun what the policy says."""
        again: list[int] = []
        for row in rows:
            if self.book.delivered[row] != NOT_DELIVERED or self._is_dropped[row]:
                continue
            request = self.toy.requests[row]
            held = replica.log.requests.get(request.id)
            count = 0 if held is None else len(held.token_ids)
            if held is not None:
                self.book.tokens[row, :count], self.book.logprobs[row, :count] = held.token_ids, held.behavior_logprobs
                self._attempt[row] = held.attempt
            self.book.count[row] = count
            if held is not None and held.close is not None:
                self._deliver(row)
                continue
            if self.policy is Policy.DROP and held is not None:
                replica.last_seq = replica.writer.append_close_recovered(
                    request.id, StopReason.ABORTED, num_tokens=count, failure=FailureType.INFRA
                )
                self._is_dropped[row] = True
                continue
            if self.policy is Policy.RESTART and held is not None:
                self._attempt[row] += 1
                self.book.count[row] = self.published[row] = 0
            if self.policy is not Policy.ROLL_FORWARD:
                self._lives[row] += 1
                self._seeds[row] = signed_seed(request_seed(request.seed, int(self._lives[row]), 0, 0))
            count = int(self.book.count[row])
            self._before[row] = self.book.tokens[row, count - 1] if count else request.prompt_ids[0]
            again.append(row)
        replica.waiting.extendleft(reversed(again))

    def _read(self, log: RecoveredLog) -> None:
        """Take a log's attempts."""
        assert (log.problems, log.failed) == ((), {})
        outcome = self.outcome
        for attempt in log.earlier_attempts:
            outcome.lengths.append(len(attempt.token_ids))
            outcome.is_censored.append(True)
            outcome.delivered.append(NOT_DELIVERED)
        for identity, newest in log.requests.items():
            outcome.lengths.append(len(newest.token_ids))
            outcome.is_censored.append(newest.close is None or newest.close.stop_reason is StopReason.ABORTED)
            outcome.delivered.append(int(self.book.delivered[self._row_of[identity]]))

    def _read_unlogged(self) -> None:
        """Take what was delivered although no log knows it."""
        missing = (self.book.delivered != NOT_DELIVERED).sum() - sum(
            one != NOT_DELIVERED for one in self.outcome.delivered
        )
        if missing:
            known = {identity for replica in self.replicas for identity in recover(replica.directory).requests}
            for identity, row in self._row_of.items():
                if identity not in known and self.book.delivered[row] != NOT_DELIVERED:
                    self.outcome.lengths.append(0)
                    self.outcome.is_censored.append(True)
                    self.outcome.delivered.append(int(self.book.delivered[row]))


def serve(root: Path, toy: Toy, done: Sequence[int], pipe: Connection) -> None:
    """One replica in a process that may be killed at any instant: tells what it publishes, a message of rows and counts
    for each step and one of a row alone for each delivery."""
    torch.set_num_threads(1)

    def tell(rows: npt.NDArray[Any], counts: npt.NDArray[Any]) -> None:
        pipe.send_bytes(np.stack([rows, counts]).astype(np.int64).tobytes())

    def tell_delivered(row: int) -> None:
        pipe.send_bytes(np.array([row], np.int64).tobytes())

    Fleet(root, toy, Policy.ROLL_FORWARD, done=done, publish=tell, deliver=tell_delivered).run()
    pipe.close()
