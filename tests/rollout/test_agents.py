"""Proves: an engine whose completions keep real sandboxes samples the same bits, and leaves the same submissions,
whatever is killed on the way; a sandbox that is lost is an infra failure of its completion and of no other; bounds
hold.

What runs twice shows: every call appends to a file that the next one counts (tests/helpers/agents.py).
"""

import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.rollout.agent_retention import retire_commands
from rollforward.rollout.agents import LocalAccess
from rollforward.rollout.environment import Ending, SandboxUse
from rollforward.rollout.tool_environment import ToolEnvironment
from rollforward.rollout.types import Completion, FailureType, RequestId, StopReason
from rollforward.rollout.workspace import Submission, Workspace
from rollforward.sandbox.command_log import read_log
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.homes import Home
from tests.helpers import agents
from tests.helpers.crashes import CrashError, crash_at


@pytest.fixture(scope="module")
def supervisor() -> Generator[str]:
    """Name of a supervisor's home in a directory of its own; the supervisor ends with the tests."""
    name = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="rf-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield name
        if (pid := Home.of(name).holder()) is not None:
            os.kill(pid, signal.SIGTERM)
            while Home.of(name).holder() is not None:
                time.sleep(0.05)


def access(run_dir: Path, supervisor: str, **container: Any) -> LocalAccess:
    return LocalAccess(settings=agents.settings(run_dir, supervisor, **container))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    agents.publish(directory)
    return directory


@pytest.fixture
def run_dir(tmp_path: Path, weights: Path) -> Path:
    (tmp_path / "weights").symlink_to(weights)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, supervisor: str, weights: Path) -> list[Completion]:
    directory = tmp_path_factory.mktemp("run")
    (directory / "weights").symlink_to(weights)
    return agents.sample(directory, access(directory, supervisor))


def bare(completions: list[Completion]) -> list[Completion]:
    """Without the sentences for people, which the log does not have."""
    return [msgspec.structs.replace(one, detail="") for one in completions]


def lines(completion: Completion) -> list[bytes]:
    assert completion.submission is not None
    return completion.submission.files["seen.txt"].splitlines()


def test_every_way_to_end_occurs(undisturbed: list[Completion]) -> None:
    assert all(one.failure is None and one.submission is not None for one in undisturbed)
    assert {StopReason.EOS, StopReason.TURNS} <= {one.stop_reason for one in undisturbed}
    submitted = [one.submission.files for one in undisturbed if one.submission is not None]
    assert any("answer.txt" in files for files in submitted), "a final call ran"
    assert not any("absent" in files for files in submitted)
    assert max(len(lines(one)) for one in undisturbed) >= 4, "files stay between calls"
    assert min(len(lines(one)) for one in undisturbed) == 1, "one called nothing that wrote"


def test_an_engine_that_crashes_anywhere_goes_on_to_the_same_bits_and_submissions(
    undisturbed: list[Completion], supervisor: str, run_dir: Path
) -> None:
    """One life after another on one log, each a few records longer; then all is answered from the logs."""
    for number in (12, 25, 31):
        replica = agents.open_replica(run_dir, access(run_dir, supervisor))
        crash_at(replica._log, number)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(CrashError):
            replica.generate(agents.requests())
        replica._log.abandon()  # pyright: ignore[reportPrivateUsage]
        replica._environment.close()  # type: ignore[union-attr]  # pyright: ignore[reportPrivateUsage]
    assert agents.sample(run_dir, access(run_dir, supervisor)) == undisturbed
    assert agents.sample(run_dir, access(run_dir, supervisor)) == undisturbed


def running(run_dir: Path) -> list[str]:
    """Completions of which a command has begun and not ended."""
    views = [read_log(path) for path in run_dir.glob("commands/*/*.log")]
    return [view.trajectory for view in views if view.history.running is not None]


