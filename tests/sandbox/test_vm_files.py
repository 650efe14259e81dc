"""Proves: what virtual machines are made of is kept whole or made anew, is the same for equal inputs, and says what is
missing where it cannot be had; a state keeps every byte of memory, and nobody can change it.
"""

import errno
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollforward.sandbox import vm, vm_cache, vm_kernel, vm_state
from rollforward.sandbox.bubblewrap import interpreter
from rollforward.sandbox.config import Limits
from rollforward.sandbox.errors import SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.qcow2 import empty_disk
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm_cpio import Entry, write_cpio
from rollforward.sandbox.vm_image import loaded_part
from rollforward.sandbox.vm_state import State
from tests.helpers.leaks import own_descriptors

MIB = 1 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (vm_cache, vm_kernel):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_directory_is_made_once_and_anew_when_it_is_damaged(cache: Path) -> None:
    made: list[Path] = []

    def make(scratch: Path) -> None:
        made.append(scratch)
        (scratch / "file").write_bytes(b"content")

    home = vm_cache.prepared("thing", "0" * 32, make)
    assert vm_cache.prepared("thing", "0" * 32, make) == home == vm_cache.found("thing", "0" * 32)
    assert len(made) == 1
    assert vm_cache.kept_digest(home / "file") == vm_cache.file_digest(home / "file")
    assert (home / "file").stat().st_mode & 0o444 == 0o444
    (home / "file").write_bytes(b"c0ntent")
    assert vm_cache.found("thing", "0" * 32) is None
    assert (vm_cache.prepared("thing", "0" * 32, make) / "file").read_bytes() == b"content"
    assert len(made) == 2
    (home / "DIGESTS").write_text("{")
    vm_cache.prepared("thing", "0" * 32, make)
    assert len(made) == 3
    assert [path.name for path in cache.iterdir()] == [home.name]


