"""Attention of one layer: low-rank query, one shared KV head, window plus compressed entries, sink, grouped output.

Here: the arithmetic of DeepSeek-V4's reference Attention on flat tokens. Which keys exist is decided in
``segments.py``, where they are kept in ``cache.py``, how they are multiplied in ``kernels/attention``.
"""

import torch
from torch import Tensor

from rollforward.kernels.attention.compress import pool_window
from rollforward.kernels.attention.index_topk import index_scores, select_entries
from rollforward.kernels.attention.rope import rope
from rollforward.kernels.attention.sparse_attention import sparse_attention
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.norm.rms_norm import rms_norm
from rollforward.kernels.rowwise import take_rows
from rollforward.model.cache import CacheView
from rollforward.model.config import ModelConfig
from rollforward.model.numerics import Numerics
from rollforward.model.rope import RopeTable
from rollforward.model.segments import EntryIndex, SegmentBatch
from rollforward.model.weights import AttentionWeights, CompressorWeights, IndexerWeights


class AttentionContext:
    """What all layers of one forward share: the batch, the mode, rotary tables, entry indices, the cache."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        tables: dict[bool, RopeTable],
        batch: SegmentBatch,
        cache: CacheView | None,
    ) -> None:
        """Bind one forward. ``tables`` holds the rotary table of compressed (True) and window-only (False) layers."""
        self.config = config
        self.numerics = numerics
        self.batch = batch
        self.cache = cache
        self._tables = tables
        self._entries: dict[int, EntryIndex] = {}

    def rotary(self, position: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [..., r/2] each, at int64 positions for a layer with or without a compressor."""
        return self._tables[compressed].at(position)

    def entry_index(self, layer: int) -> EntryIndex:
        """Return the entry index of a layer with a compressor; layers of one ratio share it."""
        ratio = self.config.compress_ratios[layer]
        if ratio not in self._entries:
            per_block = 0
            if self.cache is not None:
                per_block = self.cache.entries_per_block(f"layers.{layer}.entries")
            overlap = self.config.layer_kind(layer) == "csa"
            self._entries[ratio] = self.batch.entry_index(ratio, overlap=overlap, entries_per_block=per_block)
        return self._entries[ratio]


def attention(weights: AttentionWeights, x_TD: Tensor, layer: int, context: AttentionContext) -> Tensor:
    """Run one attention layer over the new tokens of a batch.

    Args:
        weights: the layer's weights.
        x_TD: [T, D] float32, normed input.
        layer: index into the config's lists; the MTP block passes num_hidden_layers.
        context: the forward's shared state. With a cache, the layer's planes are read and extended.

    Returns:
        [T, D] float32.

    Invariants: row-invariant: a token's bits do not depend on the batch, on chunking or on whether a cache is used.
    """
    config, numerics, batch = context.config, context.numerics, context.batch
    compressed = config.layer_kind(layer) != "window"
    name = f"layers.{layer}."
    cos, sin = context.rotary(batch.position_T, compressed=compressed)
    quantised_x = numerics.gemm_input(x_TD)

    latent_TL = rms_norm(row_linear(quantised_x, weights.wq_a), weights.q_norm, eps=config.rms_norm_eps)
    quantised_latent = numerics.gemm_input(latent_TL)
    q_TNd = row_linear(quantised_latent, weights.wq_b).view(-1, config.num_attention_heads, config.head_dim)
    q_TNd = rope(rms_norm(q_TNd, None, eps=config.rms_norm_eps), cos.unsqueeze(1), sin.unsqueeze(1))

    kv_Td = rms_norm(row_linear(quantised_x, weights.wkv), weights.kv_norm, eps=config.rms_norm_eps)
    kv_Td = numerics.kv_entry(rope(kv_Td, cos, sin), config.qk_rope_head_dim)
    keys_GSd, visible_GQS = _window_keys(kv_Td, name, context)

    if weights.compressor is not None:
        index = context.entry_index(layer)
        entries_GSd = _compressed_keys(weights.compressor, x_TD, index, name, "", context)
        entry_visible = index.visible_GQS
        if weights.indexer is not None:
            entry_visible = _select(weights.indexer, x_TD, quantised_latent, index, layer, context)
        keys_GSd = torch.cat((keys_GSd, entries_GSd), dim=1)
        visible_GQS = torch.cat((visible_GQS, entry_visible), dim=-1)

    q_GQNd = _to_groups(q_TNd, batch)
    o_GQNd = sparse_attention(q_GQNd, keys_GSd, visible_GQS, weights.attn_sink, scale=config.head_dim**-0.5)
    o_TNd = take_rows(o_GQNd.flatten(0, 1), batch.row_T)
    o_TNd = rope(o_TNd, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True)
    return _grouped_output(weights, o_TNd, context)


def _to_groups(x: Tensor, batch: SegmentBatch) -> Tensor:
    """Arrange flat rows [T, ...] by query group, [G, Q, ...]; absent queries are zero rows."""
    return take_rows(torch.cat((x, x.new_zeros((1, *x.shape[1:])))), batch.query_GQ)


