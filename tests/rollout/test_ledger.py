"""Proves: the ledger counts what was published, lost, drawn again and changed, by hand-written reports; it reads what a
killed reporter had sent and drops what was cut in two; a replica reports turns and completions at the positions that
the log says, over restarts.
"""

import os
import signal
import socket
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.model.config import ModelConfig
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.errors import LedgerError
from rollforward.rollout.ledger import Counts, Held, Ledger, LedgerClient, LedgerProcess, Report, held
from rollforward.rollout.publication import Publication
from rollforward.rollout.types import ToolUse
from rollforward.rollout.wal_recovery import recover
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.replicas import make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config


def _report(
    tokens: list[int], *, life: str = "a", start: int = 0, logged: int = 0, delivered: bool = True, attempt: int = 0
) -> Report:
    """Log-probs are minus the token."""
    ids = np.array(tokens, np.int32)
    return Report(
        scope="run",
        life=life,
        request="s0-p0-m0",
        attempt=attempt,
        start=start,
        tokens=ids.tobytes(),
        logprobs=(-ids).astype(np.float32).tobytes() if delivered else None,
        num_logged=logged,
    )


def _held(tokens: list[int], logprobs: list[float] | None = None) -> Held:
    ids = np.array(tokens, np.int32)
    return held("run", "s0-p0-m0", ids, np.array([-t for t in tokens] if logprobs is None else logprobs, np.float32))


def _counts(reports: list[Report], left: list[Held]) -> tuple[int, int, int, int]:
    """(published, lost, duplicated, unequal)."""
    ledger = Ledger()
    for report in reports:
        ledger.record(report)
    counts = ledger.count({(one.scope, one.request): one for one in left})
    return counts.published, counts.lost, counts.duplicated, counts.unequal


@pytest.mark.parametrize(
    ("reports", "left", "expected"),
    [
        ([_report([5, 6, 2])], [_held([5, 6, 2])], (3, 0, 0, 0)),
        ([_report([5, 6, 2])], [], (3, 3, 0, 0)),
        ([_report([5, 6, 2])], [_held([5, 6])], (3, 1, 0, 0)),
        ([_report([5, 6, 2])], [_held([5, 7, 2])], (3, 1, 0, 0)),
        ([_report([5, 6, 2])], [_held([5, 6, 2], [-5, -6, -2.5])], (3, 1, 0, 0)),
        # A turn leaves, and then the completion that holds it.
        ([_report([5, 6], delivered=False), _report([5, 6, 2])], [_held([5, 6, 2])], (3, 0, 0, 0)),
        # The next life finds the turn in its log, hands it over once more, and goes on.
        (
            [
                _report([5, 6], delivered=False),
                _report([5, 6], delivered=False, life="b", logged=2),
                _report([5, 6, 2], life="b", logged=2),
            ],
            [_held([5, 6, 2])],
            (3, 0, 0, 0),
        ),
        # It finds half of it and draws the rest again, although it had left; then all of it, which differs.
        ([_report([5, 6]), _report([5, 6, 2], life="b", logged=1)], [_held([5, 6, 2])], (3, 0, 1, 0)),
        ([_report([5, 6]), _report([5, 7, 2], life="b", logged=0)], [_held([5, 7, 2])], (3, 1, 2, 1)),
        # One life delivers twice.
        ([_report([5, 6]), _report([5, 6])], [_held([5, 6])], (2, 0, 2, 0)),
        ([_report([6], start=1), _report([2], start=2, delivered=False)], [_held([5, 6, 2])], (2, 0, 0, 0)),
        # A log-prob of other bits, which compares equal.
        ([_report([0])], [_held([0], [-0.0])], (1, 1, 0, 0)),
    ],
)
def test_counts_by_hand(reports: list[Report], left: list[Held], expected: tuple[int, int, int, int]) -> None:
    assert _counts(reports, left) == expected


def test_runs_do_not_mix() -> None:
    other = msgspec.structs.replace(_report([9]), scope="other", attempt=2)
    ledger = Ledger()
    for report in (_report([5]), other):
        ledger.record(report)
    left = _held([5])
    assert ledger.count({(left.scope, left.request): left}) == Counts(
        published=2, lost=1, duplicated=0, unequal=0, attempts=2
    )


def test_what_a_killed_process_had_sent_is_counted_and_half_a_report_is_not() -> None:
    with LedgerProcess() as process:
        asking = LedgerClient(process.path)
        for index in range(20):
            child = os.fork()
            if child == 0:
                report = msgspec.structs.replace(_report([5, 6, 2]), request=f"s0-p{index}-m0")
                LedgerClient(process.path).report(report)
                channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                channel.connect(str(process.path))
                data = msgspec.msgpack.encode(msgspec.structs.replace(report, request=f"s1-p{index}-m0"))
                channel.sendall(struct.pack("<I", len(data)) + data[: index * len(data) // 20])
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
            assert asking.counts([]).published == 3 * (index + 1)
        left = [held("run", f"s0-p{index}-m0", *_arrays([5, 6, 2])) for index in range(20)]
        assert asking.counts(left).lost == 0
        assert asking.counts(left[1:]).lost == 3, "what was said to be left counts once"
    with pytest.raises(LedgerError, match="no ledger"):
        asking.counts([])
    with pytest.raises(LedgerError, match="no ledger"):
        LedgerClient(process.path)


def _arrays(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(tokens, np.int32)
    return ids, (-ids).astype(np.float32)


def test_a_replica_reports_every_turn_and_completion_where_it_stands(tmp_path: Path) -> None:
    """In one life, and in a second one that answers from the log."""
    config: ModelConfig = msgspec.structs.replace(tiny_config(), vocab_size=12)
    packed = packed_params(config)
    tools = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
    requests = make_requests([1, 17, 66], members=4, max_new_tokens=28, vocab_size=12, tools=tools)
    reports: list[Report] = []

    class Noted(Publication):
        def __init__(self, life: str) -> None:
            self.__dict__.update(_scope="run", _life=life, _recovered=recover(tmp_path), _turn_ends={}, _client=self)

        def report(self, report: Report) -> None:
            reports.append(report)

    first = Noted("a")
    environment = ScriptedEnvironment(12)
    engine, log = open_engine(tmp_path, packed, model_config=config, environment=first.watch(environment))
    assert isinstance(engine, LocalEngine)
    with log:
        completions = first.completions(engine.generate(requests))
    turns = [report for report in reports if report.logprobs is None]
    assert len(turns) == len(environment.begun) + len(environment.ended) > 3
    assert any(report.start > 0 for report in turns)
    sampled = {str(one.id): one.token_ids[one.sampled_mask] for one in completions}
    for report in turns:
        tokens = np.frombuffer(report.tokens, np.int32)
        assert sampled[report.request][report.start : report.start + tokens.size].tolist() == tokens.tolist()
    again = Noted("b")
    engine, log = open_engine(tmp_path, packed, version=2, model_config=config, environment=again.watch(environment))
    with log:
        answered = [msgspec.structs.replace(request, policy_version=2) for request in requests]
        assert again.completions(engine.generate(answered)) == completions
    left = [
        held("run", str(one.id), one.token_ids[one.sampled_mask], one.behavior_logprobs[one.sampled_mask])
        for one in completions
    ]
    counts = _counts(reports, left)
    assert counts == (sum(tokens.size for tokens in sampled.values()), 0, 0, 0)
    assert all(report.num_logged == 0 for report in reports if report.life == "a")
