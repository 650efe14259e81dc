"""Joining the process group of the learner's ranks."""

import os
import socket
import sys
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from rollforward.conf.errors import first_line
from rollforward.model.errors import RankLostError, TrainerError

OPERATION_TIMEOUT_S = 1800.0
"""How long a rank waits for another that is alive: longer than a pass over its micro-batches takes."""

_RENDEZVOUS_PREFIX = ".rendezvous-"

_IN_THE_GROUP: list["weakref.finalize[..., object]"] = []
"""Ends of what works in the group that this process is in."""


def new_rendezvous(directory: Path) -> Path:
    """Return a path in ``directory`` that no group used, and remove what killed groups left there.

    Only for who owns the directory: a group that is still joining would lose its file.
    """
    for left in directory.glob(_RENDEZVOUS_PREFIX + "*"):
        left.unlink(missing_ok=True)
    return directory / f"{_RENDEZVOUS_PREFIX}{uuid.uuid4().hex}"


def join_group(rendezvous: Path, *, rank: int, num_ranks: int, timeout_s: float = OPERATION_TIMEOUT_S) -> None:
    """Join a gloo group through a file that all ranks see.

    A rank whose process ends breaks its connections, and whoever waits for it gets an error at once. One that hangs,
    or whose machine loses power, is given up after the timeout: also where a group never becomes complete.

    Args:
        rendezvous: from ``new_rendezvous``; its folder must exist and be shared by the ranks.
        rank: in [0, num_ranks).
        num_ranks: size of the group; every rank must join.
        timeout_s: how long a rank waits for the others, here and in each later operation of the group; at least 0.001.

    Raises:
        RankLostError: not all ranks joined in time.
        TrainerError: the timeout is too short to be one, or the rank's machine cannot write into the folder.
    """
    folder = rendezvous.resolve().parent
    if not os.access(folder, os.W_OK):  # where gloo says it of the group
        what = "it may only read" if folder.is_dir() else "there is no such folder"
        raise TrainerError(
            f"rank {rank} of the learner cannot write into {folder} on {socket.gethostname()}, where {what}; every rank"
            " must. Choose a run_dir in a file system that all nodes share and this user may write"
        )
    if timeout_s < 0.001:  # gloo counts milliseconds, and takes none for no limit
        raise TrainerError(f"timeout_s is {timeout_s}; ranks wait for each other for 0.001 s at least. Leave it out")
    excepthook = sys.excepthook
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous.resolve()}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank} met no group of {num_ranks} ranks at {rendezvous} within {timeout_s:g} s; all must come. Look"
            f" at the others' logs and start all again. gloo says: {first_line(error)}"
        ) from error
    finally:
        sys.excepthook = excepthook  # torch's tells every traceback twice, in later groups and without one too


def end_in_group(owner: object, end: Callable[[], object]) -> None:
    """Have ``end`` called once, when nobody has ``owner`` any more or, before that, when the group is left.

    The second is what happens to a run that an error ended: the error's frames hold ``owner`` until it has been told.
    """
    finalizer = weakref.finalize(owner, end)
    finalizer.atexit = False
    _IN_THE_GROUP[:] = [*(one for one in _IN_THE_GROUP if one.alive), finalizer]


def leave_group() -> None:
    """Leave the group, after what still works in it has ended; does nothing without one. This process may join another
    one afterwards."""
    while _IN_THE_GROUP:
        _IN_THE_GROUP.pop()()
    if torch.distributed.is_initialized():
        deepspeed = sys.modules.get("deepspeed")  # where it is in use; it would give the next group this one's state
        if deepspeed is not None and deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            torch.distributed.destroy_process_group()
