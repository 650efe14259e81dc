"""Fresh weights for training from nothing, the same bits for the same config and seed on every machine.

Matrices are normal with standard deviation 1/sqrt(fan in), which suits models of any width that start without a
pre-training run; the embedding uses initializer_range. Streams start as nearly independent copies: each
hyper-connection keeps a stream to itself and gives every sublayer an equal share of all of them.
"""

import math

import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.shapes import TensorSpec, param_specs

_STREAM_IDENTITY_LOGIT = 3.0
_MIX_SCALE = 0.1


def fresh_params(config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """Return canonical FP32 masters (int64 hash tables) of an untrained model.

    Args:
        config: the model.
        seed: chooses every draw; tensors are filled in the order of ``param_specs``.
    """
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: _fresh(spec, config, generator) for spec in param_specs(config)}


def _fresh(spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    name, shape = spec.name, spec.shape
    if name.endswith("tid2eid"):
        order = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(dim=1, stable=True)
        return order[:, : shape[1]].contiguous()
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("_base"):
        return _mix_base(shape[0], config.hc_mult)
    if name.endswith("_scale"):
        return torch.full(shape, _MIX_SCALE)
    if name.endswith(("attn_sink", "ape", "gate.bias")):
        return torch.zeros(shape)
    normal = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return normal * config.initializer_range
    return normal / math.sqrt(shape[-1])


def _mix_base(rows: int, num_streams: int) -> Tensor:
    """Gates at one half and one; the mixing matrix near the identity (absent in the head, which has gates only)."""
    base = torch.zeros(rows)
    if rows > num_streams:
        base[2 * num_streams :] = (torch.eye(num_streams) * _STREAM_IDENTITY_LOGIT).flatten()
    return base
