"""The log as a state machine: a writer, kills that leave torn bytes, and a reader, against a model of the truth.

Three kinds of log: one that grows, one in segments of zeros, and one with a second copy, of which a crash may cost a
whole directory, or bits of one copy, or bring it back as it was some crashes ago. Of each what checkpoints cover may
leave; nothing else ever does.
"""

import math
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    frame_seed,
    parse_segment_header,
    scan_frames,
)


def request(member: int, step: int) -> Request:
    return Request(
        id=RequestId(step, 0, member),
        prompt_ids=np.full(300, member, np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=1,
    )


def no_sync(_: int) -> None:
    """A kill leaves the page cache alone; what a sync is for is proven with a power cut."""


def start(directory: Path, config: WalConfig) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream="engine-0", config=config, sync=no_sync)


def end_of_frames(data: bytes) -> int:
    header = parse_segment_header(data)
    assert isinstance(header, SegmentHeader)
    return scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed("engine-0", header.epoch)).end


def append_torn(segment: Path, torn: bytes) -> None:
    """What a write that was cut short leaves: after the last record, also where zeros were prepared."""
    end = end_of_frames(segment.read_bytes())
    with segment.open("r+b") as file:
        file.seek(end)
        file.write(torn)


def damage(home: Path, kind: str, place: int, older: list[Path]) -> float:
    """What may happen to one copy of two; returns how many bytes after the last record may look torn then. `older` are
    copies of it at earlier crashes."""
    if kind == "stale":
        if older:
            shutil.rmtree(home)
            shutil.copytree(older[place % len(older)], home)
        return math.inf
    paths = sorted(home.glob("*.wal"))
    path = paths[place % len(paths)]
    match kind:
        case "directory":
            shutil.rmtree(home)
            return 0
        case "file":
            path.unlink()
            return 0
        case "bit":
            data = bytearray(path.read_bytes())
            at, end = place % len(data), end_of_frames(bytes(data))
            data[at] ^= 1 << place % 8
            path.write_bytes(data)
            # In the zeros behind the records it looks as if a write had come so far.
            return max(0, at + 1 - end)
        case _:
            path.write_bytes(path.read_bytes()[: place % 4096])
            return math.inf


def append_rows(writer: WalWriter, rows: dict[int, int]) -> int:
    """Appends one step; rows maps slot to token."""
    token_ids = np.array(list(rows.values()), np.int32)
    return writer.append_step(
        np.array(list(rows), np.uint16), token_ids, -token_ids.astype(np.float32), policy_version=1
    )


