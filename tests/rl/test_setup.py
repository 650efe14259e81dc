"""Proves: a model directory that cannot serve a run is refused with its reason before weights are read; the tools of a
run do not depend on the directory of who calls them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollforward.model.config import preset
from rollforward.model.encoding_version import APRIL, ENCODING_FILE, LATER, encoding_file
from rollforward.model.errors import CheckpointError, ConfigError, EncodingError, TokenizerError
from rollforward.model.train_config import AdamW, HybridMuon
from rollforward.rl import prompts
from rollforward.rl.errors import ModelDirectoryError, TaskError
from rollforward.rl.setup import Parts, check_learner, load_parts
from tests.helpers.runs import TASK, small_run, write_model


def _load(model_dir: Path, max_new_tokens: int = 6) -> Parts:
    run = small_run(model_dir, model_dir)
    return load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=max_new_tokens, sandbox=run.sandbox)


def test_tools_of_ones_own_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on a cluster does not work in the driver's directory."""
    model_dir = write_model(tmp_path / "model")
    (tmp_path / "tool.py").write_text('def add(a: int) -> int:\n    """Adds."""\n    return a + 1\n')
    tools = [{"name": "add", "file": "tool.py"}, {"name": "calculator"}]
    task = {**TASK, "tools": tools, "max_observation_tokens": 96, "list_tools": False}
    run = small_run(model_dir, model_dir, tasks=[task], micro_batch_tokens=512)
    monkeypatch.chdir(tmp_path)
    parts = load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)
    assert parts.environment is not None
    files = [tool.file for tool in parts.environment.tasks["chain_sum"].tools]
    assert files == [str(tmp_path / "tool.py"), None]


def test_an_image_that_does_not_exist_is_refused_before_a_sandbox_is_made(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model")
    task = {**TASK, "tools": [{"name": "bash"}], "substrate": "container", "image": "nope", "list_tools": False}
    run = small_run(model_dir, model_dir, tasks=[task], micro_batch_tokens=4096)
    with pytest.raises(TaskError, match=r"task chain_sum: image is 'nope'; there are host\. Name one of them, or add"):
        load_parts(model_dir, run.tasks, max_prompt_tokens=8, max_new_tokens=6, sandbox=run.sandbox)


def _without(name: str) -> Callable[[Path], None]:
    return lambda model_dir: next(model_dir.glob(name)).unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_without("config.json"), ConfigError, r"config\.json cannot be read"),
        (_without("tokenizer.json"), TokenizerError, "the tokenizer cannot be read"),
        (_without("*.safetensors"), CheckpointError, "is damaged or absent"),
    ],
)
def test_an_absent_file_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    model_dir = write_model(tmp_path / "model")
    spoil(model_dir)
    with pytest.raises(error, match=message):
        _load(model_dir)


def test_the_models_encoding_is_used_and_its_absence_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = write_model(tmp_path / "model")
    assert _load(model_dir).encoding.version == LATER
    assert capsys.readouterr().err.count("has no encoding.json: conversations are encoded as in v4-0731") == 1
    (model_dir / ENCODING_FILE).write_bytes(encoding_file(APRIL))
    assert _load(model_dir).encoding.version == APRIL
    assert "encoding" not in capsys.readouterr().err
    run = small_run(model_dir, model_dir, tasks=[{**TASK, "effort": "low"}])
    with pytest.raises(EncodingError, match=r"effort 'low' is not in encoding v4-0424"):
        load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)


