"""Interrupted = uninterrupted, and what tells when it is not: thousands of rollouts of a toy model through real logs.

Strongest first: bits of every response; published tokens that a log lacks; the law of lengths. The same checks find
fleets that are broken on purpose, at the sample sizes at which such a bias can be seen at all. Lengths are lognormal as
in practice (median 3,000, sigma 1, cut at 32,768 tokens), scaled by 1/80, and so are intervals between interruptions.
What this does not prove: the real model's bits over a restart (rollout/engine), durability against power cuts.
"""

import functools
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollforward.rollout.bias import (
    NOT_DELIVERED,
    BiasTotals,
    LengthBias,
    alarm_text,
    length_bias,
    with_step,
)
from rollforward.rollout.wal_recovery import recover
from tests.helpers.hazard import hazard_by_position
from tests.helpers.toy_fleet import (
    Book,
    Fleet,
    Outcome,
    Policy,
    Toy,
    ToyModel,
    geometric,
    lognormal,
    serve,
    toy,
    undisturbed,
)

LENGTHS = lognormal(37.5, 410)
MEMORYLESS = geometric(300, 4000)
SIGNIFICANT_Z = 1.96
ALARM_Z = 4.0


def _run(root: Path, asked: Toy, policy: Policy, kill_every: float, **sizes: Any) -> tuple[Outcome, LengthBias]:
    outcome = Fleet(root, asked, policy, **sizes).run(kill_every=kill_every, seed=2)
    return outcome, length_bias(*outcome.columns())


@functools.cache
def _reference(model: ToyModel, num_requests: int, run_seed: int) -> tuple[Toy, Book]:
    """Requests and what becomes of them undisturbed; read only."""
    asked = toy(model, num_requests, run_seed=run_seed)
    return asked, undisturbed(asked)


def _control(model: ToyModel, num_requests: int) -> npt.NDArray[np.int64]:
    """Lengths of an arm that nothing interrupts, with draws of its own."""
    return _reference(model, num_requests, 1000)[1].delivered


