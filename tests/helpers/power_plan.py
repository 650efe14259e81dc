"""What a power-cut guest writes, as a pure function of the number of records: guest and host both know it.

Three slots, each with one request after another. The plan is one endless sequence of events: OPEN of a slot's request,
STEP with a token for every slot, CLOSE of the requests that have all their tokens. What was recovered must be the state
after some number of events, and that number at least the acknowledged one.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

SLOTS = 3
PROMPT_IDS = (7, 8, 9)

Held = dict[int, tuple[int, bool]]
"""By request number: how many tokens it has, and whether it is closed."""


class Event(NamedTuple):
    """A record of the plan."""

    kind: str
    """open, step or close."""
    rows: tuple[tuple[int, int, int], ...]
    """(slot, request number, position of the token) of each request that it touches."""


def length(number: int) -> int:
    """How many tokens a request has."""
    return 2 + number * 7919 % 53


def token(number: int, position: int) -> int:
    """What is sampled there."""
    return (number * 1_000_003 + position * 7919 + 1) % 2**31


def logprob(number: int, position: int) -> float:
    """Its log-prob, exact in 32 bits."""
    return -(token(number, position) % 4096) / 256


def digest(token_ids: np.ndarray, logprobs: np.ndarray) -> str:
    """A name for tokens and log-probs, bit for bit."""
    return hashlib.blake2b(
        token_ids.astype("<i4").tobytes() + logprobs.astype("<f4").tobytes(), digest_size=8
    ).hexdigest()


def expected_digest(number: int, num_tokens: int) -> str:
    """The digest of the first tokens of a request."""
    positions = range(num_tokens)
    return digest(
        np.array([token(number, position) for position in positions], np.int64),
        np.array([logprob(number, position) for position in positions], np.float64),
    )


def events(start: int = 0) -> Iterator[Event]:
    """The plan from its event number `start` on."""
    return islice(_events(), start, None)


def state_after(num_events: int) -> Held:
    """What the log holds after so many events."""
    held: Held = {}
    for event in islice(_events(), num_events):
        _apply(held, event)
    return held


def find_state(held: Held) -> int | None:
    """After how many events the log holds exactly this, or None: then it is no prefix of what was written."""
    wanted = _weight(held)
    now: Held = {}
    for number, event in enumerate(_events()):
        if _weight(now) >= wanted:
            return number if now == held else None
        _apply(now, event)
    raise AssertionError("the plan has no end")


def _events() -> Iterator[Event]:
    in_slot: list[tuple[int, int] | None] = [None] * SLOTS
    number = 0
    while True:
        for slot in range(SLOTS):
            if in_slot[slot] is None:
                in_slot[slot] = number, 0
                yield Event("open", ((slot, number, 0),))
                number += 1
        rows = tuple((slot, *held) for slot, held in enumerate(in_slot) if held is not None)
        yield Event("step", rows)
        for slot, running, position in rows:
            in_slot[slot] = running, position + 1
            if position + 1 == length(running):
                in_slot[slot] = None
                yield Event("close", ((slot, running, position + 1),))


def _apply(held: Held, event: Event) -> None:
    for _, number, position in event.rows:
        match event.kind:
            case "open":
                held[number] = 0, False
            case "step":
                held[number] = position + 1, False
            case _:
                held[number] = held[number][0], True


def _weight(held: Held) -> int:
    """Grows with every event."""
    return sum(1 + num_tokens + is_closed for num_tokens, is_closed in held.values())