def test_a_process_that_is_killed_inside_a_call_is_succeeded_by_one_that_reads_its_result(
    undisturbed: list[Completion], supervisor: str, run_dir: Path
) -> None:
    program = [sys.executable, "-m", "tests.helpers.agents", str(run_dir), supervisor, "0.4"]
    inside = 0
    for _ in range(2):
        process = subprocess.Popen(program, cwd=Path(__file__).parents[2])
        try:
            seen: set[str] = set()
            end_s = time.monotonic() + 60
            while not (new := set(running(run_dir)) - seen):
                assert time.monotonic() < end_s
                assert process.poll() is None
                time.sleep(0.02)
            time.sleep(0.1)
            inside += len(new)
        finally:
            process.kill()
            process.wait()
    assert inside
    again = agents.sample(run_dir, access(run_dir, supervisor), delay_s=0.4)
    # The delay stands in the command, which is no token: all that a model sees and leaves is the same.
    assert again == undisturbed


def test_a_sandbox_that_is_lost_fails_its_completion_for_good_and_no_other(
    undisturbed: list[Completion], supervisor: str, run_dir: Path
) -> None:
    drill = access(run_dir, supervisor, inject_failures=0.5)
    replica = agents.open_replica(run_dir, drill)
    first = replica.generate(agents.requests())
    counts = replica.log_stats().sandbox
    replica.close()
    failed = [one for one in first if one.failure is FailureType.INFRA]
    assert 0 < len(failed) < len(first)
    assert all("unknown outcome of t" in one.detail and one.submission is None for one in failed)
    for one, clean in zip(first, undisturbed, strict=True):
        assert one.failure is FailureType.INFRA or one == clean
    assert bare(agents.sample(run_dir, drill)) == bare(first), "the log says the same"
    assert (counts.injected, counts.failed, counts.unknown) == (len(failed),) * 3
    assert sum(number for name, number in counts.outcomes.calls.items() if name.endswith("/infra")) == len(failed)


def test_a_drill_of_all_strikes_whoever_ends_by_a_call(
    undisturbed: list[Completion], supervisor: str, run_dir: Path
) -> None:
    """Also those that end by their first call: what is left out may not tell how a completion ended."""
    drilled = agents.sample(run_dir, access(run_dir, supervisor, inject_failures=1.0))
    submitted = [one.submission is not None and "answer.txt" in one.submission.files for one in undisturbed]
    assert sum(submitted) > 1
    lost = [one.failure is FailureType.INFRA for one in drilled]
    assert [did for did, was_lost in zip(submitted, lost, strict=True) if did and not was_lost] == []


def test_time_that_is_used_up_is_told_and_counts_as_a_timeout(supervisor: str, run_dir: Path) -> None:
    use = SandboxUse(submission=("seen.txt",), max_tool_s=0.3)
    task = msgspec.structs.replace(agents.TASK, sandbox=use)
    who = LocalAccess(settings=agents.settings(run_dir, supervisor, task=task))
    first = agents.sample(run_dir, who, task=task, delay_s=0.4)
    called = [one for one in first if len(lines(one)) > 1]
    assert called
    assert all((one.failure is FailureType.TIMEOUT) == (len(lines(one)) > 1) for one in first)
    assert max(len(lines(one)) for one in first) == 2, "one call, then the time was used up"
    told = [agents.encoding().tokenizer.decode(one.token_ids.tolist()) for one in called]
    assert any("0.3 s that tools may take are used up" in text for text in told)
    assert bare(agents.sample(run_dir, who, task=task, delay_s=0.4)) == bare(first)


def environment(supervisor: str, tmp_path: Path, **task: Any) -> ToolEnvironment:
    config = msgspec.structs.replace(agents.TASK, **task)
    who = LocalAccess(settings=agents.settings(tmp_path, supervisor, task=config))
    return ToolEnvironment(agents.encoding(), {"files": config}, {}, who.connect("test"))


def ids_of(text: str) -> np.ndarray:
    tokenizer = agents.encoding().tokenizer
    ids: list[int] = []
    for index, part in enumerate(text.split(agents.DSML)):
        ids += [tokenizer.control_id(agents.DSML)] if index else []
        ids += tokenizer.encode(part)
    return np.array([*ids, tokenizer.eos_id], dtype=np.int32)


