"""Proves: fingerprints are over canonical bytes and the same from files and from an engine's values; a version that is
damaged, half, absent, old or another model's is refused with names and the one before serves on to the bit; a reload
writes in place and takes no second copy; a model that was published here and changed since is named.

Kills are in tests/faults/test_weight_sync.py, the fixed prompt in tests/parity/test_trainer_engine.py.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from rollforward.model.config import ModelConfig, load_model_config
from rollforward.model.errors import CheckpointError
from rollforward.model.init import fresh_params
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.shapes import param_specs
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.errors import VersionRefusedError
from rollforward.rollout.replica import Replica
from rollforward.rollout.weights import (
    check_acknowledgement,
    check_manifest,
    check_version,
    checkpoint_source,
    publish_weights,
    read_manifest,
    version_directory,
)
from tests.helpers.replicas import PROCESS, fingerprints, make_requests, packed_params
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


def test_bytes_that_are_not_canonical_have_the_fingerprints_of_their_values(tmp_path: Path) -> None:
    """A group whose largest code is 3 is stored with half the scale and twice the codes; a negative zero as zero."""
    config = tiny_config()
    packed = packed_params(config)
    name = "layers.0.ffn.experts.w1.weight"
    value = unpack_published(packed[name])
    value[0, 0, :32] = 0.0
    value[0, 0, 0], value[0, 0, 1] = 3.0, 0.5
    canonical = pack_published(next(spec for spec in param_specs(config) if spec.name == name), value)
    assert canonical.scale is not None
    data, scale = canonical.data.clone(), canonical.scale.clone()
    assert data[0, 0, 0] == 0x27  # 6 and 1 of the halved scale
    data[0, 0, 0], data[0, 0, 1], scale[0, 0, 0] = 0x15, -0x78, scale[0, 0, 0] + 1  # 3 and 0.5; twice -0
    other = PackedTensor(format="mxfp4", data=data, scale=scale)
    assert torch.equal(unpack_published(other), value)
    plain = publish_weights(tmp_path / "a", 1, config, packed | {name: canonical})
    odd = publish_weights(tmp_path / "b", 1, config, packed | {name: other})
    assert odd == plain
    for file in version_directory(tmp_path / "a", 1).iterdir():
        assert (version_directory(tmp_path / "b", 1) / file.name).read_bytes() == file.read_bytes()
    source = checkpoint_source(version_directory(tmp_path / "a", 1), config)
    assert publish_weights(tmp_path / "c", 1, config, source) == plain
    assert check_version(version_directory(tmp_path / "c", 1), config).tensors == fingerprints(
        config, packed | {name: canonical}
    )


def test_where_no_version_can_be_written_that_is_said(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "a-file").touch()
    with pytest.raises(
        CheckpointError,
        match=r"v000001 cannot be written: .*Not a directory.*\. Move away what stands there.*nothing was",
    ):
        publish_weights(tmp_path / "a-file" / "weights", 1, config, packed_params(config, seed=1))


def _truncate(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def _other_model(directory: Path) -> None:
    shutil.rmtree(directory)
    config = msgspec.structs.replace(tiny_config(), rms_norm_eps=1e-5)
    publish_weights(directory.parent, 2, config, packed_params(config, seed=2))


def _old_manifest(directory: Path) -> None:
    values = json.loads((directory / "manifest.json").read_text())
    kept = {name: values[name] for name in ("policy_version", "tensors", "files")}
    (directory / "manifest.json").write_text(json.dumps(kept))


def test_a_version_that_is_not_whole_is_refused_and_the_one_before_serves_on(tmp_path: Path) -> None:
    """One engine through all of them, then the version as it was published: memory stays where it was."""
    config = tiny_config()
    root = tmp_path / "weights"
    for version in (1, 2):
        publish_weights(root, version, config, packed_params(config, seed=version))
    replicas = [
        Replica(name, tmp_path / name, config, precision="native", config=RolloutConfig(threads=1, wal=PROCESS))
        for name in ("engine-0", "undisturbed")
    ]
    replica, undisturbed = replicas
    for one in replicas:
        one.load_weights(version_directory(root, 1))
    held = replica._engine.held_tensors()
    pointers = {name: value.data_ptr() for name, value in held.items()}
    before, ack = {name: value.clone() for name, value in held.items()}, replica.acknowledge()
    target = version_directory(root, 2)
    shutil.copytree(target, tmp_path / "whole")
    for spoil, message in (
        (_flip_last_byte, r"weights 2 in .* are refused, what was loaded before stays in use: [\w.]+ are not what"),
        (_truncate, r"weights 2 .*its header describes"),
        (_change_config, r"weights 2 .*config\.json is another model's"),
        (_other_model, r"weights 2 .*config\.json is another model's"),
        (_old_manifest, r"holds no readable manifest\.json: its fingerprints are of scheme 'none, as older versions"),
        (lambda directory: next(directory.glob("*.safetensors")).unlink(), r"weights 2 .*safetensors"),
        (lambda directory: (directory / "manifest.json").unlink(), r"v000002 holds no readable manifest\.json"),
        (shutil.rmtree, r"v000002 holds no readable manifest\.json"),
    ):
        spoil(target)
        with pytest.raises(VersionRefusedError, match=message):
            replica.load_weights(target)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", target)
    assert all(torch.equal(held[name], value) for name, value in before.items())
    assert replica.acknowledge() == ack
    requests = make_requests([4, 19], max_new_tokens=5)
    for found, expected in zip(replica.generate(requests), undisturbed.generate(requests), strict=True):
        assert found.token_ids.tobytes() == expected.token_ids.tobytes()
        assert found.behavior_logprobs.tobytes() == expected.behavior_logprobs.tobytes()
    check_acknowledgement(read_manifest(target), replica.load_weights(target))
    assert {name: value.data_ptr() for name, value in replica._engine.held_tensors().items()} == pointers
    for one in replicas:
        one.close()


_RELOADS = """
import ctypes, sys, threading, time
from pathlib import Path
from rollforward.model.config import load_model_config
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.replica import Replica
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.weights import check_acknowledgement, read_manifest

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def watch():
    while True:
        peaks[0] = max(peaks[0], anonymous())
        time.sleep(0.002)

