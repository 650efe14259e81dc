"""The optimizer of a data-parallel trainer: Muon for whole matrices, AdamW for the rest, state with its owner.

    gradients of a micro-batch, by name
        |-- AdamW's    -> flat vector   -> sum of this rank's subtree --+
        |-- dense      -> [Z, bucket]   -> sum of this rank's subtree --+-- tree over the ranks --> sums at the owners
        |-- experts    -> [R, bucket], rounded to BF16, sent at once ------> FP32 sums in tree order at the owners
    sums -> norm of all, clip -> DeepSpeed's AdamW; momentum, Newton-Schulz, masters (optim_muon.py)
    masters -> published bytes on every rank (published.py)

Sums run over the micro-batches of the whole step in one fixed binary tree (`gradient_tree.py`), of which a rank owns a
subtree, because Muon turns 1e-7 in a gradient into 1e-3 in an update. So a step has the same bits on any power of two
of ranks. Dense matrices are shared in groups of Z ranks, which update redundantly; experts lie over all R ranks
(`assignment.py`).

Here: what goes where. Not here: the forward pass (`trainer.py`), collective calls (`collectives.py`), files of the
state (`trainer_state.py`).
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollforward.kernels.optim.stochastic_round import stochastic_round_bf16
from rollforward.kernels.rowwise import tree_sum
from rollforward.model.assignment import Assignment, muon_assignments
from rollforward.model.blocks import block, flat_views, flatten_blocks, square_norms, write_blocks
from rollforward.model.collectives import RankGroups, ShardedTreeSum
from rollforward.model.config import ModelConfig
from rollforward.model.gradient_tree import TreeSum, subtree_bounds
from rollforward.model.optim_adamw import MOMENTS, DeepSpeedAdamW
from rollforward.model.optim_muon import Muon
from rollforward.model.precision import PackedTensor
from rollforward.model.published import PublishedWeights, packed_bytes
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import HybridMuon, OptimConfig
from rollforward.model.trainer_state import read_matrices, read_tensors, write_matrices, write_tensors

_ADAMW_NAME = "adamw.safetensors"
_MUON_PATTERN = "muon.*.safetensors"


class MuonShard:
    """One assignment of matrices to ranks, and this rank's masters and momenta of it."""

    def __init__(self, assignment: Assignment, named: Mapping[str, Tensor], optim: HybridMuon, rank: int) -> None:
        """Copy the masters of this rank's share."""
        self.shares = tuple(share.matrices for share in assignment.shares)
        self.length = assignment.bucket_elements
        self.muon = Muon(self.shares[rank % len(self.shares)], named, optim)
        self.first = sum(len(share) for share in self.shares[: rank % len(self.shares)])
        """Number of the share's first matrix among all."""

    @property
    def num_matrices(self) -> int:
        """Matrices of all shares."""
        return sum(len(share) for share in self.shares)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the matrices cover, in order of first appearance."""
        return tuple(dict.fromkeys(matrix.tensor for share in self.shares for matrix in share))

    def bucket(self) -> Tensor:
        """Return the masters padded to the length of every rank's bucket."""
        return torch.nn.functional.pad(self.muon.masters, (0, self.length - self.muon.masters.numel()))