def _window_keys(kv_Td: Tensor, name: str, context: AttentionContext) -> tuple[Tensor, Tensor]:
    index = context.batch.window_index
    pool = [kv_Td]
    if context.cache is not None:
        pool.append(context.cache.read_ring(name + "window"))
    pool.append(kv_Td.new_zeros(1, kv_Td.shape[1]))
    keys_GSd = take_rows(torch.cat(pool), index.key_GS)
    if context.cache is not None:
        context.cache.write_ring(name + "window", kv_Td)
    return keys_GSd, index.visible_GQS


def _compressed_keys(
    weights: CompressorWeights, x_TD: Tensor, index: EntryIndex, name: str, role: str, context: AttentionContext
) -> Tensor:
    """Make the entries that this forward completes and return every group's entries in absolute order, [G, S, e]."""
    config, batch = context.config, context.batch
    entry_width = weights.norm.shape[0]
    ratio = weights.ape.shape[0]
    kv_TX = row_linear(x_TD, weights.wkv)
    score_TX = row_linear(x_TD, weights.wgate) + take_rows(weights.ape, batch.position_T % ratio)
    kv_ELX, score_ELX = _window_slots(kv_TX, score_TX, index, name + role, context)
    if kv_ELX.shape[2] != entry_width:  # CSA: previous-window role first, then current-window role
        kv_ELX = torch.cat((kv_ELX[:, :ratio, :entry_width], kv_ELX[:, ratio:, entry_width:]), dim=1)
        score_ELX = torch.cat((score_ELX[:, :ratio, :entry_width], score_ELX[:, ratio:, entry_width:]), dim=1)
    entries_Ee = rms_norm(pool_window(kv_ELX, score_ELX), weights.norm, eps=config.rms_norm_eps)
    cos, sin = context.rotary(index.position_E, compressed=True)
    entries_Ee = rope(entries_Ee, cos, sin)
    if role == "":
        entries_Ee = context.numerics.kv_entry(entries_Ee, config.qk_rope_head_dim)
    else:
        entries_Ee = context.numerics.index_vector(entries_Ee)
    if context.cache is None:
        return take_rows(torch.cat((entries_Ee, entries_Ee.new_zeros(1, entry_width))), index.key_GS)
    return take_rows(context.cache.write_entries(name + role + "entries", index, entries_Ee), index.key_GS)


def _window_slots(
    kv_TX: Tensor, score_TX: Tensor, index: EntryIndex, name: str, context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Gather the raw key-values and scores of every new entry's slots, [E, L, c*e]; absent slots hold 0 and -inf."""
    width = kv_TX.shape[1]
    kv_pool, score_pool = [kv_TX], [score_TX]
    if context.cache is not None:
        kv_pool.append(context.cache.read_ring(name + "raw_kv"))
        score_pool.append(context.cache.read_ring(name + "raw_score"))
    kv_pool.append(kv_TX.new_zeros(1, width))
    score_pool.append(score_TX.new_full((1, width), -torch.inf))
    slots = take_rows(torch.cat(kv_pool), index.raw_EL), take_rows(torch.cat(score_pool), index.raw_EL)
    if context.cache is not None:
        context.cache.write_ring(name + "raw_kv", kv_TX)
        context.cache.write_ring(name + "raw_score", score_TX)
    return slots


@torch.no_grad()
def _select(
    weights: IndexerWeights,
    x_TD: Tensor,
    quantised_latent_TL: Tensor,
    index: EntryIndex,
    layer: int,
    context: AttentionContext,
) -> Tensor:
    """Return which visible entries each query may read: the index_topk best. bool [G, Q, S]."""
    config, numerics, batch = context.config, context.numerics, context.batch
    keys_GSh = _compressed_keys(weights.compressor, x_TD, index, f"layers.{layer}.", "index_", context)
    if index.visible_GQS.shape[2] == 0 or int(index.visible_GQS.sum(-1).max()) <= config.index_topk:
        return index.visible_GQS
    heads, width = config.index_n_heads, config.index_head_dim
    cos, sin = context.rotary(batch.position_T, compressed=True)
    q_TNh = row_linear(quantised_latent_TL, weights.wq_b).view(-1, heads, width)
    q_TNh = numerics.index_vector(rope(q_TNh, cos.unsqueeze(1), sin.unsqueeze(1)))
    head_weight_TN = row_linear(x_TD, weights.weights_proj) * (width**-0.5 * heads**-0.5)
    scores = index_scores(_to_groups(q_TNh, batch), keys_GSh, _to_groups(head_weight_TN, batch))
    return select_entries(numerics.index_score(scores), index.visible_GQS, k=config.index_topk)


def _grouped_output(weights: AttentionWeights, o_TNd: Tensor, context: AttentionContext) -> Tensor:
    """Project groups of heads to o_lora each, then all groups to D. The first product's input is not quantised."""
    groups, rank = context.config.o_groups, context.config.o_lora_rank
    o_TgX = o_TNd.reshape(o_TNd.shape[0], groups, -1)
    wo_a_goX = weights.wo_a.view(groups, rank, -1)
    latent = [row_linear(o_TgX[:, group], wo_a_goX[group]) for group in range(groups)]
    return row_linear(context.numerics.gemm_input(torch.cat(latent, dim=-1)), weights.wo_b)
