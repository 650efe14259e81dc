"""Proves, in real sandboxes: hidden tests judge what was submitted and nothing else of the policy's; what they compare
with is nowhere to be found; what one test leaves behind or breaks costs no other; a failure of the platform is never a
0; many threads may ask at one time.

Not here: what a sandbox isolates (tests/sandbox), columns of a user's file (test_sandbox_rows.py).
"""

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.reward_config import UnitTestReward
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rl.tasks.unit_tests import UnitTest, UnitTestJudge
from rollforward.rollout.types import FailureType
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.client import SandboxClient, SocketTransport
from rollforward.sandbox.config import ContainerConfig, Limits
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport

MIB = 1 << 20
CONFIG = ContainerConfig(
    trusted_code=True,
    limits=Limits(wall_s=20.0, memory_bytes=128 * MIB, disk_bytes=4 * MIB, processes=32),
    create_timeout_s=60.0,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def name() -> str:
    return supervisor_id("tests of unit tests", secrets.token_hex(8))


@pytest.fixture(scope="module")
def grader(name: str) -> Iterator[Grader]:
    grader = Grader(CONFIG, [LocalTransport(name, CONFIG)])
    yield grader
    grader.close()


def judged(
    grader: Grader, files: dict[str, str], *tests: dict[str, Any], reward: UnitTestReward | None = None
) -> Score | Unscored:
    judge = UnitTestJudge(reward or UnitTestReward(timeout_s=10.0), grader, owner="task mine")
    submission = Submission(files={path: text.encode() for path, text in files.items()})
    return judge(submission, msgspec.convert(tests, tuple[UnitTest, ...]))


def value(score: Score | Unscored) -> float:
    assert isinstance(score, Score), score
    return score.value


ECHO = {"solve.py": "import sys\nprint(int(sys.stdin.read()) * 2)\n"}
RUN = ["python3", "solve.py"]


def test_the_share_of_passed_tests_is_the_score(grader: Grader) -> None:
    right, wrong = {"argv": RUN, "stdin": "4", "stdout": "8"}, {"argv": RUN, "stdin": "4", "stdout": "9"}
    assert judged(grader, ECHO, right, right) == Score(value=1.0, reason=ScoreReason.CORRECT)
    assert judged(grader, ECHO, right, wrong, right, wrong) == Score(value=0.5, reason=ScoreReason.PARTIAL)
    assert judged(grader, ECHO, wrong) == Score(value=0.0, reason=ScoreReason.WRONG)
    strict = UnitTestReward(partial_credit=False)
    assert judged(grader, ECHO, right, wrong, reward=strict) == Score(value=0.0, reason=ScoreReason.PARTIAL)
    assert judged(grader, ECHO, right, right, reward=strict) == Score(value=1.0, reason=ScoreReason.CORRECT)


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ({"argv": ["printf", " a \\n"], "stdout": "a"}, True),
        ({"argv": ["printf", " a \\n"], "stdout": "a", "compare": "exact"}, False),
        ({"argv": ["printf", "a\\n"], "stdout": "a\n", "compare": "exact"}, True),
        ({"argv": ["printf", "a b"], "stdout": "a  b"}, False),
        ({"argv": ["printf", ""], "stdout": ""}, True),
        ({"argv": ["printf", "\\377"], "stdout": "\ufffd"}, False),
        ({"argv": ["false"]}, False),
        ({"argv": ["false"], "exit_code": 1}, True),
        ({"argv": ["true"], "exit_code": 1}, False),
        ({"argv": ["sh", "-c", "echo a; exit 3"], "stdout": "a"}, False),
        ({"argv": ["sh", "-c", "echo a; exit 3"], "stdout": "a", "any_exit": True}, True),
        ({"argv": ["no-such-program"]}, False),
        ({"argv": ["cat", "data/in.txt"], "files": {"data/in.txt": "7"}, "stdout": "7"}, True),
        ({"argv": ["cat", "solve.py"], "files": {"solve.py": "7"}, "stdout": "7"}, True),
        ({"argv": ["sh", "-c", "yes | head -c 200000"], "any_exit": True, "stdout": "y\n" * 32_768}, False),
        ({"argv": ["sh", "-c", "ls -A; ls -A /tmp"], "stdout": "solve.py"}, True),
        ({"script": "import solve"}, False),
        ({"script": "assert 1 + 1 == 2"}, True),
        ({"script": "assert 1 + 1 == 3"}, False),
        ({"script": "this is no Python"}, False),
        ({"script": "print('x' * 200000)"}, True),
        ({"script": "assert open('solve.py').read().startswith('import')"}, True),
    ],
)
def test_what_passes(grader: Grader, test: dict[str, Any], passes: bool) -> None:
    assert value(judged(grader, ECHO, test)) == float(passes)


