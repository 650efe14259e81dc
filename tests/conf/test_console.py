"""Proves: progress is one plain line per step where there is no terminal, and results alone go to standard output."""

import io

import pytest

from rollforward.conf.console import Progress, fail, result, say, summary


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_one_plain_line_per_step() -> None:
    stream = io.StringIO()
    with Progress("grpo", 3, done=1, stream=stream) as progress:
        progress.step({"reward": 0.25, "tokens": 7})
        progress.step()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("grpo 2/3  reward 0.25  tokens 7  ")
    assert [line[:8] for line in lines] == ["grpo 2/3", "grpo 3/3"]


def test_fewer_lines_on_request_but_always_the_last() -> None:
    stream = io.StringIO()
    with Progress("sft", 5, every=2, stream=stream) as progress:
        for _ in range(5):
            progress.step()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["2/5", "4/5", "5/5"]


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with Progress("grpo", 2, stream=stream) as progress:
        progress.step({"reward": 0.5})
        progress.step({"reward": 0.75})
    assert "2/2" in stream.getvalue()
    assert "0.75" in stream.getvalue()


def test_only_results_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    say("going on")
    fail("first\nsecond")
    result("42")
    summary("done", {"accuracy": 0.123456, "run": "x"})
    summary("done", {"run": "x"}, {"look": "less x"})
    output = capsys.readouterr()
    assert output.out == "42\ndone\n  accuracy  0.1235\n  run       x\ndone\n  run   x\nnext\n  look  less x\n"
    assert output.err == "going on\nerror: first\nerror: second\n"
