"""For every test: a seed from its name, and under CI no silent skip. Shared builders are in tests/helpers/."""

import hashlib
import os
import random
import sys
import types
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from rollforward.conf.load import set_library_environment

# Before anything imports torch; the command line does the same.
set_library_environment()

# `from tests.helpers.x import y` works from every test, without the repository on sys.path (where `kernels` and `model`
# would shadow distributions of those names).
_tests = sys.modules.setdefault("tests", types.ModuleType("tests"))
_tests.__path__ = [str(Path(__file__).parent)]

hypothesis.settings.register_profile("rollforward", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("rollforward")

_UNDER_CI = os.environ.get("CI", "").lower() in ("1", "true")
_MAY_SKIP = ("gpu", "multi_gpu")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds random, numpy and torch (where they are imported) from the test's name; returns the seed."""
    value = int.from_bytes(hashlib.blake2b(request.node.nodeid.encode(), digest_size=4).digest())
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)
    return value


def _fail_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{reason}: nothing may be skipped under CI but tests marked {' or '.join(_MAY_SKIP)}."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under CI a skipped test that this machine should run is a failure."""
    report = yield
    is_expected = hasattr(report, "wasxfail") or any(item.get_closest_marker(name) for name in _MAY_SKIP)
    if _UNDER_CI and report.skipped and not is_expected:
        _fail_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Under CI a module that skips itself while being imported is a failure."""
    report = yield
    if _UNDER_CI and report.outcome == "skipped":
        _fail_skip(report)
    return report
