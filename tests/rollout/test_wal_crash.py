"""The log under real death: SIGKILL of the writing process at random instants, and a file that may not grow.

The ledger of what was published is kept by this process, through a pipe, never by the killed one. A build that
publishes before it is durable must fail the same harness. A SIGKILL leaves the page cache alone, so this proves the
order of publication and the recovery, not the sync: power cuts need another machine.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_recovery import RecoveredLog, recover

# Samples token f(member, position) for 8 requests, resuming whatever the log holds, and prints "member count" lines for
# tokens that it publishes: those that are durable, or with the argument "early" those that were merely appended.
WRITER = """
import os, sys, time
from pathlib import Path
import numpy as np
from rollforward.rollout.types import Request, RequestId, SamplingParams
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_records import WalConfig

directory, when, sync_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def slow_sync(descriptor):
    time.sleep(sync_s)
    os.fdatasync(descriptor)

writer, log = open_log(directory, stream="engine-0", config=WalConfig(segment_bytes=8192), sync=slow_sync)
assert not log.problems, log.problems
counts = {}
for member in range(8):
    identity = RequestId(0, 0, member)
    known = log.requests.get(identity)
    counts[member] = 0 if known is None else len(known.token_ids)
    request = Request(id=identity, prompt_ids=np.array([1], np.int32), seed=member,
                      sampling=SamplingParams(max_new_tokens=10**6), policy_version=1)
    writer.append_open(request, slot=member, resumed_tokens=counts[member])
print("ready", flush=True)
waiting = []
while True:
    members = [m for m in counts if (sum(counts.values()) + m) % 3]
    token_ids = np.array([m * 1_000_000 + counts[m] for m in members], np.int32)
    for m in members:
        counts[m] += 1
    slots = np.array(members, np.uint16)
    seq = writer.append_step(slots, token_ids, np.zeros(len(members), np.float32), policy_version=1)
    waiting.append((seq, [(m, counts[m]) for m in members]))
    while waiting and (when == "early" or waiting[0][0] <= writer.durable_seq):
        lines = "".join(f"{m} {count}\\n" for m, count in waiting.pop(0)[1])
        os.write(1, lines.encode())
    time.sleep(0.0005)
"""

GROWING = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from rollforward.rollout.errors import WalWriteError
from rollforward.rollout.types import Request, RequestId, SamplingParams
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_records import WalConfig

resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, 20_001))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer, _ = open_log(Path(sys.argv[1]), stream="engine-0", config=WalConfig())
request = Request(id=RequestId(0, 0, 0), prompt_ids=np.array([1], np.int32), seed=1,
                  sampling=SamplingParams(max_new_tokens=10**6), policy_version=1)
writer.append_open(request, slot=0)
for token in range(10_000):
    try:
        row = np.array([0], np.uint16), np.array([token], np.int32), np.zeros(1, np.float32)
        seq = writer.append_step(*row, policy_version=1)
        writer.wait_durable(seq)
    except WalWriteError as error:
        print(token, type(error.__cause__).__name__, error.__cause__.errno, flush=True)
        break
"""


def run_until_killed(directory: Path, when: str, sync_s: float, life_s: float) -> dict[int, int]:
    """Runs a writer, kills it `life_s` seconds after it is ready, and returns the published token count by member."""
    command = [sys.executable, "-c", WRITER, str(directory), when, str(sync_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout as pipe:
        assert pipe.readline() == b"ready\n"
        chunks: list[bytes] = []
        deadline = time.monotonic() + life_s
        os.set_blocking(pipe.fileno(), False)
        while time.monotonic() < deadline:
            chunks.append(pipe.read() or b"")
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        chunks.append(pipe.read() or b"")
    lines = b"".join(chunks).split(b"\n")[:-1]
    return {int(member): int(count) for member, count in (line.split() for line in lines)}


def num_lost(log: RecoveredLog, published: dict[int, int]) -> int:
    """Checks that the log holds only true tokens; returns how many published ones it does not hold."""
    assert (log.problems, log.failed, log.scan.lost_frames) == ((), {}, 0)
    lost = 0
    for member, count in published.items():
        token_ids = log.requests[RequestId(0, 0, member)].token_ids.tolist()
        assert token_ids == [member * 1_000_000 + position for position in range(len(token_ids))]
        lost += max(0, count - len(token_ids))
    return lost


def test_no_published_token_is_lost_by_a_kill(tmp_path: Path) -> None:
    rng = random.Random(20240)
    published: dict[int, int] = {}
    for life in range(5):
        latest = run_until_killed(tmp_path, "durable", rng.choice([0.0, 0.003]), rng.uniform(0.005, 0.15))
        published |= latest
        assert num_lost(recover(tmp_path), published) == 0, life
    assert sum(published.values()) > 100


def test_the_harness_sees_publication_before_durability(tmp_path: Path) -> None:
    """A life may end in the moment in which the log holds everything: there is none in many."""

    def loss(directory: Path) -> int:
        published = run_until_killed(directory, "early", 0.05, 0.2)
        return num_lost(recover(directory), published)

    assert any(loss(tmp_path / str(life)) > 0 for life in range(20))


def test_a_file_that_may_not_grow_stops_the_writer_and_keeps_the_rest(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", GROWING, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    token, cause, number = result.stdout.split()
    assert (cause, int(number), result.stderr) == ("OSError", 27, "")
    log = recover(tmp_path)
    assert log.problems == ()
    assert log.requests[RequestId(0, 0, 0)].token_ids.tolist() == list(range(int(token)))
    assert 0 < log.scan.torn_bytes < 64
