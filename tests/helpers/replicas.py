"""A tiny native-mode engine with a log in a temporary directory, and requests for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rollforward.model.config import ModelConfig
from rollforward.model.fingerprint import value_fingerprint, with_format
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.shapes import param_specs
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.kv_store import KvStore
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.environment import Environment
from rollforward.rollout.types import Request, RequestId, SamplingParams, ToolUse, request_seed
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from tests.helpers.tiny import random_params, tiny_config

PROCESS = WalConfig(level="process")


def packed_params(config: ModelConfig, seed: int = 1) -> dict[str, PackedTensor]:
    """Published bytes of random masters."""
    params = random_params(config, seed)
    return {spec.name: pack_published(spec, params[spec.name]) for spec in param_specs(config)}


def fingerprints(config: ModelConfig, packed: Mapping[str, PackedTensor]) -> dict[str, str]:
    """What an engine must show that holds these bytes' values."""
    return {
        spec.name: value_fingerprint(with_format(spec, packed[spec.name].format), unpack_published(packed[spec.name]))
        for spec in param_specs(config)
    }


def flip_bit(packed: Mapping[str, PackedTensor], name: str) -> dict[str, PackedTensor]:
    """The same bytes but for one bit of one tensor's payload, one that changes values that are used."""
    tensor = packed[name]
    data = tensor.data.clone()
    raw = data.view(torch.uint8).view(-1)
    element_bytes, bit = {"bf16": (2, 0x40), "fp32": (4, 1 << 31), "fp8": (1, 0x20), "mxfp4": (1, 0x04)}[tensor.format]
    start = raw.numel() // element_bytes // 2 * element_bytes
    raw[start + (bit.bit_length() - 1) // 8] ^= bit >> (bit.bit_length() - 1) // 8 * 8
    return {**packed, name: msgspec.structs.replace(tensor, data=data)}


def open_engine(
    directory: Path,
    packed: dict[str, PackedTensor],
    *,
    version: int = 1,
    model_config: ModelConfig | None = None,
    environment: Environment | None = None,
    kv_store: KvStore | None = None,
    **limits: Any,
) -> tuple[LocalEngine, WalWriter]:
    """A native engine, on the tiny preset unless told otherwise, with weights loaded, that counts its cache again after
    every step; `limits` are fields of RolloutConfig."""
    log, recovered = open_log(directory, stream="engine-0", config=PROCESS)
    config = RolloutConfig(wal=PROCESS, **limits)
    model_config = tiny_config() if model_config is None else model_config
    engine = LocalEngine(
        model_config,
        precision="native",
        config=config,
        log=log,
        recovered=recovered,
        environment=environment,
        kv_store=kv_store,
        checks_integrity=True,
    )
    engine.load_weights(version, packed)
    return engine, log


def make_requests(
    lengths: list[int],
    *,
    members: int = 1,
    max_new_tokens: int = 12,
    temperature: float = 1.0,
    version: int = 1,
    vocab_size: int | None = None,
    tools: ToolUse | None = None,
) -> list[Request]:
    """One prompt of random tokens per length, `members` requests each."""
    vocab_size = tiny_config().vocab_size if vocab_size is None else vocab_size
    requests: list[Request] = []
    for prompt, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 + prompt)
        ids = torch.randint(2, vocab_size, (length,), generator=generator).numpy().astype(np.int32)
        requests += [
            Request(
                id=RequestId(0, prompt, member),
                prompt_ids=ids,
                seed=request_seed(7, 0, prompt, member),
                sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature),
                policy_version=version,
                tools=tools,
            )
            for member in range(members)
        ]
    return requests
