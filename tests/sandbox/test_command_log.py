"""The command log against an enemy: torn at every byte, every byte flipped, every order of records, no files at all.

Proves that a log is either read as it was acknowledged, but for a last write, or refused by name and left untouched.
Does not prove anything about sandboxes (test_session.py) or power cuts.
"""

import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.sandbox import command_log
from rollforward.sandbox.blobs import MAX_INLINE_BYTES, BlobStore, Stored
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    encode_frame,
    encode_segment_header,
    frame_seed,
    scan_frames,
)
from rollforward.sandbox.command_history import CommandHistory
from rollforward.sandbox.command_log import CommandLog, log_path, read_log
from rollforward.sandbox.command_records import (
    ClosedRecord,
    CommandRecord,
    EndRecord,
    FailedRecord,
    GetRecord,
    OpenedRecord,
    PutRecord,
    SnapshotRecord,
    StartRecord,
    UnknownRecord,
    decode_call,
    decode_record,
    encode_call,
    encode_record,
)
from rollforward.sandbox.errors import (
    CodecUsageError,
    CommandDivergenceError,
    CommandLogDamagedError,
    CommandLogLockedError,
    CommandLogWriteError,
    GoneCause,
)
from rollforward.sandbox.types import Call, CallStatus, SandboxSpec, SnapshotKind

NAME = "s12-p3-m0"
SPEC = SandboxSpec(labels={"task": "x"})


def opened(epoch: int = 1, attempt: int = 0, instance: str = "0123456789abcdef") -> OpenedRecord:
    return OpenedRecord(epoch, attempt, f"3f9a2c71-{NAME}-a{attempt}", instance, SPEC, b"s" * 16, b"f" * 16)


def kept(data: bytes = b"tar", *, is_shared: bool = False) -> SnapshotRecord:
    return SnapshotRecord(SnapshotKind.FILES, "host", Stored(len(data), data), is_shared)


def restored(epoch: int, seq: int | None, attempt: int = 1) -> OpenedRecord:
    record = opened(epoch=epoch, attempt=attempt, instance=f"{attempt}" * 16)
    return msgspec.structs.replace(record, restored=seq)


def start(key: str) -> StartRecord:
    encoded = encode_call(Call(tool="bash", arguments={"command": f"echo {key}"}))
    return StartRecord(key, encoded.digest, encoded.request)


def end(seq: int, text: bytes = b"done", gone: GoneCause | None = None) -> EndRecord:
    return EndRecord(seq, CallStatus.OK, Stored(len(text), text), False, len(text), 0.25, "", gone)


RECORDS: list[CommandRecord] = [
    opened(),
    PutRecord(((b"a.txt", Stored(3, b"abc")), (b"b\xed\xa0\x80", Stored(0, b"")))),
    start("t0c0"),
    end(3),
    opened(epoch=2),
    start("t0c1"),
    end(6, b"\xed\xa0\x80 half a character"),
    start("t2c0"),
    end(8, gone=GoneCause.OOM),
    GetRecord(b"g" * 16, (b"answer.txt",), 99, ((b"answer.txt", Stored(2, b"42")),), ""),
    ClosedRecord(),
]


def write(directory: Path, records: list[CommandRecord] = RECORDS, name: str = NAME) -> Path:
    path = directory / f"{name}.log"
    log = CommandLog.open(path, sync=False)
    for number, record in enumerate(records, 1):
        assert log.append(record) == number
    log.close()
    return path


def told(history: CommandHistory) -> tuple[object, ...]:
    return (
        history.position,
        history.opened,
        history.put,
        list(history.commands.items()),
        history.running,
        history.collected,
        history.gone,
        history.failure,
        history.is_unknown,
        history.is_closed,
    )


def after(records: list[CommandRecord]) -> tuple[object, ...]:
    history = CommandHistory()
    for seq, record in enumerate(records, 1):
        history.apply(seq, record)
    return told(history)


def ends(data: bytes) -> list[int]:
    frames = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(NAME, 1)).frames
    return [SEGMENT_HEADER_BYTES, *(frame.end for frame in frames)]


