"""Proves: sums over 1, 2, 4 and 8 ranks have the bits of a plain recursion in one process, whatever the number of
leaves, shards and messages; gathers and exact sums; wrong calls end in an error on every rank, and neither a dead rank
nor one that hangs leaves the others waiting.

Each launch of processes costs seconds, so one function holds many checks; its name and the arguments of a failed
assertion say which.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollforward.model.collectives import RankGroups, ShardedTreeSum
from rollforward.model.distributed import join_group, leave_group
from rollforward.model.errors import ConfigError, RankLostError, TrainerError
from rollforward.model.gradient_tree import TreeSum, subtree_bounds
from tests.helpers.bits import different_bits
from tests.helpers.gradients import adversarial_leaf, recursive_sum
from tests.helpers.ranks import join_alone, run_on_ranks

MOST_LEAVES = 17
LENGTHS = {1: (1, 2, 7, 33), 2: (1, 2, 7, 33), 4: (1, 7), 8: (7,)}
"""By number of ranks: many ranks on few cores are slow."""


def local_total(leaves: list[Tensor], bounds: tuple[tuple[int, int], ...], rank: int) -> Tensor | None:
    start, stop = bounds[rank]
    tree = TreeSum(stop - start)
    for leaf in leaves[start:stop]:
        tree.add(leaf.clone())
    return tree.total()


def whole_sum(leaves: list[Tensor], num_elements: int) -> Tensor:
    total = recursive_sum(leaves)
    return torch.zeros(num_elements) if total is None else total


def reductions_are_the_tree(groups: RankGroups) -> None:
    for length in LENGTHS[groups.num_ranks]:
        for num_shards in sorted({1, groups.zero_size}):
            all_leaves = [adversarial_leaf(leaf, num_shards * length) for leaf in range(MOST_LEAVES)]
            for num_leaves in range(MOST_LEAVES + 1):
                leaves = all_leaves[:num_leaves]
                bounds = subtree_bounds(num_leaves, groups.num_ranks)
                local = local_total(leaves, bounds, groups.rank)
                ours = groups.tree_reduce_scatter(local, bounds, num_shards=num_shards, length=length)
                own = groups.rank % num_shards
                expected = whole_sum(leaves, num_shards * length)[own * length : (own + 1) * length]
                place = (length, num_shards, num_leaves, groups.rank)
                assert different_bits(ours, expected) == 0, place
                assert ours.untyped_storage().nbytes() == 4 * length, place


def sharded_sums_are_the_tree(groups: RankGroups) -> None:
    """The leaf's memory is used again for each pass, as a caller may."""
    for dtype in (torch.bfloat16, torch.float32):
        for length in (0, *LENGTHS[groups.num_ranks]):
            num_elements = groups.num_ranks * length
            all_leaves = [adversarial_leaf(leaf, num_elements).to(dtype) for leaf in range(MOST_LEAVES)]
            for num_leaves in range(MOST_LEAVES + 1):
                start, stop = subtree_bounds(num_leaves, groups.num_ranks)[groups.rank]
                tree = ShardedTreeSum(groups, num_leaves, length)
                buffer = torch.empty(num_elements, dtype=dtype)
                assert tree.num_passes == -(-num_leaves // groups.num_ranks)
                for index in range(tree.num_passes):
                    has_leaf = start + index < stop
                    if has_leaf:
                        buffer.copy_(all_leaves[start + index])
                    tree.send(buffer if has_leaf else None)
                    buffer.fill_(torch.nan)
                expected = whole_sum([leaf.float() for leaf in all_leaves[:num_leaves]], num_elements)
                own = slice(groups.rank * length, (groups.rank + 1) * length)
                assert different_bits(tree.total(), expected[own]) == 0, (dtype, length, num_leaves, groups.rank)


def gathers_keep_bytes(groups: RankGroups) -> None:
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        for length in (0, 5, 1000):
            shards = [(torch.arange(length) * 7 + 3 * rank).to(dtype) for rank in range(groups.num_ranks)]
            expected = torch.stack(shards)
            ours = groups.all_gather(shards[groups.rank], over="all")
            assert ours.dtype == dtype
            assert torch.equal(ours, expected), (dtype, length)
            first = groups.rank // groups.zero_size * groups.zero_size
            group = groups.all_gather(shards[groups.rank], over="group")
            assert torch.equal(group, expected[first : first + groups.zero_size]), (dtype, length)
    with_gaps = torch.arange(6.0)[::2] + groups.rank
    assert torch.equal(
        groups.all_gather(with_gaps, over="all")[-1], torch.tensor([0.0, 2.0, 4.0]) + groups.num_ranks - 1
    )
    payload = torch.tensor([-0.0, torch.nan, torch.inf, 1e-45])
    assert different_bits(groups.all_gather(payload, over="group")[0], payload) == 0


def sums_are_exact(groups: RankGroups) -> None:
    large = torch.tensor([2**59 + groups.rank, -groups.rank])
    before = large.clone()
    ranks = range(groups.num_ranks)
    assert groups.exact_sum(large).tolist() == [sum(2**59 + rank for rank in ranks), -sum(ranks)]
    assert torch.equal(large, before)
    values = [0.1, 5e-324, 1e308, torch.inf, 1 / 3, -7.0, 2.0**-1000, 9.0]
    mine = torch.zeros(len(values), dtype=torch.float64)
    for index, value in enumerate(values):
        if index % groups.num_ranks == groups.rank:
            mine[index] = value
    assert groups.exact_sum(mine).tolist() == values
    assert groups.exact_sum(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert groups.exact_sum(torch.tensor(3)).item() == 3 * groups.num_ranks
    assert groups.all_true(True)
    assert not groups.all_true(False)
    last = groups.num_ranks - 1
    assert not groups.all_true(groups.rank != last)
    assert groups.all_true(groups.rank == last) == (last == 0)
    assert groups.all_texts(f"rank {groups.rank} " * groups.rank) == [
        f"rank {rank} " * rank for rank in range(groups.num_ranks)
    ]


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(TrainerError, match=message):
        call()


def wrong_calls_are_refused(groups: RankGroups) -> None:
    """All ranks make the same mistake, which is found before anything is sent."""
    bounds = subtree_bounds(1, groups.num_ranks)
    local = torch.zeros(3) if groups.rank == 0 else None
    other = None if groups.rank == 0 else torch.zeros(3)

    def reduce(
        local: Tensor | None = local,
        bounds: tuple[tuple[int, int], ...] = bounds,
        num_shards: int = 1,
        length: int = 3,
    ) -> object:
        return groups.tree_reduce_scatter(local, bounds, num_shards=num_shards, length=length)

    refused("num_shards is 3; .* Pass one of the two", lambda: reduce(num_shards=3))
    refused("length is -1", lambda: reduce(length=-1))
    refused("bounds are .* Pass subtree_bounds", lambda: reduce(bounds=subtree_bounds(1, 2 * groups.num_ranks)))
    refused("bounds are ", lambda: reduce(bounds=()))
    refused(f"on rank {groups.rank}, which has .* Pass TreeSum.total", lambda: reduce(local=other))
    full = subtree_bounds(groups.num_ranks, groups.num_ranks)
    refused(
        r"local is torch.float32 \(3,\); it must be a contiguous vector \[4\]",
        lambda: reduce(torch.ones(3), full, 1, 4),
    )
    refused(r"local is torch.float64", lambda: reduce(torch.ones(3).double(), full))
    refused(r"with gaps", lambda: reduce(torch.ones(6)[::2], full))
    refused(r"shard has shape \(1, 2\)", lambda: groups.all_gather(torch.ones(1, 2), over="all"))
    refused("values are torch.float32", lambda: groups.exact_sum(torch.ones(1)))

    tree = ShardedTreeSum(groups, 1, 2)
    mine = torch.zeros(2 * groups.num_ranks) if groups.rank == 0 else None
    refused(r"after 0 of 1 passes.*Call send\(None\)", tree.total)
    refused("in pass 0 on rank", lambda: tree.send(None if groups.rank == 0 else torch.zeros(2 * groups.num_ranks)))
    tree.send(mine)
    refused("after all 1 passes", lambda: tree.send(None))
    tree.total()
    every = ShardedTreeSum(groups, groups.num_ranks, 2)
    refused("leaf is torch.float16", lambda: every.send(torch.zeros(2 * groups.num_ranks).half()))
    refused("contiguous vector", lambda: every.send(torch.zeros(2 * groups.num_ranks + 1)))
    refused("length is -1", lambda: ShardedTreeSum(groups, 1, -1))


def disagreement_is_an_error_on_every_rank(groups: RankGroups) -> None:
    """And the next operation works: nothing of the refused one is on its way."""
    last = groups.rank == groups.num_ranks - 1
    odd = int(last)
    refused("elements is .* from 5 to 6 over all ranks", lambda: groups.all_gather(torch.zeros(5 + odd), over="all"))
    refused(
        "element_bytes is", lambda: groups.all_gather(torch.zeros(5, dtype=(torch.int64, torch.bool)[odd]), over="all")
    )
    refused("is_integer is", lambda: groups.exact_sum(torch.zeros(5, dtype=(torch.int64, torch.float64)[odd])))

    def reduce(num_leaves: int, length: int) -> object:
        bounds = subtree_bounds(num_leaves, groups.num_ranks)
        return groups.tree_reduce_scatter(torch.ones(length), bounds, num_shards=1, length=length)

    refused("length is .* from 3 to 4", lambda: reduce(groups.num_ranks, 3 + odd))
    refused("num_leaves is", lambda: reduce(groups.num_ranks + odd, 3))
    tree = ShardedTreeSum(groups, groups.num_ranks, 2)
    leaf = torch.zeros(2 * groups.num_ranks, dtype=(torch.float32, torch.bfloat16)[odd])
    refused("element_bytes is .* from 2 to 4", lambda: tree.send(leaf))
    refused(
        "is in (all_true, another in all_gather|all_gather, another in all_true); all ranks call the same",
        lambda: groups.all_true(True) if last else groups.all_gather(torch.zeros(1), over="all"),
    )
    assert groups.all_true(True)


def every_check(rank: int, num_ranks: int) -> None:
    for zero_size in (1, 2, 4, 8):
        if zero_size > num_ranks:
            continue
        groups = RankGroups(zero_size, piece_elements=(1 << 20, 3, 5, 1)[zero_size % 4])
        assert (groups.rank, groups.num_ranks, groups.zero_size) == (rank, num_ranks, zero_size)
        reductions_are_the_tree(groups)
    gathers_keep_bytes(RankGroups(max(1, num_ranks // 2)))
    groups = RankGroups(num_ranks)
    sharded_sums_are_the_tree(groups)
    sums_are_exact(groups)
    wrong_calls_are_refused(groups)
    if num_ranks > 1:
        disagreement_is_an_error_on_every_rank(groups)
    for zero_size in (0, 3, 2 * num_ranks):
        with pytest.raises(ConfigError, match=f"zero_size is {zero_size}; learner_ranks = {num_ranks}"):
            RankGroups(zero_size)


def test_one_rank(tmp_path: Path) -> None:
    join_alone(tmp_path)
    every_check(0, 1)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_several_ranks(num_ranks: int, tmp_path: Path) -> None:
    run_on_ranks(every_check, num_ranks, tmp_path, num_ranks)


def hang_and_die(rank: int, directory: str) -> None:
    """First rank 3 hangs, then, in a new group, it dies in the middle of a step. In between, three make no tree."""
    bounds = subtree_bounds(4, 4)

    def reduce(groups: RankGroups) -> None:
        groups.tree_reduce_scatter(torch.ones(1000), bounds, num_shards=1, length=1000)

    leave_group()
    join_group(Path(directory) / "hang", rank=rank, num_ranks=4, timeout_s=5.0)
    groups = RankGroups(1)
    reduce(groups)
    if rank == 3:
        while len(list(Path(directory).glob("lost-*"))) < 3:  # until all others have given it up
            time.sleep(0.01)
    else:
        with pytest.raises(RankLostError, match=f"rank {rank} of 4 lost another one.* resume from the last checkpoint"):
            reduce(groups)
        (Path(directory) / f"lost-{rank}").touch()
    leave_group()

    if rank < 3:
        join_group(Path(directory) / "three", rank=rank, num_ranks=3)
        with pytest.raises(ConfigError, match=r"learner_ranks is 3; .* power of two"):
            RankGroups(1)
        leave_group()

    join_group(Path(directory) / "die", rank=rank, num_ranks=4)  # would wait for half an hour
    groups = RankGroups(4)
    reduce(groups)
    tree = ShardedTreeSum(groups, 8, 100)
    tree.send(torch.ones(400))
    if rank == 3:
        os._exit(0)  # its sockets go as those of a killed process do
    with pytest.raises(RankLostError, match=f"rank {rank} of 4 lost another one"):
        tree.send(torch.ones(400))
    with pytest.raises(RankLostError):  # and stays lost
        reduce(groups)


def test_a_rank_that_hangs_or_dies_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    run_on_ranks(hang_and_die, 4, tmp_path, str(tmp_path))
