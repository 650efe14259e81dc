"""The model's weights as nested records of tensors: what a forward reads.

The values are those of the published formats (native mode) or the plain masters (fp32 mode), float32 on the CPU; which
of the two, and straight-through gradients, are decided in ``precision.py`` before a record is built. Names inside the
records follow the official checkpoint; experts are stacked as [E, ...].

Here: records and their construction from a flat mapping of canonical names. Not here: reading files (checkpoint.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.precision import published_value
from rollforward.model.shapes import param_specs


@dataclass(frozen=True, kw_only=True)
class CompressorWeights:
    """One KV compressor. Local letters: c = 2 for CSA and 1 for HCA, e entry width, m ratio."""

    wkv: Tensor
    """[c*e, D]."""
    wgate: Tensor
    """[c*e, D]."""
    ape: Tensor
    """[m, c*e], added to the score by position in the window."""
    norm: Tensor
    """[e]."""


@dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """The lightning indexer of a CSA layer."""

    wq_b: Tensor
    """[index heads * index width, q_lora]."""
    weights_proj: Tensor
    """[index heads, D]."""
    compressor: CompressorWeights
    """Its own compressor, entry width index_head_dim."""


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """One attention layer. Local letters: L q_lora, N heads, d head_dim, g output groups, o o_lora."""

    wq_a: Tensor
    """[L, D]."""
    q_norm: Tensor
    """[L]."""
    wq_b: Tensor
    """[N*d, L]."""
    wkv: Tensor
    """[d, D]."""
    kv_norm: Tensor
    """[d]."""
    wo_a: Tensor
    """[g*o, N*d/g]."""
    wo_b: Tensor
    """[D, g*o]."""
    attn_sink: Tensor
    """[N]."""
    compressor: CompressorWeights | None
    """None in window-only layers."""
    indexer: IndexerWeights | None
    """Only in CSA layers."""


@dataclass(frozen=True, kw_only=True)
class MoEWeights:
    """One mixture of experts: gate, routed experts, one shared expert."""

    gate: Tensor
    """[E, D]."""
    bias: Tensor | None
    """[E], selection only; None in hash layers."""
    tid2eid: Tensor | None
    """int64 [V, K] in hash layers, else None."""
    w1: Tensor
    """[E, F, D]."""
    w2: Tensor
    """[E, D, F]."""
    w3: Tensor
    """[E, F, D]."""
    shared_w1: Tensor
    """[F, D]."""
    shared_w2: Tensor
    """[D, F]."""
    shared_w3: Tensor
    """[F, D]."""


@dataclass(frozen=True, kw_only=True)
class MixWeights:
    """Hyper-connection parameters of one site (or of the head, where X = M and scale has one entry)."""

    fn: Tensor
    """[X, M*D] float32."""
    base: Tensor
    """[X] float32."""
    scale: Tensor
    """[3] or [1] float32."""


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """One transformer block."""

    attn_mix: MixWeights
    attn_norm: Tensor
    attn: AttentionWeights
    ffn_mix: MixWeights
    ffn_norm: Tensor
    ffn: MoEWeights


@dataclass(frozen=True, kw_only=True)
class MTPWeights:
    """The multi-token-prediction module: projections, one block, its own head mix and norm."""

    enorm: Tensor
    hnorm: Tensor
    e_proj: Tensor
    h_proj: Tensor
    block: BlockWeights
    head_mix: MixWeights
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """All weights of a model."""

    embed: Tensor
    """[V, D]. A forward asks for it once, before the blocks."""
    blocks: Sequence[BlockWeights]
    """One a layer. A forward asks for each once, in their order."""
    head_mix: MixWeights
    norm: Tensor
    head: Tensor
    """[V, D]."""
    mtp: MTPWeights | None


def _mix(named: Mapping[str, Tensor], prefix: str) -> MixWeights:
    return MixWeights(fn=named[prefix + "_fn"], base=named[prefix + "_base"], scale=named[prefix + "_scale"])


def _compressor(named: Mapping[str, Tensor], prefix: str) -> CompressorWeights:
    return CompressorWeights(
        wkv=named[prefix + "wkv.weight"],
        wgate=named[prefix + "wgate.weight"],
        ape=named[prefix + "ape"],
        norm=named[prefix + "norm.weight"],
    )


def _attention(named: Mapping[str, Tensor], prefix: str, kind: str) -> AttentionWeights:
    indexer = None
    if kind == "csa":
        indexer = IndexerWeights(
            wq_b=named[prefix + "indexer.wq_b.weight"],
            weights_proj=named[prefix + "indexer.weights_proj.weight"],
            compressor=_compressor(named, prefix + "indexer.compressor."),
        )
    return AttentionWeights(
        wq_a=named[prefix + "wq_a.weight"],
        q_norm=named[prefix + "q_norm.weight"],
        wq_b=named[prefix + "wq_b.weight"],
        wkv=named[prefix + "wkv.weight"],
        kv_norm=named[prefix + "kv_norm.weight"],
        wo_a=named[prefix + "wo_a.weight"],
        wo_b=named[prefix + "wo_b.weight"],
        attn_sink=named[prefix + "attn_sink"],
        compressor=None if kind == "window" else _compressor(named, prefix + "compressor."),
        indexer=indexer,
    )


def _moe(named: Mapping[str, Tensor], prefix: str) -> MoEWeights:
    return MoEWeights(
        gate=named[prefix + "gate.weight"],
        bias=named.get(prefix + "gate.bias"),
        tid2eid=named.get(prefix + "gate.tid2eid"),
        w1=named[prefix + "experts.w1.weight"],
        w2=named[prefix + "experts.w2.weight"],
        w3=named[prefix + "experts.w3.weight"],
        shared_w1=named[prefix + "shared_experts.w1.weight"],
        shared_w2=named[prefix + "shared_experts.w2.weight"],
        shared_w3=named[prefix + "shared_experts.w3.weight"],
    )


def _block(named: Mapping[str, Tensor], prefix: str, kind: str) -> BlockWeights:
    return BlockWeights(
        attn_mix=_mix(named, prefix + "hc_attn"),
        attn_norm=named[prefix + "attn_norm.weight"],
        attn=_attention(named, prefix + "attn.", kind),
        ffn_mix=_mix(named, prefix + "hc_ffn"),
        ffn_norm=named[prefix + "ffn_norm.weight"],
        ffn=_moe(named, prefix + "ffn."),
    )


def build_block(config: ModelConfig, named: Mapping[str, Tensor], layer: int) -> BlockWeights:
    """Arrange the canonical tensors of one layer into its record; see ``build_weights``."""
    return _block(named, f"layers.{layer}.", config.layer_kind(layer))


def build_weights(config: ModelConfig, named: Mapping[str, Tensor]) -> ModelWeights:
    """Arrange canonical tensors into records. No copy is made; gradients flow to the tensors given.

    Args:
        config: decides layer kinds.
        named: canonical names (``shapes.param_specs``) -> tensors.

    Raises:
        KeyError: a bug here; readers check names and shapes before.
    """
    mtp = None
    if config.num_nextn_predict_layers > 0:
        mtp = MTPWeights(
            enorm=named["mtp.0.enorm.weight"],
            hnorm=named["mtp.0.hnorm.weight"],
            e_proj=named["mtp.0.e_proj.weight"],
            h_proj=named["mtp.0.h_proj.weight"],
            block=_block(named, "mtp.0.", "window"),
            head_mix=_mix(named, "mtp.0.hc_head"),
            norm=named["mtp.0.norm.weight"],
        )
    return ModelWeights(
        embed=named["embed.weight"],
        blocks=tuple(build_block(config, named, layer) for layer in range(config.num_hidden_layers)),
        head_mix=_mix(named, "hc_head"),
        norm=named["norm.weight"],
        head=named["head.weight"],
        mtp=mtp,
    )


def published_tensors(config: ModelConfig, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pass every master through its published format; gradients go straight through to the masters.

    Args:
        config: decides names and formats.
        named: canonical names -> float32 masters (int64 tables stay as they are).

    Returns:
        Canonical names -> float32 values, bit-equal to what an engine unpacks from the published bytes.

    Raises:
        NonFiniteError: a master holds NaN or infinity.
    """
    return {spec.name: published_value(spec.format, named[spec.name]) for spec in param_specs(config)}
