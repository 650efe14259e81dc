"""Proves: machine code (`sandbox/inside/native.cc`) runs commands as the Python of containers does, to the last byte,
at the edges of what a program can be given, of what it says and of how it ends; the two ways take turns; and whatever
is wrong with a message, a descriptor or a socket, no command is run by half, and no answer is half a one.
"""

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import vm_cache, vm_image
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.inside import command, frames, hearing, native, program, system
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
    "a NUL, and no such directory": ExecRequest(argv=("a\0b",), cwd="/absent"),
    "no program, and no such directory": ExecRequest(argv=("",), cwd="/absent"),
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


def test_commands_that_have_waited_for_a_machine_to_be_saved_are_answered(
    world: MachineWorld, machine: Instance
) -> None:
    async def held(number: int) -> list[ExecResult]:
        async with machine._asked().quiet():
            waiting = [asyncio.create_task(machine.exec(sh(f"echo {number} {late}"))) for late in range(3)]
            await asyncio.sleep(0.01)
        return await _all(waiting)  # what ends the pause and they reach the agent together

    for number in range(10):
        results = world.do(held(number), within_s=30.0)
        assert [result.stdout for result in results] == [b"%d %d\n" % (number, late) for late in range(3)]


ASKED = frames.pack({"op": "exec", "id": 7, "wall_s": 1.0}, b"", b"x" * 60_000)
REPORTED = command.REPORT.pack(True, 3, 0.5, 0.75)


def apart(act: Callable[[], int], namespaces: int = 0) -> int:
    """A process that acts, with the machine code, and ends with what comes of that for its status; its number."""
    library = str(vm_image.build_native())
    pid = system.fork(namespaces)[0] if namespaces else os.fork()
    if pid == 0:
        status = 99
        try:
            native.load(library)
            status = act()
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Agent:
    """A process that attends, the host's end of its socket, and that of the process around commands."""

    def __init__(self, events: int = -1, within_s: float = 0.0) -> None:
        self.host, control = socket.socketpair()
        self.channel, around = socket.socketpair()
        if within_s:  # as much as fits is sent within that time
            around.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
            around.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, int(1e6 * within_s)))

        def act() -> int:
            self.host.close()
            self.channel.close()
            upper = os.open("/", os.O_RDONLY)
            round_ = native.Round(control.fileno(), around.fileno(), upper, events, True, CHUNK, 10.0)
            if native.attend(round_) != native.OTHER:
                return 22
            try:
                around.send(b"more")
            except BrokenPipeError:
                return 20
            return 21

        self.pid = apart(act)
        control.close()
        around.close()


def answer_of(host: socket.socket) -> tuple[frames.Head, list[bytes]]:
    data = b""
    while len(data) < 4 or len(data) < 4 + frames.LENGTH.unpack_from(data)[0]:
        data += host.recv(CHUNK)
    return frames.unpack(data[4:])