class WriterCrashReader(RuleBasedStateMachine):
    """Drives a writer through appends, kills with torn writes, and restarts; a model knows what must come back.

    How far the writer's thread is when it is killed is chance, so no rule and no draw depends on the state: hypothesis
    takes a machine for broken that draws differently when it is run again.
    """

    root: Path
    level: Literal["process", "node", "cluster"]
    counter = 0
    num_retired = 0
    """Segments that left any log, so that the rule proves something."""

    def __init__(self) -> None:
        super().__init__()
        type(self).counter += 1
        self.directory = self.root / str(self.counter) / "wal" / "engine-0"
        mirror_dir = str(self.root / "mirror") if self.level == "cluster" else None
        self.config = WalConfig(
            level=self.level,
            segment_bytes=4096,
            mirror_dir=mirror_dir,
            mirror_same_device=True,
            preallocate=True,
            keep_bytes=0,
        )
        self.mirror = mirror_directory(self.config, self.directory)
        self.truth: dict[int, list[int]] = {}
        self.closed: set[int] = set()
        self.acknowledged: dict[int, int] = {}
        self.delivered: set[int] = set()
        self.slots: dict[int, int] = {}
        self.older: dict[Path, list[Path]] = {}
        self.most_torn = 0.0
        self.step_of: dict[int, int] = {}
        self.loop_step = self.covered_step = 0
        self.writer, _ = start(self.directory, self.config)

    @rule()
    def open(self) -> None:
        # A number that was never durable is used again, as a request that is asked again has the same identity.
        member = 1 + max([*self.truth, *self.step_of], default=-1)
        self.step_of[member] = self.loop_step
        slot = min(set(range(len(self.slots) + 1)) - set(self.slots))
        self.writer.append_open(request(member, self.loop_step), slot=slot)
        self.slots[slot] = member
        self.truth[member] = []

    @rule(left_out=st.integers(0, 255))
    def step(self, left_out: int) -> None:
        chosen = [slot for slot in sorted(self.slots) if not left_out >> slot % 8 & 1]
        if not chosen:
            return
        rows = {slot: 1000 * self.slots[slot] + len(self.truth[self.slots[slot]]) for slot in chosen}
        append_rows(self.writer, rows)
        for slot, token in rows.items():
            self.truth[self.slots[slot]].append(token)

    @rule(place=st.integers(0, 15))
    def close_one(self, place: int) -> None:
        if not self.slots:
            return
        slot = sorted(self.slots)[place % len(self.slots)]
        self.writer.append_close(slot, StopReason.EOS)
        self.closed.add(self.slots.pop(slot))

    @rule()
    def publish(self) -> None:
        self.writer.wait_durable(self.writer.append_version(1))
        self.acknowledged = {member: len(got) for member, got in self.truth.items()}
        self.delivered = set(self.closed)

    @rule(num_requests=st.integers(0, 6), behind=st.integers(0, 2))
    def end_step(self, num_requests: int, behind: int) -> None:
        """What the loop does: everything of its step is over and durable, a checkpoint covers it, what the oldest one
        covers may go."""
        for _ in range(num_requests):
            self.open()  # beside those that are open
        if self.slots:
            rows = {slot: 1000 * member for slot, member in self.slots.items()}
            append_rows(self.writer, rows)
            for slot, token in rows.items():
                self.truth[self.slots[slot]].append(token)
        for slot in sorted(self.slots):
            self.writer.append_close(slot, StopReason.EOS)
            self.closed.add(self.slots.pop(slot))
        self.publish()
        self.loop_step += 1
        self.retire(behind)

    @rule(behind=st.integers(0, 2))
    def retire(self, behind: int) -> None:
        """The oldest checkpoint that is kept is some steps old."""
        before_step = max(0, self.loop_step - behind)
        done = self.writer.retire(before_step)
        if self.slots:
            assert done.kept_because == f"{len(self.slots)} requests are open"
            assert done.num_segments == 0
            return
        assert done.kept_because is None
        type(self).num_retired += done.num_segments
        self.covered_step = max(self.covered_step, before_step)

    def is_covered(self, member: int) -> bool:
        return self.step_of[member] < self.covered_step

    @rule(
        torn=st.binary(max_size=40),
        is_orderly=st.booleans(),
        is_in_mirror=st.booleans(),
        loss=st.sampled_from(["nothing", "directory", "file", "bit", "tail", "stale"]),
        place=st.integers(0, 1 << 20),
    )
    def crash(
        self, torn: bytes, is_orderly: bool, is_in_mirror: bool = False, loss: str = "nothing", place: int = 0
    ) -> None:
        homes = [self.directory] if self.mirror is None else [self.directory, self.mirror]
        hit = homes[-1] if is_in_mirror else homes[0]
        if is_orderly:
            self.publish()
            self.writer.close()
        else:
            self.writer.abandon()
            append_torn(max(hit.glob("*.wal")), torn)
        most_torn: float = len(torn)
        if self.mirror is not None and loss != "nothing":
            most_torn = max(most_torn, damage(hit, loss, place, self.older.get(hit, [])))
            if loss == "stale":
                # What it had torn stays in its older segments.
                self.most_torn = math.inf
        if self.mirror is not None and hit.exists():
            older = self.older.setdefault(hit, [])
            older.append(shutil.copytree(hit, self.root / "older" / f"{self.counter}-{homes.index(hit)}-{len(older)}"))
        self.writer, log = start(self.directory, self.config)
        assert (log.failed, log.scan.lost_frames) == ({}, 0)
        # Of two copies either may be damaged and heal; one alone is never found damaged.
        kinds = {problem.kind for problem in log.problems}
        assert kinds <= ({ProblemKind.HEALED} if self.mirror is not None else set())
        assert log.scan.torn_bytes <= max(most_torn, self.most_torn)
        recovered = {found.member: again for found, again in log.requests.items()}
        assert all(found.step == self.step_of[found.member] for found in log.requests)
        assert {member for member in self.acknowledged if not self.is_covered(member)} <= set(recovered)
        # Oldest first: nothing that is gone was begun after something that is left.
        gone = set(self.acknowledged) - set(recovered)
        assert not gone or not recovered or max(gone) < min(recovered)
        for member, again in recovered.items():
            got = again.token_ids.tolist()
            assert got == self.truth[member][: len(got)]
            assert len(got) >= self.acknowledged.get(member, 0)
            assert again.close is not None or member not in self.delivered
        self.truth = {member: again.token_ids.tolist() for member, again in sorted(recovered.items())}
        self.closed = {member for member, again in recovered.items() if again.is_finished}
        self.step_of = {member: step for member, step in self.step_of.items() if member in {*recovered, *gone}}
        self.acknowledged = {member: got for member, got in self.acknowledged.items() if member in recovered}
        self.delivered &= set(recovered)
        self.slots = {}
        for slot, member in enumerate(sorted(set(recovered) - self.closed)):
            self.writer.append_open(
                request(member, self.step_of[member]), slot=slot, resumed_tokens=len(self.truth[member])
            )
            self.slots[slot] = member

    @invariant()
    def is_alive(self) -> None:
        assert self.writer.error is None

    def teardown(self) -> None:
        self.crash(b"end", False)
        self.writer.abandon()


@pytest.mark.parametrize("level", ["process", "node", "cluster"])
def test_writer_crash_reader(tmp_path: Path, level: Literal["process", "node", "cluster"]) -> None:
    WriterCrashReader.root, WriterCrashReader.level, WriterCrashReader.num_retired = tmp_path, level, 0
    WriterCrashReader.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
    WriterCrashReader.TestCase("runTest").runTest()
    assert WriterCrashReader.num_retired > 0
