"""Proves: an exported run has its newest weights bit for bit and the bytes of its start where nothing was trained; a
start that is not the run's is refused; the run's directory is only read.

The run is a real one of two steps. Not here: a killed export (tests/faults/test_export_kill.py).
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from rollforward.conf.cli import main as command
from rollforward.model.checkpoint import iter_stored, read_checkpoint, read_packed, write_checkpoint
from rollforward.model.config import config_json, load_model_config
from rollforward.model.convert import convert_checkpoint, num_differing
from rollforward.model.precision import PackedTensor
from rollforward.model.transformer import load_model
from rollforward.rl.export import newest_weights
from rollforward.rollout.weights import publish_weights, read_published
from tests.helpers.runs import TASK, write_model


def _start(folder: Path) -> Path:
    """A model in native formats whose bytes are not what publishing makes of it: larger scales for the same values."""
    plain = write_model(folder / "plain")
    config = load_model_config(plain)
    values = read_checkpoint(plain, config)
    write_checkpoint(folder / "packed", config, values)
    packed = read_packed(folder / "packed", config)
    for name, one in packed.items():
        if one.scale is not None and ".indexer." in name:
            packed[name] = _with_larger_scales(one)
    files = {"tokenizer.json": (plain / "tokenizer.json").read_bytes(), "tokenizer_config.json": b"{}"}
    write_checkpoint(folder / "start", config, packed, extra_files=files)
    return folder / "start"


def _with_larger_scales(packed: PackedTensor) -> PackedTensor:
    """FP8 whose codes are half of what publishing makes of the same values, under twice the scale."""
    assert packed.scale is not None
    codes = packed.data.to(torch.float32).round() / 2
    return PackedTensor(format="fp8", data=codes.to(torch.float8_e4m3fn), scale=packed.scale + 1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("export")
    start = _start(folder)
    values = {
        "run_dir": str(folder / "run"),
        "start": {"type": "checkpoint", "model_dir": str(start)},
        "tasks": [TASK],
        "optim": {"type": "adamw", "lr": 2e-3},
        "steps": 2,
        "micro_batch_tokens": 96,
        "max_prompt_tokens": 40,
        "max_answer_tokens": 8,
        "eval": {"prompts": 4, "every_steps": 2},
        "tracker": {"mode": "disabled"},
        "rollout": {"threads": 1, "wal": {"level": "process"}},
    }
    # In a process of its own: it joins a group, which another test of this process may have done.
    program = (
        "import json, sys, msgspec; from rollforward.rl.config import SFTRun; from rollforward.rl.sft import main;"
        " sys.exit(main(msgspec.convert(json.load(sys.stdin), SFTRun)))"
    )
    subprocess.run([sys.executable, "-c", program], input=json.dumps(values), text=True, check=True, timeout=120)
    (folder / "run" / "config.json").write_text(json.dumps(values))
    return folder / "run"


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def test_trained_as_published_and_the_rest_as_it_was(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _tree(run_dir)
    assert command(["export", f"run_dir={run_dir}", f"to={tmp_path / 'to'}"]) == 0
    assert _tree(run_dir) == before, "nothing of the run was touched"
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    config = load_model_config(run_dir / "model")
    assert load_model_config(tmp_path / "to") == config
    published, started = dict(_stored(run_dir / "model")), dict(_stored(run_dir.parent / "start"))
    copied_otherwise = 0
    for spec, exported in iter_stored(tmp_path / "to", config):
        if spec.trained:
            assert num_differing(exported, published[spec.name]) == 0, spec.name
        else:
            assert num_differing(exported, started[spec.name]) == 0, spec.name
            copied_otherwise += num_differing(exported, published[spec.name]) > 0
    assert copied_otherwise > 0, "publishing had changed the bytes of what was not trained"
    assert report["copied_tensors"] + report["trained_tensors"] == len(published)
    assert report["published_tensors"] == report["plain_tensors"] == 0
    one = load_model(tmp_path / "to", precision="native").logits(torch.tensor([[1, 5, 7]]))
    other = load_model(run_dir / "model", precision="native").logits(torch.tensor([[1, 5, 7]]))
    assert torch.equal(one, other)


def _stored(folder: Path) -> list[tuple[str, PackedTensor]]:
    return [(spec.name, packed) for spec, packed in iter_stored(folder, load_model_config(folder))]


def test_what_lies_beside_the_weights(run_dir: Path, tmp_path: Path) -> None:
    assert command(["export", f"run_dir={run_dir}", f"to={tmp_path / 'to'}"]) == 0
    names = {file.name for file in (tmp_path / "to").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "encoding.json"} <= names
    assert "manifest.json" not in names, "its hashes are of the bytes that were published"
    assert json.loads((tmp_path / "to" / "encoding.json").read_text()) == {"encoding": "v4-0731"}
    again = convert_checkpoint(tmp_path / "to", tmp_path / "canonical")
    assert again.kept_tensors == again.repacked_tensors == 0


def test_the_newest_version_of_a_run_at_work(run_dir: Path, tmp_path: Path) -> None:
    working = tmp_path / "working"
    _, config, tensors = read_published(run_dir / "model")
    for version in (9, 10):
        publish_weights(working / "weights", version, config, tensors)
    (working / "weights" / ".v000011.partial").mkdir()
    assert newest_weights(working) == working / "weights" / "v000010"
    shutil.copy(run_dir / "config.json", working)
    assert command(["export", f"run_dir={working}", f"to={tmp_path / 'to'}"]) == 0


def test_a_run_of_a_recipe_and_relative_settings(run_dir: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    (recipe / "sft").mkdir(parents=True)
    shutil.copytree(run_dir / "model", recipe / "sft" / "model")
    settings = {"start": {"type": "checkpoint", "model_dir": "start"}}
    (recipe / "sft" / "config.json").write_text(json.dumps(settings))
    command_file = {"runs": [{"folder": "sft"}, {"folder": "grpo"}], "directory": str(run_dir.parent)}
    (recipe / "runs.json").write_text(json.dumps(command_file))
    assert command(["export", f"run_dir={recipe}", f"to={tmp_path / 'to'}"]) == 0


def test_a_fresh_start_in_fp32_gives_the_published_bytes(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The masters of what is not trained are in the start, and what engines and training read is rounded from them."""
    plain = run_dir.parent / "plain"
    fresh = tmp_path / "fresh"
    shutil.copytree(plain, fresh / "init")
    config = load_model_config(plain)
    write_checkpoint(fresh / "model", config, read_checkpoint(plain, config))
    (fresh / "config.json").write_text(json.dumps({"start": {"type": "fresh"}}))
    assert command(["export", f"run_dir={fresh}", f"to={tmp_path / 'to'}"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["published_tensors"] > 0
    assert report["copied_tensors"] > 0
    for (spec, exported), (_, published) in zip(
        iter_stored(tmp_path / "to", config), iter_stored(fresh / "model", config), strict=True
    ):
        assert num_differing(exported, published) == 0, spec.name


def _refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command(words) == 2
    return capsys.readouterr().err


def test_mistakes_are_told_and_leave_nothing(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "to"
    words = ["export", f"run_dir={run_dir}", f"to={target}"]
    config = load_model_config(run_dir / "model")
    values = read_checkpoint(run_dir.parent / "start", config)

    other = dict(values)
    other["mtp.0.enorm.weight"] = other["mtp.0.enorm.weight"] + 1
    write_checkpoint(tmp_path / "other", config, other)
    assert "mtp.0.enorm.weight has other values" in _refused([*words, f"base={tmp_path / 'other'}"], capsys)

    table = dict(values)
    name = "layers.0.ffn.gate.tid2eid"
    table[name] = table[name].flip(1)
    write_checkpoint(tmp_path / "table", config, table)
    assert f"{name} has other values" in _refused([*words, f"base={tmp_path / 'table'}"], capsys)

    scaled = msgspec.structs.replace(config, routed_scaling_factor=2.5)
    write_checkpoint(tmp_path / "scaled", scaled, values)
    assert "differ in routed_scaling_factor" in _refused([*words, f"base={tmp_path / 'scaled'}"], capsys)

    assert "holds neither a model nor published weights" in _refused(
        ["export", f"run_dir={tmp_path}", f"to={target}"], capsys
    )
    moved = tmp_path / "moved"
    shutil.copytree(run_dir / "model", moved / "model")
    (moved / "config.json").write_text(json.dumps({"model_dir": "gone"}))
    assert "base=DIR" in _refused(["export", f"run_dir={moved}", f"to={target}"], capsys)
    (moved / "config.json").write_text("[]")
    assert "holds no settings" in _refused(["export", f"run_dir={moved}", f"to={target}"], capsys)
    assert "to" in _refused(["export", f"run_dir={run_dir}"], capsys)
    shard = next((moved / "model").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    told = _refused(["export", f"run_dir={moved}", f"to={target}", f"base={run_dir.parent / 'start'}"], capsys)
    assert "changed since manifest.json was written" in told
    assert not target.exists()
    assert not target.with_name(".to.partial").exists()
    nowhere = tmp_path / "nowhere" / "to"
    assert f"{nowhere.parent}, in which to write, is no folder" in _refused([*words[:2], f"to={nowhere}"], capsys)
    target.mkdir()
    assert "never overwritten" in _refused(words, capsys)


def test_a_bias_that_balancing_moved_is_the_published_one(run_dir: Path, tmp_path: Path) -> None:
    manifest, config, tensors = read_published(run_dir / "model")
    name = "layers.2.ffn.gate.bias"
    moved = PackedTensor(format="fp32", data=tensors[name].data + 0.5)
    publish_weights(tmp_path / "run" / "weights", manifest.policy_version, config, {**tensors, name: moved})
    (tmp_path / "run" / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    assert command(["export", f"run_dir={tmp_path / 'run'}", f"to={tmp_path / 'to'}"]) == 0
    assert torch.equal(read_checkpoint(tmp_path / "to")[name], moved.data)
    assert config_json(load_model_config(tmp_path / "to")) == config_json(config)