def test_what_is_refused_runs_nothing_and_stands_beside_what_runs(supervisor: str, tmp_path: Path) -> None:
    request = msgspec.structs.replace(
        agents.requests(1)[0], tools=msgspec.structs.replace(agents.USE, max_observation_tokens=400)
    )
    with_room = environment(supervisor, tmp_path, max_calls_per_turn=2, max_observation_tokens=400)
    try:
        good, bad = agents.call_of("bash", command="ls"), agents.call_of("bash", script="ls")
        for calls, told in (
            ((bad, good), ["error: bash has no parameter 'script'; it takes command", "seen.txt\n"]),
            ((agents.call_of("compass"),), ["error: there is no tool 'compass'; there are bash, submit"]),
            ((good,) * 3, ["error: the turn has 3 calls and at most 2 may be; none was made"]),
            ((agents.call_of("submit", reply="1"),), ["error: submit has no parameter 'reply'; it takes answer"]),
            ((bad, agents.call_of("submit")), None),
        ):
            ids = ids_of(agents.written(*calls))
            assert with_room.is_call(request, ids)
            if told is not None:
                with_room.begin(request, ids, turn=1)
                (observation,) = with_room.collect(block=True)
                assert observation.token_ids.tolist() == agents.encoding().encode_observation(told)
                assert (observation.command_position > 0) == ("seen.txt\n" in told)
        for calls in ((agents.call_of("submit"),), (good, agents.call_of("submit", answer="7"))):
            assert not with_room.is_call(request, ids_of(agents.written(*calls)))
    finally:
        with_room.close()


def test_the_last_call_that_has_no_end_of_turn_is_not_made(supervisor: str, tmp_path: Path) -> None:
    answering = environment(supervisor, tmp_path)
    try:
        cut, whole = agents.requests(1)
        ids = ids_of(agents.written(agents.call_of("submit", answer="7")))
        answering.end(cut, ids[:-1], turn=1)
        answering.end(whole, ids, turn=1)
        found = answering.results([cut.id, whole.id])
        assert found[cut.id].submission == Submission(files={"seen.txt": b"begin\n"})
        assert found[whole.id].submission == Submission(files={"seen.txt": b"begin\n", "answer.txt": b"7"})
        assert answering.results([cut.id]) == {}
    finally:
        answering.close()
    assert [path.stem for path in tmp_path.glob("commands/*/*.log")] == [str(whole.id)], "nothing ran in the other"


@pytest.mark.parametrize("calls", [[], [agents.call_of("submit", answer="7")]])
def test_a_file_of_a_submission_that_is_too_large_is_the_policys_doing_and_left_out(
    supervisor: str, tmp_path: Path, calls: list[str]
) -> None:
    """Also where nothing was called, so that no sandbox would have been needed."""
    use = SandboxUse(submission=("seen.txt", "answer.txt"), max_submission_bytes=5)
    answering = environment(supervisor, tmp_path, sandbox=use)
    try:
        (request, _) = agents.requests(1)
        answering.end(request, ids_of(agents.written(*calls) if calls else ""), turn=1)
        ending = answering.results([request.id])[request.id]
        assert ending.failure is None
        assert ending.submission is not None
        assert ending.submission.files == ({"answer.txt": b"7"} if calls else {})
        assert ending.submission.problem == "'seen.txt' makes it more than 5 bytes"
    finally:
        answering.close()


FAILING_TOOLS = """
import os, time

def nap(seconds: float) -> str:
    \"\"\"Sleeps.\"\"\"
    time.sleep(seconds)
    return "slept"

def leave() -> str:
    \"\"\"Ends its process.\"\"\"
    os._exit(3)

def fail() -> str:
    \"\"\"Raises.\"\"\"
    raise ValueError("no")

def over(seconds: float) -> str:
    \"\"\"Ends the completion, late.\"\"\"
    time.sleep(seconds)
    return ""

FINAL = True
"""


