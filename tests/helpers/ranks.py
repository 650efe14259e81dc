"""Process groups for tests: of one rank inside the test process, or of several processes."""

import inspect
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from rollforward.model.distributed import join_group


def join_alone(directory: Path) -> None:
    """Join a group of one, once per process."""
    if not torch.distributed.is_initialized():
        join_group(directory / f"rendezvous-{uuid.uuid4().hex}", rank=0, num_ranks=1)


def run_on_ranks(function: Callable[..., None], num_ranks: int, directory: Path, *args: object) -> None:
    """Call ``function(rank, *args)`` in ``num_ranks`` new processes that form one group; any failure fails the test.

    Args:
        function: at the top of a test module.
        num_ranks: processes.
        directory: for the rendezvous.
        args: plain data, carried as JSON.
    """
    rendezvous = directory / f"rendezvous-{uuid.uuid4().hex}"
    file = inspect.getsourcefile(function)
    assert file is not None
    main = Path(__file__).with_name("rank_main.py")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(main),
                file,
                function.__name__,
                str(rank),
                str(num_ranks),
                str(rendezvous),
                json.dumps(args),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * num_ranks, f"ranks ended with {codes}:\n" + "\n".join(output[-2000:] for output in outputs)