def test_one_that_cannot_be_made_leaves_nothing(cache: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(SandboxUnavailableError, match=r"No space left.*Make room"):
        vm_cache.prepared("thing", "1" * 32, fail)
    assert list(cache.iterdir()) == []


def test_others_that_nobody_used_for_days_go_once_their_processes_have_ended(cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rollforward.sandbox import vm_cache\n"
        "vm_cache.CACHE = Path(sys.argv[1])\n"
        "for kind in ('thing', 'other'):\n"
        "    vm_cache.prepared(kind, '2' * 32, lambda scratch: (scratch / 'f').touch())\n"
        "print(vm_cache.found('thing', '2' * 32), flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        old, other = Path(user.stdout.readline().strip()), cache / f"other-{'2' * 32}"
        for path in (old, other):
            os.utime(path, (1e9, 1e9))
        new = vm_cache.prepared("thing", "3" * 32, lambda scratch: (scratch / "f").touch())
        assert old.exists(), "a process that lives was given it"
        user.communicate()
    vm_cache.prepared("thing", "3" * 32, lambda scratch: (scratch / "f").touch())
    assert new.is_dir()
    assert not old.exists()
    assert other.exists()
    assert sorted(path.name for path in cache.iterdir()) == [other.name, new.name]


def test_what_a_killed_process_left_half_made_goes_and_what_is_being_made_stays(cache: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from rollforward.sandbox import vm_cache\n"
        "vm_cache.CACHE = Path(sys.argv[1])\n"
        "def make(scratch):\n"
        "    (scratch / 'half').touch(); os.utime(scratch, (time.time() - 120.0,) * 2)\n"
        "    print(scratch, flush=True); sys.stdin.read()\n"
        "vm_cache.prepared('thing', '4' * 32, make)\n"
    )
    command = [sys.executable, "-c", program, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        scratch = Path(maker.stdout.readline().strip())
        new = vm_cache.prepared("thing", "5" * 32, lambda scratch: (scratch / "f").touch())
        assert (scratch / "half").exists(), "a process that lives is making it"
        maker.kill()
    vm_cache.prepared("thing", "5" * 32, lambda scratch: (scratch / "f").touch())
    assert [path.name for path in cache.iterdir()] == [new.name]


@pytest.mark.parametrize("missing", ["apt-get", "dpkg-deb"])
def test_without_a_way_to_the_kernel_the_ways_out_are_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(vm_kernel.shutil, "which", lambda name: None if name == missing else which(name))
    with pytest.raises(SandboxUnavailableError) as told:
        vm_kernel.find_kernel()
    assert "\n" not in str(told.value)
    for word in (missing, "apt-get update", "linux-image-", str(cache), "kernel-"):
        assert word in str(told.value)
    assert list(cache.iterdir()) == []


def test_without_network_the_ways_out_are_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("apt-cache", "Depends: linux-image-6.1.0-1-cloud-amd64"), ("apt-get", "E: Could not resolve")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '  {said}'\necho '{said}' >&2\n[ {name} = apt-cache ]\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailableError, match=r"Could not resolve.*apt-get update.*without network"):
        vm_kernel.find_kernel()


def test_without_qemu_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailableError, match="qemu-system-x86"):
        vm.find_qemu()


def test_a_state_keeps_every_byte_and_no_empty_page(tmp_path: Path) -> None:
    size = 8 * MIB
    memory, devices = vm_state.memory_file(size), vm_state.file_of([b"devices"])
    written = {
        0: b"first",
        4095: b"ab",
        MIB - 2: b"across",
        5 * MIB: os.urandom(3 * 4096),
        size - 1: b"z",
        3 * MIB: bytes(9),
    }
    for place, data in written.items():
        os.pwrite(memory, data, place)
    vm_state.keep(State(memory, devices), tmp_path)
    assert (tmp_path / "memory").stat().st_size == (1 + 1 + 2 + 3 + 1) * 4096
    loaded = vm_state.load(tmp_path, size)
    assert os.pread(loaded.memory, size, 0) == os.pread(memory, size, 0)
    assert os.pread(loaded.devices, 99, 0) == b"devices"
    copied = vm_state.copy(loaded.memory, size)
    assert os.pread(copied, size, 0) == os.pread(memory, size, 0)
    for descriptor in loaded[:2]:
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    os.pwrite(copied, b"x", 0)
    assert os.pread(loaded.memory, 1, 0) == b"f"
    with pytest.raises(SandboxFileError, match="more than"):
        vm_state.content(devices, 3)
    assert vm_state.content(devices, 7) == [b"devices"]
    shared = vm_state.share(loaded)
    assert (loaded.disk, shared.disk) == (-1, -1)
    vm_state.close_all(loaded)
    assert vm_state.content(shared.devices, 7) == [b"devices"]
    vm_state.keep(shared._replace(disk=devices), tmp_path)
    with_disk = vm_state.load(tmp_path, size)
    assert vm_state.content(with_disk.disk, 7) == [b"devices"]
    vm_state.close_all([memory, devices, copied, *shared, *with_disk])


def test_what_is_read_and_written_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that takes some of the bytes of a call."""
    data = os.urandom(3 * 4096 + 5)
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda file, part, start: write(file, part[:1000], start))
    monkeypatch.setattr(os, "pread", lambda file, size, start: read(file, min(size, 4096), start))
    one = vm_state.file_of([data])
    assert b"".join(vm_state.content(one, len(data))) == data
    assert os.read(one, len(data)) == data, "it is at its beginning"
    copied = vm_state.copy(one, 4 * 4096)
    assert b"".join(vm_state.content(copied, 4 * 4096)) == data + bytes(4096 - 5)
    vm_state.keep(State(copied, one), tmp_path)
    assert (tmp_path / "devices").read_bytes() == data
    vm_state.close_all([one, copied])


def test_without_room_for_a_state_it_is_told_and_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = vm_state.file_of([b"x" * 5000])
    before = own_descriptors()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for ask in (lambda: vm_state.copy(memory, 8192), lambda: vm_state.file_of([b"x"])):
        with pytest.raises(SandboxUnavailableError, match=r"No space left on device\. Make room"):
            ask()
    monkeypatch.setattr(os, "pread", full)
    with pytest.raises(SandboxUnavailableError, match="No space left on device"):
        vm_state.content(memory, 5000)
    assert own_descriptors() - before == Counter()
    os.close(memory)


def test_a_state_that_is_cut_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("[[0, 4096]]")
    with pytest.raises(SandboxUnavailableError, match="Remove it"):
        vm_state.load(tmp_path, MIB)


def test_an_empty_disk_is_what_qemu_takes_for_one(tmp_path: Path) -> None:
    """By hand: magic, version 3, 64 KiB clusters, tables at the first four of them, counted once each."""
    disk = empty_disk(600 * MIB)
    assert disk[:8] == b"QFI\xfb\0\0\0\3"
    assert struct.unpack(">IQ", disk[20:32]) == (16, 600 * MIB)
    l1_size, l1_offset, refcounts = struct.unpack(">IQQ", disk[36:56])
    assert (l1_size, l1_offset, refcounts) == (2, 3 << 16, 1 << 16)
    assert struct.unpack(">Q", disk[1 << 16 : (1 << 16) + 8]) == (2 << 16,)
    assert struct.unpack(">5H", disk[2 << 16 : (2 << 16) + 10]) == (1, 1, 1, 1, 0)
    assert len(disk) == 4 << 16
    for size in (0, 511, 1 << 43):
        with pytest.raises(ValueError, match="multiple of 512"):
            empty_disk(size)
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        pytest.skip("qemu-system-x86_64 is not installed (Debian package qemu-system-x86)")
    (tmp_path / "disk").write_bytes(disk)
    command = [qemu, "-machine", "none", "-display", "none", "-nodefaults", "-monitor", "stdio"]
    command += ["-blockdev", f"driver=qcow2,node-name=d,file.driver=file,file.filename={tmp_path / 'disk'}"]
    asked = subprocess.run(command, input="info block -n -v d\nquit\n", capture_output=True, text=True, check=True)
    assert "600 MiB (629145600 bytes)" in asked.stdout


def test_an_initial_file_system_holds_what_it_was_given(tmp_path: Path) -> None:
    cpio = shutil.which("busybox") or shutil.which("cpio")
    if cpio is None:
        pytest.skip("neither busybox nor cpio is installed (Debian packages busybox, cpio)")
    with (tmp_path / "a").open("wb") as out:
        write_cpio(out, {"/d/e/f": Entry(b"text", 0o100640), "/d/l": Entry(b"e/f", 0o120777)})
    applet = [cpio, "cpio"] if cpio.endswith("busybox") else [cpio]
    with (tmp_path / "a").open("rb") as archive:
        subprocess.run([*applet, "-i", "-d"], stdin=archive, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "d/l").read_bytes() == b"text"
    assert (tmp_path / "d/e/f").stat().st_mode & 0o777 == 0o640


def test_a_program_without_what_debuggers_read_still_runs(tmp_path: Path) -> None:
    program = Path(interpreter())
    libraries = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line]
    for path in {program, *libraries}:
        data = path.read_bytes()
        short = loaded_part(data)
        assert len(short) <= len(data)
        assert short[64:] == data[64 : len(short)]
        (tmp_path / path.name).write_bytes(short)
        (tmp_path / path.name).chmod(0o755)
    command = [str(tmp_path / program.name), "-c", "import ctypes, json; print(json.dumps(6 * 7))"]
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONHOME": sys.base_prefix}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "42\n"
    assert loaded_part(b"#!/bin/sh\n") == b"#!/bin/sh\n"


def test_the_counters_rate_is_about_this_processors() -> None:
    assert 500_000 < vm.tsc_khz() < 10_000_000


def test_few_sizes_of_machines_hold_all_limits() -> None:
    sizes = {
        vm.guest_bytes(SandboxSpec(limits=Limits(memory_bytes=memory * MIB, disk_bytes=disk * MIB)))
        for memory in range(16, 600, 8)
        for disk in (1, 4, 64)
    }
    assert len(sizes) < 14
    assert all(size % (64 * MIB) == 0 for size in sizes)
    assert vm.guest_bytes(SandboxSpec(limits=Limits(memory_bytes=512 * MIB, disk_bytes=64 * MIB))) >= (512 + 128) * MIB


def test_what_keeps_a_file_from_being_opened_is_told_with_its_way_out(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache.mkdir()
    with pytest.raises(
        SandboxUnavailableError, match=rf"{tmp_path}/none cannot be read: No such file.*Look at the disk"
    ):
        vm.files_as([str(tmp_path / "file"), str(tmp_path / "none")])
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.open("/dev/null", os.O_RDONLY)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 1, hard))
    try:
        for ask in (
            lambda: vm.files_as([str(tmp_path / "file")] * 2),
            lambda: vm_cache.prepared("thing", "7" * 32, lambda scratch: (scratch / "f").touch()),
            lambda: vm_state.load(tmp_path, 1 << 20),
        ):
            with pytest.raises(SandboxUnavailableError, match=r"Too many open files.*ulimit -n"):
                ask()
            opened = os.open("/dev/null", os.O_RDONLY)
            os.close(opened)
            assert opened == first, "a descriptor is left open"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_this_user_may_not_read_is_to_be_had_by_chmod() -> None:
    denied = r"a thing cannot be read: Permission denied\. Let this user"
    with pytest.raises(SandboxUnavailableError, match=denied), refusals("a thing cannot be read"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
