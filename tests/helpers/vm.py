"""Guests of QEMU that start in a moment and are killed like a machine without power.

A guest is booted once: it imports what programs need and waits for a command. That state is kept beside the image, and
every later guest starts from it, so under plain emulation too one costs a second or two. It has touched no disk yet.
KVM is used where the processor has it and a boot with it comes to its end; else emulation (TCG).
"""

import hashlib
import io
import json
import os
import select
import socket
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.helpers.vm_disk import Disk
from tests.helpers.vm_image import Program, build_image, find_kernel, tool

_MEMORY_MIB = 384
_BOOT_LIMIT_S = {"kvm": 30.0, "tcg": 240.0}
_LINE_LIMIT_S = 120.0
_PROGRAM_BYTES = 4 << 20
_NUM_DISKS = 2


class Guests:
    """Starts guests that run one program."""

    def __init__(self, program: Program, folder: Path, *, accelerator: str | None = None) -> None:
        """Args are the program, a folder for this test's files, and "kvm" or "tcg" to insist on one."""
        self.qemu = tool("qemu-system-x86_64", "qemu-system-x86")
        self.folder = folder
        self._image = build_image(find_kernel(), program)
        self._archive = program.archive
        self._program = folder / "program.tar"
        self.accelerator, self._state = self._saved_state(accelerator)

    def start(self, disks: Sequence[Disk], command: dict[str, Any]) -> "Guest":
        """Starts a guest on these disks and gives it its command."""
        for disk in disks:
            disk.start()
        self._write_program(command)
        files = [(disk.name, disk.work, disk.log) for disk in disks]
        return Guest(self._command(self.accelerator, files, self._state), self.folder / "console", is_waiting=True)

    def _write_program(self, command: dict[str, Any] | None) -> None:
        buffer = io.BytesIO(self._archive)
        if command is not None:
            content = json.dumps(command).encode()
            with tarfile.open(fileobj=buffer, mode="a") as archive:
                member = tarfile.TarInfo("command.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        self._program.write_bytes(buffer.getvalue().ljust(_PROGRAM_BYTES, b"\0"))

    def _saved_state(self, accelerator: str | None) -> tuple[str, Path]:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        has_kvm = os.access("/dev/kvm", os.R_OK | os.W_OK) and bool({"vmx", "svm"} & set(cpu.split()))
        wanted = [accelerator] if accelerator else ["kvm", "tcg"] if has_kvm else ["tcg"]
        version = subprocess.run([self.qemu, "--version"], capture_output=True, text=True, check=True).stdout
        for name in wanted:
            # A state goes on only where it was saved: this QEMU, and under KVM this processor.
            models = {line for line in cpu.splitlines() if line.startswith("model")} if name == "kvm" else ()
            same = hashlib.blake2b(f"{version} {sorted(models)} {_MEMORY_MIB}".encode(), digest_size=8).hexdigest()
            state, hopeless = (self._image / f"{word}-{name}-{same}" for word in ("state", "hopeless"))
            if state.exists() or (not (hopeless.exists() and len(wanted) > 1) and self._save(name, state)):
                return name, state
            hopeless.touch()
        raise AssertionError(f"no guest came up with {' or '.join(wanted)}; its console is {self.folder / 'console'}")

    def _save(self, accelerator: str, state: Path) -> bool:
        """Boots a guest and keeps its state; False when it does not come up in time."""
        temporary = state.with_name(f".{state.name}-{os.getpid()}")
        self._write_program(None)
        with Guest(self._command(accelerator, [], None), self.folder / "console") as guest:
            try:
                if guest.line(_BOOT_LIMIT_S[accelerator]) != "ready":
                    return False
            except (TimeoutError, EOFError):
                return False
            guest.save(temporary, self.folder / "qmp")
        temporary.rename(state)
        return True

    def _command(self, accelerator: str, files: Sequence[tuple[str, Path, Path]], state: Path | None) -> list[str]:
        # Disks that this guest does not use are there too, without a file system: the saved state counts them.
        spares = [(f"spare{n}", self.folder / f"spare{n}", self.folder / f"spare{n}.log") for n in range(_NUM_DISKS)]
        files = [*files, *spares[len(files) :]]
        for name, path, log in files:
            if name.startswith("spare"):
                path.write_bytes(bytes(1 << 20))
                log.write_bytes(b"")
        command = [self.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-machine", "pc", "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max"]
        command += ["-smp", "1", "-m", str(_MEMORY_MIB)]
        command += ["-serial", "stdio", "-serial", f"file:{self.folder / 'console'}"]
        command += ["-qmp", f"unix:{self.folder / 'qmp'},server=on,wait=off"]
        command += ["-kernel", str(self._image / "kernel"), "-initrd", str(self._image / "initrd")]
        command += ["-append", "console=ttyS1 quiet panic=-1 rdinit=/init random.trust_cpu=on mitigations=off"]
        command += ["-blockdev", f"driver=file,read-only=on,node-name=program,filename={self._program}"]
        command += ["-device", "virtio-blk-pci,drive=program,serial=program"]
        for number, (name, path, log) in enumerate(files):
            # The host does not die: its own syncs would only cost time.
            for node, file in ((f"data{number}", path), (f"log{number}", log)):
                command += ["-blockdev", f"driver=file,node-name={node},filename={file},cache.no-flush=on"]
            drive = f"driver=blklogwrites,node-name=disk{number},file=data{number},log=log{number}"
            command += ["-blockdev", f"{drive},log-sector-size=512"]
            command += ["-device", f"virtio-blk-pci,drive=disk{number},serial={name},write-cache=on"]
        if state is not None:
            command += ["-incoming", f"exec:cat '{state}'"]
        return command


class Guest:
    """A running guest, killed at the end of its `with`."""

    def __init__(self, command: list[str], console: Path, *, is_waiting: bool = False) -> None:
        self._console = console
        # It starts from a saved state and waits for a byte; what comes before it is restored is lost.
        self._is_waiting = is_waiting
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def line(self, limit_s: float = _LINE_LIMIT_S) -> str:
        """The next line that the guest sent, whole.

        Raises:
            TimeoutError: none came in time.
            EOFError: the guest is gone and there is none.

        """
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._received:
            if self._is_waiting:
                self._nudge()
            left_s = max(0.0, end - time.monotonic())
            if select.select([self._process.stdout], [], [], min(left_s, 0.1 if self._is_waiting else left_s))[0]:
                received = os.read(self._process.stdout.fileno(), 1 << 16)
                if not received:
                    raise EOFError(f"the guest is gone; {self._tail()}")
                self._received += received
                self._is_waiting = False
            elif not left_s:
                raise TimeoutError(f"the guest said nothing for {limit_s} s; it said before: {self._tail()}")
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _nudge(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError:
            raise EOFError(f"the guest is gone; {self._tail()}") from None

    def kill(self) -> list[str]:
        """SIGKILL to QEMU; returns what whole lines the guest had sent."""
        self._process.kill()
        left, _ = self._process.communicate()
        lines = (self._received + left).decode().split("\n")[:-1]
        self._received = b""
        return lines

    def save(self, path: Path, control: Path) -> None:
        """Write the guest's state to a file; it stands still afterwards."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(control))
            stream = connection.makefile("rw", encoding="utf-8")

            def ask(name: str, **arguments: Any) -> Any:
                stream.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
                stream.flush()
                while "event" in (answer := json.loads(stream.readline())):
                    pass
                return answer["return"]

            stream.readline()
            ask("qmp_capabilities")
            ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
            ask("migrate", uri=f"exec:cat > '{path}'")
            while (status := ask("query-migrate").get("status")) not in ("completed", "failed"):
                time.sleep(0.05)
        assert status == "completed", f"the guest's state could not be saved: {status}"

    def _tail(self) -> str:
        console = self._console.read_text(encoding="utf-8", errors="replace")[-2000:] if self._console.exists() else ""
        errors = b""
        if self._process.poll() is not None and self._process.stderr is not None:
            errors = self._process.stderr.read()
        return (
            f"{self._received.decode(errors='replace')[-500:]!r} {errors.decode(errors='replace')} console: {console}"
        )
