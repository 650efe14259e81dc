"""Proves: records of leases are whole or not there, homes belong to one at a time, and what the dead left is removed.

Does not prove: that control groups and processes of real sandboxes go (test_supervisor_kills.py).
"""

import errno
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rollforward.sandbox import cgroups, homes
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.homes import Claim, Home, homes_root, supervisor_id, sweep_home, sweep_homes
from rollforward.sandbox.leases import Deadline, LeaseBook, LeaseRecord, started_ticks
from tests.helpers.sandboxes import is_gone, wait_for

NAME = secrets.token_hex(8)
"""Of no other process: control groups are the whole machine's."""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return homes_root()


def record(instance: str = NAME, **fields: object) -> LeaseRecord:
    values: dict[str, object] = {"sandbox_id": "a-0", "owner": "me", "labels": {"run": "x"}, "made_unix_s": 1.5}
    return LeaseRecord(instance=instance, **(values | fields))  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    book = LeaseBook(tmp_path / "leases")
    book.write(record())
    book.write(record(pid=5, started_ticks=6, cgroups=("/a",)))
    assert list(book.read()) == [record(pid=5, started_ticks=6, cgroups=("/a",))]
    book.remove(NAME)
    book.remove(NAME)
    assert list(book.read()) == []


def test_torn_and_foreign_files_are_no_records(tmp_path: Path) -> None:
    book = LeaseBook(tmp_path / "leases")
    book.write(record())
    whole = (tmp_path / "leases" / NAME).read_bytes()
    for length in range(len(whole) - 1):
        (tmp_path / "leases" / NAME).write_bytes(whole[:length])
        assert list(book.read()) == [], length
    (tmp_path / "leases" / NAME).write_bytes(whole)
    (tmp_path / "leases" / "another-name").write_bytes(whole)
    (tmp_path / "leases" / "empty").touch()
    (tmp_path / "leases" / "directory").mkdir()
    (tmp_path / "leases" / "dangling").symlink_to("nowhere")
    (tmp_path / "leases" / "a-device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "leases" / "a-pipe")
    assert list(book.read()) == [record()]


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    book = LeaseBook(tmp_path)
    book.write(record())
    whole = (tmp_path / NAME).read_bytes()
    for bit in range((len(whole) - 1) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(damaged)
        found = list(book.read())
        assert found in ([], [record()]), bit  # a crc in capitals is the same crc
    (tmp_path / NAME).write_bytes(whole)
    assert list(book.read()) == [record()]


def test_a_full_disk_refuses_the_record_and_keeps_the_old_one(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path], check=True)
    try:
        book = LeaseBook(tmp_path / "leases")
        book.write(record())
        (tmp_path / "ballast").write_bytes(bytes(4096))
        with pytest.raises(SandboxUnavailableError, match=r"No space left.*Make room"):
            book.write(record(owner="x" * 9000))
        assert list(book.read()) == [record()]
        assert os.listdir(tmp_path / "leases") == [NAME]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_renewal_never_shortens_a_lease() -> None:
    now_s = 100.0
    deadline = Deadline(10.0, lambda: now_s)
    deadline.renew(5.0)
    assert deadline.left_s == 10.0
    now_s = 108.0
    deadline.renew(5.0)
    assert deadline.left_s == 5.0
    deadline.put_off(3.0)
    assert deadline.left_s == 8.0


def test_names_are_the_same_for_the_same() -> None:
    assert supervisor_id("run", 0, ()) == supervisor_id("run", 0, ())
    assert len({supervisor_id("run", n) for n in range(100)}) == 100


def test_one_process_has_a_home() -> None:
    home = Home.of(NAME)
    assert home.holder() is None
    claim = Claim.take(home, make=True)
    assert claim is not None
    assert home.holder() == os.getpid()
    assert Claim.take(home, make=True) is None
    assert not sweep_home(home)
    claim.remove()
    assert not home.path.exists()
    assert home.holder() is None


def test_a_hundred_take_and_remove_one_home_and_never_two_have_it() -> None:
    home, inside, most, taken = Home.of(NAME), [0], [0], [0]
    lock = threading.Lock()

    def strive() -> None:
        for _ in range(50):
            claim = Claim.take(home, make=True)
            if claim is None:
                continue
            with lock:
                inside[0] += 1
                most[0], taken[0] = max(most[0], inside[0]), taken[0] + 1
            (home.path / "file").write_bytes(b"x")
            with lock:
                inside[0] -= 1
            claim.remove()

    threads = [threading.Thread(target=strive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert taken[0] > 8
    assert not home.path.exists()


def test_the_dead_are_cleaned_up_after_and_the_living_left_alone(root: Path) -> None:
    dead, living = Home.of(NAME), Home.of("f" * 16)
    killed = subprocess.Popen(["sleep", "1000"])
    spared = subprocess.Popen(["sleep", "1000"])
    try:
        claim = Claim.take(dead, make=True)
        assert claim is not None
        dead.book.write(record("1" * 16, pid=killed.pid, started_ticks=started_ticks(killed.pid)))
        # Another process has the number by now.
        dead.book.write(record("2" * 16, pid=spared.pid, started_ticks=1))
        (dead.path / "leases" / "torn").write_bytes(b"0000")
        (dead.path / "tools").mkdir()
        (dead.path / "tools" / "link").symlink_to(root)
        dead.socket.write_bytes(b"stale")
        claim.release()
        lives = Claim.take(living, make=True)
        assert lives is not None
        (root / "somebody-else").mkdir()
        (root / "a-file").write_bytes(b"")
        assert sweep_homes() == [NAME]
        assert killed.wait(timeout=60) == -signal.SIGKILL
        assert spared.poll() is None
        assert sorted(os.listdir(root)) == ["a-file", "f" * 16, "somebody-else"]
        lives.remove()
    finally:
        for process in (killed, spared):
            process.kill()
            process.wait()


def test_a_lock_is_free_as_soon_as_its_process_is_killed() -> None:
    code = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from rollforward.sandbox.homes import Claim, Home\n"
        "assert Claim.take(Home.of(sys.argv[2]), make=True); print('has it', flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", code, tempfile.gettempdir(), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Home.of(NAME).holder() == process.pid
        assert not sweep_home(Home.of(NAME))
        process.kill()
    wait_for(lambda: is_gone(process.pid))
    assert sweep_home(Home.of(NAME))


def test_of_one_that_is_known_to_be_dead_a_lock_that_is_held_for_a_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(homes, "_PATIENCE_S", 60.0)
    home = Home.of(NAME)
    claim = Claim.take(home, make=True)
    assert claim is not None
    assert not sweep_home(home)
    threading.Timer(0.3, claim.release).start()
    began_s = time.monotonic()
    assert sweep_home(home, is_dead=True)
    assert not sweep_home(home, is_dead=True)
    assert time.monotonic() - began_s < 50.0  # there is none, and it is not waited for


def test_a_successor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_PATIENCE_S", 0.2)
    successor = Claim.take(Home.of(NAME), make=True)
    assert successor is not None
    assert not sweep_home(Home.of(NAME), is_dead=True)
    assert Home.of(NAME).holder() == os.getpid()
    successor.remove()


def test_a_sweep_that_fails_leaves_the_lock_free(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home.of(NAME)
    claim = Claim.take(home, make=True)
    assert claim is not None
    home.socket.touch()
    claim.release()
    remove, failures = homes._remove, [1]  # pyright: ignore[reportPrivateUsage]

    def fail_once(path: Path) -> None:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(path)

    monkeypatch.setattr(homes, "_remove", fail_once)
    assert not sweep_home(home)
    assert sweep_home(home)
    assert not home.path.exists()


def test_control_groups_are_found_wherever_the_dead_one_had_them() -> None:
    """A supervisor was killed before it could record a sandbox, and whoever cleans up is in another group."""
    parents = [parent / f"rollforward-elsewhere-{NAME}" for parent in cgroups.find().parents()]
    home, member = Home.of(NAME), subprocess.Popen(["sleep", "1000"])
    groups = [parent / f"rollforward.{NAME}.x" for parent in parents]
    try:
        for group in groups:
            group.mkdir(parents=True)
            (group / "cgroup.procs").write_text(str(member.pid))
        claim = Claim.take(home, make=True)
        assert claim is not None
        (home.path / "groups").write_text("\n".join(map(str, [*parents, "/nowhere", "relative", "\0"])))
        claim.release()
        assert sweep_home(home)
        assert member.wait(timeout=60) == -signal.SIGKILL
        assert [group for group in groups if group.exists()] == []
    finally:
        member.kill()
        member.wait()
        for path in [*groups, *parents]:
            if path.exists():
                path.rmdir()


def test_while_a_group_cannot_be_removed_its_home_stays_for_the_next_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_END_S", 0.2)
    home = Home.of(NAME)
    groups = [parent / f"rollforward.{NAME}.x" for parent in cgroups.find().parents()]
    claim = Claim.take(home, make=True)
    assert claim is not None
    claim.note_groups()
    home.book.write(record())
    home.socket.touch()
    try:
        for group in groups:
            (group / "in-the-way").mkdir(parents=True)
        assert not claim.clean()
        claim.remove()  # as one does that ends in order
        assert not sweep_home(home)
        assert sorted(os.listdir(home.path)) == ["LOCK", "groups", "leases"]
        for group in groups:
            (group / "in-the-way").rmdir()
        assert sweep_home(home)
        assert [group for group in groups if group.exists()] == []
        assert not home.path.exists()
    finally:
        for path in [path for group in groups for path in (group / "in-the-way", group)]:
            if path.exists():
                path.rmdir()


@pytest.mark.parametrize("is_taken_again", [False, True])
def test_a_home_that_was_removed_while_its_lock_was_waited_for_is_nobodys(
    is_taken_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.of(NAME)
    held = Claim.take(home, make=True)
    lock = fcntl.flock

    def slow_lock(descriptor: int, operation: int) -> None:
        if waiting:
            waiting.pop().remove()  # between the opening of the file and the lock
            if is_taken_again:
                others.append(Claim.take(home, make=True))
        lock(descriptor, operation)

    waiting, others = [held] if held is not None else [], list[Claim | None]()
    monkeypatch.setattr(fcntl, "flock", slow_lock)
    claim = Claim.take(home, make=True)
    assert home.holder() == os.getpid()
    assert [claim is not None, *(other is not None for other in others)].count(True) == 1
    for one in (claim, *others):
        if one is not None:
            one.remove()
    assert not home.path.exists()


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_root_that_somebody_else_may_have_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / f"rollforward-sandboxes-{os.geteuid()}"
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "open":
        path.mkdir()
        path.chmod(0o777)
    else:
        path.touch()
    with pytest.raises(SandboxUnavailableError, match="belongs to you alone"):
        homes_root()


def test_when_a_process_started_is_told_until_it_is_gone() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        first = started_ticks(process.pid)
        time.sleep(0.01)
        assert first is not None
        assert started_ticks(process.pid) == first
        process.kill()
    assert started_ticks(process.pid) is None