def _welch(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    variance = left.var(ddof=1) / left.size + right.var(ddof=1) / right.size
    return float((left.mean() - right.mean()) / math.sqrt(variance))


def _delivered(outcome: Outcome) -> npt.NDArray[np.int64]:
    return outcome.book.delivered[outcome.book.delivered != NOT_DELIVERED]


def _num_equal(book: Book, reference: Book) -> int:
    return sum(book.response(row) == reference.response(row) for row in range(len(book.delivered)))


def _rings(bias: LengthBias) -> bool:
    return alarm_text(with_step(BiasTotals(), bias), ALARM_Z) is not None


def test_ten_thousand_rollouts_under_random_kills_are_the_undisturbed_ones(tmp_path: Path) -> None:
    """A request of mean length is interrupted with probability 0.25; the alarm has nothing to say."""
    asked = toy(LENGTHS, 10_000, run_seed=1)
    outcome, bias = _run(tmp_path, asked, Policy.ROLL_FORWARD, 200, replicas=40, slots=128)
    assert outcome.kills > 80
    assert _num_equal(outcome.book, undisturbed(asked)) == 10_000
    assert outcome.published_lost == 0
    assert (bias.natural.num_attempts, bias.num_delivered, bias.z) == (10_000, 10_000, 0.0)


@pytest.mark.parametrize(
    ("policy", "num_requests", "interval", "beyond"),
    [
        (Policy.RESTART, 1765, 625, ALARM_Z),
        pytest.param(Policy.DROP, 1765, 625, ALARM_Z, marks=pytest.mark.slow),
        (Policy.RESTART, 407, 250, ALARM_Z),
        (Policy.DROP, 407, 250, ALARM_Z),
        (Policy.RESTART, 132, 100, SIGNIFICANT_Z),
        (Policy.DROP, 132, 100, SIGNIFICANT_Z),
    ],
)
def test_restarting_and_dropping_are_found(
    tmp_path: Path, policy: Policy, num_requests: int, interval: float, beyond: float
) -> None:
    """At the sizes at which a t-test against an undisturbed arm has a power of 0.8: intervals of 50,000, 20,000 and
    8,000 tokens. The alarm compares the arm with its own censored attempts; 132 responses are few for its threshold."""
    asked, expected = _reference(LENGTHS, num_requests, 2)
    outcome, bias = _run(tmp_path, asked, policy, interval, replicas=num_requests // 30, slots=15)
    assert _num_equal(outcome.book, expected) < 0.99 * num_requests
    assert bias.z < -beyond
    assert _rings(bias) or beyond < ALARM_Z
    assert bias.shift / bias.natural.mean < -0.05
    # The instrument knows what the fleet hid: the mean of the law is 61 tokens.
    assert abs(bias.natural.mean - 61) < 3 * math.sqrt(bias.natural.variance)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_restarting_fleet_ends_sooner_at_every_position(tmp_path: Path) -> None:
    """Hazard by position of what is delivered against that of an undisturbed arm, chi-square over 5 buckets (16.7 is
    exceeded by chance once in 200); the fleet that rolls forward has the arm's."""
    edges_K = np.array([0, 20, 40, 80, 160, 410])
    chi_square: dict[Policy, float] = {}
    for policy in (Policy.RESTART, Policy.ROLL_FORWARD):
        asked = toy(LENGTHS, 1765, run_seed=3)
        outcome, _ = _run(tmp_path / policy, asked, policy, 250, replicas=147, slots=6)
        lengths, control = _delivered(outcome), _control(LENGTHS, 1765)
        ends_AK, drawn_AK = np.swapaxes(
            [hazard_by_position(arm, np.ones(arm.size, np.bool_), edges_K) for arm in (lengths, control)], 0, 1
        )
        expected_AK = drawn_AK * (ends_AK.sum(0) / drawn_AK.sum(0))
        chi_square[policy] = float(((ends_AK - expected_AK) ** 2 / expected_AK).sum())
    assert chi_square[Policy.RESTART] > 16.7 > chi_square[Policy.ROLL_FORWARD]


@pytest.mark.parametrize(
    "policy", [Policy.EARLY, Policy.REDRAW, pytest.param(Policy.ROLL_FORWARD, marks=pytest.mark.slow)]
)
def test_with_a_log_that_lags_64_steps_only_early_publication_is_biased(tmp_path: Path, policy: Policy) -> None:
    """Geometric lengths, a crash every 200 steps. Rolled back and drawn anew, the law stays, if ends are rolled back
    too; published before they are durable they are not, and the rest gets a second chance to end."""
    asked, expected = _reference(MEMORYLESS, 192, 4)
    outcome, bias = _run(tmp_path, asked, policy, 200, replicas=8, slots=24, lag=64)
    welch = _welch(_delivered(outcome), _control(MEMORYLESS, 192))
    num_equal = _num_equal(outcome.book, expected)
    assert outcome.kills > 50
    if policy is Policy.EARLY:
        assert outcome.published_lost > 1000
        assert num_equal < 170
        assert welch < -SIGNIFICANT_Z
        assert _rings(bias)
        assert bias.shift / bias.natural.mean < -0.2
    else:
        assert outcome.published_lost == 0
        assert abs(welch) < SIGNIFICANT_Z
        assert (bias.num_delivered, bias.z) == (192, 0.0)
        assert (num_equal == 192) == (policy is Policy.ROLL_FORWARD)


def test_killed_processes_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL of a child at random instants. What it published is kept here: every token is in the log, and every
    response is the undisturbed one, delivered once."""
    asked = toy(LENGTHS, 1000, run_seed=5)
    reference = undisturbed(asked)
    rng = random.Random(6)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.toy_fleet"])
    published = np.zeros(len(asked.requests), np.int64)
    delivered: list[int] = []
    kills = 0
    while len(delivered) < len(asked.requests):
        pipe, other = context.Pipe(duplex=False)
        child = context.Process(target=serve, args=(tmp_path, asked, tuple(delivered), other))
        child.start()
        other.close()
        life_s = rng.uniform(0.01, 0.15) if kills < 12 else math.inf
        deadline_s: float | None = None
        while True:
            if deadline_s is not None and time.monotonic() > deadline_s and child.is_alive():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                deadline_s = math.inf
                kills += 1
            if deadline_s is not None and not pipe.poll(0.001):
                continue
            try:
                message = np.frombuffer(pipe.recv_bytes(), np.int64)
            except EOFError:
                break
            deadline_s = time.monotonic() + life_s if deadline_s is None else deadline_s
            if message.size == 1:
                delivered.append(int(message[0]))
            else:
                rows, counts = message.reshape(2, -1)
                published[rows] = np.maximum(published[rows], counts)
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        requests = recover(tmp_path / "engine-0").requests
        for row, request in enumerate(asked.requests):
            held = requests.get(request.id)
            count = 0 if held is None else len(held.token_ids)
            assert published[row] <= count
            if held is not None:
                assert np.array_equal(held.token_ids, reference.tokens[row, :count])
                assert held.behavior_logprobs.tobytes() == reference.logprobs[row, :count].tobytes()
                assert row not in delivered or (held.is_finished and count == reference.delivered[row])
    assert sorted(delivered) == list(range(len(asked.requests)))
    assert kills >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", [Policy.RESTART, Policy.DROP])
def test_power_at_the_sample_sizes_of_the_table(tmp_path: Path, policy: Policy) -> None:
    """Repetitions at an interval of 20,000 tokens and 407 responses: Welch finds about 0.8 of them, the comparison with
    the arm's own censored attempts all, and most of them beyond the alarm's threshold."""
    welch, own = [], []
    for seed in range(12):
        asked = toy(LENGTHS, 407, run_seed=100 + seed)
        outcome = Fleet(tmp_path / str(seed), asked, policy, replicas=34, slots=6).run(kill_every=250, seed=seed)
        control = undisturbed(toy(LENGTHS, 407, run_seed=1000 + seed)).delivered
        welch.append(_welch(_delivered(outcome), control))
        own.append(length_bias(*outcome.columns()).z)
    assert np.mean(np.array(welch) < -SIGNIFICANT_Z) >= 0.5
    assert np.mean(np.array(own) < -SIGNIFICANT_Z) == 1.0
    assert np.mean(np.array(own) < -ALARM_Z) >= 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_forty_thousand_rollouts_under_denser_kills(tmp_path: Path) -> None:
    asked = toy(LENGTHS, 40_000, run_seed=7)
    outcome, bias = _run(tmp_path, asked, Policy.ROLL_FORWARD, 50, replicas=400, slots=32)
    assert outcome.kills > 2000
    assert _num_equal(outcome.book, undisturbed(asked)) == 40_000
    assert (outcome.published_lost, bias.z) == (0, 0.0)