def forge(path: Path, *frames: tuple[int, int, int, int, bytes], name: str = NAME, kind: str = "CMND") -> Path:
    """A log with frames (type, flags, seq, batch_seq, payload), each with a good checksum."""
    header = SegmentHeader(kind=kind, stream=name, epoch=1, segment=0, first_seq=1, tail_crc=0)
    data = encode_segment_header(header)
    for kind_number, flags, seq, batch_seq, payload in frames:
        data += encode_frame(
            frame_type=kind_number,
            flags=flags,
            seq=seq,
            batch_seq=batch_seq,
            payload=payload,
            seed=frame_seed(name, 1),
        )[0]
    path.write_bytes(data)
    return path


def refused(path: Path) -> str:
    """What an opening and a look say of a log that is not believed; nothing of it is changed by either."""
    before = path.read_bytes()
    with pytest.raises(CommandLogDamagedError) as caught:
        CommandLog.open(path, sync=True)
    assert path.read_bytes() == before
    view = read_log(path)
    assert view.damage == str(caught.value)
    assert str(path) in view.damage
    return view.damage


def test_every_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert [decode_record(kind, 0, payload) for kind, payload in map(encode_record, RECORDS)] == RECORDS
    log = CommandLog.open(path, sync=True)
    assert told(log.history) == after(RECORDS)
    view = read_log(path)
    assert (view.trajectory, told(view.history), view.torn_bytes, view.damage) == (NAME, after(RECORDS), 0, "")
    log.close()


def test_a_log_torn_at_every_byte_is_what_was_acknowledged_and_goes_on(tmp_path: Path) -> None:
    data = write(tmp_path).read_bytes()
    marks = ends(data)
    path = tmp_path / "torn" / f"{NAME}.log"
    path.parent.mkdir()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        if size < SEGMENT_HEADER_BYTES:
            refused(path)
            continue
        whole = sum(mark <= size for mark in marks) - 1
        view = read_log(path)
        assert (told(view.history), view.torn_bytes, view.damage) == (after(RECORDS[:whole]), size - marks[whole], "")
        assert path.stat().st_size == size
        log = CommandLog.open(path, sync=False)
        assert told(log.history) == after(RECORDS[:whole])
        assert path.stat().st_size == marks[whole]
        for record in RECORDS[whole:]:
            log.append(record)
        log.close()
        assert path.read_bytes() == data


def test_a_flipped_bit_is_never_believed(tmp_path: Path, seed: int) -> None:
    data = write(tmp_path).read_bytes()
    marks = ends(data)
    path = tmp_path / "flipped" / f"{NAME}.log"
    path.parent.mkdir()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << ((place * 31 + seed) % 8)
        path.write_bytes(flipped)
        if place >= marks[-2]:
            # The last record: what a cut write looks like. The sandbox knows the rest.
            assert told(read_log(path).history) == after(RECORDS[:-1])
        elif place % 4:
            assert str(path) in read_log(path).damage
        else:
            refused(path)


@given(st.binary(max_size=300), st.integers(0, 255), st.integers(0, 255))
def test_no_payload_raises_anything_else(payload: bytes, kind: int, flags: int) -> None:
    for given_flags in (0, flags):
        try:
            record = decode_record(kind, given_flags, payload)
        except CommandLogDamagedError:
            continue
        assert decode_record(*_framed(record)) == record


def _framed(record: CommandRecord) -> tuple[int, int, bytes]:
    kind, payload = encode_record(record)
    return kind, 0, payload


ORDER = re.compile("N?(?:O[ON]*(?:P[ON]*)?(?:SO*E[ON]*)*(?:SO*U|(?:SO*|G)?F?)|F?)C?")


