"""Joining the process group of the learner's ranks."""

from pathlib import Path

import torch


def join_group(rendezvous: Path, *, rank: int, num_ranks: int) -> None:
    """Join a gloo group through a file that all ranks see.

    Args:
        rendezvous: a path that no earlier group used; its folder must exist and be shared by the ranks.
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
