"""Proves: a rendezvous is fresh, those that killed groups left are removed, a group with a rank missing is given up;
one process trains in one group after the other, and what an error
still holds of an optimizer has ended when the group is left.

What happens when a rank of a complete group dies or hangs: test_collectives.py.
"""

import gc
import sys
from pathlib import Path

import pytest
import torch

from rollforward.model.distributed import join_group, leave_group, new_rendezvous
from rollforward.model.errors import RankLostError, TrainerError
from rollforward.model.optim_adamw import DeepSpeedAdamW
from rollforward.model.train_config import AdamW
from tests.helpers.ranks import run_on_ranks


def test_a_rendezvous_is_fresh_and_old_ones_go(tmp_path: Path) -> None:
    other = tmp_path / "metrics.jsonl"
    other.write_text("{}")
    first = new_rendezvous(tmp_path)
    assert not first.exists()
    first.write_text("left by a killed group")
    second = new_rendezvous(tmp_path)
    assert second != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def waits_for_nobody(_rank: int, directory: str) -> None:
    leave_group()
    with pytest.raises(RankLostError, match=r"rank 0 met no group of 2 ranks at .*/alone within 1 s; all must come"):
        join_group(Path(directory) / "alone", rank=0, num_ranks=2, timeout_s=1.0)
    with pytest.raises(TrainerError, match=r"timeout_s is 0\.0"):
        join_group(Path(directory) / "never", rank=0, num_ranks=1, timeout_s=0.0)


def test_a_group_that_never_becomes_complete_is_given_up(tmp_path: Path) -> None:
    run_on_ranks(waits_for_nobody, 1, tmp_path, str(tmp_path))


def trains_in_two_groups(rank: int, directory: str) -> None:
    for number in range(2):
        leave_group()
        join_group(Path(directory) / str(number), rank=rank, num_ranks=1)
        optimizer = DeepSpeedAdamW({"weight": torch.ones(3)}, AdamW(lr=0.1, weight_decay=0.0))
        optimizer.step({"weight": torch.ones(3)}, lr=0.1)
        torch.testing.assert_close(optimizer.parameters()["weight"], torch.full((3,), 0.9))


def test_a_process_trains_in_one_group_after_the_other(tmp_path: Path) -> None:
    """As the runs of a recipe do, of which two may be SFT."""
    run_on_ranks(trains_in_two_groups, 1, tmp_path, str(tmp_path))


def fails_while_it_trains(rank: int, directory: str) -> None:
    told: list[object] = []
    sys.unraisablehook = told.append  # where the end of an object is said to have failed
    leave_group()
    join_group(Path(directory) / "fails", rank=rank, num_ranks=1)
    with pytest.raises(ZeroDivisionError) as held:
        _train_and_fail()
    leave_group()
    del held  # its frames held the optimizer
    gc.collect()
    assert told == []
    assert sys.excepthook is sys.__excepthook__, "torch's would tell a traceback twice, once behind [rank0]"


def _train_and_fail() -> None:
    optimizer = DeepSpeedAdamW({"weight": torch.ones(3)}, AdamW(lr=0.1, weight_decay=0.0))
    optimizer.step({"weight": torch.ones(3)}, lr=1 / 0)


def test_an_error_that_holds_an_optimizer_says_nothing_of_its_end(tmp_path: Path) -> None:
    run_on_ranks(fails_while_it_trains, 1, tmp_path, str(tmp_path))
