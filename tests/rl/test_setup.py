"""Proves: a model directory that cannot serve a run is refused with its reason before weights are read; the tools of a
run do not depend on the directory of who calls them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollforward.model.config import preset
from rollforward.model.encoding_version import APRIL, ENCODING_FILE, LATER, encoding_file
from rollforward.model.errors import CheckpointError, ConfigError, EncodingError, TokenizerError
from rollforward.model.train_config import AdamW, HybridMuon
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
    with pytest.raises(ModelDirectoryError, match=f"max_position_embeddings = {longest}"):
        _load(model_dir, longest - 39)


def test_ranks_over_which_muons_matrices_do_not_fit_are_refused_with_the_names_of_the_settings() -> None:
    tiny = preset("tiny")
    check_learner(tiny, HybridMuon(lr=1e-3), 16)
    check_learner(tiny, AdamW(lr=1e-3), 64)
    refusal = r"zero_size is 64; .*Set zero_size=16 .*optim\.zero_size, cluster\.learner_ranks and optim\.max_padding$"
    with pytest.raises(ConfigError, match=refusal):
        check_learner(tiny, HybridMuon(lr=1e-3), 64)
    check_learner(tiny, HybridMuon(lr=1e-3, zero_size=16), 32)