def test_what_a_test_compares_with_is_nowhere(grader: Grader) -> None:
    """The submission prints every text that it can read and that ends with what is looked for."""
    secret, given = f"beef{secrets.token_hex(14)}", f"beef{secrets.token_hex(14)}"
    seek = """
import os, re, sys
texts = [str(os.environ), str(sys.argv), sys.stdin.read()]
for top in ("/workspace", "/tmp", "/home", "/proc", "/dev/shm", "/run", "/var", "/etc"):
    for directory, _, names in os.walk(top):
        for name in names:
            try:
                descriptor = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NONBLOCK)
                texts.append(os.read(descriptor, 1 << 16).decode("latin-1"))
                os.close(descriptor)
            except OSError:
                pass
print(*sorted({word for text in texts for word in re.findall("beef[0-9a-f]{28}", text)}))
"""
    run = {"argv": RUN, "stdin": given, "stdout": given, "timeout_s": 30.0}
    score = judged(
        grader, {"solve.py": seek}, run, {"argv": ["true"], "stdout": secret}, run | {"stdin": "", "stdout": secret}
    )
    assert value(score) == pytest.approx(1 / 3), "it finds what it is given and no more"


def test_a_deadline_fails_its_test_alone(grader: Grader) -> None:
    slow = {"argv": ["sleep", "3"], "timeout_s": 0.3}
    assert judged(grader, ECHO, slow, {"argv": RUN, "stdin": "1", "stdout": "2"}).value == 0.5  # type: ignore[union-attr]
    score = judged(grader, ECHO, slow)
    assert score == Score(value=0.0, reason=ScoreReason.TIMEOUT)
    assert score.failure is FailureType.TIMEOUT  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "harm",
    [
        "x = []\nwhile True: x.append(bytearray(1 << 22))",
        "open('fill', 'wb').write(bytes(64 << 20))",
        "import os\nos.mkdir('in.txt')",
        "import os\nos.symlink('/etc/passwd', 'in.txt')",
        "import os\nos.mkfifo('in.txt')",
        "import os\nwhile True: os.fork()",
        "import os\nos.kill(-1, 9)",
        "import os\nos.kill(1, 9)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: open('in.txt', 'w').write('forged')",
    ],
)
def test_what_one_test_does_to_its_sandbox_costs_no_other(grader: Grader, harm: str) -> None:
    files = {"harm.py": harm, "answer.txt": "42"}
    bad = {"argv": ["python3", "harm.py"], "timeout_s": 3.0, "stdout": "done"}
    good = {"argv": ["cat", "in.txt", "answer.txt"], "files": {"in.txt": "in "}, "stdout": "in 42"}
    assert value(judged(grader, files, bad, good)) == 0.5


@pytest.mark.parametrize(
    "forgery",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "print('passed')\nimport os, sys\nsys.stdout.flush()\nos._exit(0)",
        "import atexit, os\natexit.register(lambda: os._exit(0))\nraise ValueError",
        "import sys\nsys.modules['solve'] = type(sys)('solve')\nsys.exit()",
        "import threading, os, time\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(5)",
        "raise BaseException",
    ],
)
def test_the_end_of_a_script_is_not_easily_forged(grader: Grader, forgery: str) -> None:
    script = {"script": "from solve import double\nassert double(2) == 4"}
    assert value(judged(grader, {"solve.py": "def double(x): return 2 * x"}, script)) == 1.0
    assert value(judged(grader, {"solve.py": forgery}, script)) == 0.0


