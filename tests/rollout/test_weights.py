"""Proves: a model that was published here and changed since is refused with the names of what changed."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollforward.model.config import ModelConfig, load_model_config
from rollforward.model.errors import CheckpointError
from rollforward.model.init import fresh_params
from rollforward.model.precision import pack_published
from rollforward.model.shapes import param_specs
from rollforward.rollout.weights import check_manifest, publish_weights, version_directory
from tests.helpers.tiny import tiny_config


def _publish(root: Path, config: ModelConfig) -> Path:
    masters = fresh_params(config, seed=0)
    packed = {spec.name: pack_published(spec, masters[spec.name]) for spec in param_specs(config)}
    publish_weights(root, 3, config, packed, extra_files={"tokenizer.json": b'{"a": 1}'})
    return version_directory(root, 3)


def _flip_last_byte(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _change_config(directory: Path) -> None:
    values = json.loads((directory / "config.json").read_text())
    values["rope_theta"] *= 2
    (directory / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_flip_last_byte, r": [\w.]+ changed since manifest\.json"),
        (lambda directory: (directory / "tokenizer.json").write_bytes(b'{"a": 2}'), r": tokenizer\.json changed"),
        (lambda directory: (directory / "tokenizer.json").unlink(), r": tokenizer\.json changed"),
        (_change_config, r": config\.json changed"),
        (lambda directory: (directory / "manifest.json").write_bytes(b"{"), r"manifest\.json cannot be read"),
    ],
)
def test_what_changed_since_the_publish_is_named(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    directory = _publish(tmp_path, tiny_config())
    check_manifest(directory, load_model_config(directory))
    spoil(directory)
    with pytest.raises(CheckpointError, match=message):
        check_manifest(directory, load_model_config(directory))


def test_layout_of_the_config_and_a_model_from_elsewhere_pass(tmp_path: Path) -> None:
    directory = _publish(tmp_path, tiny_config())
    config_file = directory / "config.json"
    config_file.write_bytes(msgspec.json.encode(json.loads(config_file.read_text())))
    check_manifest(directory, load_model_config(directory))
    _flip_last_byte(directory)
    (directory / "manifest.json").unlink()
    check_manifest(directory, load_model_config(directory))
