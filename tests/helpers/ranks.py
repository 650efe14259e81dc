"""A process group of one rank inside the test process, for everything that needs DeepSpeed."""

import uuid
from pathlib import Path

import torch

from rollforward.model.distributed import join_group


def join_alone(directory: Path) -> None:
    """Join a group of one, once per process."""
    if not torch.distributed.is_initialized():
        join_group(directory / f"rendezvous-{uuid.uuid4().hex}", rank=0, num_ranks=1)