def test_a_sandbox_that_is_taken_away_is_no_0(grader: Grader, name: str) -> None:
    """Somebody closes every sandbox of the first attempt in the middle of a test."""

    def steal(pool: ThreadPoolExecutor, num: int) -> Future[int]:
        """Who does it is there already when this returns."""
        is_there = threading.Event()
        thief = pool.submit(asyncio.run, close_all(num, is_there))
        assert is_there.wait(60)
        return thief

    async def close_all(num: int, is_there: threading.Event) -> int:
        async with SandboxClient([LocalTransport(name, CONFIG)], CONFIG, owner="thief") as client:
            closed = 0
            await client.list()
            is_there.set()
            while closed < num:
                for info in await client.list():
                    await (await client.adopt(info.sandbox_id)).close()
                    closed += 1
                await asyncio.sleep(0.05)
            return closed

    test = {"argv": ["sh", "-c", "sleep 3; cat solve.py"], "stdout": "hello"}
    with ThreadPoolExecutor(2) as pool:
        thief = steal(pool, 1)
        score = pool.submit(judged, grader, {"solve.py": "hello"}, test)
        assert value(score.result()) == 1.0
        assert thief.result() == 1
        thief = steal(pool, CONFIG.attempts)
        lost = pool.submit(judged, grader, {"solve.py": "hello"}, test)
        unscored = lost.result()
        assert isinstance(unscored, Unscored)
        assert unscored.failure is FailureType.INFRA
        assert unscored.detail.startswith("task mine: the tests failed as infra 3 times: ")


def test_nobody_to_ask_is_infra(tmp_path: Path) -> None:
    config = ContainerConfig(attempts=1, create_timeout_s=1.0)
    grader = Grader(config, [SocketTransport(tmp_path / "nobody")])
    unscored = judged(grader, ECHO, {"argv": RUN})
    assert isinstance(unscored, Unscored)
    assert unscored.failure is FailureType.INFRA
    assert "the tests failed as infra 1 times" in unscored.detail
    grader.close()
    grader.close()


def test_files_that_go_nowhere_are_a_fault_of_the_data(grader: Grader) -> None:
    unscored = judged(grader, ECHO, {"argv": RUN, "files": {"/proc/self/nowhere": "1"}})
    assert isinstance(unscored, Unscored)
    assert unscored.failure is FailureType.DATA
    assert "cannot be put into a fresh sandbox" in unscored.detail


def test_a_submission_in_the_way_of_a_test_s_files_fails_that_test_alone(grader: Grader) -> None:
    """Else a policy that wrote such a file would have no score in place of a bad one."""
    right = {"argv": RUN, "stdin": "4", "stdout": "8"}
    needs = {"argv": ["cat", "data/in.txt"], "files": {"data/in.txt": "7"}, "stdout": "7"}
    assert value(judged(grader, ECHO, needs, right)) == 1.0
    assert value(judged(grader, ECHO | {"data": "in the way"}, needs, right, needs)) == pytest.approx(1 / 3)
    assert value(judged(grader, ECHO | {"data/in.txt/x": "in the way"}, needs)) == 0.0


def test_many_threads_at_one_time(grader: Grader) -> None:
    def one(number: int) -> float:
        test = {"argv": RUN, "stdin": str(number), "stdout": str(2 * number if number % 3 else -1)}
        return value(judged(grader, ECHO, test))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(48))) == [float(bool(number % 3)) for number in range(48)]


def test_a_closed_grader_opens_again(grader: Grader) -> None:
    for _ in range(2):
        assert value(judged(grader, ECHO, {"argv": RUN, "stdin": "1", "stdout": "2"})) == 1.0
        grader.close()