def test_every_order_of_records_is_either_one_that_is_written_or_refused() -> None:
    """All sequences of up to eight records, against a grammar that is written down independently."""

    def record(letter: str, before: str) -> CommandRecord:
        running = before.rfind("S") + 1 if before.rfind("S") > before.rfind("E") else 1
        make: dict[str, Callable[[], CommandRecord]] = {
            "O": lambda: opened(epoch=before.count("O") + 1),
            "P": lambda: PutRecord(()),
            "S": lambda: start(f"t{before.count('S')}c0"),
            "E": lambda: end(running),
            "G": lambda: GetRecord(b"", (), 1, (), ""),
            "U": lambda: UnknownRecord(running, "lost"),
            "F": lambda: FailedRecord("lost"),
            "C": ClosedRecord,
            "N": lambda: kept(before.encode()),
        }
        return make[letter]()

    def replay(letters: str) -> CommandHistory:
        history = CommandHistory()
        for seq, letter in enumerate(letters, 1):
            history.apply(seq, record(letter, letters[: seq - 1]))
        return history

    accepted, waiting = 0, [""]
    while waiting:
        before = waiting.pop()
        for letter in "OPSEGUFCN":
            history = replay(before)
            state = told(history)
            following = record(letter, before)
            if not ORDER.fullmatch(before + letter):
                with pytest.raises(CommandLogDamagedError, match=rf"record {len(before) + 1} \("):
                    history.apply(len(before) + 1, following)
                assert told(history) == state
                continue
            history.apply(len(before) + 1, following)
            accepted += 1
            if len(before) < 7:
                waiting.append(before + letter)
    assert accepted > 500


@pytest.mark.parametrize(
    ("before", "record", "why"),
    [
        ([opened()], opened(epoch=3), "epoch is 3"),
        ([opened(attempt=1)], opened(epoch=2), "attempt is smaller"),
        ([opened(), start("t0c0")], opened(epoch=2, instance="f" * 16), "another sandbox"),
        ([opened()], OpenedRecord(2, 0, "x", "y", SPEC, b"other", b"f" * 16), "something else"),
        ([opened(), start("t1c0"), end(2)], start("t1c0"), "was sent before"),
        ([opened(), start("t1c0"), end(2)], start("t0c9"), "goes on to t1c0"),
        ([opened(), start("t9c0"), end(2)], start("t10c"), "must read"),
        ([opened(), start("t9c0"), end(2)], start("t01c0"), "must read"),
        ([opened(), start("t0c0"), end(2, gone=GoneCause.OOM)], opened(epoch=2), "needed no more"),
        ([opened(), start("t0c0")], restored(2, None), "not restored to the last"),
        ([opened(), start("t0c0"), end(2), kept(), kept()], restored(2, 4), "not restored to the last"),
        ([opened(), start("t0c0"), end(2), kept()], restored(2, 0), "not restored to the last"),
        ([opened(), kept()], restored(2, 2), "no command had run"),
        ([opened(), start("t0c0")], msgspec.structs.replace(opened(epoch=2), restored=0), "nothing was restored"),
        ([opened(), start("t0c0")], kept(), "a command runs"),
        ([kept()], kept(), "no sandbox was opened"),
        ([opened(), start("t0c0")], end(1), "ends command 1"),
        ([opened(), start("t0c0")], EndRecord(2, CallStatus.INFRA, Stored(0, b""), False, 0, 0.0, ""), "infra"),
    ],
)
def test_what_a_record_says_must_fit_too(before: list[CommandRecord], record: CommandRecord, why: str) -> None:
    history = CommandHistory()
    for seq, earlier in enumerate(before, 1):
        history.apply(seq, earlier)
    with pytest.raises(CommandLogDamagedError, match=why):
        history.apply(len(before) + 1, record)
    assert told(history) == after(before)


def test_what_is_done_again_is_what_ended_after_the_snapshot_until_something_new_is_asked() -> None:
    history = CommandHistory()
    before = [opened(), start("t0c0"), end(2), kept(), start("t1c0"), end(5), start("t2c0"), end(7), start("t3c0")]

    def keys(*records: CommandRecord) -> list[str]:
        for record in records:
            history.apply(history.next_seq, record)
        return [command.start.key for command in history.redo]

    assert keys(*before) == []
    assert history.snapshot_seq == 4
    assert not history.is_as_kept
    assert keys(restored(2, 4)) == ["t1c0", "t2c0"]
    successor = msgspec.structs.replace(restored(3, None), instance="1" * 16)
    assert keys(successor) == ["t1c0", "t2c0"]
    assert keys(restored(4, 4, attempt=2)) == ["t1c0", "t2c0"]
    assert history.settled_attempt == 0
    assert keys(end(9)) == []
    assert history.settled_attempt == 2
    assert keys(kept(), restored(5, 14, attempt=3)) == []
    assert history.is_as_kept


