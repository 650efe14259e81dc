"""The models that have a name, as data: fields of `config.json` that differ from `ModelConfig`'s defaults.

What does not live here: the fields and their rules (`config.py`).

**mini** is Flash with smaller numbers, to train and serve on one GPU with every mechanism and with the kernels that
Flash needs. What a kernel is built around stays as in Flash; only what it loops over shrinks.

kept, because a kernel's tile or a cache format has the number in it:

- head_dim 512 = 448 + 64 rotary: the 584-byte cache entry, and two halves of 256 columns in attention.
- num_attention_heads 64: the heads of one query are the rows of an attention tile, and a tile has at least 64 (public
  decode kernels know 64 and 128). o_groups 8: eight heads a group, as in both released models, which makes 4096
  columns of a group's input.
- index_n_heads 64 x index_head_dim 128: again one tile a query; keys of 68 bytes. index_topk 512: with the window 640
  keys, ten tiles of 64. hc_mult 4 and 20 rounds (the defaults): a mix of 24 rows.
- sliding_window 128, ratios 4 and 128, three hash layers, six experts a token, rotary and YaRN numbers: the mechanisms.
- vocab_size 129280: the official tokenizer; 505 tiles of 256.

shrunk, in multiples of 128 (the FP8 block, and an activation's group), so that no block is ragged:

- hidden_size 1024: 4 x 1024 = 4096 is two of the fixed splits of 2048 in the mix's projection; the vocabulary's two
  matrices, which nothing can shrink otherwise, are a sixth of the model.
- q_lora_rank 512, o_lora_rank 256: half and a quarter of Flash's. Projections from and to 64 x 512 = 32768 columns are
  what attention weighs.
- n_routed_experts 64 x moe_intermediate_size 512: six of 64 is the least sparsity at which the routing is still a
  choice; 64 columns are one tile of the gate. An expert is 3 x 512 x 1024, and all of them two thirds of the model.
- num_hidden_layers 9 = two window layers, three pairs of CSA and HCA, one CSA: Flash's schedule with three pairs where
  it has twenty. Three layers are hash-routed, six by score, MTP is the tenth.
"""

from typing import Any, Literal

PresetName = Literal["flash", "pro", "mini", "tiny"]
"""Models that `preset` knows."""

_RELEASED: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
}
"""What Flash and Pro share beyond the defaults."""

_FLASH: dict[str, Any] = _RELEASED | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "index_topk": 512,
    "routed_scaling_factor": 1.5,
    "compress_ratios": (0, 0, *(4, 128) * 20, 4, 0),
}

PRESETS: dict[PresetName, dict[str, Any]] = {
    "flash": _FLASH,
    "pro": _RELEASED
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "index_topk": 1024,
        "routed_scaling_factor": 2.5,
        "compress_ratios": (128, 128, *(4, 128) * 29, 4, 0),
    },
    "mini": _FLASH
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 9,
        "q_lora_rank": 512,
        "o_lora_rank": 256,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "compress_ratios": (0, 0, *(4, 128) * 3, 4, 0),
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 80,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        "compress_ratios": (0, 4, 32, 4, 0),
        "compress_rates": {"heavily_compressed_attention": 32},
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 256},
        "max_position_embeddings": 2048,
    },
}
"""By name: flash and pro are the released models, mini is Flash for one GPU, tiny learns on two CPU cores."""
