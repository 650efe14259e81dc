"""What one process of `run_on_ranks` executes: join the group, load the test module, call the function."""

import importlib.util
import json
import sys
import types
from pathlib import Path

from rollforward.conf.load import set_library_environment

set_library_environment()

import torch  # noqa: E402 - the environment comes first

from rollforward.model.distributed import join_group, leave_group  # noqa: E402


def main() -> None:
    """Arguments: file, function, rank, number of ranks, rendezvous, JSON list of further arguments."""
    file, function, rank, num_ranks, rendezvous, arguments = sys.argv[1:]
    tests = sys.modules.setdefault("tests", types.ModuleType("tests"))
    tests.__path__ = [str(Path(__file__).parents[1])]
    torch.set_num_threads(1)
    join_group(Path(rendezvous), rank=int(rank), num_ranks=int(num_ranks))
    spec = importlib.util.spec_from_file_location("rank_test_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)(int(rank), *json.loads(arguments))
    leave_group()


if __name__ == "__main__":
    main()
