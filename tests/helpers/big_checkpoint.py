"""A checkpoint of any size from a seed, written, read and converted in one process that watches its own memory.

    python -m tests.helpers.big_checkpoint FOLDER LAYERS MODE      -> JSON: bytes, largest RssAnon, what differed

MODE `convert`: bytes that are not canonical -> canonical (values compared) -> canonical (bytes compared). MODE `read`:
written, read and compared, with never more than one copy on the disk, and no more than 2 GiB of memory at all.
"""

import json
import resource
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from rollforward.model.checkpoint import iter_stored, write_stored
from rollforward.model.checkpoint_writer import CheckpointWriter, json_bytes
from rollforward.model.config import ModelConfig, config_json, preset
from rollforward.model.convert import convert_checkpoint
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.shapes import TensorFormat, TensorSpec, scale_shape, stored_form, tensor_specs

SHARD_BYTES = 128 * 2**20
LIMIT_BYTES = 2 * 2**30


def big_config(layers: int) -> ModelConfig:
    """A third of a GB a layer, in plain BF16 but for one stack of MXFP4 experts."""
    return msgspec.structs.replace(
        preset("tiny"),
        hidden_size=1024,
        moe_intermediate_size=1024,
        n_routed_experts=58,
        num_hidden_layers=layers,
        compress_ratios=(0,) * layers,
        num_nextn_predict_layers=0,
    )


def stored_format(spec: TensorSpec) -> TensorFormat:
    """MXFP4 where its name says, plain elsewhere, so that the work is reading and writing."""
    if ".experts." in spec.name and spec.name.startswith("layers.0.") and ".w1." in spec.name:
        return "mxfp4"
    return "bf16" if spec.format in ("mxfp4", "fp8") else spec.format


def made(spec: TensorSpec) -> PackedTensor:
    """The tensor that the seed gives to a name: finite, with every code and many scales."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    if spec.format == "int64":
        return PackedTensor(format="int64", data=torch.arange(spec.num_elements).view(spec.shape) % 58)
    if spec.format == "mxfp4":
        packed = (*spec.shape[:-1], spec.shape[-1] // 2)
        data = _random_bytes(spec.num_elements // 2, generator).view(torch.int8).view(packed)
        scale = _random_bytes(spec.num_elements // 32, generator) % 8 + 120
        return PackedTensor(format="mxfp4", data=data, scale=scale.view(scale_shape(spec.shape, "mxfp4")))
    if spec.format == "bf16":
        bits = _random_bytes(2 * spec.num_elements, generator).view(torch.int16) & -0x4001  # no exponent of all ones
        return PackedTensor(format="bf16", data=bits.view(torch.bfloat16).view(spec.shape))
    return PackedTensor(format="fp32", data=torch.randn(spec.shape, generator=generator))


def _random_bytes(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(-(-count // 8), dtype=torch.int64).random_(generator=generator).view(torch.uint8)[:count].clone()


def write(folder: Path, config: ModelConfig) -> int:
    """Write the checkpoint tensor by tensor; returns its bytes."""
    specs = [msgspec.structs.replace(spec, format=stored_format(spec)) for spec in tensor_specs(config)]
    groups = [stored_form(spec) for spec in specs]
    with CheckpointWriter(folder, groups, max_shard_bytes=SHARD_BYTES) as writer:
        for spec in specs:
            write_stored(writer, spec, made(spec))
        writer.publish({"config.json": json_bytes(config_json(config))})
    return sum(one.num_bytes for group in groups for one in group)


def num_other_values(folder: Path, config: ModelConfig) -> int:
    """How many tensors have other values than the seed gave."""
    wrong = 0
    for spec, packed in iter_stored(folder, config):
        expected = made(msgspec.structs.replace(spec, format=stored_format(spec)))
        if packed.format != expected.format:
            wrong += 1
        elif packed.format == "mxfp4":
            pairs = zip(_rows(packed), _rows(expected), strict=True)
            wrong += not all(torch.equal(unpack_published(one), unpack_published(other)) for one, other in pairs)
        else:
            wrong += not torch.equal(packed.data, expected.data)
    return wrong


def _rows(packed: PackedTensor) -> Iterator[PackedTensor]:
    """A few rows at a time, since as numbers they are eight times as large."""
    assert packed.scale is not None
    for data, scale in zip(packed.data.split(64), packed.scale.split(64), strict=True):
        yield PackedTensor(format="mxfp4", data=data, scale=scale)


def num_other_files(one: Path, other: Path) -> int:
    """How many files are not the same bytes; read a piece at a time."""
    names = {file.name for file in (*one.iterdir(), *other.iterdir())}
    return sum(_checksum(one / name) != _checksum(other / name) for name in names)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as opened:
        while part := opened.read(2**20):
            value = zlib.crc32(part, value)
    return value


def rss_anon_bytes() -> int:
    """Anonymous memory of this process now."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:"))


class Watch(threading.Thread):
    """Looks at this process's memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest_bytes = 0

    def run(self) -> None:
        while True:
            self.largest_bytes = max(self.largest_bytes, rss_anon_bytes())
            time.sleep(0.003)


def main(folder: Path, layers: int, mode: str) -> None:
    """Do the work and print what came of it."""
    torch.set_num_threads(1)
    watch = Watch()
    watch.start()
    start_bytes = rss_anon_bytes()
    config = big_config(layers)
    report: dict[str, object] = {"start_bytes": start_bytes}
    if mode == "read":
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        report["bytes"] = write(folder / "made", config)
        report["other_values"] = num_other_values(folder / "made", config)
    else:
        report["bytes"] = write(folder / "made", config)
        once = convert_checkpoint(folder / "made", folder / "once", max_shard_bytes=SHARD_BYTES)
        shutil.rmtree(folder / "made")
        report["changed_bytes"] = once.changed_bytes
        report["other_values"] = num_other_values(folder / "once", config)
        twice = convert_checkpoint(folder / "once", folder / "twice", max_shard_bytes=SHARD_BYTES)
        report["changed_again"] = twice.changed_bytes
        report["other_files"] = num_other_files(folder / "once", folder / "twice")
    report["largest_bytes"] = watch.largest_bytes
    report["seconds"] = time.process_time()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
