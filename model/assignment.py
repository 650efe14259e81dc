"""Which rank computes which of Muon's matrices: whole ones, balanced, with the padding that equal buckets cost.

What lives here: the two layouts of hybrid ZeRO as pure functions of matrices and numbers. What does not: which
matrices there are (`matrices.py`). This module imports neither torch nor ray.

Dense matrices fill the equal buckets of one bounded ZeRO group; further groups hold the same and update redundantly.
Routed experts lie flat over all ranks. A bucket is as long as the fullest rank's share; the rest of it is padding.
Source: DeepSeek-V4 report 3.5.1.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rollforward.model.config import ModelConfig
from rollforward.model.errors import ConfigError
from rollforward.model.matrices import LogicalMatrix, dense_matrices, expert_matrices, tensor_roles
from rollforward.model.train_config import HybridMuon

NUM_CAPS = 16
"""Bucket lengths that the knapsack tries, evenly spaced up to the padding allowed."""


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank updates."""

    matrices: tuple[LogicalMatrix, ...]
    """In bucket order."""

    @property
    def num_elements(self) -> int:
        """Elements of the matrices."""
        return sum(matrix.num_elements for matrix in self.matrices)

    @property
    def flops(self) -> int:
        """Newton-Schulz work of one update."""
        return sum(matrix.flops for matrix in self.matrices)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Every matrix on exactly one rank of a group.

    Example: matrices of 6, 4 and 3 elements as [6], [4, 3]: buckets of 7, 1 element of padding, 1/13 of what is real.
    """

    shares: tuple[RankShare, ...]
    """By rank of the group."""
    num_groups: int
    """Groups that hold the same shares and update them redundantly."""

    @property
    def num_matrices(self) -> int:
        """Matrices of a group."""
        return sum(len(share.matrices) for share in self.shares)

    @property
    def num_elements(self) -> int:
        """Elements of a group, padding not counted."""
        return sum(share.num_elements for share in self.shares)

    @property
    def bucket_elements(self) -> int:
        """Length of every rank's bucket: the fullest share."""
        return max(share.num_elements for share in self.shares)

    @property
    def padding_elements(self) -> int:
        """What a group's buckets hold beyond the matrices."""
        return self.bucket_elements * len(self.shares) - self.num_elements

    @property
    def padding_share(self) -> float:
        """Padding over real elements; one less than the imbalance of elements, max over mean."""
        return self.padding_elements / self.num_elements

    @property
    def flops(self) -> int:
        """Newton-Schulz work of a group."""
        return sum(share.flops for share in self.shares)

    @property
    def max_flops(self) -> int:
        """Newton-Schulz work of the rank that has most: how long an update takes."""
        return max(share.flops for share in self.shares)

    @property
    def flops_imbalance(self) -> float:
        """Most over mean Newton-Schulz work of a rank."""
        return self.max_flops * len(self.shares) / self.flops

    def share_of(self, rank: int) -> RankShare:
        """Return what a rank of the learner updates: groups are runs of consecutive ranks."""
        assert 0 <= rank < len(self.shares) * self.num_groups, f"there is no rank {rank}"
        return self.shares[rank % len(self.shares)]