def test_an_agent_answers_in_pieces_of_whatever_size_it_hears(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 5\noom_group_kill 0\n")
    descriptor = os.open(events, os.O_RDONLY)
    agent = Agent(descriptor)
    for sizes in (1, 7, 5000, len(ASKED)):
        for start in range(0, 24 if sizes == 1 else len(ASKED), sizes):
            agent.host.sendall(ASKED[start : start + sizes])
        agent.host.sendall(ASKED[24:] if sizes == 1 else b"")
        message, descriptors, _, _ = socket.recv_fds(agent.channel, 2 * CHUNK, 4)
        while len(message) < 4 + 1 + 60_000:
            message += agent.channel.recv(CHUNK)
        assert message == frames.LENGTH.pack(60_001) + b"x" * 60_001
        for end, said in zip(descriptors, (b"out", b"err"), strict=True):
            os.write(end, said)
        agent.channel.sendall(REPORTED[:6])
        agent.channel.sendall(REPORTED[6:])
        head, blobs = answer_of(agent.host)
        assert (head["id"], head["leader"], head["leader_cpu_s"], head["ooms"]) == (7, 3, 0.5, 5)
        assert blobs == [b"out", b"err"]
        for end in descriptors:
            os.close(end)
    agent.host.close()
    assert status_of(agent.pid) == 0
    os.close(descriptor)


def test_an_agent_that_cannot_say_all_of_an_answer_ends() -> None:
    agent = Agent()
    agent.channel.sendall(REPORTED)
    agent.host.sendall(ASKED)
    agent.host.close()
    assert status_of(agent.pid) == 1


def test_an_agent_that_cannot_tell_who_was_killed_for_memory_ends() -> None:
    unreadable = os.open("/dev/null", os.O_WRONLY)
    agent = Agent(unreadable)
    agent.channel.sendall(REPORTED)
    agent.host.sendall(ASKED)
    agent.host.shutdown(socket.SHUT_WR)
    assert status_of(agent.pid) == 1
    assert agent.host.recv(CHUNK) == b""
    os.close(unreadable)


def test_a_process_that_was_given_half_a_command_is_given_nothing_more() -> None:
    agent = Agent(within_s=0.2)
    agent.host.sendall(ASKED)
    assert status_of(agent.pid) == 20
    given = b""
    while data := agent.channel.recv(CHUNK):
        given += data
    assert 0 < len(given) < 60_000


def test_a_command_whose_time_is_over_is_not_heard_any_longer_however_much_it_says() -> None:
    agent = Agent()
    agent.channel.sendall(REPORTED)
    agent.host.sendall(frames.pack({"op": "exec", "id": 7, "wall_s": 1e-9}, b"", b"x"))
    agent.host.shutdown(socket.SHUT_WR)
    assert status_of(agent.pid) == 22


@pytest.mark.parametrize("text", [b"\xff" * 4, b"\xff" * 23, b"\xff" * CHUNK + b"x"])
def test_a_message_that_is_no_command_is_left_to_python(text: bytes) -> None:
    agent = Agent()
    agent.host.sendall(frames.LENGTH.pack(len(text)) + text)
    agent.host.shutdown(socket.SHUT_WR)
    assert status_of(agent.pid) == 21


def test_the_rest_of_a_message_that_does_not_come_ends_who_waits_for_it() -> None:
    host, control = socket.socketpair()

    def act() -> int:
        host.close()
        hearing.receive_rest(control.fileno(), b"\xff" * 4, 100)
        return 21

    pid = apart(act)
    host.sendall(b"more")
    host.close()
    assert status_of(pid) == 0


def led(message: bytes, descriptors: int) -> tuple[int, bytes]:
    """Exit status of a process that was to run one command, and what it has said, in a namespace of its own."""
    ours, channel = socket.socketpair()

    def act() -> int:
        assert os.getpid() == 1, "it ends all processes that it sees"
        ours.close()
        channel.set_inheritable(False)
        native.lead(channel.fileno(), 1, 1.0)
        return 0

    pid = apart(act, system.NEWUSER | system.NEWPID)
    channel.close()
    null = [os.open("/dev/null", os.O_RDWR) for _ in range(descriptors)]
    socket.send_fds(ours, [message], null)
    said = b""
    while data := ours.recv(CHUNK):
        said += data
    for descriptor in null:
        os.close(descriptor)
    return status_of(pid), said


def test_a_message_to_the_process_around_commands_is_what_it_says_or_nothing_is_run() -> None:
    data = b"x" + program.pack(("sh", "-c", "exit 5"), {}, "/")
    message = frames.LENGTH.pack(len(data)) + data
    for descriptors in (2, 3):
        status, said = led(message, descriptors)
        assert (status, command.REPORT.unpack(said)[:2]) == (0, (False, 5))
    assert led(message, 4) == (0, b"")
    assert led(message + b"more", 2) == (0, b"")
    assert led(message, 1) == (1, b"")
    assert led(frames.LENGTH.pack(0), 2) == (1, b"")


@pytest.mark.parametrize("stdin", [b"", b"input"])
def test_a_command_has_its_three_streams_and_no_other_descriptor(
    world: MachineWorld, machine: Instance, stdin: bytes
) -> None:
    for _ in range(3):
        seen = world.sh(machine, "echo /proc/self/fd/*", stdin=stdin).stdout.split()
        assert seen == [b"/proc/self/fd/%d" % number for number in range(4)]  # the last is the directory's own


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
    for cut in range(frames.LENGTH.size, 28 + len("input")):
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
