"""Teachers for tests: tiny model directories, and who has which of their files mapped."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from rollforward.distill.teacher_weights import TeacherSource
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.config import ModelConfig
from tests.helpers.tiny import random_params, tiny_config


def wide_config() -> ModelConfig:
    """A teacher whose width and depth are not those of the tiny student."""
    return msgspec.structs.replace(
        tiny_config(), hidden_size=160, num_hidden_layers=3, compress_ratios=(0, 4, 32, 0), n_routed_experts=6
    )


def write_teacher(
    directory: Path, config: ModelConfig, seed: int, stored: Literal["published", "fp32"] = "published"
) -> TeacherSource:
    """Write random weights and return the source, which nobody described. No two scales of a matrix are alike."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    params = {
        name: _uneven(value) if "attn.w" in name else value for name, value in random_params(config, seed).items()
    }
    write_checkpoint(directory, config, params, precision=stored, max_shard_bytes=2**19)
    return TeacherSource(name=directory.name, directory=directory, version=f"seed {seed}", width=config.hidden_size)


def _uneven(value: Tensor) -> Tensor:
    """Each 128 rows half as large as those above, which gives them another scale."""
    return value * 2.0 ** -(torch.arange(len(value)) // 128).unsqueeze(1)


def mapped_teachers(root: Path) -> set[str]:
    """Return the names of the directories below ``root`` of which this process has a file mapped or open."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    paths = [Path(line[5]) for line in lines if len(line) == 6]
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself, or of another thread
            paths.append(descriptor.readlink())
    return {path.relative_to(root).parts[0] for path in paths if path.is_relative_to(root)}
