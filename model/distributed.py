"""Joining the process group of the learner's ranks."""

import uuid
from pathlib import Path

import torch

_RENDEZVOUS_PREFIX = ".rendezvous-"


def new_rendezvous(directory: Path) -> Path:
    """Return a path in ``directory`` that no group used, and remove what killed groups left there.

    Only for who owns the directory: a group that is still joining would lose its file.
    """
    for left in directory.glob(_RENDEZVOUS_PREFIX + "*"):
        left.unlink(missing_ok=True)
    return directory / f"{_RENDEZVOUS_PREFIX}{uuid.uuid4().hex}"


def join_group(rendezvous: Path, *, rank: int, num_ranks: int) -> None:
    """Join a gloo group through a file that all ranks see.

    Args:
        rendezvous: from ``new_rendezvous``; its folder must exist and be shared by the ranks.
        rank: in [0, num_ranks).
        num_ranks: size of the group; every rank must join.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous.resolve()}", rank=rank, world_size=num_ranks
    )


def leave_group() -> None:
    """Leave the group; does nothing without one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
