"""What passes between the learner's ranks: sums in the order of the tree, whole vectors, yes or no.

    local subtree (gradient_tree.TreeSum)
       --distance 1, 2, ... below num_shards: give half of the shards, add the other--> own shard of the group's sum
       --distances from num_shards on: swap the shard, add--> own shard of everyone's sum

Pairs of ranks at distance 1, 2, 4, ... are the levels of the tree above the subtrees, so sums have the bits of one
process. Every rank knows all bounds, hence whose subtree has no leaf and is skipped.

Every operation is collective: all ranks call the same ones in the same order, which each begins by making sure (gloo
itself would abort the process or read the wrong bytes). Everything runs over gloo on CPU tensors, point to point but
for the smallest sums. A rank whose process ends breaks its connections, and who waits for it gets RankLostError at
once; one that hangs is given up after ``join_group``'s timeout. A rank that got the error must end too, or those that
wait for *it* wait out their timeout: whoever started the ranks ends all when one fails.

Here: one process of the group. Not here: joining it (``distributed.py``), which tensors there are
(``optim_hybrid.py``).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import Work

from rollforward.conf.errors import first_line
from rollforward.model.errors import ConfigError, RankLostError, TrainerError
from rollforward.model.gradient_tree import TreeSum, check_power_of_two, join_subtrees, subtree_bounds

PIECE_ELEMENTS = 1 << 20
"""Elements of a message that is added on arrival: two of them are all that a reduction holds beside its argument."""

_OPERATIONS = ("tree_reduce_scatter", "all_gather", "exact_sum", "all_true", "all_texts", "ShardedTreeSum.send")
_NUM_AGREED = 5
_UNKNOWN = 1 << 62
"""Stands for a number that this rank leaves to the others."""


class RankGroups:
    """This rank among all ranks, and in its ZeRO group: the run of ``zero_size`` consecutive ranks that holds it.

    Raises:
        ConfigError: the ranks are no power of two or no multiple of ``zero_size``.
    """

    def __init__(self, zero_size: int, *, piece_elements: int = PIECE_ELEMENTS) -> None:
        """Read rank and number of ranks of the group that this process joined.

        Args:
            zero_size: ranks of a ZeRO group; divides the number of ranks.
            piece_elements: of a reduction's messages, at least 1, the same on every rank; no result depends on it.
        """
        self._rank = torch.distributed.get_rank()
        self._num_ranks = torch.distributed.get_world_size()
        self._zero_size = zero_size
        self._piece_elements = piece_elements
        check_power_of_two(self._num_ranks)
        if zero_size < 1 or self._num_ranks % zero_size:
            raise ConfigError(
                f"zero_size is {zero_size}; learner_ranks = {self._num_ranks} is no multiple of it. Set zero_size to a"
                f" power of two up to {self._num_ranks}"
            )

    @property
    def rank(self) -> int:
        """This rank, in [0, num_ranks)."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """All ranks of the learner."""
        return self._num_ranks

    @property
    def zero_size(self) -> int:
        """Ranks of a ZeRO group."""
        return self._zero_size

    def tree_reduce_scatter(
        self, local: Tensor | None, bounds: Sequence[tuple[int, int]], *, num_shards: int, length: int
    ) -> Tensor:
        """Add the subtrees of all ranks in tree order and keep one shard of the sum.

        Args:
            local: float32 [num_shards * length], the total of this rank's ``TreeSum``; None where it has no leaves.
                It is used up: afterwards its content means nothing.
            bounds: ``subtree_bounds`` of the step.
            num_shards: 1, or zero_size.
            length: elements of a shard, at least 0.

        Returns:
            float32 [length]: shard rank % num_shards of the sum over all ranks; zeros of a step without leaves.

        Raises:
            TrainerError: an argument breaks its rule, or differs between ranks.
            RankLostError: another rank died.

        Invariants: bit-equal to the tree summed in one process, on any number of ranks.
        """
        self._check_reduction(local, bounds, num_shards, length)
        self._agree("tree_reduce_scatter", num_leaves=bounds[-1][1], num_shards=num_shards, length=length)
        own = self._rank % num_shards
        if length == 0 or bounds[-1][1] == 0:
            return torch.zeros(length)
        shards = {} if local is None else dict(enumerate(local.detach().view(num_shards, length).unbind(0)))
        distance = 1
        while distance < self._num_ranks:
            first = self._rank & -distance
            is_mine = bounds[first][0] < bounds[first + distance - 1][1]
            first ^= distance
            is_theirs = bounds[first][0] < bounds[first + distance - 1][1]
            partner = self._rank ^ distance
            # Below num_shards the pair splits what it still has, from there on both want the same shard.
            stride = min(2 * distance, num_shards)
            kept = range(self._rank % stride, num_shards, stride)
            given = range(partner % stride, num_shards, stride)
            if is_theirs and not is_mine:
                shards = {index: torch.empty(length) for index in kept}
            self._add_partner(
                partner,
                [shards[index] for index in given] if is_mine else [],
                [shards[index] for index in kept] if is_theirs else [],
                add=is_mine,
            )
            distance *= 2
        return shards[own] if num_shards == 1 else shards[own].clone()  # a view would keep all of local alive

    def _check_reduction(
        self, local: Tensor | None, bounds: Sequence[tuple[int, int]], num_shards: int, length: int
    ) -> None:
        if num_shards not in (1, self._zero_size):
            raise TrainerError(
                f"num_shards is {num_shards}; a sum is whole on every rank (1) or has a shard for each rank of a ZeRO"
                f" group ({self._zero_size}). Pass one of the two"
            )
        if length < 0:
            raise TrainerError(f"length is {length}; a shard has 0 or more elements. Pass its number")
        if not bounds or tuple(bounds) != subtree_bounds(bounds[-1][1], self._num_ranks):
            raise TrainerError(
                f"bounds are {tuple(bounds)}; they must be the subtrees of {self._num_ranks} ranks. Pass"
                f" subtree_bounds(num_leaves, {self._num_ranks})"
            )
        start, stop = bounds[self._rank]
        if (local is None) != (start == stop):
            raise TrainerError(
                f"local is {'None' if local is None else 'a sum'} on rank {self._rank}, which has {stop - start}"
                " leaves; a sum comes from each rank with leaves and from no other. Pass TreeSum.total()"
            )
        if local is not None:
            _check_vector("local", local, num_shards * length, (torch.float32,))

    def _add_partner(self, partner: int, give: list[Tensor], keep: list[Tensor], *, add: bool) -> None:
        """Send ``give`` while ``keep`` receives what the partner gives: added in rank order, or stored.

        The two lists have the same shapes; either may be empty.
        """
        give = [piece for tensor in give for piece in tensor.split(self._piece_elements)]
        keep = [piece for tensor in keep for piece in tensor.split(self._piece_elements)]
        with self._others_alive():
            sent = [_send(piece, partner, tag) for tag, piece in enumerate(give)]
            if add and keep:
                self._add_arriving(partner, sent, keep)
                return
            for work in [*(_receive(piece, partner, tag) for tag, piece in enumerate(keep)), *sent]:
                work.wait()

    def _add_arriving(self, partner: int, sent: list[Work], keep: list[Tensor]) -> None:
        """Add the partner's pieces, one in work and one on its way, and wait for ours (once: gloo counts)."""
        size = min(self._piece_elements, max(piece.numel() for piece in keep))
        buffers = [torch.empty(size), torch.empty(size)]

        def receive(tag: int) -> tuple[Tensor, Work]:
            buffer = buffers[tag % 2][: keep[tag].numel()]
            return buffer, _receive(buffer, partner, tag)

        arriving = receive(0)
        for tag, mine in enumerate(keep):
            theirs, work = arriving
            if tag + 1 < len(keep):
                arriving = receive(tag + 1)
            work.wait()
            sent[tag].wait()  # what is given may be what is kept: it must have left before it changes
            if self._rank < partner:
                torch.add(mine, theirs, out=mine)
            else:
                torch.add(theirs, mine, out=mine)

    def all_gather(self, shard: Tensor, *, over: Literal["group", "all"]) -> Tensor:
        """Return the shards of all ranks, of this rank's ZeRO group or of everyone.

        Args:
            shard: [S] of any dtype, the same S and dtype on every rank.
            over: "group" or "all".

        Returns:
            [ranks, S], in rank order.

        Raises:
            TrainerError: the shard is no vector, or ranks disagree about the arguments.
            RankLostError: another rank died.
        """
        if shard.dim() != 1:
            raise TrainerError(f"shard has shape {tuple(shard.shape)}; a vector is gathered. Flatten it")
        num_ranks = self._num_ranks if over == "all" else self._zero_size
        first = self._rank - self._rank % num_ranks
        self._agree("all_gather", ranks=num_ranks, elements=shard.numel(), element_bytes=shard.element_size())
        shard = shard.detach().contiguous()
        gathered = torch.empty((num_ranks, shard.numel()), dtype=shard.dtype)
        gathered[self._rank - first] = shard
        if shard.numel():
            rows = gathered.view(torch.uint8)  # gloo knows few dtypes
            self._swap(
                [(peer, shard.view(torch.uint8)) for peer in self._others(first, num_ranks)],
                [(peer, rows[peer - first]) for peer in self._others(first, num_ranks)],
            )
        return gathered

    def exact_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of numbers for which no order of addition matters.

        Args:
            values: int64, or float64 of which each element is 0 on all ranks but one; the same shape on every rank.

        Returns:
            A new tensor like values.

        Raises:
            TrainerError: another dtype, or ranks disagree about it or the number of elements.
            RankLostError: another rank died.
        """
        if values.dtype not in (torch.int64, torch.float64):
            raise TrainerError(
                f"values are {values.dtype}; they are added in an order that is not ours, exact in int64 and where one"
                " rank alone gives each number, in float64. Convert them, or use tree_reduce_scatter"
            )
        self._agree("exact_sum", elements=values.numel(), is_integer=int(values.dtype == torch.int64))
        total = values.detach().clone(memory_format=torch.contiguous_format)
        if self._num_ranks > 1 and total.numel():
            with self._others_alive():
                torch.distributed.all_reduce(total)
        return total

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank; all get the same answer."""
        self._agree("all_true")
        smallest = torch.tensor(int(flag))
        if self._num_ranks > 1:
            with self._others_alive():
                torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
        return bool(smallest)

    def all_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order; all get the same list.

        Raises:
            TrainerError: ranks are in different operations.
            RankLostError: another rank died.
        """
        self._agree("all_texts")
        found = [""] * self._num_ranks
        with self._others_alive():
            torch.distributed.all_gather_object(found, text)
        return found

    def swap_shards(
        self, leaf: Tensor | None, senders: Sequence[int], *, length: int, num_leaves: int, index: int
    ) -> dict[int, Tensor]:
        """Send each rank its shard of this rank's leaf: one pass of a ``ShardedTreeSum``, which has checked the leaf.

        Args:
            leaf: [num_ranks * length], None where this rank is no sender.
            senders: ranks that have a leaf, at least one.
            length: of a shard. num_leaves: of the step. index: of the pass.

        Returns:
            By sender this rank's shard in memory of its own.

        Raises:
            TrainerError: ranks disagree about a number or the leaves' dtype.
            RankLostError: another rank died.
        """
        numbers = self._agree(
            "ShardedTreeSum.send",
            index=index,
            num_leaves=num_leaves,
            length=length,
            element_bytes=None if leaf is None else leaf.element_size(),
        )
        dtype = torch.bfloat16 if numbers["element_bytes"] == torch.bfloat16.itemsize else torch.float32
        received = {sender: torch.empty(length, dtype=dtype) for sender in senders}
        if length == 0:
            return received
        sends: list[tuple[int, Tensor]] = []
        if leaf is not None:
            shards = leaf.detach().view(self._num_ranks, length)
            received[self._rank].copy_(shards[self._rank])
            sends = [(peer, shards[peer].view(torch.uint8)) for peer in self._others(0, self._num_ranks)]
        receives = [(peer, shard.view(torch.uint8)) for peer, shard in received.items() if peer != self._rank]
        self._swap(sends, receives)
        return received

    def _others(self, first: int, num_ranks: int) -> list[int]:
        """The other ranks of a run of consecutive ones, next neighbour first, so that not all talk to one at once."""
        own = self._rank - first
        return [first + (own + step) % num_ranks for step in range(1, num_ranks)]

    def _swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive tensors, contiguous and of gloo's dtypes, at most one to and one from each rank."""
        with self._others_alive():
            works = [_receive(tensor, peer, 0) for peer, tensor in receives]
            works += [_send(tensor, peer, 0) for peer, tensor in sends]
            for work in works:
                work.wait()

    def _agree(self, operation: str, **numbers: int | None) -> dict[str, int]:
        """Make sure that all ranks are in the same operation with the same numbers; None leaves one to the others.

        Raises:
            TrainerError: they are not; on every rank.
        """
        mine = [_OPERATIONS.index(operation), *(_UNKNOWN if number is None else number for number in numbers.values())]
        mine += [0] * (_NUM_AGREED - len(mine))
        both = torch.tensor(mine + [-number if number != _UNKNOWN else _UNKNOWN for number in mine])
        if self._num_ranks > 1:
            with self._others_alive():
                torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN)
        least, most = both[:_NUM_AGREED].tolist(), (-both[_NUM_AGREED:]).tolist()
        if least[0] != most[0]:
            raise TrainerError(
                f"rank {self._rank} is in {operation}, another in"
                f" {_OPERATIONS[least[0] if _OPERATIONS[most[0]] == operation else most[0]]}; all ranks call the same"
                " operations in the same order. Look for a condition that not every rank meets"
            )
        for name, number, smallest, largest in zip(numbers, mine[1:], least[1:], most[1:], strict=False):
            if smallest != largest:
                raise TrainerError(
                    f"{operation}: {name} is {number} on rank {self._rank}, and from {smallest} to {largest} over all"
                    " ranks; it must be the same on each. Derive it from what all ranks know"
                )
        return dict(zip(numbers, least[1:], strict=False))

    @contextmanager
    def _others_alive(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self._rank} of {self._num_ranks} lost another one, which died or hung. End all ranks, read the"
                f" log of the first that failed, and resume from the last checkpoint. gloo says: {first_line(error)}"
            ) from error


