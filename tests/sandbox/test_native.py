"""Proves: machine code (`sandbox/inside/native.cc`) runs commands as the Python of containers does, to the last byte,
at the edges of what a program can be given, of what it says and of how it ends; and the two ways take turns.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import vm_cache, vm_image
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.inside import frames, program
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import ExecRequest, ExecResult
from tests.helpers.containers import SMALL, World
from tests.helpers.machines import MachineWorld

pytestmark = pytest.mark.timeout(300)
ROOM, CHUNK = 200_000, 1 << 16
LIMITS = msgspec.structs.replace(SMALL, output_bytes=ROOM)


def sh(script: str, **more: object) -> ExecRequest:
    return ExecRequest(argv=("sh", "-c", script), **more)  # type: ignore[arg-type]


COMMANDS = {
    "nothing": ExecRequest(argv=("true",)),
    "its path": ExecRequest(argv=("/bin/true",)),
    "empty arguments": ExecRequest(argv=("printf", "<%s>", "", "a", "")),
    "no program": ExecRequest(argv=("",)),
    "no such program": ExecRequest(argv=("absent", "x")),
    "no such path": ExecRequest(argv=("/absent/absent",)),
    "a path through a file": ExecRequest(argv=("/bin/true/x",)),
    "a directory": ExecRequest(argv=("/bin",)),
    "a directory by name": ExecRequest(argv=("bin",), env={"PATH": "/absent:/:/usr"}),
    "refused, and found later": ExecRequest(argv=("true",), env={"PATH": "/etc/passwd:/:/bin"}),
    "no PATH to speak of": ExecRequest(argv=("true",), env={"PATH": ""}),
    "here by PATH": ExecRequest(argv=("here",), env={"PATH": "/absent::/nowhere"}),
    "a text": ExecRequest(argv=("./text",)),
    "a name that is too long": ExecRequest(argv=("x" * 256,)),
    "a name that is much too long": ExecRequest(argv=("x" * 5000,)),
    "directories that are too long": ExecRequest(argv=("true",), env={"PATH": f"/{'x' * 5000}:/bin"}),
    "a long name": ExecRequest(argv=("x" * 255,)),
    "a long argument": ExecRequest(argv=("sh", "-c", "echo ${#0}", "x" * 100_000)),
    "a NUL": ExecRequest(argv=("echo", "a\0b")),
    "a NUL in a name": ExecRequest(argv=("a\0b",)),
    "a NUL in a variable": ExecRequest(argv=("env",), env={"A": "b\0C=d"}),
    "a NUL in a directory": ExecRequest(argv=("pwd",), cwd="/\0bin"),
    "a variable without a name": ExecRequest(argv=("env",), env={"": "x"}),
    "a variable with a sign": ExecRequest(argv=("env",), env={"A=B": "x"}),
    "all variables": ExecRequest(argv=("env",), env={"A": "b=c", "HOME": "/tmp", "E": ""}),
    "a byte that is no text": ExecRequest(argv=("printf", "%s", "a\udcffb")),
    "a character that is no byte": ExecRequest(argv=("echo", "a\ud800b")),
    "a directory of its own": ExecRequest(argv=("pwd",), cwd="/usr/bin"),
    "no such directory": ExecRequest(argv=("pwd",), cwd="/absent"),
    "a file for a directory": ExecRequest(argv=("pwd",), cwd="/workspace/text"),
    "input": sh("cat; echo on >&2", stdin=b"\0in\xff"),
    "no input": ExecRequest(argv=("wc", "-c")),
    "input that nobody reads": ExecRequest(argv=("true",), stdin=bytes(300_000)),
    "both streams": sh("echo out; echo err >&2; echo more"),
    "an exit code": sh("exit 255"),
    "a signal": sh("kill -SEGV $$"),
    "who takes the process around it for its parent": sh("kill -9 $PPID; echo on"),
    "a second of its kind": sh("setsid sleep 100 & echo on"),
    "closed streams": sh("exec >&- 2>&-; sleep 0.01"),
    "a stream closed early": sh("exec >&-; echo err >&2"),
    "just as much as is kept": sh(f"head -c {ROOM} /dev/zero"),
    "a byte more than is kept": sh(f"echo first; head -c {ROOM} /dev/zero; echo err >&2"),
    "a byte less than a chunk": sh(f"head -c {CHUNK - 1} /dev/zero; head -c {CHUNK - 1} /dev/zero >&2"),
    "just a chunk": sh(f"head -c {CHUNK} /dev/zero; head -c {CHUNK} /dev/zero >&2"),
    "more than a pipe holds": sh("yes abcd | head -n 30000; yes abcd | head -n 30000 >&2"),
    "what is said slowly": sh("for i in 1 2 3; do echo $i; sleep 0.05; done"),
    "a deadline": sh("echo on; sleep 100", wall_s=1.0),
    "who sits in a directory that goes": sh("mkdir gone; cd gone; rmdir ../gone"),
}


def comparable(result: ExecResult) -> tuple[object, ...]:
    return result.status, result.exit_code, result.stdout, result.stderr, result.stdout_bytes, result.stderr_bytes


@pytest.fixture(scope="module")
def in_container() -> Iterator[dict[str, ExecResult]]:
    with World([]) as world:
        container = world.create(LIMITS)
        world.do(container.upload(FILES))
        world.sh(container, "chmod 755 text here")
        yield {name: world.do(container.exec(request)) for name, request in COMMANDS.items()}


FILES = {"text": b"echo text\n", "here": b"#!/bin/sh\necho here\n"}


@pytest.fixture(scope="module")
def world() -> Iterator[MachineWorld]:
    with MachineWorld("microvm") as world:
        yield world


@pytest.fixture(scope="module")
def machine(world: MachineWorld) -> Instance:
    made = world.create(LIMITS)
    world.do(made.upload(FILES))
    world.sh(made, "chmod 755 text here")
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_it_is_in_a_container(
    world: MachineWorld, machine: Instance, in_container: dict[str, ExecResult], name: str
) -> None:
    result = world.do(machine.exec(COMMANDS[name]))
    assert comparable(result) == comparable(in_container[name])
    assert world.sh(machine, "echo on; set -- /proc/[0-9]*; echo $#").stdout == b"on\n2\n"  # nothing is left


def test_more_commands_than_a_process_takes_and_others_between(world: MachineWorld, machine: Instance) -> None:
    for number in range(150):
        assert world.sh(machine, f"echo {number}").stdout == b"%d\n" % number
        if number % 40 == 7:
            many = [machine.exec(sh(f"echo {number}; sleep 0.0{late}; cat", stdin=b"%d" % late)) for late in range(6)]
            results = world.do(_all(many))
            assert [result.stdout for result in results] == [b"%d\n%d" % (number, late) for late in range(6)]
            world.do(machine.upload({"between": b"x" * number}))
            assert len(world.do(machine.download(["between"], max_bytes=1000))["between"]) == number


async def _all(many: list[object]) -> list[ExecResult]:
    return list(await asyncio.gather(*many))  # type: ignore[arg-type]


def test_a_command_that_comes_while_another_runs_does_not_wait_for_it(world: MachineWorld, machine: Instance) -> None:
    long = world.loop.create_task(machine.exec(sh("until [ -e now ]; do sleep 0.05; done; echo seen; rm now")))
    world.do(asyncio.sleep(0.5))
    assert world.sh(machine, "echo on").stdout == b"on\n"
    assert not long.done()
    world.do(machine.upload({"now": b""}))
    assert world.do(_all([long]))[0].stdout == b"seen\n"


def test_a_program_that_is_packed_is_unpacked() -> None:
    told = program.unpack(program.pack(("a", "", "\udcff"), {"B": "c=d", "PATH": "/x"}, "/e"))
    assert (told.name, told.argv, told.directory) == (b"a", [b"a", b"", b"\xff"], b"/e")
    assert told.environment == {
        b"PATH": b"/x",
        b"HOME": b"/home",
        b"USER": b"user",
        b"LANG": b"C.UTF-8",
        b"TERM": b"dumb",
        b"B": b"c=d",
    }
    for argv, environment, directory in (
        (("a\0b",), {}, "/"),
        (("a",), {"b": "\0"}, "/"),
        (("a",), {"": "b"}, "/"),
        (("a",), {"b=": "c"}, "/"),
        (("a",), {}, "\0"),
        (("a", "\ud800"), {}, "/"),
    ):
        assert program.unpack(program.pack(argv, environment, directory)).argv == []


def test_a_command_is_a_message_of_its_own() -> None:
    head = {"op": "exec", "id": (1 << 64) - 1, "wall_s": 1.5}
    data = frames.pack(head, b"input", b"program")
    assert frames.unpack(data[frames.LENGTH.size :]) == (head, [b"input", b"program"])
    assert data[frames.LENGTH.size :][:4] == b"\xff" * 4
    for cut in range(frames.LENGTH.size, 28):
        with pytest.raises(ValueError, match="no message"):
            frames.unpack(data[frames.LENGTH.size : cut])


def test_a_source_that_cannot_be_compiled_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vm_cache, "CACHE", tmp_path)
    monkeypatch.setattr(vm_image, "_NATIVE", ("-no-such-option",))
    with pytest.raises(SandboxUnavailableError, match="no-such-option"):
        vm_image.build_native()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="apt-get install g"):
        vm_image.build_native()


def test_machine_code_has_no_warning(tmp_path: Path) -> None:
    source = Path(vm_image.__file__).parent / "inside/native.cc"
    command = ["g++", *vm_image._NATIVE, "-Wall", "-Wextra", "-Werror", str(source), "-o", str(tmp_path / "x.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
