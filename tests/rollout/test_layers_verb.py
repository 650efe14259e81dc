"""`rollforward sandbox layers list|make|gc`: what it prints, exit codes, and sentences for mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf import cli
from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.layers import LayerStore
from tests.helpers.archives import Layout, member, tar


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], list[str]]:
    """The last line as JSON, and the lines before it."""
    assert cli.main(["sandbox", "layers", *words]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    return json.loads(last), table


def test_layers_are_made_listed_and_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, layout = f"dir={tmp_path / 'store'}", Layout(tmp_path / "layout")
    layout.image([tar(member("a", b"x" * 1000)), tar(member("b"))], name="one")
    empty, table = ask(capsys, "list", store)
    assert (empty["layers"], empty["bytes"], empty["all"], table) == (0, 0, [], [])
    assert not (tmp_path / "store").exists()

    source = f"{layout.path}#one"
    made, lines = ask(capsys, "make", source, store)
    assert [line.split()[0] for line in lines] == [f"layer:{digest}" for digest in made["layers"][source]]
    there, table = ask(capsys, "list", store)
    assert (there["layers"], there["bytes"], len(table)) == (2, 1000, 3)
    assert ask(capsys, "list", store, "json=true") == (there, [])

    kept = f"layer:{made['layers'][source][0]}"
    assert ask(capsys, "gc", store)[0]["removed"] == 0
    with LayerStore(LayersConfig(dir=str(tmp_path / "store"))) as held:
        held.layers(kept)
        assert [info["is_held"] for info in ask(capsys, "list", store)[0]["all"]] == [True, False]
        assert ask(capsys, "gc", "unused_days=0", store)[0]["removed"] == 1
    assert ask(capsys, "gc", "unused_days=0", store)[0]["removed"] == 1
    assert ask(capsys, "list", store)[0]["layers"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing"),
        (["list", "x"], "it takes: layers list"),
        (["make"], "it takes: layers list"),
        (["gc", "unused_days=-1"], "a number of days"),
        (["gc", "unused_days=soon"], "a number of days"),
        (["list", "unused_days=1"], "it takes: layers list"),
        (["list", "json=maybe"], "it takes: layers list"),
        (["make", "nowhere"], "nowhere is no directory, tar archive or OCI layout"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["sandbox", "layers", *words, *([f"dir={tmp_path / 'store'}"] if words else [])]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in " ".join(told.err.split())
    assert "Traceback" not in told.err
