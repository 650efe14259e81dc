"""The log as a state machine: a writer, kills that leave torn bytes, and a reader, against a model of the truth."""

from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog


def request(member: int) -> Request:
    return Request(
        id=RequestId(0, 0, member),
        prompt_ids=np.array([member], np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=1,
    )


def start(directory: Path) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream="engine-0", config=WalConfig(level="process", segment_bytes=4096))


def append_rows(writer: WalWriter, rows: dict[int, int]) -> int:
    """Appends one step; rows maps slot to token."""
    token_ids = np.array(list(rows.values()), np.int32)
    return writer.append_step(
        np.array(list(rows), np.uint16), token_ids, -token_ids.astype(np.float32), policy_version=1
    )


class WriterCrashReader(RuleBasedStateMachine):
    """Drives a writer through appends, kills with torn writes, and restarts; a model knows what must come back."""

    root: Path
    counter = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).counter += 1
        self.directory = self.root / str(self.counter)
        self.truth: dict[int, list[int]] = {}
        self.closed: set[int] = set()
        self.acknowledged: dict[int, int] = {}
        self.delivered: set[int] = set()
        self.slots: dict[int, int] = {}
        self.writer, _ = start(self.directory)

    @rule()
    def open(self) -> None:
        member = len(self.truth)
        slot = min(set(range(len(self.slots) + 1)) - set(self.slots))
        self.writer.append_open(request(member), slot=slot)
        self.slots[slot] = member
        self.truth[member] = []

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.slots)), min_size=1, unique=True))
        rows = {slot: 1000 * self.slots[slot] + len(self.truth[self.slots[slot]]) for slot in chosen}
        append_rows(self.writer, rows)
        for slot, token in rows.items():
            self.truth[self.slots[slot]].append(token)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def close_one(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        self.writer.append_close(slot, StopReason.EOS)
        self.closed.add(self.slots.pop(slot))

    @rule()
    def publish(self) -> None:
        self.writer.wait_durable(self.writer.append_version(1))
        self.acknowledged = {member: len(got) for member, got in self.truth.items()}
        self.delivered = set(self.closed)

    @rule(torn=st.binary(max_size=40), is_orderly=st.booleans())
    def crash(self, torn: bytes, is_orderly: bool) -> None:
        if is_orderly:
            self.publish()
            self.writer.close()
        else:
            self.writer.abandon()
            with max(self.directory.glob("*.wal")).open("ab") as segment:
                segment.write(torn)
        self.writer, log = start(self.directory)
        assert (log.problems, log.failed, log.scan.lost_frames) == ((), {}, 0)
        assert log.scan.torn_bytes <= len(torn)
        recovered = {found.member: again for found, again in log.requests.items()}
        assert set(self.acknowledged) <= set(recovered)
        for member, again in recovered.items():
            got = again.token_ids.tolist()
            assert got == self.truth[member][: len(got)]
            assert len(got) >= self.acknowledged.get(member, 0)
            assert again.close is not None or member not in self.delivered
        self.truth = {member: again.token_ids.tolist() for member, again in sorted(recovered.items())}
        self.closed = {member for member, again in recovered.items() if again.is_finished}
        self.slots = {}
        for slot, member in enumerate(sorted(set(recovered) - self.closed)):
            self.writer.append_open(request(member), slot=slot, resumed_tokens=len(self.truth[member]))
            self.slots[slot] = member

    @invariant()
    def is_alive(self) -> None:
        assert self.writer.error is None

    def teardown(self) -> None:
        self.crash(b"end", False)
        self.writer.abandon()


def test_writer_crash_reader(tmp_path: Path) -> None:
    WriterCrashReader.root = tmp_path
    WriterCrashReader.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
    WriterCrashReader.TestCase("runTest").runTest()