class StepGradients:
    """The gradients of one step on their way to their owners. Collective: every rank makes the same calls."""

    def __init__(self, owner: "HybridOptimizer", step: int, num_leaves: int) -> None:
        """Begin the sums of a step over ``num_leaves`` micro-batches of all ranks."""
        self._owner, self._step = owner, step
        self.bounds = subtree_bounds(num_leaves, owner.groups.num_ranks)
        start, stop = self.bounds[owner.groups.rank]
        self._leaf, self._stop = start, stop
        self._adamw = TreeSum(stop - start)
        self._dense = TreeSum(stop - start)
        self._experts: ShardedTreeSum | None = None
        if owner.experts is not None:
            self._experts = ShardedTreeSum(owner.groups, num_leaves, owner.experts.length)

    @property
    def num_passes(self) -> int:
        """How often every rank calls `add`: micro-batches of the rank that has most."""
        return max(stop - start for start, stop in self.bounds)

    def add(self, gradients: Mapping[str, Tensor] | None) -> None:
        """Take the gradients of this rank's next micro-batch; None in a pass in which it has none."""
        owner = self._owner
        assert (gradients is not None) == (self._leaf < self._stop), "a rank adds each of its micro-batches once"
        if gradients is not None:
            self._adamw.add(owner.flat_adamw(gradients))
            if owner.dense is not None:
                self._dense.add(_flat_shares(owner.dense, gradients))
        if self._experts is not None:
            self._experts.send(None if gradients is None else self._expert_leaf(gradients))
        self._leaf += 1

    def reduce(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sums over all micro-batches: AdamW's flat vector on every rank, this rank's bucket of dense and of
        expert matrices."""
        groups, owner = self._owner.groups, self._owner
        adamw = groups.tree_reduce_scatter(
            self._adamw.total(), self.bounds, num_shards=1, length=owner.num_adamw_elements
        )
        dense = experts = None
        if owner.dense is not None:
            dense = groups.tree_reduce_scatter(
                self._dense.total(), self.bounds, num_shards=groups.zero_size, length=owner.dense.length
            )
        if self._experts is not None:
            experts = self._experts.total()
        return adamw, dense, experts

    def _expert_leaf(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """One micro-batch's gradients of all expert matrices by owner, rounded if that is asked for."""
        shard, optim = self._owner.experts, self._owner.optim
        assert shard is not None
        assert isinstance(optim, HybridMuon)
        if not optim.stochastic_rounding:
            return _flat_shares(shard, gradients)
        leaf = torch.zeros(len(shard.shares) * shard.length, dtype=torch.bfloat16)
        number = 0  # in the flat order that all ranks' shares have end to end, however many there are
        for row, share in zip(leaf.view(len(shard.shares), -1), shard.shares, strict=True):
            for matrix, target in zip(share, flat_views(row, share), strict=True):
                key = (self._owner.seed, self._step, self._leaf, number)
                target.copy_(stochastic_round_bf16(block(gradients[matrix.tensor], matrix), key=key))
                number += 1
        return leaf


class HybridOptimizer:
    """Masters and state of every trained tensor, sharded over the ranks of an initialised process group.

    With `AdamW` there are no matrices of Muon's. States: between two steps; `begin` and `update` frame one. Methods are
    collective where they say so.
    """

    def __init__(self, config: ModelConfig, named: Mapping[str, Tensor], optim: OptimConfig, *, seed: int) -> None:
        """Copy this rank's masters out of canonical float32 tensors. Collective.

        Raises:
            ConfigError: the matrices cannot be distributed as configured.
        """
        num_ranks = torch.distributed.get_world_size()
        zero_size = (optim.zero_size if isinstance(optim, HybridMuon) else None) or num_ranks
        self.optim, self.seed = optim, seed
        self.groups = RankGroups(zero_size)
        self.dense: MuonShard | None = None
        self.experts: MuonShard | None = None
        if isinstance(optim, HybridMuon):
            dense, experts = muon_assignments(config, optim, num_ranks)
            self.dense = MuonShard(dense, named, optim, self.groups.rank)
            self.experts = MuonShard(experts, named, optim, self.groups.rank)
        by_muon = {name for shard in self._shards() for name in shard.tensors}
        self._adamw_specs = [spec for spec in param_specs(config) if spec.trained and spec.name not in by_muon]
        self._shapes = {spec.name: spec.shape for spec in param_specs(config)}
        self._adamw = DeepSpeedAdamW({spec.name: named[spec.name] for spec in self._adamw_specs}, optim)

    @property
    def num_adamw_elements(self) -> int:
        """Elements of AdamW's tensors."""
        return sum(spec.num_elements for spec in self._adamw_specs)

    def flat_adamw(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of AdamW's tensors end to end, as a copy."""
        return torch.cat([gradients[spec.name].reshape(-1) for spec in self._adamw_specs])

    def begin(self, step: int, num_leaves: int) -> StepGradients:
        """Begin the gradients of a step. Collective, as are the calls of what is returned."""
        return StepGradients(self, step, num_leaves)

    def update(self, gradients: StepGradients, *, lr: float) -> float:
        """Reduce, clip and take the step, unless the gradient is not finite: then nothing changes. Collective.

        Returns:
            L2 norm of the gradient of all tensors before clipping, the same on every rank.
        """
        adamw, dense, experts = gradients.reduce()
        norm = self._norm(adamw, dense, experts)
        if not math.isfinite(norm):
            return norm
        factor = min(1.0, self.optim.max_grad_norm / (norm + 1e-6))
        for flat in (adamw, dense, experts):
            if flat is not None and factor < 1.0:
                flat.mul_(factor)
        self._adamw.step(self._split_adamw(adamw), lr=lr)
        for shard, flat in ((self.dense, dense), (self.experts, experts)):
            if shard is not None and flat is not None:
                shard.muon.step(flat, lr=lr)
        return norm

    def publish_into(self, weights: PublishedWeights) -> int:
        """Turn all masters into published bytes, on every rank. Collective.

        Returns:
            Groups of routed experts' weights whose scale the format's range raised (`mxfp4_clamped_groups`), of all
            ranks.
        """
        weights.take_clamped()
        for name, master in {**self._adamw.parameters(), **self._dense_masters()}.items():
            weights.replace(name, weights.pack(name, master))
        clamped = weights.take_clamped()
        if self.experts is not None:
            packed: list[PackedTensor] = []
            matrices = self.experts.muon.matrices
            for matrix, master in zip(matrices, flat_views(self.experts.muon.masters, matrices), strict=True):
                packed.append(weights.pack(matrix.tensor, master))
            self._replace_experts(weights, packed_bytes(packed))
            clamped += int(self.groups.exact_sum(torch.tensor([weights.take_clamped()]))[0])
        return clamped

    def masters(self) -> dict[str, Tensor]:
        """Return a copy of every trained tensor's FP32 master. Collective."""
        found = {name: master.clone() for name, master in self._adamw.parameters().items()}
        found |= self._dense_masters()
        if self.experts is not None:
            rows = self.groups.all_gather(self.experts.bucket(), over="all")
            found |= self._assembled(self.experts, rows)
        return found

    def save(self, directory: Path, *, num_steps: int) -> None:
        """Write this rank's part of masters and state into a directory that all ranks see. Collective."""
        moments = self._adamw.moments()
        if self.groups.rank == 0:
            write_tensors(directory / _ADAMW_NAME, {**moments, **self._adamw.parameters()}, num_steps=num_steps)
        for label, shard in (("dense", self.dense), ("experts", self.experts)):
            if shard is not None and self._writes(shard):
                path = directory / f"muon.{label}.{self.groups.rank:05d}.safetensors"
                muon = shard.muon
                write_matrices(path, muon.matrices, muon.masters, muon.momenta, num_steps=num_steps)

    def load(self, directory: Path, *, num_steps: int) -> None:
        """Take this rank's part of what any number of ranks saved. Collective.

        Raises:
            TrainerError: a matrix or a tensor is not there, of another shape or of another step.
        """
        shapes = {
            name: spec.shape
            for spec in self._adamw_specs
            for name in (spec.name, *(f"{spec.name}.{moment}" for moment in MOMENTS))
        }
        stored = read_tensors(directory / _ADAMW_NAME, shapes, num_steps=num_steps)
        self._adamw.load(stored, stored, num_steps=num_steps)
        wanted = {
            matrix: (master.view(-1), momentum.view(-1))
            for muon in (shard.muon for shard in self._shards())
            for matrix, master, momentum in zip(
                muon.matrices,
                flat_views(muon.masters, muon.matrices),
                flat_views(muon.momenta, muon.matrices),
                strict=True,
            )
        }
        read_matrices(directory, _MUON_PATTERN, wanted, num_steps=num_steps)

    def _shards(self) -> list[MuonShard]:
        return [shard for shard in (self.dense, self.experts) if shard is not None]

    def _writes(self, shard: MuonShard) -> bool:
        """Whether this rank is the one of those with the same share that speaks for it."""
        return self.groups.rank < len(shard.shares)

    def _norm(self, adamw: Tensor, dense: Tensor | None, experts: Tensor | None) -> float:
        """Norm over all tensors from one square for each tensor and matrix, added exactly: no order has a say."""
        squares = [float(tree_sum(part.double().square(), 0)) for part in self._adamw_parts(adamw)]
        for shard, flat in ((self.dense, dense), (self.experts, experts)):
            if shard is None or flat is None:
                continue
            mine = torch.zeros(shard.num_matrices, dtype=torch.float64)
            if self._writes(shard):
                mine[shard.first : shard.first + len(shard.muon.matrices)] = square_norms(flat, shard.muon.matrices)
            squares += self.groups.exact_sum(mine).tolist()
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan

    def _split_adamw(self, flat: Tensor) -> dict[str, Tensor]:
        specs = self._adamw_specs
        return {spec.name: part.view(spec.shape) for spec, part in zip(specs, self._adamw_parts(flat), strict=True)}

    def _adamw_parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([spec.num_elements for spec in self._adamw_specs])

    def _dense_masters(self) -> dict[str, Tensor]:
        if self.dense is None:
            return {}
        return self._assembled(self.dense, self.groups.all_gather(self.dense.bucket(), over="group"))

    def _assembled(self, shard: MuonShard, rows: Tensor) -> dict[str, Tensor]:
        """Whole tensors from the buckets of all owners."""
        named = {name: torch.empty(self._shapes[name]) for name in shard.tensors}
        for row, share in zip(rows, shard.shares, strict=True):
            write_blocks(row, share, named)
        return named

    def _replace_experts(self, weights: PublishedWeights, mine: Tensor) -> None:
        """Give every rank the bytes of all expert matrices."""
        assert self.experts is not None
        longest = max(weights.num_bytes(share) for share in self.experts.shares)
        rows = self.groups.all_gather(torch.nn.functional.pad(mine, (0, longest - len(mine))), over="all")
        weights.replace_experts(zip(self.experts.shares, rows, strict=True))


def _flat_shares(shard: MuonShard, gradients: Mapping[str, Tensor]) -> Tensor:
    """The gradients of all matrices by owner, each owner's part padded to one length."""
    flat = torch.zeros(len(shard.shares) * shard.length)
    for row, share in zip(flat.view(len(shard.shares), -1), shard.shares, strict=True):
        flatten_blocks(gradients, share, row)
    return flat
