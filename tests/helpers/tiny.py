"""Small models for tests: random weights in which nothing is trivial, and configs that reach every mechanism."""

import math

import torch
from torch import Tensor

from rollforward.model.config import CompressRates, ModelConfig, RopeScaling, preset
from rollforward.model.shapes import param_specs


def random_params(config: ModelConfig, seed: int = 1) -> dict[str, Tensor]:
    """Return canonical fp32 tensors with non-trivial norms, sinks, biases, mixing terms and hash tables."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    params = {}
    for spec in param_specs(config):
        name, shape = spec.name, spec.shape
        if name.endswith("tid2eid"):
            rows = [torch.randperm(config.n_routed_experts, generator=generator)[: shape[1]] for _ in range(shape[0])]
            params[name] = torch.stack(rows)
        elif "norm" in name:
            params[name] = 1 + 0.1 * normal(shape)
        elif name.endswith("gate.bias"):
            params[name] = 0.2 * normal(shape)
        elif name.endswith(("attn_sink", "ape", "_base")):
            params[name] = normal(shape)
        elif name.endswith("_scale"):
            params[name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            params[name] = normal(shape) / math.sqrt(shape[-1])
    return params


def oracle_config(kind: str = "flash") -> ModelConfig:
    """Return one of three small configs: flash-like, pro-like (HCA first), or with other ratios."""
    ratios = {
        "flash": (0, 0, 4, 128, 4, 128, 0),
        "pro": (128, 128, 4, 128, 4, 0),
        "other": (0, 6, 40, 6, 0),
    }[kind]
    rates = CompressRates()
    if kind == "other":
        rates = CompressRates(compressed_sparse_attention=6, heavily_compressed_attention=40)
    return ModelConfig(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=len(ratios) - 1,
        num_attention_heads=8 if kind != "other" else 6,
        head_dim=128 if kind != "other" else 96,
        qk_rope_head_dim=64 if kind != "other" else 32,
        q_lora_rank=48,
        num_experts_per_tok=2,
        n_routed_experts=8,
        num_hash_layers={"flash": 3, "pro": 3, "other": 1}[kind],
        routed_scaling_factor=1.5,
        compress_ratios=ratios,
        compress_rates=rates,
        sliding_window={"flash": 16, "pro": 128, "other": 10}[kind],
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=8,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=256),
    )


def tiny_config() -> ModelConfig:
    """Return the shipped tiny preset."""
    return preset("tiny")


def random_tokens(config: ModelConfig, shape: tuple[int, ...], seed: int = 3) -> Tensor:
    """Return token ids in [2, vocab_size), int64."""
    return torch.randint(2, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
