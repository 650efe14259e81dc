"""What an engine replica takes on each of its GPUs: weights in the form that it holds them, and the cache of its
sequences.

What lives here: records and pure functions. This module imports neither torch nor ray.
"""

import math

import msgspec

from rollforward.model.config import ModelConfig
from rollforward.model.errors import ConfigError
from rollforward.model.plan_config import EngineShape, WeightForm
from rollforward.model.plan_model import CachePlan, cache_plan
from rollforward.model.shapes import TensorFormat, TensorSpec, is_stacked_expert, param_specs, stored_form, unstacked

_FP32_BYTES = 4

_TABLE_BYTES = 8

_USUAL_CONTEXT = 8192
"""Tokens of a sequence where nobody says how many."""


class WeightBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A model's weights in one form."""

    one_expert: int
    """The experts of one number, in all layers."""
    num_experts: int
    """Experts of a layer."""
    others: int
    """All that is no routed expert; on every GPU of a replica."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.others + self.num_experts * self.one_expert

    def on_a_gpu(self, gpus: int) -> int:
        """Return what the fullest of so many GPUs holds, among which whole experts are divided."""
        return self.others + -(-self.num_experts // gpus) * self.one_expert


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the fullest GPU of a replica; activations not counted."""

    gpus: int
    """GPUs of the replica."""
    weights: WeightBytes
    """In the form asked for."""
    cache: CachePlan
    """Of a sequence, in the formats that belong to that form."""
    sequences: int
    """Sequences in flight in the replica."""
    sequences_on_a_gpu: int
    """The largest share of them."""
    context: int
    """Tokens of each."""

    @property
    def weight_bytes(self) -> int:
        """Weights on the fullest GPU."""
        return self.weights.on_a_gpu(self.gpus)

    @property
    def cache_bytes(self) -> int:
        """Cache on the fullest GPU."""
        return self.sequences_on_a_gpu * self.cache.of_sequence(self.context)

    @property
    def total(self) -> int:
        """Both."""
        return self.weight_bytes + self.cache_bytes

    def longest_context(self, num_bytes: int) -> int:
        """Return the longest context, in whole blocks, with which the same sequences fit into so many bytes; 0: none
        does."""
        for_each = (num_bytes - self.weight_bytes) // self.sequences_on_a_gpu - self.cache.per_sequence
        return max(0, for_each // self.cache.padded_block) * self.cache.block_tokens

    def most_sequences(self, num_bytes: int) -> int:
        """Return how many sequences of the same context fit into so many bytes a GPU; 0: none does."""
        return self.gpus * max(0, (num_bytes - self.weight_bytes) // self.cache.of_sequence(self.context))


def weight_bytes(config: ModelConfig, form: WeightForm) -> WeightBytes:
    """Add up a model's weights, MTP and frozen tensors too.

    Example: Flash's routed experts are 150.6 GB in native form, 283 GB in fp8.
    """
    one_expert = others = 0
    for spec in param_specs(config):
        if is_stacked_expert(spec.name):
            one_expert += _held_bytes(unstacked(spec)[0], form)
        else:
            others += _held_bytes(spec, form)
    return WeightBytes(one_expert=one_expert, num_experts=config.n_routed_experts, others=others)


def _held_bytes(spec: TensorSpec, form: WeightForm) -> int:
    if form == "fp32":
        return spec.num_elements * (_TABLE_BYTES if spec.format == "int64" else _FP32_BYTES)
    held: TensorFormat = "fp8" if form == "fp8" and spec.format == "mxfp4" else spec.format
    return sum(stored.num_bytes for stored in stored_form(msgspec.structs.replace(spec, format=held)))


def context_of(config: ModelConfig, shape: EngineShape) -> int:
    """Return the tokens of each sequence.

    Raises:
        ConfigError: more than the model's longest.
    """
    longest = config.max_position_embeddings
    if shape.context is None:
        return min(_USUAL_CONTEXT, longest)
    if shape.context > longest:
        raise ConfigError(
            f"engine.context is {shape.context:,}; the model's max_position_embeddings are {longest:,}. Set"
            f" engine.context={longest} or less."
        )
    return shape.context


def make_engine_plan(config: ModelConfig, shape: EngineShape) -> EnginePlan:
    """Compute what a replica of that shape takes.

    Raises:
        ConfigError: a context beyond the model's, or more GPUs than experts.
    """
    if shape.gpus > config.n_routed_experts:
        raise ConfigError(
            f"engine.gpus is {shape.gpus}; whole experts are divided among them, and a layer has"
            f" {config.n_routed_experts}. Set engine.gpus={config.n_routed_experts} or less."
        )
    return EnginePlan(
        gpus=shape.gpus,
        weights=weight_bytes(config, shape.weights),
        cache=cache_plan(config, packed=shape.weights != "fp32"),
        sequences=shape.sequences,
        sequences_on_a_gpu=math.ceil(shape.sequences / shape.gpus),
        context=context_of(config, shape),
    )


def fewest_gpus(config: ModelConfig, shape: EngineShape, num_bytes: int) -> int | None:
    """Return the smallest number of GPUs on each of which the same load takes at most so many bytes; None: no number
    does."""
    plan = make_engine_plan(config, shape)
    for gpus in range(1, config.n_routed_experts + 1):
        on_a_gpu = math.ceil(shape.sequences / gpus)
        if msgspec.structs.replace(plan, gpus=gpus, sequences_on_a_gpu=on_a_gpu).total <= num_bytes:
            return gpus
    return None