def test_ten_comes_after_nine(tmp_path: Path) -> None:
    history = CommandHistory()
    for seq, record in enumerate([opened(), start("t9c9"), end(2), start("t9c10"), end(4), start("t10c0")], 1):
        history.apply(seq, record)
    with pytest.raises(CommandDivergenceError, match="t10c0 has no result"):
        history.check_next("t10c1")


def test_forged_records_with_good_checksums_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    good = _framed(opened())[2]
    cases: list[tuple[tuple[int, int, int, int, bytes], str]] = [
        ((10, 0, 1, 1, b""), "type 10"),
        ((0, 0, 1, 1, b""), "type 0"),
        ((1, 4, 1, 1, good), "flags 4"),
        ((1, 0, 1, 0, good), "batch"),
        ((1, 0, 2, 2, good), "record before it is 0"),
        ((1, 0, 1, 1, good[:-1]), "does not decode"),
        ((1, 0, 1, 1, good + b"\0"), "does not decode"),
        ((1, 0, 1, 1, b"\x91" * 100_000), "does not decode"),
        ((2, 0, 1, 1, _framed(PutRecord(((b"\xff", Stored(0, b"")),)))[2]), "does not decode"),
        ((4, 0, 1, 1, _framed(end(0))[2]), "no sandbox was opened"),
    ]
    for frame, why in cases:
        assert why in refused(forge(path, frame))
    assert "is a log of kind 'TOKN'" in refused(forge(path, kind="TOKN"))
    assert "the one of s12-p3-m1" in refused(forge(path, name="s12-p3-m1"))
    forge(path)
    data = bytearray(path.read_bytes())
    data[8] = 2  # another format, and its checksum is another one
    path.write_bytes(data)
    assert "damaged header" in refused(path)


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    target = write(tmp_path / "elsewhere")
    makers: dict[str, Callable[[Path], object]] = {
        "directory": Path.mkdir,
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(target),
        "dangling": lambda path: path.symlink_to(tmp_path / "nothing"),
        "empty": Path.touch,
        "noise": lambda path: path.write_bytes(os.urandom(200)),
        "huge": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    }
    for name, make in makers.items():
        path = tmp_path / name / f"{NAME}.log"
        path.parent.mkdir()
        make(path)
        before = os.lstat(path)
        with pytest.raises(CommandLogDamagedError, match=re.escape(str(path))):
            CommandLog.open(path, sync=True)
        assert str(path) in read_log(path).damage
        found = os.lstat(path)
        assert (found.st_mode, found.st_size, found.st_ino) == (before.st_mode, before.st_size, before.st_ino)
    assert "cannot be read" in read_log(tmp_path / "absent.log").damage


def test_a_name_that_no_header_holds(tmp_path: Path) -> None:
    with pytest.raises(CodecUsageError, match="Shorten"):
        CommandLog.open(tmp_path / f"{'x' * 33}.log", sync=False)
    assert list(tmp_path.iterdir()) == []


def test_a_log_has_one_writer_and_a_killed_one_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "step_000012" / f"{NAME}.log"
    first = CommandLog.open(path, sync=True)
    with pytest.raises(CommandLogLockedError, match=re.escape(str(path))):
        CommandLog.open(path, sync=True)
    first.append(opened())
    assert read_log(path).history.position == 1
    first.close()
    first.close()
    code = (
        "import sys, time; from pathlib import Path; from rollforward.sandbox.command_log import CommandLog\n"
        "log = CommandLog.open(Path(sys.argv[1]), sync=True); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CommandLogLockedError):
            CommandLog.open(path, sync=True)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    second = CommandLog.open(path, sync=True)
    assert second.history.position == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]
    second.close()


