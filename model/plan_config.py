"""Schema of `rollforward plan`: the model, the machines, and what is to be done on them. Read by `model/plan.py`."""

from typing import Annotated, Literal

import msgspec

from rollforward.model.matrices import MuonSplit

RankCount = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
"""A number of processes with one accelerator each."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**50)]

Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e18)]

WeightForm = Literal["native", "fp8", "fp32"]
"""How an engine holds weights: as published, with experts expanded to FP8 without loss, or as FP32 values."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine replica and its load."""

    gpus: RankCount = 1
    """GPUs of a replica. Routed experts are divided among them, other weights are whole on each, and each keeps the
    cache of its share of the sequences. More than 1 is not in rollforward yet."""
    weights: WeightForm = "native"
    """native: published bytes, experts in FP4. fp8: experts as FP8, twice as large, the same values. fp32: values, with
    an FP32 cache, which is what the engine that computes on CPUs holds."""
    sequences: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 256
    """Sequences in flight in a replica (`rollout.max_batch_requests`)."""
    context: Count | None = None
    """Tokens of each, prompt included. null: 8,192, or the model's longest where that is less."""
    steps_per_s: Positive = 50.0
    """Decode steps in a second, each a token of every sequence."""


class SyncPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way of new weights from the learner to the engines, through files. Measure your own."""

    write_bytes_per_s: Positive = 2e9
    """What the one process that writes a version reaches."""
    read_bytes_per_s: Positive = 2e9
    """What one replica reaches when it reads."""
    shared_bytes_per_s: Positive | None = None
    """What all replicas together reach when they read at once. null: as many times read_bytes_per_s."""
    shard_bytes: Count = 2 * 2**30
    """A file is closed before it would be larger (`write_checkpoint`)."""


class LogOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests ask the token log to keep beside tokens and log-probs."""

    routes: bool = False
    """The experts that every position visited (`algo.keep_routing`)."""
    kept_tokens: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """Mean size of the set that a token was drawn from, where top_p or top_k cut the vocabulary; 0: nothing is cut."""


class PlanRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `rollforward plan`; the learner is one with `optim.type=hybrid_muon`."""

    model: str
    """flash, pro, mini, tiny, or a folder with a config.json."""
    nodes: RankCount | None = None
    """Machines. null: sizes alone, and nothing is refused for want of memory."""
    gpus_per_node: RankCount = 8
    """GPUs of a machine."""
    gpu_bytes: Count = 141 * 10**9
    """Memory of a GPU; an H200 has 141 GB."""
    usable: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.9
    """Share of it that tensors listed here may take. The rest is for activations of one layer, workspaces, collectives
    and the CUDA context."""
    shared: bool = True
    """Whether learner and engines are on the same GPUs, where their memory adds up. false: the GPUs that the learner
    leaves are the engines'."""
    zero_size: RankCount | None = None
    """Ranks that share Muon's dense matrices. Ranks beyond it form further groups of that size, which update the same
    matrices redundantly. A power of two. null: the largest up to 32 that stays within max_padding.
    """
    learner_ranks: RankCount | None = None
    """Data-parallel ranks of the learner, over which routed experts are spread; a power of two that zero_size
    divides. null: all GPUs (half of them with shared=false), or zero_size where no machines are given."""
    max_padding: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.1
    """Most padding in Muon's buckets, over real elements. More is refused."""
    micro_batch_tokens: Count = 8192
    """Tokens of one forward and backward pass of a rank; their layer inputs are kept (with `recompute=true`)."""
    split: MuonSplit = MuonSplit()
    """What is one logical matrix where the report does not say."""
    engine: EngineShape = EngineShape()
    """A replica."""
    sync: SyncPath = SyncPath()
    """How weights get to it."""
    wal: LogOptions = LogOptions()
    """What its token log holds."""
    teachers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 1
    """Teachers whose hidden states distillation keeps of every token."""
    json: bool = False
    """Print one JSON object instead of text; bytes are whole numbers."""

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all machines; None where none are given."""
        return None if self.nodes is None else self.nodes * self.gpus_per_node

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks of the learner."""
        if self.learner_ranks is not None:
            return self.learner_ranks
        if self.num_gpus is None:
            return self.zero_size or 1
        most = self.num_gpus if self.shared else max(1, self.num_gpus // 2)
        return 1 << (most.bit_length() - 1)

    @property
    def num_engine_gpus(self) -> int:
        """GPUs that engines may use."""
        if self.num_gpus is None:
            return self.engine.gpus
        return self.num_gpus if self.shared else self.num_gpus - self.num_ranks

    @property
    def num_replicas(self) -> int:
        """Engine replicas that the GPUs have room for, memory aside."""
        return self.num_engine_gpus // self.engine.gpus

    @property
    def usable_bytes(self) -> int:
        """What tensors may take of one GPU."""
        return int(self.gpu_bytes * self.usable)

    def __post_init__(self) -> None:
        """Refuse numbers of ranks that the learner's tree of gradients has no level for, and more than there are."""
        for name, value in (("zero_size", self.zero_size or 1), ("learner_ranks", self.num_ranks)):
            if value & (value - 1):
                raise ValueError(
                    f"{name} is {value}; gradients are added in a binary tree of which each rank owns a subtree. Set a"
                    f" power of two, such as {name}={1 << (value.bit_length() - 1)}"
                )
        if self.num_gpus is None:
            return
        if self.num_ranks > self.num_gpus:
            raise ValueError(
                f"learner_ranks is {self.num_ranks}; nodes x gpus_per_node are {self.num_gpus} GPUs, and a rank has one"
                f" of its own. Set learner_ranks={1 << (self.num_gpus.bit_length() - 1)} or"
                f" nodes={-(-self.num_ranks // self.gpus_per_node)}"
            )
        if self.engine.gpus > self.num_engine_gpus:
            raise ValueError(
                f"engine.gpus is {self.engine.gpus}; the learner leaves {self.num_engine_gpus} of {self.num_gpus} GPUs"
                f" to engines. Set fewer, fewer learner_ranks, shared=true, or more nodes"
            )
