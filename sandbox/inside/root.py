"""The file system of a container: an overlay of read-only layers and one private layer of fixed size, which all places
that can be written share.

    /box            a tmpfs of the template's, never seen by commands
      frame/        the lowest layer of an image: users and mount points
      host/         the same with links into this machine's /usr: the image `host`
      quota/        mount point of the container's own tmpfs: upper/ and work/
      root/         mount point of its root
      place/        mount point of whatever else a container's first process makes
      proc/         the template's /proc, without which the kernel lets nobody mount one
"""

import os
import shutil
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox.inside import system

USER: Final = 1000
"""The sandbox's user and group, as seen inside."""
BOX: Final = "/box"
PROC: Final = f"{BOX}/proc"
FRAME: Final = f"{BOX}/frame"
HOST: Final = f"{BOX}/host"
ROOT: Final = f"{BOX}/root"
_QUOTA: Final = f"{BOX}/quota"
PLACE: Final = f"{BOX}/place"
SHARED: Final = f"{_QUOTA}/shm"
"""What the sandbox has as shared memory: of the private layer's size, and in no snapshot."""
_TEXTS: Final = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{USER}:{USER}:user:/home:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": f"root:x:0:\nuser:x:{USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
OWN: Final = (("tmp", 0o1777, USER), ("workspace", 0o755, USER), ("home", 0o755, USER))
"""Directories that the private layer has from the start."""
_LINKS: Final = ("bin", "lib", "lib64", "lib32", "libx32", "sbin")
_MASKED: Final = (
    *("kcore", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "keys", "key-users", "sched_debug", "slabinfo"),
    *("sysrq-trigger", "timer_list", "timer_stats", "latency_stats", "vmallocinfo", "kallsyms"),
)


def prepare(binds: list[str]) -> None:
    """Make /box, in the template.

    Args:
        binds: directories of this machine that the image `host` shows.
    """
    system.mount("tmpfs", BOX, "tmpfs", system.MS_NOSUID | system.MS_NODEV, f"mode=755,uid={os.getuid()}")
    for path in (_QUOTA, ROOT, PROC, PLACE):
        os.mkdir(path)
    system.mount("proc", PROC, "proc", system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC)
    _frame(Path(FRAME))
    host = Path(HOST)
    _frame(host)
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            (host / name).symlink_to(os.readlink(f"/{name}"))
    for path in binds:
        (host / path[1:]).mkdir(parents=True, exist_ok=True)
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copyfile("/etc/ld.so.cache", host / "etc/ld.so.cache")
    if os.path.isdir("/etc/alternatives"):
        shutil.copytree("/etc/alternatives", host / "etc/alternatives", symlinks=True)


def _frame(lowest: Path) -> None:
    for name in ("dev", "etc", "proc", "root", "run", "var"):
        (lowest / name).mkdir(parents=True)
    for name, text in _TEXTS.items():
        (lowest / "etc" / name).write_text(text)


def masked() -> list[str]:
    """Files of /proc that say something of the host, or do something to it."""
    return [f"/proc/{name}" for name in _MASKED if os.path.exists(f"{PROC}/{name}")]


def build(request: dict[str, Any], restore: Any) -> int:
    """Make the container's root and enter it.

    Args:
        request: see `template.py`; a machine's may say where a file system of its size is mounted already, "private".
        restore: called with a descriptor of the empty private layer, before it is in use.

    Returns:
        A descriptor of the private layer, which has no path any more.
    """
    descriptor = lay(request, restore)
    system.mount("proc", f"{ROOT}/proc", "proc", system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC)
    system.bind("/dev", f"{ROOT}/dev")
    system.bind(SHARED, f"{ROOT}/dev/shm")
    system.pivot(ROOT)
    return descriptor


def lay(request: dict[str, Any], restore: Any) -> int:
    """Lay the container's layers at ROOT; arguments and result as of `build`."""
    system.mount("", "/", flags=system.MS_REC | system.MS_PRIVATE)
    if request.get("private"):
        system.bind(request["private"], _QUOTA)
    else:
        options = f"size={request['disk_bytes']},nr_inodes={request['files'] + 16},mode=755"
        system.mount("tmpfs", _QUOTA, "tmpfs", system.MS_NOSUID | system.MS_NODEV, options)
    upper = f"{_QUOTA}/upper"
    for path in (upper, f"{_QUOTA}/work", SHARED):
        os.mkdir(path)
    _own(SHARED, 0o1777, USER)
    descriptor = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
    for name, mode, owner in OWN:
        os.mkdir(f"{upper}/{name}")
        _own(f"{upper}/{name}", mode, owner)
    restore(descriptor)
    lower = ":".join(request["image"])
    options = f"lowerdir={lower},upperdir={upper},workdir={_QUOTA}/work,userxattr"
    system.mount("overlay", ROOT, "overlay", system.MS_NOSUID | system.MS_NODEV, options)
    for path in request["binds"]:
        system.bind(path, ROOT + path)
    return descriptor


def _own(path: str, mode: int, owner: int) -> None:
    os.chmod(path, mode)
    if os.getuid() == 0:
        os.chown(path, owner, owner)
