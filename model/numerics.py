"""Where a forward quantises: the two modes of the model.

``fp32`` is the reference mode (no quantiser anywhere), to be compared with other implementations. ``native`` applies
the formats of the released model: GEMM inputs in groups of 128 along K where the weight is FP4 or FP8, the KV cache in
groups of 64 on the plain dims (rotary dims BF16), indexer queries and keys in FP4 after a Hadamard rotation with BF16
scores, and the vector that the head reads in BF16. Gradients pass straight through. Learner and engine share this file,
so they quantise alike (docs/design.md, P4).

Here: activations. Weights are published in ``precision.py``.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from rollforward.kernels.quant.bf16 import fake_quant_bf16
from rollforward.kernels.quant.formats import FP8_BLOCK, KV_GROUP
from rollforward.kernels.quant.fp4_group import fake_quant_fp4_group
from rollforward.kernels.quant.fp8 import fake_quant_fp8_group
from rollforward.kernels.quant.hadamard import hadamard
from rollforward.model.errors import ModelInputError
from rollforward.model.train_config import Precision


@dataclass(frozen=True)
class Numerics:
    """The quantisers of one mode; every method is the identity in fp32 mode and straight-through in native mode."""

    precision: Precision

    def __post_init__(self) -> None:
        """Refuse a mode that does not exist.

        Raises:
            ModelInputError: precision is neither ``fp32`` nor ``native``.
        """
        if self.precision not in get_args(Precision):
            raise ModelInputError(
                f"precision is {self.precision!r}; the modes are 'fp32' and 'native'. Use one of them."
            )

    def gemm_input(self, x_TK: Tensor) -> Tensor:
        """Quantise the input of a product with an FP4 or FP8 weight: E4M3, groups of 128 along K. [T, K]."""
        return fake_quant_fp8_group(x_TK, group=FP8_BLOCK) if self.precision == "native" else x_TK

    def kv_entry(self, kv_Td: Tensor, rotary_dim: int) -> Tensor:
        """Quantise window keys or compressed entries after RoPE: plain dims E4M3 by 64, rotary dims BF16. [T, d]."""
        if self.precision == "fp32":
            return kv_Td
        plain, rotary = kv_Td[:, :-rotary_dim], kv_Td[:, -rotary_dim:]
        return torch.cat((fake_quant_fp8_group(plain, group=KV_GROUP), fake_quant_bf16(rotary)), dim=-1)

    def head_input(self, hidden_TD: Tensor) -> Tensor:
        """Round the vector that the head reads to BF16, so that a BF16 copy of it loses nothing. [T, D]."""
        return fake_quant_bf16(hidden_TD) if self.precision == "native" else hidden_TD

    def index_vector(self, x: Tensor) -> Tensor:
        """Rotate an indexer query or key by the Hadamard matrix and quantise it to FP4 by 32. [..., h]."""
        return fake_quant_fp4_group(hadamard(x)) if self.precision == "native" else x

    def index_score(self, score_GQS: Tensor) -> Tensor:
        """Round index scores to BF16."""
        return fake_quant_bf16(score_GQS) if self.precision == "native" else score_GQS
