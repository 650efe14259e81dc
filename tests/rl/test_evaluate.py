"""Proves: `eval` of a user's dataset, reward and tool, all named by relative paths, is begun in one directory and
resumed from another; one that could judge no answer of a task says so in place of an accuracy, and one whose tool never
returns says that.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf import cli
from rollforward.model.dsml import AssistantTurn, parse_turn
from rollforward.model.encoding import ChatEncoding
from rollforward.model.tokenizer import DSML
from rollforward.rl.evaluation import Evaluator
from tests.helpers.runs import write_calling_model, write_model

RECIPE = """
summary: "a user's own files"
runs:
  - name: heldout
    verb: eval
    config:
      model_dir: model
      tasks:
        - type: dataset
          name: mine
          path: questions.jsonl
          heldout_size: 4
          reward: {type: python, file: reward.py}
          tools: [{name: add, file: tool.py}]
          list_tools: false
          max_observation_tokens: 96
      sampling: {max_new_tokens: 4, temperature: 0.0}
      prompts: 4
      max_prompt_tokens: 40
      rollout: {threads: 1, wal: {level: process}}
"""


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _write_files(here: Path, reward: str) -> None:
    """What the recipe names, and the recipe."""
    here.mkdir()
    write_model(here / "model")
    rows = [json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) for n in range(8)]
    (here / "questions.jsonl").write_text("\n".join(rows))
    (here / "reward.py").write_text(f"def score(question, answer, text):\n    {reward}\n")
    (here / "tool.py").write_text('def add(a: int) -> int:\n    """Adds."""\n    return a + 1\n')
    (here / "mine.yaml").write_text(RECIPE)


def test_a_run_with_files_of_ones_own_is_resumed_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    _write_files(here, "return 1.0")
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    evaluate: Callable[..., Any] = Evaluator.evaluate
    monkeypatch.setattr(Evaluator, "evaluate", _interrupt)
    assert cli.main(["eval", "recipe=mine.yaml", "run_dir=../out"]) == 130
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.chdir(elsewhere)
    assert cli.main(["resume", "../out"]) == 0, capsys.readouterr().err
    (result,) = json.loads((tmp_path / "out" / "heldout" / "eval.json").read_text())
    assert (result["task"], result["correct"], result["judged"]) == ("mine", 4, 4)


def test_an_evaluation_that_could_judge_nothing_fails_and_goes_on_when_that_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    _write_files(here, "raise OSError('no such host')")
    monkeypatch.chdir(here)
    assert cli.main(["eval", "recipe=mine.yaml", "run_dir=../out"]) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert re.match(r"error: not one of the answers to mine could be judged \(.*eval.json has the", said)
    file = tmp_path / "out" / "heldout" / "eval.json"
    (result,) = json.loads(file.read_text())
    assert (result["judged"], result["unscored"]) == (0, {"infra": 4})
    (here / "reward.py").write_text("def score(question, answer, text):\n    return 1.0\n")
    assert cli.main(["resume", "../out"]) == 0
    (result,) = json.loads(file.read_text())
    assert (result["correct"], result["judged"], result["unscored"]) == (4, 4, {})


def test_a_tool_that_never_returns_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained model whose turns end: what reads them reads a call in each."""
    here = tmp_path / "here"
    _write_files(here, "return 1.0")
    write_calling_model(here / "plain")
    (here / "tool.py").write_text('def add() -> int:\n    """Adds nothing."""\n    raise ValueError\n')
    recipe = RECIPE.replace("model_dir: model", "model_dir: calling").replace("max_new_tokens: 4", "max_new_tokens: 20")
    (here / "mine.yaml").write_text(recipe)
    call = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="add">\n</{DSML}invoke>\n</{DSML}tool_calls>'

    def read_turn(*_: Any, **__: Any) -> AssistantTurn:
        return parse_turn(call, "non-think")

    monkeypatch.setattr(ChatEncoding, "read_turn", read_turn)
    monkeypatch.chdir(here)
    assert cli.main(["eval", "recipe=mine.yaml", "run_dir=../out"]) == 0
    assert re.search(
        r"^tool add has not returned once in (\d+) calls: \1 error$", capsys.readouterr().err, re.MULTILINE
    )
