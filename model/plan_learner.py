"""What a learner takes: who updates each tensor, on which rank, and the bytes of the rank with most.

What lives here: records and pure functions. What does not: who updates what (`matrices.py`) and where
(`assignment.py`). This module imports neither torch nor ray.
"""

from typing import Literal

import msgspec

from rollforward.model.assignment import Assignment, assign_dense, assign_experts
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ConfigError
from rollforward.model.matrices import (
    MuonSplit,
    Rule,
    TensorRole,
    declared_rules,
    dense_matrices,
    expert_matrices,
    tensor_roles,
)
from rollforward.model.plan_config import PlanRun
from rollforward.model.shapes import TensorSpec, is_stacked_expert, param_specs, stored_form, stored_tensors, unstacked

MAX_ZERO_SIZE = 32
"""Largest ZeRO group that is chosen where none is given."""

Division = Literal["experts", "everything"]
"""What a learner that rollforward does not have yet would divide among its ranks besides the optimizer's state: values,
gradients, sums and published bytes of routed experts, or of every tensor (values then come a layer at a time)."""

_FP32_BYTES = 4

_BF16_BYTES = 2

_ZERO_ALIGNMENT = 2
"""DeepSpeed pads each group of flat parameters to a multiple of this x ranks."""


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
    layer_inputs: int
    """Inputs of all layers for one micro-batch, which a backward pass needs even with `recompute=true`: 4 T L M D."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.experts.shares)

    @property
    def zero_size(self) -> int:
        """Ranks of a ZeRO group."""
        return len(self.dense.shares)

    @property
    def total(self) -> int:
        """Bytes of the rank with most; beside them only the activations of one layer."""
        return self.memory.total + self.layer_inputs


def make_learner_plan(config: ModelConfig, run: PlanRun) -> LearnerPlan:
    """Assign every tensor of a model to its updater, and every matrix of Muon's to a rank.

    Raises:
        ConfigError: the ranks or the padding are impossible; see `assign_dense` and `assign_experts`.
    """
    roles = tensor_roles(config, run.split)
    num_ranks = run.num_ranks
    dense = _assign_dense(roles, run)
    experts = assign_experts(
        expert_matrices(roles), zero_size=len(dense.shares), learner_ranks=num_ranks, max_padding=run.max_padding
    )
    return LearnerPlan(
        rules=tuple(row for rule in declared_rules(run.split) if (row := _rule_row(rule, roles)).num_tensors > 0),
        dense=dense,
        experts=experts,
        memory=learner_memory(config, roles, dense, experts, num_ranks=num_ranks),
        layer_inputs=layer_input_bytes(config, run.micro_batch_tokens),
    )


def _assign_dense(roles: tuple[TensorRole, ...], run: PlanRun) -> Assignment:
    """The asked-for ZeRO group, or the largest up to MAX_ZERO_SIZE whose padding is allowed."""
    matrices, ranks = dense_matrices(roles), run.num_ranks
    size = run.zero_size or min(ranks, MAX_ZERO_SIZE)
    while True:
        try:
            return assign_dense(matrices, zero_size=size, learner_ranks=ranks, max_padding=run.max_padding)
        except ConfigError:
            if run.zero_size is not None or size == 1:
                raise
            size //= 2


def layer_input_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of what enters the trunk's layers: M streams of D FP32 numbers for each token and layer."""
    return _FP32_BYTES * num_tokens * config.num_hidden_layers * config.hc_mult * config.hidden_size


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


def undivided_bytes(plan: LearnerPlan) -> int:
    """Return what no number of ranks takes off the fullest one: bytes, values, gradients and sums of gradients of the
    whole model, AdamW's parameters, and the layer inputs. Padding is not counted."""
    memory = plan.memory
    dense_padding = len(plan.dense.shares) * plan.dense.bucket_elements - plan.dense.num_elements
    sums = memory.dense_sums - _FP32_BYTES * dense_padding + (_FP32_BYTES + _BF16_BYTES) * plan.experts.num_elements
    return memory.published + memory.values + memory.gradients + memory.adamw_parameters + sums + plan.layer_inputs


class LearnerElements(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner has to hold of a model somewhere, before it is divided among ranks."""

    num_expert_matrices: int
    """Matrices of trained routed experts."""
    expert_matrix_elements: int
    """Elements of each."""
    dense: int
    """Elements of Muon's other matrices."""
    largest_dense: int
    """Of the largest of them."""
    adamw: int
    """Elements of AdamW's tensors."""
    expert_bytes: int
    """Published bytes and FP32 values of routed experts, frozen ones too."""
    other_bytes: int
    """The same of all other tensors."""
    largest_layer: int
    """FP32 values of the largest layer without its routed experts."""

    def divided(self, num_ranks: int, division: Division) -> int:
        """Return what a rank would hold if the learner divided more than it does; layer inputs are not counted.

        Dense shares are taken as equal; tokens travel to the experts, whose owner sums their gradients in place.

        Args:
            num_ranks: R. Dense masters lie on a ZeRO group of min(R, MAX_ZERO_SIZE).
            division: what is divided by R.
        """
        share = -(-self.num_expert_matrices // num_ranks) * self.expert_matrix_elements
        bucket = max(-(-self.dense // min(num_ranks, MAX_ZERO_SIZE)), self.largest_dense)
        masters = 2 * _FP32_BYTES * (bucket + share) + 3 * _FP32_BYTES * self.adamw // num_ranks
        # Gradients and their sums, FP32.
        experts = self.expert_bytes // num_ranks + 2 * _FP32_BYTES * share
        rest = self.other_bytes + 2 * _FP32_BYTES * (self.adamw + self.dense) + _FP32_BYTES * self.adamw
        if division == "everything":
            rest = rest // num_ranks + self.largest_layer
        return masters + experts + rest


def learner_elements(config: ModelConfig, split: MuonSplit) -> LearnerElements:
    """Add up a model's tensors by who updates them."""
    roles, specs = tensor_roles(config, split), param_specs(config)
    experts, dense = expert_matrices(roles), [matrix.num_elements for matrix in dense_matrices(roles)]
    held = {True: 0, False: 0}
    for spec in specs:
        is_expert = is_stacked_expert(spec.name)
        stored = sum(entry.num_bytes for entry in stored_form(unstacked(spec)[0]))
        held[is_expert] += _value_bytes(spec) + stored * (config.n_routed_experts if is_expert else 1)
    return LearnerElements(
        num_expert_matrices=len(experts),
        expert_matrix_elements=experts[0].num_elements,
        dense=sum(dense),
        largest_dense=max(dense),
        adamw=sum(role.spec.num_elements for role in roles if role.rule.updater == "adamw"),
        expert_bytes=held[True],
        other_bytes=held[False],
        largest_layer=_largest_layer_bytes(specs),
    )


def _largest_layer_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """FP32 values of the largest layer, routed experts not counted; embedding and head are layers of their own."""
    layers: dict[str, int] = {}
    for spec in specs:
        if not is_stacked_expert(spec.name):
            layer = ".".join(spec.name.split(".")[:2]) if spec.name.startswith(("layers.", "mtp.")) else spec.name
            layers[layer] = layers.get(layer, 0) + _value_bytes(spec)
    return max(layers.values())


def _rule_row(rule: Rule, roles: tuple[TensorRole, ...]) -> RuleRow:
    under = [role for role in roles if role.rule == rule]
    return RuleRow(
        rule=rule,
        num_tensors=len(under),
        num_matrices=sum(len(role.matrices) for role in under),
        num_elements=sum(role.spec.num_elements for role in under),
    )