def test_every_outcome_of_a_call_is_counted_by_its_tool_once(supervisor: str, tmp_path: Path) -> None:
    """Those of the last turn too, which nobody sees; those that the log answers only in the life that made them."""
    (tmp_path / "over.py").write_text(FAILING_TOOLS)
    (tmp_path / "others.py").write_text(FAILING_TOOLS.replace("FINAL = True", ""))
    others = [ToolConfig(name=n, file=str(tmp_path / "others.py"), timeout_s=0.5) for n in ("nap", "leave", "fail")]
    tools = (*others, ToolConfig(name="over", file=str(tmp_path / "over.py"), timeout_s=0.5))
    changes = {"tools": tools, "max_observation_tokens": 400}
    (request, _) = agents.requests(1)
    request = msgspec.structs.replace(request, tools=msgspec.structs.replace(agents.USE, max_observation_tokens=400))
    naps = [agents.call_of("nap", seconds=seconds) for seconds in (0, 30, 0)]
    failing = [agents.call_of(name) for name in ("leave", "fail", "compass", "nap")]
    first = environment(supervisor, tmp_path, **changes)
    try:
        first.begin(request, ids_of(agents.written(*naps, *failing)), turn=1)
        (observation,) = first.collect(block=True)
        first.end(request, ids_of(agents.written(agents.call_of("over", seconds=30))), turn=2)
        assert first.results([request.id])[request.id].failure is None
        assert first.counts().outcomes.calls == {
            "nap/ok": 2,
            "nap/timeout": 1,
            "nap/refused": 1,
            "leave/killed": 1,
            "fail/error": 1,
            "over/timeout": 1,
            "unknown": 1,
        }
    finally:
        first.close()
    again = environment(supervisor, tmp_path, **changes)
    try:
        again.begin(request, ids_of(agents.written(*naps)), turn=1)
        assert again.collect(block=True)[0].failure is None
        again.end(request, ids_of("")[:-1], turn=2, position=observation.command_position)
        again.results([request.id])
        assert (again.counts().replayed, again.counts().outcomes.calls) == (3, {})
    finally:
        again.close()


def test_calls_that_a_completion_has_no_time_for_are_counted_as_refused(supervisor: str, tmp_path: Path) -> None:
    (request, _) = agents.requests(1)
    hurried = environment(supervisor, tmp_path, sandbox=SandboxUse(max_tool_s=0.2))
    try:
        calls = [agents.call_of("bash", command="sleep 0.4")] * 3
        hurried.begin(request, ids_of(agents.written(*calls)), turn=1)
        assert hurried.collect(block=True)[0].failure is None
        hurried.end(request, ids_of("")[:-1], turn=2)
        assert hurried.results([request.id])[request.id].failure is FailureType.TIMEOUT
        assert hurried.counts().outcomes.calls == {"bash/ok": 1, "bash/refused": 2}
    finally:
        hurried.close()


def test_a_request_that_was_begun_again_after_a_failure_has_a_new_sandbox(supervisor: str, tmp_path: Path) -> None:
    """As an evaluation is that the platform failed; one that was damaged in the token log goes on with its commands."""
    who = LocalAccess(settings=agents.settings(tmp_path, supervisor, inject_failures=1.0))
    (request, other) = agents.requests(1)
    ids = ids_of(agents.written(*[agents.call_of("bash", command="echo x >> seen.txt; wc -l < seen.txt")] * 2))
    failing = ToolEnvironment(agents.encoding(), {"files": agents.TASK}, {}, who.connect("test"))
    failing.begin(request, ids, turn=1)
    (observation,) = failing.collect(block=True)
    assert observation.failure is FailureType.INFRA
    failing.close()
    answering = environment(supervisor, tmp_path)
    try:
        expected = agents.encoding().encode_observation(["2\n", "3\n"])
        for one, attempt in ((request, 1), (other, 0), (other, 1)):
            answering.begin(one, ids, turn=1, attempt=attempt)
            (observation,) = answering.collect(block=True)
            assert observation.token_ids.tolist() == expected
        answering.begin(request, ids, turn=1, attempt=1)
        assert answering.collect(block=True)[0].token_ids.tolist() == expected, "answered from the log"
    finally:
        answering.close()


