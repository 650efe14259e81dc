"""Teachers for tests: tiny model directories, and who has which of their files mapped."""

from pathlib import Path
from typing import Literal

import msgspec

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
    """Write random weights and return the source, which nobody described."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, config, random_params(config, seed), precision=stored, max_shard_bytes=2**19)
    return TeacherSource(name=directory.name, directory=directory, version=f"seed {seed}", width=config.hidden_size)


def mapped_teachers(root: Path) -> set[str]:
    """Return the names of the directories below ``root`` of which this process has a file mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if len(line.split(maxsplit=5)) == 6]
    return {path.relative_to(root).parts[0] for path in paths if path.is_relative_to(root)}
