"""What a task says of its completions' sandboxes: the substrate, and what is prepared once for all of them."""

from typing import Any

import msgspec
import pytest

from rollforward.rl.sampling import tool_use
from rollforward.rl.setup import _sandbox_use  # pyright: ignore[reportPrivateUsage]
from rollforward.rl.tasks.config import ErrandsConfig, ReasoningGymConfig, TaskConfig, identity_bytes
from rollforward.rollout.workspace import Workspace
from rollforward.sandbox.config import ToolConfig

ERRANDS: dict[str, Any] = {"type": "errands", "name": "e"}


def task(**settings: Any) -> TaskConfig:
    return msgspec.convert(ERRANDS | settings, TaskConfig)


@pytest.mark.parametrize("substrate", ["container", "microvm", "fullvm"])
def test_sandboxes_that_last_are_of_the_tasks_substrate(substrate: str) -> None:
    options = task(substrate=substrate)
    use = _sandbox_use(options)
    assert use is not None
    assert (use.substrate, options.keeps_sandbox, options.kept_substrate) == (substrate, True, substrate)


def test_containers_may_be_isolated_by_gvisor() -> None:
    """And a task that does not say so is the one that it was before there was such a setting."""
    options = task(isolation="gvisor")
    use = _sandbox_use(options)
    assert use is not None
    assert (use.substrate, options.substrate, options.kept_substrate) == ("gvisor", "container", "gvisor")
    assert b"isolation" not in identity_bytes(task())
    assert identity_bytes(options) != identity_bytes(task())


def test_functions_keep_none() -> None:
    options = ReasoningGymConfig(name="g", dataset="basic_arithmetic", tools=(ToolConfig(name="calculator"),))
    assert (options.keeps_sandbox, _sandbox_use(options)) == (False, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"substrate": "function", "prepare": [["true"]], "submission": []}, "prepare has commands"),
        ({"prepare": [[]]}, "without a program"),
        ({"prepare": [["true"], [""]]}, "without a program"),
        ({"substrate": "vm"}, "vm"),
        ({"substrate": "gvisor"}, "gvisor"),
        ({"substrate": "microvm", "isolation": "gvisor"}, "isolation is gvisor, but substrate is microvm"),
        ({"substrate": "function", "isolation": "gvisor", "submission": []}, "leave isolation out"),
        ({"isolation": "runc"}, "runc"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=said):
        task(**settings)


def test_what_is_prepared_makes_another_workspace_and_another_task() -> None:
    """And where nothing is, both are what they were before there was such a setting."""
    plain, prepared = ErrandsConfig(name="e"), ErrandsConfig(name="e", prepare=(("true",),))
    assert b"prepare" not in identity_bytes(plain)
    assert identity_bytes(prepared) != identity_bytes(plain)
    before, after = Workspace(files={"a": b"x"}), Workspace(files={"a": b"x"}, prepare=(("true",),))
    assert before.digest == "119cf49a0af5706119d6df2618751615"
    assert before.digest != after.digest
    assert after.digest != Workspace(files={"a": b"x"}, prepare=(("false",),)).digest
    use, other = tool_use(plain, before), tool_use(plain, after)
    assert use != other
