"""The log against a disk that fails, in real processes: what strace makes the kernel answer, and a file system that is
really full.

The ledger is what the writer published through a pipe; it is kept by this process. The law: everything published is in
the log, a failed call is not made again on its descriptor, the error names the file, the free bytes and a way out, and
the next writer goes on. Counters of strace are per thread: the first syncs (zeros, header) are the opening thread's.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_recovery import RecoveredLog, recover

# Draws token 0, 1, 2, ... of one request, each its own commit, and publishes its number when it is durable.
WRITER = """
import os, sys
from pathlib import Path
import msgspec
import numpy as np
from rollforward.rollout.errors import WalWriteError
from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_records import WalConfig

directory, count, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
writer, log = open_log(directory, stream="engine-0", config=msgspec.json.decode(settings, type=WalConfig))
identity = RequestId(0, 0, 0)
start = len(log.requests[identity].token_ids) if identity in log.requests else 0
request = Request(id=identity, prompt_ids=np.array([1], np.int32), seed=1,
                  sampling=SamplingParams(max_new_tokens=10**6), policy_version=1)
try:
    writer.wait_durable(writer.append_open(request, slot=0, resumed_tokens=start))
    for token in range(start, start + count):
        row = np.array([0], np.uint16), np.array([token], np.int32), np.zeros(1, np.float32)
        writer.wait_durable(writer.append_step(*row, policy_version=1))
        os.write(1, b"%d\\n" % token)
    writer.close()
    print("closed", flush=True)
except WalWriteError as error:
    for again in (lambda: writer.append_version(2), writer.close):
        try:
            again()
            print("went on", flush=True)
        except WalWriteError:
            pass
    writer.abandon()
    print(f"durable {writer.durable_seq} error {error}", flush=True)
"""


class Outcome(NamedTuple):
    """What a writer did before it ended."""

    published: list[int]
    """Tokens in the order of their publication."""
    last: str
    """Its last line, when it is not a token."""
    calls: list[str]
    """strace's lines of the traced calls, in order."""
    code: int
    """Exit code; negative for a signal."""


