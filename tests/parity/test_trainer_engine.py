"""Proves promises P3 and P4 on the CPU: the log-probs of the training forward that backward uses equal the engine's,
bit
for bit, because both hold the same published bytes; one flipped bit of one engine weight breaks the equality and is
named.

The engine batches, pages and chunks as it likes; the trainer packs whole sequences with autograd on.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import AdamW
from rollforward.model.trainer import LossPart, Trainer
from rollforward.rl.learner import publish_trained
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.errors import WeightsError
from rollforward.rollout.replica import Replica
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.weights import (
    WeightsAck,
    check_acknowledgement,
    publish_weights,
    read_published,
    version_directory,
)
from tests.helpers.bits import probs_diff
from tests.helpers.ranks import join_alone
from tests.helpers.replicas import PROCESS, fingerprints, flip_bit, make_requests, open_engine
from tests.helpers.tiny import random_params, tiny_config

LENGTHS = [1, 5, 17, 33, 66]
FLIPPED = [
    "embed.weight",
    "head.weight",
    "layers.0.attn.wq_a.weight",
    "layers.1.attn.compressor.wkv.weight",
    "layers.2.attn.compressor.ape",
    "layers.3.ffn.experts.w2.weight",
    "layers.0.hc_attn_fn",
    "layers.2.ffn.gate.bias",
    "norm.weight",
]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    join_alone(tmp_path)
    config = tiny_config()
    return Trainer(config, random_params(config), precision="native", optim=AdamW(lr=1e-2))


def _score(trainer: Trainer, pairs: list[tuple[Request, Completion]], per_batch: int) -> dict[str, np.ndarray]:
    """Take one optimizer step on the pairs and return the log-probs that its backward went through, by request."""
    batches, spans = [], []
    for start in range(0, len(pairs), per_batch):
        group = pairs[start : start + per_batch]
        tokens = [np.concatenate((request.prompt_ids, completion.token_ids)) for request, completion in group]
        flat = torch.tensor(np.concatenate(tokens), dtype=torch.int64)
        scored = torch.zeros(flat.shape, dtype=torch.bool)
        offset = 0
        for (request, completion), ids in zip(group, tokens, strict=True):
            first = offset + request.prompt_ids.size - 1
            scored[first : first + completion.token_ids.size] = True
            spans.append((str(request.id), len(batches), first, first + completion.token_ids.size))
            offset += ids.size
        batches.append(
            ScoringBatch(
                token_ids_T=flat,
                sequence_lengths=tuple(ids.size for ids in tokens),
                target_ids_T=flat.roll(-1),
                scored_mask_T=scored,
            )
        )
    seen: list[Tensor] = []

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        assert logprobs_T.requires_grad
        seen.append(logprobs_T.detach().clone())
        return LossPart(loss=-logprobs_T.mean(), name=f"micro-batch {index}")

    trainer.train_step(batches, loss)
    return {name: seen[batch][first:last].numpy() for name, batch, first, last in spans}


def _generate(engine: LocalEngine, version: int, members: int) -> list[tuple[Request, Completion]]:
    requests = make_requests(LENGTHS, members=members, version=version)
    renamed = [msgspec.structs.replace(r, id=msgspec.structs.replace(r.id, step=version)) for r in requests]
    return list(zip(renamed, engine.generate(renamed), strict=True))


@pytest.mark.parametrize("per_batch", [1, 3, 100])
def test_training_log_probs_are_the_engines_over_several_versions(
    trainer: Trainer, tmp_path: Path, per_batch: int
) -> None:
    """Three versions, an optimizer step between them, so that equality is not an accident of the first weights."""
    engine, log = open_engine(tmp_path / "log", trainer.published(), max_batch_requests=4, prefill_chunk_tokens=29)
    with log:
        for version in (1, 2, 3):
            if version > 1:
                engine.load_weights(version, trainer.published())
            pairs = _generate(engine, version, members=2)
            scored = _score(trainer, pairs, per_batch)
            for request, completion in pairs:
                assert scored[str(request.id)].tobytes() == completion.behavior_logprobs.tobytes(), str(request.id)


@pytest.mark.parametrize("name", FLIPPED)
def test_one_flipped_bit_of_an_engine_weight_is_seen_and_named(trainer: Trainer, tmp_path: Path, name: str) -> None:
    config = tiny_config()
    manifest = publish_weights(tmp_path / "weights", 1, config, trainer.published())
    flipped = flip_bit(trainer.published(), name)
    ack = WeightsAck(replica="engine-0", policy_version=1, tensors=fingerprints(config, flipped))
    with pytest.raises(WeightsError, match=rf"engine-0 does not hold the published {name} \(version 1\)"):
        check_acknowledgement(manifest, ack)
    engine, log = open_engine(tmp_path / "log", flipped)
    with log:
        pairs = _generate(engine, 1, members=3)
    scored = _score(trainer, pairs, per_batch=100)
    differences = [
        max(probs_diff(scored[str(request.id)], completion.behavior_logprobs)) for request, completion in pairs
    ]
    assert max(differences) > 0.0


def test_what_is_published_is_what_is_read_and_acknowledged(trainer: Trainer, tmp_path: Path) -> None:
    config = tiny_config()
    root = tmp_path / "weights"
    for version in (0, 1):
        manifest = publish_weights(root, version, config, trainer.published(), extra_files={"tokenizer.json": b"{}"})
    assert [path.name for path in sorted(root.iterdir())] == ["v000000", "v000001"]
    read, read_config, packed = read_published(version_directory(root, 1))
    assert (read, read_config) == (manifest, config)
    check_acknowledgement(
        manifest, WeightsAck(replica="engine-0", policy_version=1, tensors=fingerprints(config, packed))
    )
    with pytest.raises(WeightsError, match="holds version 0, published is 1"):
        check_acknowledgement(
            manifest, WeightsAck(replica="engine-0", policy_version=0, tensors=fingerprints(config, packed))
        )
    partial = {
        name: value for name, value in fingerprints(config, packed).items() if name != "layers.0.ffn.gate.tid2eid"
    }
    with pytest.raises(WeightsError, match=r"layers\.0\.ffn\.gate\.tid2eid"):
        check_acknowledgement(manifest, WeightsAck(replica="engine-0", policy_version=1, tensors=partial))


def test_a_published_directory_without_its_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "v000000").mkdir()
    with pytest.raises(WeightsError, match=r"v000000 holds no readable manifest\.json"):
        read_published(tmp_path / "v000000")


def test_the_fixed_prompt_tells_other_arithmetic_from_other_weights(trainer: Trainer, tmp_path: Path) -> None:
    """The publisher's own forward scores it in one run; engines decode it. One engine has the trainer's number formats,
    the other computes activations in FP32 with the very same weights."""
    manifest = publish_trained(tmp_path / "weights", 1, trainer, {})
    assert manifest.canary is not None
    config = tiny_config()
    assert len(manifest.canary.token_ids) >= config.sliding_window + max(config.compress_ratios)
    directory = version_directory(tmp_path / "weights", 1)
    acks: dict[str, WeightsAck] = {}
    for precision in ("native", "fp32"):
        replica = Replica(
            f"engine-{precision}",
            tmp_path / precision,
            config,
            precision=precision,
            config=RolloutConfig(threads=1, wal=PROCESS),
        )
        acks[precision] = replica.load_weights(directory)
        replica.close()
    check_acknowledgement(manifest, acks["native"])
    assert acks["fp32"].tensors == acks["native"].tensors
    with pytest.raises(WeightsError, match=r"engine-fp32: the weights are the same, arithmetic is not: the log"):
        check_acknowledgement(manifest, acks["fp32"])
    silent = msgspec.structs.replace(acks["native"], canary=())
    with pytest.raises(WeightsError, match="arithmetic is not"):
        check_acknowledgement(manifest, silent)
    other = msgspec.structs.replace(acks["fp32"], tensors={**acks["fp32"].tensors, "norm.weight": "0"})
    with pytest.raises(WeightsError, match=r"does not hold the published norm\.weight"):
        check_acknowledgement(manifest, other)