def test_commands_that_the_policy_saw_and_no_log_has_are_a_failure_of_the_platform(
    supervisor: str, tmp_path: Path
) -> None:
    """A new sandbox in the middle would have none of their files, and what it submits would be scored."""
    (request, _) = agents.requests(1)
    ids = ids_of(agents.written(agents.call_of("bash", command="echo x >> seen.txt; wc -l < seen.txt")))
    first = environment(supervisor, tmp_path)
    first.begin(request, ids, turn=1)
    (observation,) = first.collect(block=True)
    assert observation.command_position > 0
    first.close()
    (log,) = tmp_path.glob("commands/*/*.log")
    log.unlink()
    later = environment(supervisor, tmp_path)
    try:
        later.resume(request, turn=2, position=observation.command_position)
        later.end(request, ids[:-1], turn=2, position=observation.command_position)
        ending = later.results([request.id])[request.id]
        assert (ending.submission, ending.failure) == (None, FailureType.INFRA)
        assert f"record {observation.command_position} was durable once" in ending.detail
        later.begin(request, ids, turn=2, position=observation.command_position)
        (refused,) = later.collect(block=True)
        assert (refused.failure, refused.token_ids.size) == (FailureType.INFRA, 0)
        assert f"record {observation.command_position} was durable once" in refused.detail
    finally:
        later.close()


