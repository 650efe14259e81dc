"""The log against a power cut: a guest machine writes and acknowledges, QEMU is killed, another guest reads its disks.

A SIGKILL of the writer proves nothing about durability, since the kernel keeps its pages. Here the kernel dies too.
What the guest acknowledged came out of its serial port: this process knows it. The law, at levels `node` and `cluster`:

- every acknowledged record is recovered, with the right tokens and log-probs;
- what is recovered is the plan's state after some number of records: a prefix without gaps, nothing twice;
- opening raises nothing, finds no damage, and goes on, over any number of cuts; `wal verify` counts the same;
- one of two disks lost at `cluster` loses nothing, and is told.

Proven too: that the drive's own cache may be lost. The disk after a cut holds what a FLUSH covered, and later writes
whole, in part (sectors of 512 bytes, in any order) or not at all (tests/helpers/vm_disk.py); the power goes at the kill
or, of the same run, at an earlier request to the drive. Broken builds are found: no sync, a sync that does not empty
the drive's cache, directories that are not synced, acknowledgement before the sync, level `process`.

Not proven: drives that lie about a FLUSH or tear a sector of 512 bytes, file systems other than ext4, real hardware.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers import power_plan
from tests.helpers.vm import Guests
from tests.helpers.vm_disk import CACHES, INSTANTS, Disk
from tests.helpers.vm_image import rehearse

_PROGRAM = "tests.helpers.power_main"


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Guests:
    """Guests that write a log; makes kernel, image and saved state where they are not cached."""
    return Guests(rehearse(_PROGRAM), tmp_path_factory.mktemp("guests"))


class Ack(NamedTuple):
    """The guest said that records below `number` are durable."""

    number: int
    log_bytes: tuple[int, ...] | None
    """Lengths of the disks' request logs when it was received, or None when they were just growing."""


class Machine:
    """A log on the disks of a machine whose power fails, and the ledger of what it acknowledged."""

    def __init__(self, guests: Guests, folder: Path, *, level: str, seed: int, build: str = "product") -> None:
        self.guests, self.level, self.build = guests, level, build
        self.draw = random.Random(f"{level} {build} {seed}")
        self.disks = [Disk(folder, name) for name in (("log", "mirror") if level == "cluster" else ("log",))]
        self.settings: dict[str, Any] = {
            "level": level,
            "segment_bytes": self.draw.choice((4096, 16384, 1 << 20)),
            "preallocate": self.draw.random() < 0.75,
        }
        if level == "cluster":
            self.settings["mirror_dir"] = "/mirror"
        self.durable = 0

    def live(self, num_acks: int | None, *, num_events: int | None = None) -> tuple[dict[str, Any], list[Ack]]:
        """Run a guest until it has acknowledged so much, or to its end, and kill it: its report, and what it said."""
        command = {
            "filesystems": {disk.name: "/" + disk.name for disk in self.disks},
            "module": _PROGRAM,
            "arguments": {
                "seed": self.draw.getrandbits(32),
                "build": self.build,
                "directory": "/log/run/wal/engine-0",
                "config": self.settings,
                "num_events": num_events,
            },
        }
        acks: list[Ack] = []
        with self.guests.start(self.disks, command) as guest:
            report: dict[str, Any] = json.loads(guest.line())
            assert "error" not in report, report["error"]
            line = ""
            while line != "end" and (num_acks is None or len(acks) < num_acks):
                line = guest.line()
                if line.startswith("a "):
                    before = self._log_bytes()
                    acks.append(Ack(int(line[2:]), before if self._log_bytes() == before else None))
                else:
                    assert "error" not in line, json.loads(line)["error"]
            # What was said before the kill counts too; how long the logs were then is not known.
            acks += [Ack(int(line[2:]), None) for line in guest.kill() if line.startswith("a ")]
        return report, acks

    def cut(self, acks: Sequence[Ack], *, cache: str, instant: str = "end") -> str:
        """Lose what the disks had not kept; the ledger keeps what was acknowledged before. Returns what happened."""
        if len(self.disks) > 1 and instant != "end":
            # One instant for both: that of an acknowledgement.
            known = [ack for ack in acks if ack.log_bytes is not None]
            at = self.draw.choice(known) if known else None
            lengths = at.log_bytes if at is not None and at.log_bytes is not None else [None] * len(self.disks)
            cuts = [disk.cut(cache, self.draw, log_bytes=n) for disk, n in zip(self.disks, lengths, strict=True)]
            acks = [ack for ack in acks if at is None or ack.number <= at.number]
        else:
            cuts = [disk.cut(cache, self.draw, instant=instant) for disk in self.disks]
            if instant != "end":
                (cut,) = cuts
                acks = [ack for ack in acks if ack.log_bytes is not None and ack.log_bytes[0] <= cut.log_bytes]
        self.durable = max([self.durable, *(ack.number for ack in acks)])
        return f"{cache} {instant} {cuts}; acknowledged {self.durable}; {self.settings}"

    def check(self, report: dict[str, Any], happened: str = "", *, lost_disk: bool = False) -> int:
        """Hold a guest's report against the ledger; returns how many records were recovered."""
        held = {int(number): one for number, one in report["requests"].items()}
        for number, (num_tokens, _, digest, _) in held.items():
            assert digest == power_plan.expected_digest(number, num_tokens), (number, happened)
        num_events = power_plan.find_state({number: (one[0], one[1]) for number, one in held.items()})
        assert num_events is not None, (held, happened)
        assert num_events >= self.durable, (num_events, happened, report["problems"])
        told = report["verify"]
        assert (report["failed"], told["failed"], told["lost_records"]) == ([], 0, 0), (report, happened)
        if not lost_disk:
            assert (report["problems"], told["damaged"], told["problems"]) == ([], 0, []), happened
        counts = len(held), sum(one[0] for one in held.values()), sum(one[1] for one in held.values())
        assert counts == (told["requests"], told["tokens"], told["finished"]), (report, happened)
        assert told["unfinished"] == told["requests"] - told["finished"]
        assert told["torn_bytes"] == report["torn_bytes"]
        return num_events

    def lost(self, report: dict[str, Any]) -> int:
        """How many acknowledged records are not there."""
        held = {int(number): (one[0], one[1]) for number, one in report["requests"].items()}
        return self.durable - (power_plan.find_state(held) or 0)

    def _log_bytes(self) -> tuple[int, ...]:
        return tuple(disk.log.stat().st_size for disk in self.disks)


