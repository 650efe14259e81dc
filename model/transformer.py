"""DeepSeek-V4 forward: embedding, hyper-connected blocks, head; and the multi-token-prediction module.

One forward serves decode, chunked prefill and packed training: see ``segments.py``. ``Model`` is what users hold.

A forward works where its weights are. Where hyper-connections run in their tile form, the residual streams are BF16 on
the GPU, also when the weights are on the CPU: then what goes into a sublayer and comes out of it is copied.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollforward.kernels import dispatch
from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.mhc.mix import mhc_across, mhc_enter, mhc_head, mhc_post
from rollforward.kernels.norm.rms_norm import rms_norm
from rollforward.model.attention import AttentionContext, attention
from rollforward.model.cache import CacheView
from rollforward.model.checkpoint import read_checkpoint
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelInputError
from rollforward.model.moe import Router, moe
from rollforward.model.numerics import Numerics
from rollforward.model.rope import RopeTable, rope_table
from rollforward.model.routing import Routing
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.train_config import Precision
from rollforward.model.weights import BlockWeights, MixWeights, ModelWeights, build_weights, published_tensors


class Transformer:
    """The arithmetic of a config in one mode. Holds no weights: they are an argument of every call.

    Thread-safe once its rotary tables have grown to the longest position used.
    """

    def __init__(self, config: ModelConfig, precision: Precision, *, recompute: bool = False) -> None:
        """Prepare a forward.

        Args:
            config: the model.
            precision: ``fp32`` or ``native``.
            recompute: a trunk forward with grad keeps only the input of every layer and runs the layer again in
                backward: the memory of one layer for a third more products. No bit of values and gradients changes, if
                the weights do not change before the backward: torch cannot notice it here.
        """
        self.config = config
        self._recompute = recompute
        self.numerics = Numerics(precision)
        self._tables: dict[bool, RopeTable] = {
            compressed: rope_table(config, compressed=compressed) for compressed in (False, True)
        }

    def streams(
        self,
        weights: ModelWeights,
        token_T: Tensor,
        batch: SegmentBatch,
        storage: dict[str, Tensor] | None = None,
        *,
        routing: Routing | None = None,
    ) -> Tensor:
        """Run the trunk over the new tokens of a batch.

        Args:
            weights: values of this mode's formats.
            token_T: int64 [T], flat in the order of the batch's segments, each in [0, vocab_size); on any device, and
                so is the batch.
            batch: which tokens they are.
            storage: cache storage, on the weights' device; needed when a segment starts after 0, then read and
                extended.
            routing: replays recorded experts and holds those that were visited; None where nobody asks.

        Returns:
            [T, M, D] float32 (``mix`` as tile: bfloat16): the residual streams after the last block, before the head
            mix.

        Raises:
            ModelInputError: for ids outside the vocabulary, a count that does not match the batch, or slots without
                storage and the reverse.

        Invariants: row-invariant (docs/design.md, the bit contract), the same with autograd on or off. Replaying what
        the same forward visited changes no bit, of values and gradients.
        """
        self._check_tokens(token_T, batch)
        embed_VD = weights.embed  # once: it may be gathered from other ranks
        token_T, batch = token_T.to(embed_VD.device), batch.on(embed_VD.device)
        context = self._context(batch, storage)
        embedded_TD = _as_streams(functional.embedding(token_T, embed_VD))
        streams_TMD = embedded_TD.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        # Not with a cache: a second pass would write it again.
        recompute = self._recompute and storage is None and torch.is_grad_enabled()
        for layer, block in enumerate(weights.blocks):
            arguments = (
                block,
                streams_TMD,
                token_T,
                layer,
                context,
                None if routing is None else routing.router(layer),
            )
            if recompute:
                # Nothing in a layer draws random numbers.
                streams_TMD = checkpoint(self._block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                streams_TMD = self._block(*arguments)
        return streams_TMD

    def hidden(self, weights: ModelWeights, streams_TMD: Tensor) -> Tensor:
        """Merge the streams and apply the final norm: the vector that the head reads. [T, M, D] -> [T, D] float32, on
        the weights' device, of BF16 values in native mode."""
        return self._head_input(weights.head_mix, streams_TMD, weights.norm)

    def logits(self, weights: ModelWeights, hidden_TD: Tensor) -> Tensor:
        """Apply the LM head. [T, D] -> [T, V] float32, no cap; row-invariant."""
        return row_linear(hidden_TD, weights.head)

    def mtp_streams(
        self, weights: ModelWeights, streams_TMD: Tensor, next_token_T: Tensor, batch: SegmentBatch
    ) -> Tensor:
        """Run the MTP module: from the streams at i and the token at i + 1, streams that predict the token at i + 2.

        Args:
            weights: with an ``mtp`` record.
            streams_TMD: [T, M, D], trunk streams (or this module's own, to draft further).
            next_token_T: int64 [T], the token after each position.
            batch: segments that start at 0; T tokens.

        Returns:
            [T, M, D] of the same kind, before the module's own head.
        """
        mtp = weights.mtp
        if mtp is None:
            raise ModelInputError(
                "the model has no MTP module (num_nextn_predict_layers is 0); load a checkpoint with mtp.0.* tensors"
            )
        self._check_tokens(next_token_T, batch)
        next_token_T, batch = next_token_T.to(mtp.enorm.device), batch.on(mtp.enorm.device)
        context = self._context(batch, None)
        eps, quantise = self.config.rms_norm_eps, self.numerics.gemm_input
        embedded_TD = rms_norm(functional.embedding(next_token_T, weights.embed), mtp.enorm, eps=eps)
        from_token_TD = row_linear(quantise(embedded_TD), mtp.e_proj)
        normed = rms_norm(streams_TMD.to(mtp.hnorm), mtp.hnorm, eps=eps).flatten(0, 1)
        from_streams = row_linear(quantise(normed), mtp.h_proj).view_as(streams_TMD)
        merged = _as_streams(from_token_TD.unsqueeze(1) + from_streams)
        return self._block(mtp.block, merged, next_token_T, self.config.num_hidden_layers, context)

    def mtp_logits(self, weights: ModelWeights, mtp_streams_TMD: Tensor) -> Tensor:
        """Merge the MTP streams with the module's own mix and norm and apply the shared head. [T, V] float32."""
        mtp = weights.mtp
        assert mtp is not None, "mtp_streams was called before and checks it"
        return self.logits(weights, self._head_input(mtp.head_mix, mtp_streams_TMD, mtp.norm))

    def _check_tokens(self, token_T: Tensor, batch: SegmentBatch) -> None:
        if token_T.shape != (batch.num_tokens,):
            raise ModelInputError(
                f"token ids have shape {tuple(token_T.shape)}, the segments hold {batch.num_tokens} tokens; "
                "give one flat id per token"
            )
        if token_T.dtype != torch.int64:
            raise ModelInputError(
                f"token ids are {token_T.dtype}; the rule is torch.int64. Convert them where they are read."
            )
        low, high = int(token_T.min()), int(token_T.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ModelInputError(
                f"token ids range from {low} to {high}; the rule is 0 <= id < vocab_size = {self.config.vocab_size}. "
                "Check that tokenizer and model belong together."
            )

    def _context(self, batch: SegmentBatch, storage: dict[str, Tensor] | None) -> AttentionContext:
        if batch.has_cache != (storage is not None):
            raise ModelInputError(
                f"segments {'have' if batch.has_cache else 'have no'} cache slots and storage is "
                f"{'absent' if storage is None else 'given'}; give both or neither"
            )
        cache = None if storage is None else CacheView(storage, batch)
        return AttentionContext(self.config, self.numerics, self._tables, batch, cache)

    def _head_input(self, mix: MixWeights, streams_TMD: Tensor, norm: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        numbers = (one.to(streams_TMD.device) for one in (mix.fn, mix.base, mix.scale))
        merged_TD = mhc_head(streams_TMD, *numbers, eps=self.config.hc_eps, norm_eps=eps)
        return self.numerics.head_input(rms_norm(merged_TD.to(norm), norm, eps=eps))

    def _block(
        self,
        block: BlockWeights,
        streams_TMD: Tensor,
        token_T: Tensor,
        layer: int,
        context: AttentionContext,
        router: Router | None = None,
    ) -> Tensor:
        config, device = self.config, streams_TMD.device
        constants: dict[str, Any] = {
            "iters": config.hc_sinkhorn_iters,
            "eps": config.hc_eps,
            "norm_eps": config.rms_norm_eps,
        }
        site = _site(block.attn_mix, block.attn_norm, device)
        normed_TD, post, comb = mhc_enter(streams_TMD, *site, **constants)
        output_TD = attention(block.attn, normed_TD.to(block.attn_norm), layer, context)
        site = _site(block.ffn_mix, block.ffn_norm, device)
        streams_TMD, normed_TD, post, comb = mhc_across(
            output_TD.to(device), streams_TMD, post, comb, *site, **constants
        )
        output_TD = moe(block.ffn, normed_TD.to(block.ffn_norm), token_T, config, self.numerics, router=router)
        return mhc_post(output_TD.to(device), streams_TMD, post, comb)


def _as_streams(x: Tensor) -> Tensor:
    """Values as residual streams hold them."""
    return x.to(x.device if x.is_cuda else "cuda", torch.bfloat16) if dispatch.is_tile("mix") else x


def _site(mix: MixWeights, norm: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers of the way into a sublayer, where the streams are."""
    return mix.fn.to(device), mix.base.to(device), mix.scale.to(device), norm.to(device)


class Model:
    """A transformer together with its weights, for evaluation and inspection."""

    def __init__(
        self, config: ModelConfig, named: Mapping[str, Tensor], *, precision: Precision, device: str = "cpu"
    ) -> None:
        """Build a model from canonical fp32 tensors; in native mode they pass through their published formats, and then
        to the device, where forwards work."""
        self.config = config
        self.transformer = Transformer(config, precision)
        values = published_tensors(config, named) if precision == "native" else named
        self.weights = build_weights(config, {name: value.to(device) for name, value in values.items()})

    @torch.no_grad()
    def logits(self, token_ids_BT: Tensor) -> Tensor:
        """Return next-token logits for every position.

        Args:
            token_ids_BT: int64 [B, T], T >= 1; every row is a sequence from position 0, no padding; on any device.

        Returns:
            [B, T, V] float32, on the model's device.

        Raises:
            ModelInputError: for another shape or ids outside the vocabulary.
        """
        token_T, batch = self._flat(token_ids_BT)
        streams_TMD = self.transformer.streams(self.weights, token_T, batch)
        logits_TV = self.transformer.logits(self.weights, self.transformer.hidden(self.weights, streams_TMD))
        return logits_TV.view(*token_ids_BT.shape, -1)

    @torch.no_grad()
    def mtp_logits(self, token_ids_BT: Tensor) -> Tensor:
        """Return the MTP module's logits: row i predicts token i + 2. int64 [B, T >= 2] -> [B, T - 1, V] float32."""
        token_T, batch = self._flat(token_ids_BT)
        streams = self.transformer.streams(self.weights, token_T, batch)
        streams = streams.view(*token_ids_BT.shape, *streams.shape[1:])[:, :-1].flatten(0, 1)
        next_token_T, short = self._flat(token_ids_BT[:, 1:])
        mtp_streams = self.transformer.mtp_streams(self.weights, streams, next_token_T, short)
        return self.transformer.mtp_logits(self.weights, mtp_streams).view(
            token_ids_BT.shape[0], -1, self.config.vocab_size
        )

    def _flat(self, token_ids_BT: Tensor) -> tuple[Tensor, SegmentBatch]:
        if token_ids_BT.dim() != 2 or token_ids_BT.shape[1] < 1:
            raise ModelInputError(f"token ids have shape {tuple(token_ids_BT.shape)}; give [B, T] with T >= 1")
        rows, length = token_ids_BT.shape
        return token_ids_BT.reshape(-1), packed_batch(self.config, [length] * rows)


def packed_batch(config: ModelConfig, lengths: Sequence[int]) -> SegmentBatch:
    """Return the batch of whole sequences that lie flat one after another, without a cache."""
    return SegmentBatch([Segment(start=0, length=length) for length in lengths], window=config.sliding_window)


def load_model(directory: str | Path, *, precision: Precision, device: str = "cpu") -> Model:
    """Load a checkpoint directory (config.json and safetensors in the official layout).

    Args:
        directory: holds config.json and one *.safetensors file or an index with shards. Plain BF16/FP32 tensors are
            accepted wherever the official file has quantised ones.
        precision: ``fp32`` (quantisation off) or ``native``.
        device: where its weights lie and its forward works: ``cpu``, ``cuda`` or ``cuda:0``.

    Raises:
        ModelError: naming the tensor, key or value at fault.

    Example: load_model("runs/sft/model", precision="native").logits(torch.tensor([[0, 5, 7]])).shape == (1, 3, V)
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelInputError(f"device is {device!r}; a model works on 'cpu', 'cuda' or 'cuda:N'. Set one of them.")
    number = int(device.partition(":")[2] or 0)
    if device != "cpu" and number >= torch.cuda.device_count():
        raise ModelInputError(
            f"device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices. Set device='cpu'."
        )
    Numerics(precision)  # refuses an unknown mode before files are read
    config = load_checkpoint_config(Path(directory))
    return Model(config, read_checkpoint(Path(directory), config), precision=precision, device=device)