def test_a_beginning_that_was_cut_short_leaves_no_log(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    (tmp_path / f".{NAME}.log.tmp").write_bytes(b"half a header of a predecessor that was killed")
    CommandLog.open(path, sync=True).close()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert read_log(path).damage == ""
    with open(tmp_path / ".s0-p0-m0.log.tmp", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CommandLogLockedError):
            CommandLog.open(tmp_path / "s0-p0-m0.log", sync=True)


def test_who_makes_a_log_late_does_not_empty_the_one_that_is_there(tmp_path: Path) -> None:
    """A maker was killed between giving the log its name and taking away the temporary one; another one saw no log."""
    path = write(tmp_path)
    before = path.read_bytes()
    temporary = tmp_path / f".{NAME}.log.tmp"
    os.link(path, temporary)
    assert command_log._make(path, sync=False) is None
    assert (path.read_bytes(), temporary.exists()) == (before, False)


def test_a_log_that_is_removed_and_made_again_is_the_new_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    held = CommandLog.open(path, sync=False)
    path.unlink()
    new = CommandLog.open(path, sync=False)
    assert new.history.position == 0
    held.close()
    new.close()


def _at_most(size: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_write_that_fails_ends_the_log_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.log"
    code = """
import sys
from pathlib import Path
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import FailedRecord, ClosedRecord
from rollforward.sandbox.errors import CommandLogWriteError, CommandLogDamagedError
log = CommandLog.open(Path(sys.argv[1]), sync=True)
for record in (FailedRecord("x" * 4000), ClosedRecord()):
    try:
        log.append(record)
    except CommandLogWriteError as error:
        print(error)
print(log.history.position)
try:
    log.blobs.put(b"x" * 100_000)
except CommandLogWriteError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=_at_most(1000))
    lines = done.stdout.splitlines()
    assert lines[0] == lines[1]  # never tried again
    assert "File too large" in lines[0]
    assert str(path) in lines[0]
    assert lines[2] == "0"
    assert "blob" in lines[3]
    assert list((tmp_path / "blobs").iterdir()) == []
    assert path.stat().st_size == 1000
    log = CommandLog.open(path, sync=True)
    assert (log.history.position, path.stat().st_size) == (0, SEGMENT_HEADER_BYTES)
    log.close()


def test_a_record_is_synced_before_it_counts_and_a_new_log_with_its_directories(tmp_path: Path) -> None:
    """In the order of the system calls of a real process."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (Debian package strace)")
    path, trace = tmp_path / "commands" / "step_000012" / f"{NAME}.log", tmp_path / "strace"
    code = """
import os, sys
from pathlib import Path
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import FailedRecord, ClosedRecord
log = CommandLog.open(Path(sys.argv[1]), sync=sys.argv[2] == "sync")
for record in (FailedRecord("x"), ClosedRecord()):
    log.append(record)
    os.write(1, b"told")
log.blobs.put(b"x" * 100_000)
os.write(1, b"told")
"""
    calls = "trace=pwrite64,fsync,fdatasync,link,rename,write"
    for mode in ("sync", "no"):
        command = ["strace", "-f", "-y", "-qq", "-e", calls, "-o", str(trace)]
        subprocess.run([*command, sys.executable, "-c", code, str(path), mode], check=True, capture_output=True)
        steps = [step for line in trace.read_text().splitlines() if (step := _step(line, tmp_path))]
        log = f"commands/step_000012/{NAME}.log"
        folder, blobs = "commands/step_000012", "commands/step_000012/blobs"
        made = [f"pwrite64 {log}", f"fsync {log}", "link", f"fsync {folder}", f"fsync {log}"]
        told = [f"pwrite64 {log}", f"fdatasync {log}", "told"]
        blob = [f"pwrite64 {blobs}/", f"fsync {blobs}/", "rename", f"fsync {blobs}", f"fsync {folder}", "told"]
        names = ["fsync commands", "fsync ."]
        expected = [*names, *made, *told, *told, *blob] if mode == "sync" else []
        if mode == "no":
            expected = [step for step in [*made, *told, *told, *blob] if "sync" not in step]
        assert steps == expected
        shutil.rmtree(tmp_path / "commands")


def _step(line: str, root: Path) -> str:
    """A system call as `NAME FILE`, the file relative to the root and a blob without its name."""
    if '"told"' in line:
        return "told"
    match = re.search(r"(pwrite64|f(?:data)?sync)\(\d+<([^>]*)>", line)
    if match is not None and Path(match[2]).is_relative_to(root):
        # The log's descriptor was opened under its temporary name.
        name = str(Path(match[2]).relative_to(root)).replace(f".{NAME}.log.tmp", f"{NAME}.log")
        return f"{match[1]} {re.sub('blobs/.*', 'blobs/', name)}"
    match = re.search(r"(link|rename)\(.*\) = 0", line)
    return match[1] if match is not None and str(root) in line else ""


def test_a_record_that_cannot_stand_there_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path, RECORDS[:3])
    log = CommandLog.open(path, sync=False)
    before = path.read_bytes()
    with pytest.raises(CommandLogDamagedError, match="t0c0 has no result"):
        log.append(start("t1c0"))
    assert path.read_bytes() == before
    log.append(end(3))
    log.close()
    with pytest.raises(CommandLogWriteError, match="closed"):
        log.append(ClosedRecord())


