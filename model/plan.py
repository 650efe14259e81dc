"""`rollforward plan`: what a model weighs, who updates it and what a learner's rank holds, from the shape table alone,
before anything is allocated.

What lives here: the schema of the verb, pure functions that return records, and their rendering as text.
What does not: shapes (`shapes.py`), who updates what (`matrices.py`) and where (`assignment.py`). This module imports
neither torch nor ray.
"""

from typing import Annotated, Literal

import msgspec

from rollforward.conf import console
from rollforward.model.assignment import Assignment, assign_dense, assign_experts
from rollforward.model.config import ModelConfig, resolve_model
from rollforward.model.matrices import (
    MuonSplit,
    Rule,
    TensorRole,
    declared_rules,
    dense_matrices,
    expert_matrices,
    tensor_roles,
)
from rollforward.model.shapes import StoredDtype, TensorSpec, is_stacked_expert, param_specs, stored_tensors

KV_GROUP = 64
"""Non-rotary dimensions of a cache entry that share one scale byte."""

_SCALE_ALIGNMENT = 8
"""Scale bytes of a cache entry are padded to this."""

_FP32_BYTES = 4

_BF16_BYTES = 2

_ZERO_ALIGNMENT = 2
"""DeepSpeed pads each group of flat parameters to a multiple of this x ranks."""

RankCount = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
"""A number of processes with one accelerator each."""


class PlanRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `rollforward plan`; the ranks, padding and split are those of a learner with
    `optim.type=hybrid_muon`."""

    model: str
    """flash, pro, tiny, or a folder with a config.json."""
    zero_size: RankCount = 1
    """Ranks that share Muon's dense matrices. Ranks beyond it form further groups of that size, which update the same
    matrices redundantly. A power of two.
    """
    learner_ranks: RankCount | Literal["zero_size"] = "zero_size"
    """Data-parallel ranks of the learner, over which routed experts are spread; a power of two that zero_size
    divides."""
    max_padding: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.1
    """Most padding in Muon's buckets, over real elements. More is refused."""
    split: MuonSplit = MuonSplit()
    """What is one logical matrix where the report does not say."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks of the learner."""
        return self.zero_size if self.learner_ranks == "zero_size" else self.learner_ranks

    def __post_init__(self) -> None:
        """Refuse numbers of ranks that the learner's tree of gradients has no level for."""
        for name, value in (("zero_size", self.zero_size), ("learner_ranks", self.num_ranks)):
            if value & (value - 1):
                raise ValueError(
                    f"{name} is {value}; gradients are added in a binary tree of which each rank owns a subtree. Set a"
                    f" power of two, such as {name}={1 << (value.bit_length() - 1)}"
                )


class DtypeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of one element type."""

    dtype: StoredDtype
    """As safetensors spells it."""
    num_tensors: int
    """Entries in the files."""
    num_bytes: int
    """Their data."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one model."""

    dtypes: tuple[DtypeRow, ...]
    """By element type, largest first."""
    num_parameters: int
    """Of the trunk; token-to-expert tables are not parameters."""
    num_mtp_parameters: int
    """Of the MTP module."""
    num_activated_parameters: int
    """Of the trunk, used by one token: K of E routed experts; embedding and head count whole."""
    num_trained_parameters: int
    """Updated by RL."""
    kv_bytes_per_token: float
    """Compressed entries and index keys, averaged over a long context."""
    window_bytes_per_sequence: int
    """Sliding windows of all layers."""
    state_bytes_per_sequence: int
    """Compressor states, FP32."""

    @property
    def num_tensors(self) -> int:
        """Entries in the files, scales included."""
        return sum(row.num_tensors for row in self.dtypes)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the files."""
        return sum(row.num_bytes for row in self.dtypes)


class RuleRow(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a model that fall under one rule."""

    rule: Rule
    """Who updates them, and why."""
    num_tensors: int
    """Tensors; the stacked matrices of a layer's routed experts are one."""
    num_matrices: int
    """Logical matrices; 0 where Muon does not update."""
    num_elements: int
    """Elements."""


class LearnerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the tensors that a learner's rank holds, of the rank with most; activations not counted.

    R ranks, Z of them in a ZeRO group; B elements of the fullest share of Muon's matrices (dense or experts);
    A elements of AdamW's tensors, W of all trained ones.
    """

    muon_dense: int
    """FP32 masters and momenta of dense matrices: 8 B."""
    muon_experts: int
    """FP32 masters and momenta of routed experts: 8 B."""
    adamw_parameters: int
    """FP32 parameters, whole on every rank: 4 A, each of two groups (with decay and without) padded to 2 R."""
    adamw_state: int
    """ZeRO-1's part of a rank: masters and both moments, 12 A / R, padded like the parameters."""
    published: int
    """Packed bytes of every tensor, frozen ones too, on every rank; what a checkpoint for engines has."""
    values: int
    """FP32 values that the forward reads, unpacked from those bytes, on every rank: 4 an element, 8 of a table."""
    gradients: int
    """FP32 gradients of one micro-batch: 4 W."""
    dense_sums: int
    """FP32 sum over a rank's micro-batches of AdamW's and dense gradients: 4 (A + Z B). With n micro-batches a rank
    there are log2(n) more in between."""
    expert_sums: int
    """Expert gradients by the rank that they come from, FP32, and one micro-batch's on its way, BF16: (4 + 2) R B. The
    sums, too, are more with more micro-batches."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class LearnerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who updates what of one model, on which rank, and what that takes."""

    rules: tuple[RuleRow, ...]
    """As declared; every tensor under one."""
    dense: Assignment
    """Muon's matrices outside routed experts, over a ZeRO group."""
    experts: Assignment
    """Routed experts' matrices, over all ranks."""
    memory: LearnerMemory
    """Of the rank with most."""