def test_an_end_that_nobody_told_is_no_empty_submission(
    supervisor: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untold = agents.requests(1)[1].id
    whole = ToolEnvironment.results

    def results(environment: ToolEnvironment, identities: Sequence[RequestId]) -> dict[RequestId, Ending]:
        return {key: ending for key, ending in whole(environment, identities).items() if key != untold}

    monkeypatch.setattr(ToolEnvironment, "results", results)
    completions = agents.sample(run_dir, access(run_dir, supervisor), members=1)
    assert [one.failure for one in completions] == [None, FailureType.INFRA]
    assert [one.submission is None for one in completions] == [False, True]
    assert "nobody told" in completions[1].detail


def test_a_path_at_which_no_log_can_be_looked_for_fails_the_completion_and_no_process(
    supervisor: str, tmp_path: Path
) -> None:
    (request, _) = agents.requests(1)
    nowhere = environment(supervisor, tmp_path / ("x" * 300))
    try:
        nowhere.resume(request, turn=1)
        nowhere.begin(request, ids_of(agents.written(agents.call_of("bash", command="true"))), turn=1)
        (observation,) = nowhere.collect(block=True)
        assert (observation.failure, observation.token_ids.size) == (FailureType.INFRA, 0)
        assert "File name too long" in observation.detail
        nowhere.end(request, ids_of("")[:-1], turn=1)
        ending = nowhere.results([request.id])[request.id]
        assert (ending.submission, ending.failure) == (None, FailureType.INFRA)
        assert "File name too long" in ending.detail
    finally:
        nowhere.close()


def test_files_that_fit_into_no_sandbox_are_the_datas_fault_in_every_life(supervisor: str, tmp_path: Path) -> None:
    (request, other) = agents.requests(1)
    unfit = Workspace(files={"a": b"a file", "a/b": b"below it"})
    request, other = (msgspec.structs.replace(one, workspace=unfit) for one in (request, other))
    ids = ids_of(agents.written(agents.call_of("bash", command="true")))
    final = ids_of(agents.written(agents.call_of("submit", answer="1")))
    for _ in range(2):
        life = environment(supervisor, tmp_path)
        try:
            life.begin(request, ids, turn=1)
            (observation,) = life.collect(block=True)
            assert (observation.failure, observation.token_ids.size) == (FailureType.DATA, 0)
            assert "a/b" in observation.detail
            for one, turn_ids in ((request, ids[:-1]), (other, final)):
                life.end(one, turn_ids, turn=1)
                ending = life.results([one.id])[one.id]
                assert (ending.submission, ending.failure) == (None, FailureType.DATA)
                assert "a/b" in ending.detail
            assert life.counts().failed == 0
        finally:
            life.close()


def test_what_needs_no_sandbox_to_be_known_makes_none(tmp_path: Path) -> None:
    """An image may have something at a path; the workspace says it of its own paths alone. What a sandbox refuses is
    left to one: too many bytes, a directory."""
    from rollforward.rollout.agent_sessions import _untouched  # pyright: ignore[reportPrivateUsage]

    workspace = Workspace(files={"a/b": b"1", "/workspace/c": b"2", "/srv/d": b"3"})
    paths = ("/workspace/a/b", "c", "/srv/d", "nothing")
    found = _untouched(workspace, SandboxUse(submission=paths, max_submission_bytes=3))
    assert found == Submission(files={"/workspace/a/b": b"1", "c": b"2", "/srv/d": b"3"})
    for unknown in (("/srv/e",), ("c", "a")):
        assert _untouched(workspace, SandboxUse(submission=unknown)) is None
    assert _untouched(workspace, SandboxUse(submission=paths, max_submission_bytes=2)) is None


def test_command_logs_of_covered_steps_go_the_oldest_first(tmp_path: Path) -> None:
    for name, step in itertools.product(("step", "eval"), range(4)):
        place = tmp_path / "commands" / f"{name}_{step:06d}" / "blobs"
        place.mkdir(parents=True)
        (place / "blob").write_bytes(bytes(100))

    def left() -> set[str]:
        return {path.name for path in (tmp_path / "commands").iterdir()}

    def size(name: str) -> int:
        return sum(path.lstat().st_size for path in (tmp_path / "commands" / name).rglob("*"))

    total = sum(size(name) for name in left())
    assert retire_commands(tmp_path, 3, keep_bytes=total) == 0
    assert retire_commands(tmp_path, 3, keep_bytes=total - 1) == size("step_000000")
    assert left() == {f"{name}_{step:06d}" for name in ("step", "eval") for step in range(4)} - {"eval_000000"}
    retire_commands(tmp_path, 3, keep_bytes=0)
    assert left() == {"step_000003", "eval_000003"}
    assert retire_commands(tmp_path / "nothing", 3, keep_bytes=0) == 0


def test_states_that_completions_began_with_cost_no_log(tmp_path: Path) -> None:
    """One state is larger than all logs: the logs stay, and of states the newest that fit for themselves."""
    commands = tmp_path / "commands"
    for step in range(4):
        prepared = commands / f"step_{step:06d}" / "prepared"
        prepared.mkdir(parents=True)
        (prepared / "state").write_bytes(bytes(600_000))
        (prepared.parent / "one.log").write_bytes(bytes(1000))

    def left(name: str) -> list[int]:
        return [step for step in range(4) if (commands / f"step_{step:06d}" / name).exists()]

    assert retire_commands(tmp_path, 3, keep_bytes=2_400_000) == 0
    assert retire_commands(tmp_path, 3, keep_bytes=1_300_000) == 1_200_000
    assert (left("one.log"), left("prepared")) == ([0, 1, 2, 3], [2, 3])
    # Not even where the states of steps that no checkpoint covers are more than that.
    assert retire_commands(tmp_path, 2, keep_bytes=100_000) == 0
    assert (left("one.log"), left("prepared")) == ([0, 1, 2, 3], [2, 3])
    # A log that goes takes its state along.
    logs = sum(path.lstat().st_size for path in commands.glob("*/one.log"))
    assert logs == 4000
    retire_commands(tmp_path, 3, keep_bytes=0)
    assert (left("one.log"), left("prepared")) == ([3], [3])
