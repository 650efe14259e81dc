"""Proves: every error class of our own ends a command with a line and an exit code, also when Ray wrapped it; what is
none of them keeps its traceback. The message itself is each folder's to test.
"""

import importlib
import inspect

import pytest
from ray.exceptions import RayTaskError

from rollforward.conf import cli

FOLDERS = ("conf", "kernels", "model", "rollout", "sandbox", "rl", "distill")
ERRORS = [
    error
    for folder in FOLDERS
    for error in vars(importlib.import_module(f"rollforward.{folder}.errors")).values()
    if inspect.isclass(error) and issubclass(error, Exception) and error.__module__ == f"rollforward.{folder}.errors"
]


def _wrapped(error: Exception) -> Exception:
    return RayTaskError("step", "a page of traceback", error).as_instanceof_cause()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.__module__.split('.')[1]}.{error.__name__}")
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["here", "in an actor"])
def test_an_error_of_ours_is_told_without_a_traceback(
    error: type[Exception], is_wrapped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = error.__new__(error, "what, the value, the rule and the way out")  # whatever its constructor takes

    def fail(_: list[str]) -> int:
        raise _wrapped(raised) if is_wrapped else raised

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == (2 if issubclass(error, ValueError) else 1)
    assert capsys.readouterr().err == "error: what, the value, the rule and the way out\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise _wrapped(RuntimeError("a bug"))

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(RuntimeError, match="a page of traceback"):
        cli.main([])