def kv_entry_bytes(config: ModelConfig) -> int:
    """Return the bytes of one window or compressed entry: E4M3, then BF16 rotary dimensions, then padded scales."""
    num_scales = -(-config.nope_head_dim // KV_GROUP)
    return config.nope_head_dim + 2 * config.qk_rope_head_dim + -(-num_scales // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT


def index_key_bytes(config: ModelConfig) -> int:
    """Return the bytes of one indexer key: packed E2M1 and a scale byte per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def kv_bytes_per_token(config: ModelConfig) -> float:
    """Return the cache growth per token of a long sequence, MTP not counted.

    Each CSA layer adds (entry + index key) / ratio, each HCA layer entry / ratio.
    """
    total = 0.0
    for layer in range(config.num_hidden_layers):
        kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
        if kind != "window":
            total += (kv_entry_bytes(config) + (index_key_bytes(config) if kind == "csa" else 0)) / ratio
    return total


def state_bytes_per_sequence(config: ModelConfig) -> int:
    """Return the FP32 compressor state of a sequence: value and score for every slot of an open window.

    An overlapping (CSA) compressor keeps two windows of doubled columns, for its entries and for its index keys.
    """
    total = 0
    for layer in range(config.num_hidden_layers):
        kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
        if kind == "csa":
            total += 2 * (2 * ratio) * 2 * (config.head_dim + config.index_head_dim) * _FP32_BYTES
        elif kind == "hca":
            total += 2 * ratio * config.head_dim * _FP32_BYTES
    return total


def make_plan(config: ModelConfig) -> Plan:
    """Compute a model's sizes from its shape table."""
    rows: dict[StoredDtype, tuple[int, int]] = {}
    for stored in stored_tensors(config):
        count, size = rows.get(stored.dtype, (0, 0))
        rows[stored.dtype] = (count + 1, size + stored.num_bytes)
    parameters = [spec for spec in param_specs(config) if spec.format != "int64"]
    trunk = [spec for spec in parameters if not spec.name.startswith("mtp.")]
    num_trunk = sum(spec.num_elements for spec in trunk)
    return Plan(
        dtypes=tuple(
            DtypeRow(dtype=dtype, num_tensors=count, num_bytes=size)
            for dtype, (count, size) in sorted(rows.items(), key=lambda row: -row[1][1])
        ),
        num_parameters=num_trunk,
        num_mtp_parameters=sum(spec.num_elements for spec in parameters) - num_trunk,
        num_activated_parameters=sum(_activated(spec, config) for spec in trunk),
        num_trained_parameters=sum(spec.num_elements for spec in parameters if spec.trained),
        kv_bytes_per_token=kv_bytes_per_token(config),
        window_bytes_per_sequence=config.num_hidden_layers * config.sliding_window * kv_entry_bytes(config),
        state_bytes_per_sequence=state_bytes_per_sequence(config),
    )


def _activated(spec: TensorSpec, config: ModelConfig) -> int:
    if is_stacked_expert(spec.name):
        return spec.num_elements // config.n_routed_experts * config.num_experts_per_tok
    return spec.num_elements


def render_plan(model: str, plan: Plan) -> str:
    """Return the plan as text, one fact a line."""
    lines = [f"model {model}", f"{'dtype':<10}{'tensors':>10}{'bytes':>20}"]
    lines += [f"{row.dtype:<10}{row.num_tensors:>10,}{row.num_bytes:>20,}" for row in plan.dtypes]
    lines += [
        f"{'total':<10}{plan.num_tensors:>10,}{plan.num_bytes:>20,}",
        f"parameters {plan.num_parameters:,} + MTP {plan.num_mtp_parameters:,}",
        f"activated per token {plan.num_activated_parameters:,}, trained by RL {plan.num_trained_parameters:,}",
        f"KV cache {plan.kv_bytes_per_token:,.1f} bytes per token",
        f"windows {plan.window_bytes_per_sequence:,} bytes per sequence",
        f"compressor state {plan.state_bytes_per_sequence:,} bytes per sequence",
    ]
    return "\n".join(lines)


def make_learner_plan(config: ModelConfig, run: PlanRun) -> LearnerPlan:
    """Assign every tensor of a model to its updater, and every matrix of Muon's to a rank.

    Raises:
        ConfigError: the ranks or the padding are impossible; see `assign_dense` and `assign_experts`.
    """
    roles = tensor_roles(config, run.split)
    sizes = {"zero_size": run.zero_size, "learner_ranks": run.num_ranks}
    dense = assign_dense(dense_matrices(roles), **sizes, max_padding=run.max_padding)
    experts = assign_experts(expert_matrices(roles), **sizes, max_padding=run.max_padding)
    return LearnerPlan(
        rules=tuple(row for rule in declared_rules(run.split) if (row := _rule_row(rule, roles)).num_tensors > 0),
        dense=dense,
        experts=experts,
        memory=learner_memory(config, roles, dense, experts, num_ranks=run.num_ranks),
    )


def learner_memory(
    config: ModelConfig,
    roles: tuple[TensorRole, ...],
    dense: Assignment,
    experts: Assignment,
    *,
    num_ranks: int,
) -> LearnerMemory:
    """Add up what the rank with most holds of a model; the formulas are the record's."""
    muon_bytes = 2 * _FP32_BYTES
    by_adamw = [role.spec for role in roles if role.rule.updater == "adamw"]
    num_adamw = sum(spec.num_elements for spec in by_adamw)
    padded = _padded(by_adamw, _ZERO_ALIGNMENT * num_ranks)
    # Of the fullest rank: a ZeRO group's gradients are summed for all of it, everyone's expert gradients for its own.
    dense_elements = len(dense.shares) * dense.bucket_elements
    expert_elements = num_ranks * experts.bucket_elements
    return LearnerMemory(
        muon_dense=muon_bytes * dense.bucket_elements,
        muon_experts=muon_bytes * experts.bucket_elements,
        adamw_parameters=_FP32_BYTES * padded,
        adamw_state=3 * _FP32_BYTES * padded // num_ranks,
        published=sum(stored.num_bytes for stored in stored_tensors(config)),
        values=sum(_value_bytes(role.spec) for role in roles),
        gradients=sum(_value_bytes(role.spec) for role in roles if role.spec.trained),
        dense_sums=_FP32_BYTES * (num_adamw + dense_elements),
        expert_sums=(_FP32_BYTES + _BF16_BYTES) * expert_elements,
    )


def _padded(specs: list[TensorSpec], multiple: int) -> int:
    """Elements of tensors with decay (matrices) and without (vectors), each group padded."""
    groups = [sum(spec.num_elements for spec in specs if (len(spec.shape) >= 2) == decays) for decays in (True, False)]
    return sum(-(-elements // multiple) * multiple for elements in groups)


def _value_bytes(spec: TensorSpec) -> int:
    return spec.num_elements * (8 if spec.format == "int64" else _FP32_BYTES)


def _rule_row(rule: Rule, roles: tuple[TensorRole, ...]) -> RuleRow:
    under = [role for role in roles if role.rule == rule]
    return RuleRow(
        rule=rule,
        num_tensors=len(under),
        num_matrices=sum(len(role.matrices) for role in under),
        num_elements=sum(role.spec.num_elements for role in under),
    )


def render_learner_plan(plan: LearnerPlan) -> str:
    """Return who updates what, and how Muon's matrices lie on the ranks."""
    lines = ["learner with optim.type=hybrid_muon; with adamw, AdamW updates what is Muon's here"]
    lines += [f"{'updated':<27}{'by':<8}{'tensors':>8}{'matrices':>10}{'elements':>20}  why"]
    lines += [
        f"{row.rule.title:<27}{row.rule.updater:<8}{row.num_tensors:>8,}{row.num_matrices:>10,}"
        f"{row.num_elements:>20,}  {row.rule.reason}"
        for row in plan.rules
    ]
    for name, assignment in (("dense", plan.dense), ("experts", plan.experts)):
        lines += _assignment_lines(name, assignment)
    return "\n".join(lines + _memory_lines(plan.memory))


def _memory_lines(memory: LearnerMemory) -> list[str]:
    rows = (
        ("masters and momenta, Muon dense", memory.muon_dense),
        ("masters and momenta, Muon experts", memory.muon_experts),
        ("parameters, AdamW", memory.adamw_parameters),
        ("masters and moments, AdamW, ZeRO-1", memory.adamw_state),
        ("published bytes, all tensors", memory.published),
        ("their values, FP32", memory.values),
        ("gradients of a micro-batch, FP32", memory.gradients),
        ("sums of gradients, AdamW and dense", memory.dense_sums),
        ("sums of gradients, experts", memory.expert_sums),
        ("total, without activations", memory.total),
    )
    return [f"{'memory of the fullest rank':<36}{'bytes':>24}"] + [f"  {name:<34}{size:>24,}" for name, size in rows]


def _assignment_lines(name: str, assignment: Assignment) -> list[str]:
    num_ranks = len(assignment.shares)
    counts = [len(share.matrices) for share in assignment.shares]
    mean_elements, mean_flops = assignment.num_elements / num_ranks, assignment.flops / num_ranks
    shapes = {matrix.ns_shape for share in assignment.shares for matrix in share.matrices}
    return [
        f"Muon {name}: groups {assignment.num_groups:,}, ranks of a group {num_ranks:,}, matrices "
        f"{assignment.num_matrices:,} (a rank {min(counts):,} to {max(counts):,}), shapes {len(shapes)}",
        f"  elements a rank: most {assignment.bucket_elements:,}, mean {mean_elements:,.0f}, "
        f"imbalance {assignment.bucket_elements / mean_elements:.3f}, padding {assignment.padding_share:.2%}",
        f"  Newton-Schulz GFLOP a rank: most {assignment.max_flops / 1e9:,.1f}, mean {mean_flops / 1e9:,.1f}, "
        f"imbalance {assignment.flops_imbalance:.3f}",
    ]


def main(config: PlanRun) -> int:
    """Write the plan of config.model to standard output and return the exit status 0.

    Raises:
        ConfigError: the model is unknown, its config.json is refused, or the learner's ranks are impossible.
    """
    model = resolve_model(config.model)
    learner = make_learner_plan(model, config)
    console.result(render_plan(config.model, make_plan(model)) + "\n" + render_learner_plan(learner))
    return 0