def run(directory: Path, count: int, inject: str | None = None, *, settings: str = "{}") -> Outcome:
    """Runs a writer, under strace where a fault is given (`CALL:FAULT:when=N`, see strace -e inject)."""
    command = [sys.executable, "-c", WRITER, str(directory), str(count), settings]
    trace = directory.parent / "strace"
    if inject is not None:
        if shutil.which("strace") is None:
            pytest.skip("strace is not installed (Debian package strace)")
        call = inject.partition(":")[0]
        # -y names the descriptors' files.
        traced = ["-e", f"trace={call}", "-e", f"inject={inject}"]
        command = ["strace", "-f", "-y", "-qq", "-o", str(trace), *traced, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    published = [int(line) for line in lines if line.isdigit()]
    last = lines[-1] if lines and not lines[-1].isdigit() else done.stderr if done.returncode else ""
    return Outcome(published, last, trace.read_text().splitlines() if inject else [], done.returncode)


def assert_goes_on(directory: Path, published: list[int], *, settings: str = "{}") -> RecoveredLog:
    """Checks that what was published is there, in order and once, and that a new writer goes on."""
    log = recover(directory)
    assert (log.problems, log.failed, log.scan.lost_frames) == ((), {}, 0)
    held = log.requests[RequestId(0, 0, 0)].token_ids.tolist()
    assert held == list(range(len(held)))
    assert published == held[: len(published)]
    # Beyond it at most the one that was being written.
    assert len(held) <= len(published) + 1
    after = run(directory, 3, settings=settings)
    assert (after.last, after.published) == ("closed", [len(held), len(held) + 1, len(held) + 2])
    again = recover(directory)
    assert again.requests[RequestId(0, 0, 0)].token_ids.tolist() == list(range(len(held) + 3))
    assert (again.problems, again.scan.torn_bytes, again.was_sealed) == ((), 0, True)
    return log


def assert_failed(outcome: Outcome, says: str) -> None:
    assert re.match(rf"durable \d+ error log .*\.wal[^:]*: .*{says}.*\d+ bytes are free there", outcome.last), (
        outcome.last
    )
    assert "went on" not in outcome.last
    assert "rollforward resume RUN_DIR" in outcome.last


def calls_after_the_fault(outcome: Outcome, call: str) -> list[str]:
    """Later calls of the kind on the descriptor that failed."""
    (at,) = [index for index, line in enumerate(outcome.calls) if "(INJECTED)" in line]
    found = re.search(rf"{call}\((\d+<[^>]*>)", outcome.calls[at])
    assert found is not None, outcome.calls[at]
    return [line for line in outcome.calls[at + 1 :] if found[1] in line]


@pytest.mark.parametrize("settings", ['{"preallocate": true}', '{"preallocate": false}'])
@pytest.mark.parametrize("number", [3, 7])
def test_a_failed_sync_ends_the_writer_although_the_next_would_succeed(
    tmp_path: Path, number: int, settings: str
) -> None:
    outcome = run(tmp_path / "log", 50, f"fdatasync:error=EIO:when={number}", settings=settings)
    assert_failed(outcome, "Input/output error")
    # The thread's n-th sync is that of OPEN and then of token n - 2.
    assert outcome.published == list(range(number - 2))
    assert calls_after_the_fault(outcome, "fdatasync") == []
    assert_goes_on(tmp_path / "log", outcome.published)


@pytest.mark.parametrize(
    "fault", ["pwrite64:when=75", "fsync:when=30", "link:when=2", "unlink:when=3", "ftruncate:when=1"]
)
def test_a_failure_in_a_rotation_ends_the_writer(tmp_path: Path, fault: str) -> None:
    """A segment of 4,096 bytes holds some 70 tokens; the numbers are beyond what the opening thread calls."""
    call, when = fault.split(":")
    settings = '{"segment_bytes": 4096}'
    outcome = run(tmp_path / "log", 3000, f"{call}:error=EIO:{when}", settings=settings)
    assert_failed(outcome, "Input/output error")
    assert 60 < len(outcome.published) < 2999
    if call != "unlink":
        assert sum("(INJECTED)" in line for line in outcome.calls) == 1
    assert_goes_on(tmp_path / "log", outcome.published, settings=settings)


def test_a_write_of_which_the_kernel_swallowed_a_part_is_counted_as_damage(tmp_path: Path) -> None:
    """The kernel says 37 bytes were written and wrote none: no writer can know, every reader must."""
    outcome = run(tmp_path / "log", 10, "pwrite64:retval=37:when=5")
    assert (outcome.published, outcome.last) == (list(range(10)), "closed")
    log = recover(tmp_path / "log")
    assert (log.scan.lost_frames, set(log.failed)) == (1, {RequestId(0, 0, 0)})
    assert log.scan.damaged_bytes == 56
    again = run(tmp_path / "log", 0)
    assert again.last == "closed"


def test_the_directories_of_a_log_are_durable_before_a_token_leaves(tmp_path: Path) -> None:
    """A power cut must not take the directory that a durable file lies in: whoever made the run's directories did not
    sync them."""
    home = tmp_path / "runs" / "a" / "wal" / "engine-0"
    home.parent.mkdir(parents=True)
    outcome = run(home, 0, "fsync:delay_exit=1")
    assert outcome.last == "closed"
    for directory in (home, *home.parents[:4]):
        assert any(f"<{directory}>)" in line for line in outcome.calls), directory


def test_a_full_disk_ends_the_writer_and_says_what_to_do(tmp_path: Path) -> None:
    outcome = run(tmp_path / "log", 50, "pwrite64:error=ENOSPC:when=6+")
    assert_failed(outcome, "No space left on device")
    assert "Make room" in outcome.last
    assert outcome.published == list(range(4))
    # "6+" fails every later write of the thread too: there was none.
    assert sum("(INJECTED)" in line for line in outcome.calls) == 1
    assert_goes_on(tmp_path / "log", outcome.published)


@pytest.mark.parametrize("fault", ["fsync:when=1", "fsync:when=2", "fsync:when=3", "rename:when=1", "link:when=1"])
def test_a_log_that_cannot_be_opened_says_what_to_do_and_opens_afterwards(tmp_path: Path, fault: str) -> None:
    published = run(tmp_path / "log", 5).published
    call, when = fault.split(":")
    outcome = run(tmp_path / "log", 5, f"{call}:error=ENOSPC:{when}")
    assert sum("(INJECTED)" in line for line in outcome.calls) == 1
    assert outcome.published == []
    told = outcome.last.splitlines()[-1]
    assert re.match(
        r"\S+WalRefusedError: log \S+: .*No space left on device.*; \d+ bytes are free there; it was not", told
    )
    assert "Make room" in told
    assert "rollforward resume RUN_DIR" in told
    assert_goes_on(tmp_path / "log", published)


def test_a_slow_sync_delays_publication_and_nothing_else(tmp_path: Path) -> None:
    outcome = run(tmp_path / "log", 10, "fdatasync:delay_exit=50000")
    assert (outcome.published, outcome.last) == (list(range(10)), "closed")
    assert_goes_on(tmp_path / "log", outcome.published)


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_killed_inside_the_nth_sync(tmp_path: Path, number: int) -> None:
    outcome = run(tmp_path / "log", 50, f"fdatasync:signal=KILL:when={number}")
    assert outcome.code != 0
    if not outcome.published:
        # In the opening thread: not even the first segment is there.
        assert recover(tmp_path / "log").problems == ()
        assert run(tmp_path / "log", 1).last == "closed"
        return
    assert_goes_on(tmp_path / "log", outcome.published)


def small_file_system(folder: Path, size: str, script: str, *arguments: str) -> list[str]:
    """What a script says whose first argument lies in a file system of this size, which is mounted for it alone."""
    probe = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", str(folder)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("user namespaces with mounts are needed (unshare of Debian package util-linux)")
    full = folder / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o size={size} none {full} && exec "$@"'
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    command = [*isolated, sys.executable, "-c", script, str(full / "log"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.splitlines()


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    """300 KiB hold neither the zeros of a segment nor all tokens; the log grows until they are used up."""
    keep = tmp_path / "kept"
    script = WRITER + f"\nimport shutil\nshutil.copytree(directory, {str(keep)!r})\n"
    lines = small_file_system(tmp_path, "300k", script, "20000", "{}")
    published = [int(line) for line in lines if line.isdigit()]
    assert_failed(Outcome(published, lines[-1], [], 0), "No space left on device")
    assert " 0 bytes are free there" in lines[-1]
    assert len(published) > 1000
    assert_goes_on(keep, published)


def test_a_file_system_that_is_full_at_a_restart(tmp_path: Path) -> None:
    script = (
        WRITER
        + """
with open(directory.parent / "ballast", "wb", buffering=0) as ballast:
    try:
        while ballast.write(bytes(1024)):
            pass
    except OSError:
        pass
def open_again():
    return open_log(directory, stream="engine-0", config=msgspec.json.decode(settings, type=WalConfig))
try:
    open_again()
except WalWriteError as error:
    print(f"refused {error}")
(directory.parent / "ballast").unlink()
writer, log = open_again()
print(log.requests[identity].token_ids.tolist(), log.problems)
writer.close()
"""
    )
    lines = small_file_system(tmp_path, "300k", script, "4", "{}")
    assert lines[:5] == ["0", "1", "2", "3", "closed"]
    assert re.match(
        r"refused log .*/full/log/EPOCH.*No space left on device.*; 0 bytes are free there; it was", lines[5]
    )
    assert "Make room" in lines[5]
    assert lines[6:] == ["[0, 1, 2, 3] ()"]