def _send(tensor: Tensor, peer: int, tag: int) -> Work:
    work = torch.distributed.isend(tensor, peer, tag=tag)
    assert work is not None, "every rank is in the group of all"
    return work


def _receive(tensor: Tensor, peer: int, tag: int) -> Work:
    work = torch.distributed.irecv(tensor, peer, tag=tag)
    assert work is not None, "every rank is in the group of all"
    return work


def _check_vector(name: str, tensor: Tensor, num_elements: int, dtypes: Sequence[torch.dtype]) -> None:
    if tuple(tensor.shape) != (num_elements,) or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise TrainerError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ' with gaps'}; it must"
            f" be a contiguous vector [{num_elements}] of {' or '.join(map(str, dtypes))}. Flatten and convert it"
        )


class ShardedTreeSum:
    """The tree's sum of leaves that are too large to be held by every rank: a rank keeps its shard of each.

    In pass i every rank sends its i-th leaf, shard by shard, to the shards' owners, and takes its own shard of all
    ranks' i-th leaves into one float32 ``TreeSum`` per sender. ``total``, after ``num_passes`` passes, joins the
    senders' subtrees. So memory is num_ranks * (1 + log2 of a rank's leaves) shards, and the bits are those of one
    process.

    Example: 3 leaves, 2 ranks: rank 0 sends leaves 0 and 1, rank 1 leaf 2 and None; each total is (l0 + l1) + l2.
    """

    def __init__(self, groups: RankGroups, num_leaves: int, length: int) -> None:
        """Start without a leaf; no communication.

        Args:
            groups: all ranks own a shard, whatever their ZeRO group.
            num_leaves: micro-batches of the whole step.
            length: elements of a shard, at least 0.
        """
        if length < 0:
            raise TrainerError(f"length is {length}; a shard has 0 or more elements. Pass its number")
        self._groups = groups
        self._num_leaves = num_leaves
        self._length = length
        self._leaves_of = tuple(stop - start for start, stop in subtree_bounds(num_leaves, groups.num_ranks))
        self._sums = [TreeSum(leaves) for leaves in self._leaves_of]
        self._num_sent = 0

    @property
    def num_passes(self) -> int:
        """Sends that every rank makes: as many as the rank with most leaves has."""
        return max(self._leaves_of)

    def send(self, leaf: Tensor | None) -> None:
        """Take part in one pass; collective.

        Args:
            leaf: [num_ranks * length] bfloat16 or float32, one dtype on all ranks, shards in rank order; this rank's
                next leaf, which may be used again afterwards. None in a pass in which it has none.

        Raises:
            TrainerError: too many passes, a leaf where none is due or none where one is, a wrong one, or ranks that
                disagree.
            RankLostError: another rank died.
        """
        groups = self._groups
        if self._num_sent == self.num_passes:
            raise TrainerError(f"send() came after all {self.num_passes} passes of the step. Make a sum of more leaves")
        senders = [rank for rank, leaves in enumerate(self._leaves_of) if self._num_sent < leaves]
        if (leaf is not None) != (groups.rank in senders):
            raise TrainerError(
                f"leaf is {'None' if leaf is None else 'a tensor'} in pass {self._num_sent} on rank {groups.rank},"
                f" which has {self._leaves_of[groups.rank]} leaves; each is sent in its pass, and None in those after"
                " them. Follow subtree_bounds"
            )
        if leaf is not None:
            _check_vector("leaf", leaf, groups.num_ranks * self._length, (torch.bfloat16, torch.float32))
        shards = groups.swap_shards(
            leaf, senders, length=self._length, num_leaves=self._num_leaves, index=self._num_sent
        )
        for sender in senders:
            self._sums[sender].add(shards.pop(sender).float())
        self._num_sent += 1

    def total(self) -> Tensor:
        """Return this rank's shard of the sum over all leaves, float32 [length]; zeros of no leaves. Call it once.

        Raises:
            TrainerError: passes are missing.
        """
        if self._num_sent < self.num_passes:
            raise TrainerError(
                f"total() came after {self._num_sent} of {self.num_passes} passes; a rank without a leaf takes part in"
                " all of them. Call send(None) there"
            )
        joined = join_subtrees([one.total() for one in self._sums])
        self._sums = []
        return torch.zeros(self._length) if joined is None else joined
