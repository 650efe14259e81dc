"""Proves that docs/plan.md shows what its commands print."""

from pathlib import Path

import pytest

from rollforward.conf import cli

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
COMMAND = ".venv/bin/rollforward "


def _shown() -> dict[str, list[str]]:
    """Command -> the lines below it, of the blocks that show output."""
    blocks = PAGE.read_text().split("```\n")[1::2]
    shown: dict[str, list[str]] = {}
    for block in blocks:
        first, *lines = block.rstrip().split("\n")
        if lines and not lines[0].startswith(COMMAND):
            shown[first.removeprefix(COMMAND)] = lines
    return shown


def test_the_page_has_the_asked_for_plans() -> None:
    commands = "\n".join(_shown())
    for asked in ("model=flash nodes=1\n", "model=flash nodes=8 ", "model=pro nodes=32 ", "model=mini nodes=1 "):
        assert asked in commands + "\n"


@pytest.mark.parametrize("command", _shown())
def test_a_shown_line_is_printed(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = cli.main(command.split())
    out, err = capfd.readouterr()
    missing = [line for line in _shown()[command] if line not in out + err]
    assert missing == []
    assert (status, err == "") in ((0, True), (2, False))
    assert (status == 0) == ("mini" in command)