def survive(machine: Machine, plan: Sequence[tuple[str, str, int]]) -> None:
    """Cut after cut over one log, then a close in order, after which everything must be there.

    Args:
        machine: whose power fails.
        plan: (cache, instant, acknowledgements before the kill) of each cut.

    """
    happened = "new"
    for cache, instant, num_acks in plan:
        report, acks = machine.live(num_acks)
        machine.check(report, happened)
        assert len(acks) >= num_acks
        happened = machine.cut(acks, cache=cache, instant=instant)
    report, acks = machine.live(None, num_events=40)
    start = machine.check(report, happened)
    assert acks[-1].number == start + 40
    happened = machine.cut(acks, cache="flushed")
    report, _ = machine.live(0)
    assert machine.check(report, happened) == start + 40
    assert (report["was_sealed"], report["torn_bytes"], report["verify"]["is_sealed"]) == (True, 0, True)


def lose_a_disk(machine: Machine, which: int, num_acks: int) -> None:
    """After a cut one of two disks comes back empty: nothing acknowledged is lost, it is told, both are whole again."""
    report, acks = machine.live(num_acks)
    machine.check(report)
    happened = machine.cut(acks, cache="flushed")
    machine.disks[which].format()
    report, acks = machine.live(num_acks)
    machine.check(report, happened, lost_disk=True)
    assert report["verify"]["damaged"] > 0, happened
    happened = machine.cut(acks, cache="flushed")
    machine.disks[1 - which].format()
    report, acks = machine.live(0)
    machine.check(report, happened, lost_disk=True)
    assert report["verify"]["damaged"] > 0, happened


def test_what_was_acknowledged_survives_power_cuts(guests: Guests, tmp_path: Path) -> None:
    survive(Machine(guests, tmp_path, level="node", seed=0), [("torn", "unflushed", 30), ("flushed", "end", 10)])


def test_one_of_two_disks_lost_with_the_power_loses_nothing(guests: Guests, tmp_path: Path) -> None:
    lose_a_disk(Machine(guests, tmp_path, level="cluster", seed=0), 0, 15)


def test_a_log_that_is_not_synced_loses_what_it_acknowledged(guests: Guests, tmp_path: Path) -> None:
    """Level `process` promises no more. If nothing were lost here, the tests above would prove nothing."""
    machine = Machine(guests, tmp_path, level="process", seed=0)
    machine.cut(machine.live(30)[1], cache="kept")
    report, _ = machine.live(0)
    assert machine.lost(report) > 0


def draw_plan(seed: int, num_cuts: int) -> list[tuple[str, str, int]]:
    draw = random.Random(seed)
    return [(draw.choice(CACHES), draw.choice(INSTANTS), draw.randrange(1, 150)) for _ in range(num_cuts)]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["node", "cluster"])
@pytest.mark.parametrize("seed", range(20))
def test_many_power_cuts(guests: Guests, tmp_path: Path, level: str, seed: int) -> None:
    survive(Machine(guests, tmp_path, level=level, seed=seed), draw_plan(seed, 3))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_many_lost_disks(guests: Guests, tmp_path: Path, which: int, seed: int) -> None:
    lose_a_disk(Machine(guests, tmp_path, level="cluster", seed=seed), which, random.Random(seed).randrange(1, 100))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "level", "cache"),
    [
        ("product", "process", "kept"),
        ("no_sync", "node", "kept"),
        ("no_sync", "cluster", "kept"),
        ("no_flush", "node", "flushed"),
        ("no_flush", "cluster", "flushed"),
        ("no_names", "node", "flushed"),
        ("early", "node", "flushed"),
    ],
)
def test_broken_builds_lose_what_they_acknowledged(
    guests: Guests, tmp_path: Path, build: str, level: str, cache: str
) -> None:
    lost = []
    for seed in range(4):
        machine = Machine(guests, tmp_path, level=level, seed=seed, build=build)
        machine.cut(machine.live(60)[1], cache=cache)
        lost.append(machine.lost(machine.live(0)[0]))
    assert max(lost) > 0


@pytest.mark.slow
def test_a_drive_that_keeps_its_cache_hides_a_missing_flush(guests: Guests, tmp_path: Path) -> None:
    """So it is the lost cache that finds that build, where the segment's size and extents are on the disk already."""
    lost = {}
    for cache in CACHES:
        machine = Machine(guests, tmp_path, level="node", seed=0, build="no_flush")
        machine.settings |= {"preallocate": True, "segment_bytes": 1 << 20}
        machine.cut(machine.live(60)[1], cache=cache)
        lost[cache] = machine.lost(machine.live(0)[0])
    assert lost["kept"] == 0
    assert lost["flushed"] > 0
