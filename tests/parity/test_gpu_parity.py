"""Proves promise P3 with the tile forms on a GPU: the log-probs that an engine logs are those of the training forward,
bit for bit, whatever was batched, cut or cached, and at every temperature; in a reference form of either they are not,
nor after one bit of a weight of the engine, or of what it logged, was flipped.

The training forward is `target_logprobs` with autograd, which the trainer calls; the trainer's sums and optimizer are
the CPU's business and need DeepSpeed.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.mhc import mix_sweep
from rollforward.model.backends import choose_kernels
from rollforward.model.config import ModelConfig, preset
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.transformer import Transformer
from rollforward.model.weights import build_weights, published_tensors
from rollforward.rollout.types import Completion, Request, SamplingParams
from tests.helpers.bits import probs_diff
from tests.helpers.replicas import flip_bit, make_requests, open_engine, packed_params
from tests.helpers.tiny import random_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

TILE = KernelBackends(mix="tile", linear_logprob="tile")
CONFIG: ModelConfig = msgspec.structs.replace(preset("tiny"), hidden_size=512, moe_intermediate_size=128)
SAMPLINGS = [
    SamplingParams(max_new_tokens=6, temperature=1.0),
    SamplingParams(max_new_tokens=6, temperature=0.7, top_p=0.8),
    SamplingParams(max_new_tokens=6, temperature=0.0),
    SamplingParams(max_new_tokens=6, temperature=0.7, top_k=5),
]


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Any:
    programs = mix_sweep.programs(CONFIG.hidden_size, CONFIG.hc_sinkhorn_iters)
    dispatch.warm([*programs, *vocab_sweep.programs(CONFIG.vocab_size, CONFIG.hidden_size)], jobs=16)
    yield
    dispatch.choose({})


def _requests() -> list[Request]:
    requests = make_requests([1, 17, 33, 66], members=2, vocab_size=CONFIG.vocab_size)
    return [
        msgspec.structs.replace(request, sampling=SAMPLINGS[index % len(SAMPLINGS)])
        for index, request in enumerate(requests)
    ]


def _batch(pairs: list[tuple[Request, Completion]]) -> ScoringBatch:
    tokens = [np.concatenate((request.prompt_ids, completion.token_ids)) for request, completion in pairs]
    flat = torch.tensor(np.concatenate(tokens), dtype=torch.int64)
    scored, counts = torch.zeros(len(flat), dtype=torch.bool), torch.zeros(len(flat), dtype=torch.int64)
    kept: list[np.ndarray] = []
    offset = 0
    for (request, completion), ids in zip(pairs, tokens, strict=True):
        rows = slice(offset + request.prompt_ids.size - 1, offset + ids.size - 1)
        scored[rows] = True
        if completion.kept is not None:
            counts[rows] = torch.tensor(completion.kept.counts_T, dtype=torch.int64)
            kept.append(completion.kept.token_ids)
        offset += ids.size
    return ScoringBatch(
        token_ids_T=flat,
        sequence_lengths=tuple(ids.size for ids in tokens),
        target_ids_T=flat.roll(-1),
        scored_mask_T=scored,
        kept_counts_T=counts,
        kept_ids=torch.tensor(np.concatenate([np.zeros(0, np.int32), *kept]), dtype=torch.int64),
    )


def _temperature(request: Request) -> float:
    """A greedy token has its log-prob at 1."""
    return request.sampling.temperature or 1.0


def _trained(pairs: list[tuple[Request, Completion]], per_batch: int) -> list[np.ndarray]:
    """Log-probs of the completions, each of them under the temperature that it was drawn at."""
    leaves = {name: one.requires_grad_(one.is_floating_point()) for name, one in random_params(CONFIG).items()}
    weights, transformer = build_weights(CONFIG, published_tensors(CONFIG, leaves)), Transformer(CONFIG, "native")
    found: list[np.ndarray] = []
    for start in range(0, len(pairs), per_batch):
        group = pairs[start : start + per_batch]
        batch, of_temperature = _batch(group), {}
        for temperature in {_temperature(request) for request, _ in group}:
            logprob_T, _ = target_logprobs(transformer, weights, batch, temperature=temperature)
            assert logprob_T.requires_grad
            of_temperature[temperature] = logprob_T.detach().numpy()
        end = 0
        for (request, completion), length in zip(group, batch.sequence_lengths, strict=True):
            end += length
            found.append(of_temperature[_temperature(request)][end - 1 - completion.token_ids.size : end - 1])
    return found


def test_training_log_probs_are_the_engines(tmp_path: Path) -> None:
    choose_kernels(TILE, "a test")
    engine, log = open_engine(
        tmp_path / "log",
        packed_params(CONFIG),
        model_config=CONFIG,
        max_batch_requests=3,
        prefill_chunk_tokens=29,
    )
    with log:
        requests = _requests()
        pairs = list(zip(requests, engine.generate(requests), strict=True))
        token_ids = [int(token) for token in pairs[-1][0].prompt_ids]
        scored = engine.score(token_ids)
    for per_batch in (1, 8):
        for (request, completion), ours in zip(pairs, _trained(pairs, per_batch), strict=True):
            assert ours.tobytes() == completion.behavior_logprobs.tobytes(), str(request.id)
    choose_kernels(KernelBackends(mix="tile"), "a test")
    other = _trained(pairs, 8)
    assert any(ours.tobytes() != one.behavior_logprobs.tobytes() for (_, one), ours in zip(pairs, other, strict=True))
    # The fixed prompt, scored alone: what a replica's acknowledgement is compared with.
    choose_kernels(TILE, "a test")
    assert scored.tobytes() == _scored_alone(packed_params(CONFIG), token_ids).tobytes()


def _scored_alone(packed: dict[str, PackedTensor], token_ids: list[int]) -> np.ndarray:
    """Log-probs of all tokens but the first under published bytes, by the forward that the trainer has."""
    weights = build_weights(CONFIG, {name: unpack_published(one) for name, one in packed.items()})
    token_T = torch.tensor(token_ids)
    mask_T = torch.ones(len(token_ids), dtype=torch.bool)
    mask_T[-1] = False
    batch = ScoringBatch(
        token_ids_T=token_T, sequence_lengths=(len(token_ids),), target_ids_T=token_T.roll(-1), scored_mask_T=mask_T
    )
    logprob_T, _ = target_logprobs(Transformer(CONFIG, "native"), weights, batch, temperature=1.0)
    return logprob_T[:-1].numpy()


def _probs_diff_max(pairs: list[tuple[Request, Completion]], trained: list[np.ndarray]) -> float:
    """The largest difference of a token's probabilities."""
    return max(
        max(probs_diff(ours, completion.behavior_logprobs))
        for (_, completion), ours in zip(pairs, trained, strict=True)
    )


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.hc_attn_fn",
        "layers.1.attn.wkv.weight",
        "layers.2.hc_ffn_fn",
        "hc_head_fn",
        "norm.weight",
        "head.weight",
    ],
)
def test_one_flipped_bit_of_an_engine_weight_is_seen(tmp_path: Path, name: str) -> None:
    """In what the tile forms read of it: a projection's two halves, a head that is rounded once."""
    choose_kernels(TILE, "a test")
    requests, packed = _requests()[:4], packed_params(CONFIG)
    engine, log = open_engine(tmp_path / "log", flip_bit(packed, name), model_config=CONFIG)
    with log:
        pairs = list(zip(requests, engine.generate(requests), strict=True))
        assert _probs_diff_max(pairs, _trained(pairs, 8)) > 0.0
        # The right bytes, written where the flipped ones were.
        engine.load_weights(2, packed)
        again = [
            msgspec.structs.replace(one, id=msgspec.structs.replace(one.id, step=1), policy_version=2)
            for one in requests
        ]
        pairs = list(zip(again, engine.generate(again), strict=True))
    assert _probs_diff_max(pairs, _trained(pairs, 8)) == 0.0


