"""An independent DeepSeek-V4: transformers' own modules carrying our weights (quantisation off, no Hadamard)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollforward.model.config import ModelConfig, config_json

_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.w2.weight": "mlp.experts.down_proj",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
_TRUNK_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def _block_state(params: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    local = {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}
    state = {_BLOCK_NAMES[name]: tensor for name, tensor in local.items() if name in _BLOCK_NAMES}
    state["mlp.experts.gate_up_proj"] = torch.cat((local["ffn.experts.w1.weight"], local["ffn.experts.w3.weight"]), 1)
    return state


class Oracle:
    """transformers' model and an MTP module built from its layer classes, evaluated without gradients."""

    def __init__(self, config: ModelConfig, params: dict[str, Tensor]) -> None:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

        raw: dict[str, Any] = config_json(config)
        raw.pop("quantization_config")
        raw.pop("torch_dtype")
        # transformers reads layer kinds from the released ratios and the real ones from compress_rates.
        released = {"window": 0, "csa": 4, "hca": 128}
        raw["compress_ratios"] = [released[config.layer_kind(i)] for i in range(config.num_layers_with_mtp)]
        rates = config.compress_rates
        raw["compress_rates"] = {
            "compressed_sparse_attention": rates.compressed_sparse_attention,
            "heavily_compressed_attention": rates.heavily_compressed_attention,
        }
        self.config = DeepseekV4Config(**raw)
        self.model = DeepseekV4ForCausalLM(self.config).eval().float()
        state = {theirs: params[ours] for ours, theirs in _TRUNK_NAMES.items()}
        for layer in range(config.num_hidden_layers):
            block = _block_state(params, f"layers.{layer}.")
            state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert all("inv_freq" in name for name in missing), missing
        self.modeling = modeling
        self._build_mtp(config, params)

    def _build_mtp(self, config: ModelConfig, params: dict[str, Tensor]) -> None:
        mtp_config = copy.deepcopy(self.config)
        mtp_config.layer_types = [*self.config.layer_types, "sliding_attention"]
        mtp_config.mlp_layer_types = [*self.config.mlp_layer_types, "moe"]
        mtp_config.num_hidden_layers = config.num_hidden_layers + 1
        self._mtp_config = mtp_config
        self._mtp_block = self.modeling.DeepseekV4DecoderLayer(mtp_config, config.num_hidden_layers).eval()
        self._mtp_block.load_state_dict(_block_state(params, "mtp.0."), strict=True)
        self._mtp_head = self.modeling.DeepseekV4HyperHead(mtp_config).eval()
        self._mtp_head.load_state_dict(
            {f"hc_{part}": params[f"mtp.0.hc_head_{part}"] for part in ("fn", "base", "scale")}
        )
        self.mtp = {name: params[f"mtp.0.{name}.weight"] for name in ("enorm", "hnorm", "norm", "e_proj", "h_proj")}

    @torch.no_grad()
    def logits(self, token_ids_BT: Tensor) -> Tensor:
        """Logits of whole sequences, [B, T, V]."""
        return self.model(token_ids_BT, use_cache=False).logits

    def gradients(self, token_ids_BT: Tensor, cotangent_BTV: Tensor) -> dict[str, Tensor]:
        """Gradients of sum(logits * cotangent) by canonical name, of every trunk tensor that gets one."""
        self.model.zero_grad()
        (self.model(token_ids_BT, use_cache=False).logits * cotangent_BTV).sum().backward()
        theirs = {name: tensor.grad for name, tensor in self.model.named_parameters() if tensor.grad is not None}
        self.model.zero_grad()
        ours = {name: theirs[other] for name, other in _TRUNK_NAMES.items()}
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            ours |= {
                f"layers.{layer}.{name}": theirs[prefix + other]
                for name, other in _BLOCK_NAMES.items()
                if prefix + other in theirs
            }
            w1, w3 = theirs[prefix + "mlp.experts.gate_up_proj"].chunk(2, dim=1)
            ours |= {f"layers.{layer}.ffn.experts.w1.weight": w1, f"layers.{layer}.ffn.experts.w3.weight": w3}
        return ours

    @torch.no_grad()
    def streams(self, token_ids_BT: Tensor) -> Tensor:
        """Residual streams after the last block, [B, T, M, D]."""
        captured: dict[str, Tensor] = {}
        hook = self.model.model.layers[-1].register_forward_hook(lambda *args: captured.__setitem__("out", args[2]))
        self.model(token_ids_BT, use_cache=False)
        hook.remove()
        return captured["out"]

    @torch.no_grad()
    def mtp_logits(self, token_ids_BT: Tensor) -> Tensor:
        """MTP logits, [B, T - 1, V]."""
        from transformers.masking_utils import create_sliding_window_causal_mask

        streams = self.streams(token_ids_BT)[:, :-1]
        next_ids = token_ids_BT[:, 1:]
        eps = self.config.rms_norm_eps

        def norm(x: Tensor, name: str) -> Tensor:
            return functional.rms_norm(x, (x.shape[-1],), self.mtp[name], eps)

        embedded = norm(self.model.model.embed_tokens(next_ids), "enorm") @ self.mtp["e_proj"].T
        x = embedded.unsqueeze(2) + norm(streams, "hnorm") @ self.mtp["h_proj"].T
        position = torch.arange(x.shape[1])[None]
        rotary = self.model.model.rotary_emb
        tables = {kind: rotary(x, position_ids=position, layer_type=kind) for kind in ("main", "compress")}
        mask = create_sliding_window_causal_mask(
            config=self._mtp_config,
            inputs_embeds=x[:, :, 0],
            attention_mask=None,
            past_key_values=None,
            position_ids=position,
        )
        y = self._mtp_block(
            x, input_ids=next_ids, position_embeddings=tables, position_ids=position, attention_mask=mask
        )
        return norm(self._mtp_head(y), "norm") @ self.model.lm_head.weight.T

    def layer(self, index: int) -> nn.Module:
        """One decoder layer, for layer-wise comparison."""
        return self.model.model.layers[index]