root, log = Path(sys.argv[1]), Path(sys.argv[2])
config = RolloutConfig(threads=1, wal=WalConfig(level="process"))
empty = anonymous()
replica = Replica("engine-0", log, load_model_config(root / "v000001"), precision="native", config=config)
check_acknowledgement(read_manifest(root / "v000001"), replica.load_weights(root / "v000001"))
ctypes.CDLL(None).malloc_trim(0)
before = anonymous()
peaks = [before]
threading.Thread(target=watch, daemon=True).start()
check_acknowledgement(read_manifest(root / "v000002"), replica.load_weights(root / "v000002"))
print(before - empty, peaks[0] - before)
replica.close()
"""


def test_a_reload_takes_no_second_copy(tmp_path: Path) -> None:
    """More than 200 MB of float32 values; a copy of a layer's experts alone would be seen."""
    config = msgspec.structs.replace(
        tiny_config(), hidden_size=512, moe_intermediate_size=512, n_routed_experts=16, vocab_size=4096
    )
    generator = torch.Generator().manual_seed(1)
    packed: dict[str, PackedTensor] = {}
    for spec in param_specs(config):
        if spec.format == "mxfp4":
            data = torch.randint(
                -128, 128, (*spec.shape[:-1], spec.shape[-1] // 2), dtype=torch.int8, generator=generator
            )
            scale = torch.full((*spec.shape[:-1], spec.shape[-1] // 32), 120, dtype=torch.uint8)
            packed[spec.name] = PackedTensor(format="mxfp4", data=data, scale=scale)
        elif spec.format == "int64":
            table = torch.arange(spec.shape[1]).repeat(spec.shape[0], 1)
            packed[spec.name] = PackedTensor(format="int64", data=table)
        else:
            packed[spec.name] = pack_published(spec, 0.05 * torch.randn(spec.shape, generator=generator))
    for version in (1, 2):
        publish_weights(tmp_path, version, config, packed)
    value_bytes = sum(4 * math.prod(spec.shape) for spec in param_specs(config))
    assert value_bytes > 200e6
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(
        [sys.executable, "-c", _RELOADS, str(tmp_path), str(tmp_path / "log")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    held_bytes, growth_bytes = map(int, done.stdout.split())
    assert held_bytes > value_bytes
    assert growth_bytes < 0.2 * value_bytes, f"{growth_bytes / value_bytes:.2f} of the values"


def test_layout_of_the_config_and_a_model_from_elsewhere_pass(tmp_path: Path) -> None:
    directory = _publish(tmp_path, tiny_config())
    config_file = directory / "config.json"
    config_file.write_bytes(msgspec.json.encode(json.loads(config_file.read_text())))
    check_manifest(directory, load_model_config(directory))
    _flip_last_byte(directory)
    (directory / "manifest.json").unlink()
    check_manifest(directory, load_model_config(directory))