def test_large_bytes_are_blobs_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs", sync=True)
    small, large = b"s" * MAX_INLINE_BYTES, b"l" * (MAX_INLINE_BYTES + 1)
    assert blobs.put(small) == Stored(len(small), small)
    stored = blobs.put(large)
    assert (stored.data, stored.size_bytes, blobs.get(stored)) == (None, len(large), large)
    (path,) = (tmp_path / "blobs").iterdir()
    first = path.stat()
    assert blobs.put(large) == stored
    assert path.stat().st_ino == first.st_ino  # not written again
    for harm in (large[:-1], b"x" + large[1:], b"", large * 2):
        path.write_bytes(harm)
        with pytest.raises(CommandLogDamagedError, match=re.escape(str(path))):
            blobs.get(stored)
        assert blobs.put(large) == stored  # who has the bytes heals it
        assert blobs.get(stored) == large
    path.unlink()
    with pytest.raises(CommandLogDamagedError, match="No such file"):
        blobs.get(stored)
    path.symlink_to("/etc/hostname")
    with pytest.raises(CommandLogDamagedError, match=re.escape(str(path))):
        blobs.get(stored)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"n": 10**40, "x": -0.0}, {"s": "\ud800 \0 ü"}, {"b": 1, "a": [None, True, {"z": 1, "y": 2}]}],
)
def test_a_call_comes_back_as_it_was(arguments: dict[str, object]) -> None:
    call = Call(tool="ba\udc00sh", arguments=arguments)
    encoded = encode_call(call)
    again = decode_call(StartRecord("t0c0", encoded.digest, encoded.request))
    assert repr(again) == repr(call)
    assert encode_call(again) == encoded


def test_calls_that_differ_have_other_digests_and_no_json_is_no_call() -> None:
    texts = [("a", {}), ("b", {}), ("a", {"x": 1}), ("a", {"x": "1"}), ("a", {"x": 1.0}), ("a", {"x": True})]
    assert len({encode_call(Call(tool=tool, arguments=arguments)).digest for tool, arguments in texts}) == len(texts)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for arguments in ({"x": {1, 2}}, {"x": b"bytes"}, {"x": deep}):
        with pytest.raises(ValueError, match="no JSON"):
            encode_call(Call(tool="a", arguments=arguments))
    for request in (b"", b"[]", b'["a", 1]', b"[" * 100_000, b'{"tool": 1}'):
        with pytest.raises(CommandLogDamagedError, match="t0c0 is no call"):
            decode_call(StartRecord("t0c0", b"", request))


def test_where_logs_lie() -> None:
    assert log_path(Path("r"), "s12-p3-m0") == Path("r/commands/step_000012/s12-p3-m0.log")
    assert log_path(Path("r"), "eval7-p0-m15") == Path("r/commands/eval_000007/eval7-p0-m15.log")
    for name in ("s12", "s1-p2-m3/../x", "S1-p2-m3", "s01-p2-m3", "s1-p2-m3\n", "s1-p2-m9999999999", ""):
        with pytest.raises(ValueError, match="trajectory is"):
            log_path(Path("r"), name)