def test_a_bit_that_flips_in_an_engines_memory_is_seen(tmp_path: Path) -> None:
    """Also in the head, of which the device has kept a copy since the tokens before."""
    choose_kernels(TILE, "a test")
    packed = packed_params(CONFIG)
    token_ids = [int(token) for token in _requests()[-1].prompt_ids]
    engine, log = open_engine(tmp_path / "log", packed, model_config=CONFIG)
    with log:
        expected = engine.score(token_ids)
        assert expected.tobytes() == _scored_alone(packed, token_ids).tobytes()
        for name in ("head.weight", "layers.0.hc_attn_fn"):
            values = engine._forward.values[name].view(torch.int32).view(-1)
            values[len(values) // 2] ^= 1 << 22
            assert engine.score(token_ids).tobytes() != expected.tobytes(), name
            values[len(values) // 2] ^= 1 << 22
            assert engine.score(token_ids).tobytes() == expected.tobytes(), name


def test_one_flipped_bit_of_a_logged_log_prob_is_seen(tmp_path: Path) -> None:
    choose_kernels(TILE, "a test")
    engine, log = open_engine(tmp_path / "log", packed_params(CONFIG), model_config=CONFIG)
    with log:
        requests = _requests()
        pairs = list(zip(requests, engine.generate(requests), strict=True))
    trained = _trained(pairs, 8)
    assert _probs_diff_max(pairs, trained) == 0.0
    for index, (_, completion) in enumerate(pairs):
        for position in range(completion.token_ids.size):
            other = completion.behavior_logprobs.copy()
            other.view(np.int32)[position] ^= 1
            flipped = list(pairs)
            flipped[index] = (pairs[index][0], msgspec.structs.replace(completion, behavior_logprobs=other))
            assert _probs_diff_max(flipped, trained) > 0.0
