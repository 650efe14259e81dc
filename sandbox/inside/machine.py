"""The first process of a virtual machine: makes the guest ready, waits to be woken, and has an agent serve the host.

    boot -> drivers, disks, imports -> {"id": 0} -> [the host keeps this state; each sandbox goes on from it] -> wake
         -> agent (agent.py), in namespaces as in a container -> its end is the machine's

The agent has one port to the host, this process the other. There it is woken, by

    {"op": "wake", "entropy", "unix_ns", "image", "disk_bytes", "files", "memory_bytes", "processes", "snapshot_parts"}

and so many messages with a part of a snapshot each: it takes new random numbers, the time, and the sandbox's limits.
Nothing that two machines of one state have in common is ever a secret. A machine that goes on where it was saved is
asked for the like later: {"op": "renew", "entropy", "unix_ns"}. Manifest and drivers lie in the initial file system.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import mmap
import os
import select
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox.inside import frames, hearing, native, root, system, template

_RNDADDENTROPY, _RNDRESEEDCRNG = 0x4008_5203, 0x5207
_FINIT_MODULE: Final = {"x86_64": 313, "aarch64": 273}
_RB_AUTOBOOT: Final = 0x0123_4567
_MS_MOVE: Final = 8192
_NEW_ROOT: Final = "/machine"
_AGENT_PORT, _KEEPER_PORT = "/dev/vport0p1", "/dev/vport0p2"
_GROUPS: Final = "/sys/fs/cgroup"
_GROUP: Final = f"{_GROUPS}/sandbox"
_SYSTEM, _PRIVATE = "system", "private"
"""Disks with a meaning: the agent's own world, and where the sandbox's files go if that is not memory."""
_PORT_S: Final = 60.0
_SPARE_BYTES: Final = 8 << 20
_SPARE_SHARE: Final = 32
"""Of what is free, for the pages' own table and for what the kernel keeps back, which both grow with memory."""
_FAULT_AROUND_BYTES: Final = 32 << 10
_MAP_POPULATE: Final = 0x8000
_LINKS: Final = ("bin", "lib", "lib64", "sbin")
_NODES: Final = (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9))
_STREAMS: Final = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))


def main() -> None:
    """Be the machine. Never returns."""
    try:
        manifest = json.loads(Path("/manifest.json").read_text(encoding="utf-8"))
        system.no_new_privileges()
        control, keeper = _come_up(manifest)
        system.write_all(keeper, frames.pack({"id": 0, "kind": "", "error": ""}))
        _serve(control, keeper, _programs(manifest["prefix"]))
    except BaseException:  # noqa: BLE001, the host keeps what is said here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        reboot()


def reboot() -> None:
    """End the machine: the emulator is told not to start it again."""
    os.sync()
    ctypes.CDLL(None).reboot(ctypes.c_int(_RB_AUTOBOOT))
    while True:
        time.sleep(1.0)


def _come_up(manifest: dict[str, Any]) -> tuple[int, int]:
    """Make the guest ready; descriptors of the ports to the host."""
    for name, kind in (("proc", "proc"), ("sys", "sysfs"), ("dev", "devtmpfs")):
        os.makedirs(f"/{name}", exist_ok=True)
        system.mount(kind, f"/{name}", kind)
    for name in manifest["modules"]:
        _load(f"/drivers/{name}")
    _map_fewer_pages()
    _make_root(manifest["prefix"], _disks())
    importlib.invalidate_caches()
    for name in template.PRELOADED:
        importlib.import_module(name)
    native.load("/program/native.so")
    control, keeper = _open_port(_AGENT_PORT), _open_port(_KEEPER_PORT)
    _make_devices()
    Path("/proc/sys/vm/drop_caches").write_text("1")  # what was read to come up
    _rehearse()
    root.prepare([])
    gc.collect()
    gc.freeze()
    gc.disable()
    _empty_free_memory()
    return control, keeper