def assign_dense(
    matrices: Iterable[LogicalMatrix], *, zero_size: int, learner_ranks: int, max_padding: float
) -> Assignment:
    """Distribute dense matrices over a ZeRO group by a knapsack in two measures.

    Memory is bound by elements, time by Newton-Schulz work, and a matrix rich in one may be poor in the other. So
    buckets get a length, and matrices, the most laborious first, go to the rank with the least work whose bucket has
    room. Of several lengths, and of a distribution by elements alone, the one with the smallest sum of the two
    imbalances is taken.

    Args:
        matrices: at least one, each once; in any order.
        zero_size: ranks of a group, at least 1.
        learner_ranks: all ranks, a multiple of it.
        max_padding: most padding over real elements, at least 0.

    Returns:
        Shares in whose buckets matrices of one Newton-Schulz shape lie together.

    Raises:
        ConfigError: the ranks are no multiple; no distribution within max_padding was found.

    Invariants: deterministic, independent of the order of `matrices`.
    Example: elements 6, 4, 3, 3 over two ranks: [6, 3], [4, 3] where work goes with elements.
    """
    _check_multiple(zero_size, learner_ranks)
    ordered = sorted(matrices)
    assert len(set(ordered)) == len(ordered) > 0, "each matrix once, and one at least"
    found = _pack(ordered, zero_size, max_padding)
    if found is None:
        raise ConfigError(_dense_refusal(ordered, zero_size, learner_ranks, max_padding))
    shares = [RankShare(matrices=tuple(sorted(share, key=lambda matrix: (matrix.ns_shape, matrix)))) for share in found]
    return Assignment(shares=tuple(shares), num_groups=learner_ranks // zero_size)


def assign_experts(
    matrices: Sequence[LogicalMatrix], *, zero_size: int, learner_ranks: int, max_padding: float
) -> Assignment:
    """Cut the flat sequence of expert matrices into runs of whole ones over all ranks.

    Args:
        matrices: of one size, in flat order (`expert_matrices`).
        zero_size: bound of the dense group. Experts have none; it only shapes the way out of a refusal.
        learner_ranks: all ranks, at least 1.
        max_padding: most padding over real elements, at least 0.

    Returns:
        Consecutive runs whose lengths differ by one matrix at most, the longer ones first.

    Raises:
        ConfigError: whole matrices would need more padding.

    Example: 5 matrices over 2 ranks: 3 and 2; padding 1/5.
    """
    assert len({matrix.num_elements for matrix in matrices}) == 1, "expert matrices are of one size"
    if _expert_padding(len(matrices), learner_ranks) > max_padding:
        raise ConfigError(_expert_refusal(len(matrices), zero_size, learner_ranks, max_padding))
    least, longer = divmod(len(matrices), learner_ranks)
    starts = [rank * least + min(rank, longer) for rank in range(learner_ranks + 1)]
    shares = [RankShare(matrices=tuple(matrices[starts[rank] : starts[rank + 1]])) for rank in range(learner_ranks)]
    return Assignment(shares=tuple(shares), num_groups=1)


def muon_assignments(config: ModelConfig, optim: HybridMuon, learner_ranks: int) -> tuple[Assignment, Assignment]:
    """Return who updates Muon's matrices of a model: dense ones in a ZeRO group, routed experts over all ranks.

    Args:
        config: the model.
        optim: its split, its ZeRO size (None is all ranks) and the padding that it allows.
        learner_ranks: all ranks, at least 1.

    Raises:
        ConfigError: whole matrices do not fit these ranks; the message has the way out.
    """
    roles = tensor_roles(config, optim.split)
    zero_size, padding = optim.zero_size or learner_ranks, optim.max_padding
    dense = assign_dense(dense_matrices(roles), zero_size=zero_size, learner_ranks=learner_ranks, max_padding=padding)
    experts = assign_experts(
        expert_matrices(roles), zero_size=zero_size, learner_ranks=learner_ranks, max_padding=padding
    )
    return dense, experts


def _check_multiple(zero_size: int, learner_ranks: int) -> None:
    if learner_ranks % zero_size == 0:
        return
    divisors = [size for size in range(1, learner_ranks + 1) if learner_ranks % size == 0]
    below = max(size for size in divisors if size < zero_size)
    fuller = -(-learner_ranks // zero_size) * zero_size
    raise ConfigError(
        f"zero_size is {zero_size}; learner_ranks = {learner_ranks} is no multiple of it, and groups that update "
        f"redundantly are of one size. Set zero_size={below} or learner_ranks={fuller}."
    )


_Packed = list[list[LogicalMatrix]]


def _pack(matrices: Sequence[LogicalMatrix], num_ranks: int, max_padding: float) -> _Packed | None:
    """The best distribution found within max_padding, or None."""
    total = sum(matrix.num_elements for matrix in matrices)
    work = sum(matrix.flops for matrix in matrices)
    mean = total / num_ranks
    limit = math.floor(mean * (1.0 + max_padding))
    largest = max(matrix.num_elements for matrix in matrices)
    if max(largest, -(-total // num_ranks)) > limit:
        return None
    caps = {math.floor(mean * (1.0 + max_padding * step / NUM_CAPS)) for step in range(1, NUM_CAPS + 1)}
    tried = [_by_work(matrices, num_ranks, cap) for cap in sorted(caps) if cap >= largest]
    tried.append(_by_elements(matrices, num_ranks))
    fitting = [packed for packed in tried if packed is not None and _bucket(packed) <= limit]

    def imbalance(packed: _Packed) -> float:
        most = max(sum(matrix.flops for matrix in share) for share in packed)
        return _bucket(packed) / total + most / work

    return min(fitting, key=imbalance, default=None)


def _bucket(packed: _Packed) -> int:
    return max(sum(matrix.num_elements for matrix in share) for share in packed)


def _by_work(matrices: Sequence[LogicalMatrix], num_ranks: int, cap: int) -> _Packed | None:
    ordered = sorted(matrices, key=lambda matrix: (-matrix.flops, -matrix.num_elements, matrix))
    return _greedy(ordered, num_ranks, cap, lambda matrix: (matrix.flops, matrix.num_elements), 1)


def _by_elements(matrices: Sequence[LogicalMatrix], num_ranks: int) -> _Packed:
    ordered = sorted(matrices, key=lambda matrix: (-matrix.num_elements, -matrix.flops, matrix))
    total = sum(matrix.num_elements for matrix in matrices)
    packed = _greedy(ordered, num_ranks, total, lambda matrix: (matrix.num_elements, matrix.flops), 0)
    assert packed is not None, "a bucket for everything has room"
    return packed


def _greedy(
    ordered: Sequence[LogicalMatrix],
    num_ranks: int,
    cap: int,
    weights: Callable[[LogicalMatrix], tuple[int, int]],
    capped: int,
) -> _Packed | None:
    """Put each matrix on the rank with the least (first weight, second weight, index) where weight `capped` fits.

    Returns:
        Matrices by rank, or None when one fits nowhere.
    """
    packed: _Packed = [[] for _ in range(num_ranks)]
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    for matrix in ordered:
        weight = weights(matrix)
        full: list[tuple[int, int, int]] = []
        while loads and loads[0][capped] + weight[capped] > cap:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        first, second, rank = heapq.heappop(loads)
        packed[rank].append(matrix)
        for load in (*full, (first + weight[0], second + weight[1], rank)):
            heapq.heappush(loads, load)
    return packed


def _dense_refusal(matrices: Sequence[LogicalMatrix], zero_size: int, learner_ranks: int, max_padding: float) -> str:
    total = sum(matrix.num_elements for matrix in matrices)
    largest = max(matrices, key=lambda matrix: matrix.num_elements)
    padding = _bucket(_by_elements(matrices, zero_size)) * zero_size / total - 1.0
    # One rank never has padding, so there is a size that fits.
    smaller = next(
        size
        for size in range(zero_size - 1, 0, -1)
        if learner_ranks % size == 0 and _pack(matrices, size, max_padding) is not None
    )
    return (
        f"zero_size is {zero_size}; whole dense matrices would leave {padding:.1%} of padding in its buckets, and "
        f"max_padding is {max_padding:.1%}. {_named(largest)} has {largest.num_elements:,} elements, a rank's mean is "
        f"{total // zero_size:,}. Set zero_size={smaller} learner_ranks={learner_ranks} (groups of ranks then "
        f"update redundantly) or max_padding={_rounded_up(padding)}."
    )


def _named(matrix: LogicalMatrix) -> str:
    return f"{matrix.tensor} [{matrix.num_rows}, {matrix.num_columns}]"


def _rounded_up(share: float) -> str:
    """Two decimals, not below the share."""
    return f"{math.ceil(share * 100 + 1e-9) / 100:.2f}"


def _expert_padding(num_matrices: int, num_ranks: int) -> float:
    return -(-num_matrices // num_ranks) * num_ranks / num_matrices - 1.0


def _expert_refusal(num_matrices: int, zero_size: int, learner_ranks: int, max_padding: float) -> str:
    padding = _expert_padding(num_matrices, learner_ranks)
    fits = [n for n in range(learner_ranks - 1, 0, -1) if _expert_padding(num_matrices, n) <= max_padding]
    multiples = [n for n in fits if n % zero_size == 0]
    # One rank never has padding, so there is a number that fits.
    settings = f"learner_ranks={multiples[0]}" if multiples else f"zero_size={fits[0]} learner_ranks={fits[0]}"
    return (
        f"learner_ranks is {learner_ranks}; {num_matrices:,} whole expert matrices would leave {padding:.1%} of "
        f"padding in its buckets, and max_padding is {max_padding:.1%}. Set {settings} "
        f"or max_padding={_rounded_up(padding)}."
    )