def test_limits_beyond_the_model_are_refused_and_those_at_it_are_not(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model")
    longest = _load(model_dir).model_config.max_position_embeddings
    _load(model_dir, longest - 40)
    with pytest.raises(
        ModelDirectoryError,
        match=rf"max_position_embeddings = {longest}\. .*max_prompt_tokens or sampling\.max_new_tokens$",
    ):
        _load(model_dir, longest - 39)
    own = small_run(model_dir, model_dir, tasks=[{**TASK, "max_new_tokens": longest}], micro_batch_tokens=2 * longest)
    with pytest.raises(ModelDirectoryError, match=r"Lower max_prompt_tokens or max_new_tokens of task chain_sum$"):
        load_parts(model_dir, own.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=own.sandbox)


def test_ranks_over_which_muons_matrices_do_not_fit_are_refused_with_the_names_of_the_settings() -> None:
    tiny = preset("tiny")
    check_learner(tiny, HybridMuon(lr=1e-3), 16)
    check_learner(tiny, AdamW(lr=1e-3), 64)
    refusal = r"zero_size is 64; .*Set zero_size=16 .*optim\.zero_size, cluster\.learner_ranks and optim\.max_padding$"
    with pytest.raises(ConfigError, match=refusal):
        check_learner(tiny, HybridMuon(lr=1e-3), 64)
    check_learner(tiny, HybridMuon(lr=1e-3, zero_size=16), 32)


def _file_task(path: Path, questions: list[str]) -> dict[str, object]:
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions))
    return {"type": "dataset", "name": "mine", "path": str(path), "reward": {"type": "math_verify"}, "heldout_size": 4}


def test_a_question_that_is_too_long_stops_the_run_at_its_start(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model")
    questions = [f"{index} + 1 = ?" + " 1" * (200 if index % 10 == 9 else 0) for index in range(60)]
    run = small_run(model_dir, model_dir, tasks=[_file_task(tmp_path / "long.jsonl", questions)])
    with pytest.raises(
        TaskError, match=r"task mine: (train|heldout) example \d+ has \d+ prompt tokens; max_prompt_tok"
    ):
        load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)
    load_parts(model_dir, run.tasks, max_prompt_tokens=450, max_new_tokens=6, sandbox=run.sandbox)


def test_of_a_large_file_as_much_as_costs_seconds_is_looked_at_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "_SPREAD_ROWS", 8)
    model_dir = write_model(tmp_path / "model")
    tasks = [_file_task(tmp_path / "large.jsonl", [f"{index} + 1 = ?" for index in range(60)])]
    run = small_run(model_dir, model_dir, tasks=tasks)
    load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)
    assert (
        "task mine: 8 of its 56 train prompts, evenly spaced, are within max_prompt_tokens" in capsys.readouterr().err
    )


def test_an_evaluation_is_not_refused_for_questions_that_it_never_asks(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model")
    train = _file_task(tmp_path / "long.jsonl", [f"{index} + 1 = ?" + " 1" * 200 for index in range(60)])
    _file_task(tmp_path / "short.jsonl", [f"{index} + 2 = ?" for index in range(8)])
    run = small_run(model_dir, model_dir, tasks=[{**train, "heldout_path": str(tmp_path / "short.jsonl")}])
    load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox, asks=("heldout",))
    with pytest.raises(TaskError, match="task mine: train example 0 has"):
        load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)


def test_a_model_directory_that_is_not_there_is_named_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=rf"^model_dir is {tmp_path}/absent, where there is no directory"):
        _load(tmp_path / "absent")


def test_what_tools_may_say_is_named_among_the_limits(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "model")
    positions = _load(model_dir).model_config.max_position_embeddings
    task = {
        **TASK,
        "tools": [{"name": "calculator"}],
        "max_turns": 3,
        "max_observation_tokens": positions,
        "list_tools": False,
    }
    run = small_run(model_dir, model_dir, tasks=[task], micro_batch_tokens=8 * positions)
    told = (
        rf"{2 * positions + 6} tokens may follow: 6 sampled and {2 * positions} that tools of task chain_sum may say,"
        r" its \(max_turns - 1\) \* max_observation_tokens; .*or that task's max_turns or max_observation_tokens$"
    )
    with pytest.raises(ModelDirectoryError, match=told):
        load_parts(model_dir, run.tasks, max_prompt_tokens=40, max_new_tokens=6, sandbox=run.sandbox)