def _map_fewer_pages() -> None:
    """Have a fault of a file's page bring fewer pages beside it: what a short program gets for nothing is undone at its
    end, one by one. With half of what Linux brings `true` takes the fewest steps."""
    place = "/sys/kernel/debug"
    with contextlib.suppress(OSError):  # a kernel without it does more work
        system.mount("debugfs", place, "debugfs")
        try:
            Path(place, "fault_around_bytes").write_text(str(_FAULT_AROUND_BYTES))
        finally:
            system.unmount(place)


def _load(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    number = ctypes.c_long(_FINIT_MODULE[os.uname().machine])
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        system.check(libc.syscall(number, ctypes.c_long(descriptor), b"", ctypes.c_long(0)), f"loading {path}")
    finally:
        os.close(descriptor)


def _disks() -> dict[str, str]:
    """Devices by the names that the host gave them."""
    found: dict[str, str] = {}
    for block in Path("/sys/block").iterdir():
        serial = block / "serial"
        if serial.exists():
            found[serial.read_bytes().strip().decode()] = f"/dev/{block.name}"
    return found


def _make_root(prefix: str, disks: dict[str, str]) -> None:
    """Change from the initial file system, which cannot be left by namespaces, to one that shows the system disk's
    programs and Python; other disks lie below /images."""
    os.makedirs(_NEW_ROOT)
    system.mount("tmpfs", _NEW_ROOT, "tmpfs", 0, "mode=755,size=16m")
    for name in ("proc", "sys", "dev", "images", "usr", "program", "drivers", "tmp", "etc", root.BOX[1:]):
        os.mkdir(f"{_NEW_ROOT}/{name}")
    for name, device in disks.items():
        if name == _PRIVATE:
            os.mkdir(f"{_NEW_ROOT}/{_PRIVATE}")
            system.mount(device, f"{_NEW_ROOT}/{_PRIVATE}", "ext4", system.MS_NOSUID | system.MS_NODEV)
            continue
        place = f"{_NEW_ROOT}/images/{name}"
        os.mkdir(place)
        _mount_disk(device, place)
    lowest = f"{_NEW_ROOT}/images/{_SYSTEM}"
    system.bind(f"{lowest}/usr", f"{_NEW_ROOT}/usr")
    for name in _LINKS:
        if os.path.islink(f"{lowest}/{name}"):
            os.symlink(os.readlink(f"{lowest}/{name}"), f"{_NEW_ROOT}/{name}")
    if not prefix.startswith("/usr"):
        os.makedirs(_NEW_ROOT + prefix)
        system.bind(lowest + prefix, _NEW_ROOT + prefix)
    system.bind("/program", f"{_NEW_ROOT}/program")
    for name in ("proc", "sys", "dev"):
        system.mount(f"/{name}", f"{_NEW_ROOT}/{name}", flags=_MS_MOVE)
    os.chdir(_NEW_ROOT)
    system.mount(".", "/", flags=_MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def _mount_disk(device: str, place: str) -> None:
    """Mount a disk read-only, whichever of the file systems of images it has."""
    tried: list[str] = []
    for kind in ("ext4", "erofs", "squashfs"):
        try:
            system.mount(device, place, kind, system.MS_RDONLY | system.MS_NOSUID | system.MS_NODEV)
        except OSError as error:
            tried.append(f"{kind}: {error.strerror}")
        else:
            return
    raise OSError(f"{device} has no file system of an image ({'; '.join(tried)})")


def _open_port(path: str) -> int:
    end = time.monotonic() + _PORT_S
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _make_devices() -> None:
    """In place of the machine's devices those few that commands see; nothing else can be opened by name any more."""
    system.mount("tmpfs", "/dev", "tmpfs", system.MS_NOSUID, "mode=755,size=64k")
    for name, minor in _NODES:
        os.mknod(f"/dev/{name}", 0o20666, os.makedev(1, minor))
        os.chmod(f"/dev/{name}", 0o666)
    for name, end in _STREAMS:
        os.symlink(f"/proc/self/fd{end}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    system.mount("cgroup2", _GROUPS, "cgroup2")
    Path(_GROUPS, "cgroup.subtree_control").write_text("+memory +pids")
    os.mkdir(_GROUP)


def _rehearse() -> None:
    """Have in memory what nearly every command needs of the system disk: a sandbox would read it for itself alone."""
    for name in ("sh", "true", "cat", "python3"):
        if os.path.exists(f"/usr/bin/{name}"):
            argv = [f"/usr/bin/{name}", "-c", "pass"] if name == "python3" else [f"/usr/bin/{name}", "/dev/null"]
            os.waitpid(os.posix_spawn(argv[0], argv, {"PYTHONHASHSEED": "0"}), 0)


def _empty_free_memory() -> None:
    """Have the kernel fill what is free with zeros: pages that are empty are in no state that is kept."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))
    spare = _SPARE_BYTES + free // _SPARE_SHARE
    if free > spare:  # the first process is killed for a page too much, and the machine with it
        mmap.mmap(-1, free - spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_POPULATE).close()


def _programs(prefix: str) -> list[str]:
    """Directories that the image `host` shows as they are: files of an overlay take longer to open, and every program
    opens some."""
    return ["/usr"] if prefix.startswith("/usr") else ["/usr", prefix]


def _serve(control: int, keeper: int, programs: list[str]) -> None:
    """Wait to be woken, have an agent serve the host, and tell how it ended."""
    wake, _ = hearing.receive(keeper)
    _renew(wake)
    Path(_GROUP, "memory.max").write_text(str(wake["memory_bytes"]))
    Path(_GROUP, "pids.max").write_text(str(wake["processes"]))
    snapshot = _take_snapshot(keeper, wake["snapshot_parts"])
    events = os.open(f"{_GROUP}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
    procs = os.open(f"{_GROUP}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    given = [control, *([snapshot] if snapshot >= 0 else []), events, procs]
    request = {
        "image": [*(f"/images/{name}" for name in wake["image"]), root.FRAME],
        "binds": programs if wake["image"] == [_SYSTEM] else [],
        "uid": root.USER,
        "private": f"/{_PRIVATE}" if os.path.isdir(f"/{_PRIVATE}") else "",
        "disk_bytes": wake["disk_bytes"],
        "files": wake["files"],
        "has_snapshot": snapshot >= 0,
        "has_events": True,
    }
    pid, pidfd = template.make(request, given, is_many=True)
    if snapshot >= 0:
        os.close(snapshot)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(keeper, select.POLLIN)
    while pidfd not in (ready := [descriptor for descriptor, _ in poller.poll()]):
        if keeper in ready:
            _renew(hearing.receive(keeper)[0])
            system.write_all(keeper, frames.pack({"ooms": system.oom_kills(events)}))
    os.waitpid(pid, 0)
    if kills := system.oom_kills(events):
        system.write_all(control, frames.pack({"id": -1, "last_words": str(kills)}))


def _renew(wake: dict[str, Any]) -> None:
    """Be another machine than those that go on from the same state."""
    entropy = bytes.fromhex(wake["entropy"])
    with open("/dev/urandom", "wb", buffering=0) as random:
        fcntl.ioctl(random, _RNDADDENTROPY, struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy)
        fcntl.ioctl(random, _RNDRESEEDCRNG)
    time.clock_settime_ns(time.CLOCK_REALTIME, wake["unix_ns"])


def _take_snapshot(control: int, parts: int) -> int:
    """A descriptor of a file with the snapshot, which counts to nobody; -1 where there is none."""
    if not parts:
        return -1
    descriptor = os.memfd_create("snapshot", os.MFD_CLOEXEC)
    for _ in range(parts):
        _, (data,) = hearing.receive(control)
        system.write_all(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
