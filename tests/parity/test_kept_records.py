"""Proves promise P3 where the engine recorded more than log-probs: with kept sets and replayed routes, over turns with
observations, through groups, batches and micro-batches, the trainer's log-probs are the engine's bit for bit.

The replay itself is proved in tests/model/test_routing.py; what the engine records in tests/rollout/engine.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import AdamW
from rollforward.model.trainer import LossPart, Trainer
from rollforward.rl.batch import PackedBatch, build_step_batch, concatenate
from rollforward.rl.algorithms import GRPO
from rollforward.rl.learner import TOKENIZER_NAME, Learner, LearnerSettings, scoring_batch
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.types import Completion, Group, KeptSets, Request, SamplingParams, ToolUse, Trajectory
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.ranks import join_alone
from tests.helpers.replicas import make_requests, open_engine
from tests.helpers.tiny import random_params, tiny_config

TOOLS = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
TEMPERATURE = 0.8
CUTS = [{"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.9, "top_k": 5}, {}]
CONFIG = msgspec.structs.replace(tiny_config(), vocab_size=12)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    join_alone(tmp_path)
    return Trainer(CONFIG, random_params(CONFIG), precision="native", optim=AdamW(lr=3e-2))


def _requests(version: int = 1) -> list[Request]:
    """Groups of two on prompts of several lengths; every member cuts the vocabulary in another way, or not at all."""
    requests = make_requests([1, 17, 33], members=4, version=version, vocab_size=CONFIG.vocab_size, tools=TOOLS)
    return [
        msgspec.structs.replace(
            request,
            id=msgspec.structs.replace(request.id, step=version),
            sampling=SamplingParams(max_new_tokens=12, temperature=TEMPERATURE, **CUTS[request.id.member]),
            record_routes=True,
        )
        for request in requests
    ]


def _generate(engine: LocalEngine, version: int = 1) -> list[tuple[Request, Completion]]:
    requests = _requests(version)
    return list(zip(requests, engine.generate(requests), strict=True))


def _trajectory(request: Request, completion: Completion) -> Trajectory:
    size = request.prompt_ids.size
    kept = completion.kept
    if kept is not None:
        kept = KeptSets(counts_T=np.append(np.zeros(size, np.int32), kept.counts_T), token_ids=kept.token_ids)
    return Trajectory(
        id=request.id,
        task="scripted",
        token_ids_T=np.append(request.prompt_ids, completion.token_ids),
        trained_mask_T=np.append(np.zeros(size, np.bool_), completion.sampled_mask),
        behavior_logprobs_T=np.append(np.zeros(size, np.float32), completion.behavior_logprobs),
        policy_version=request.policy_version,
        reward=float(request.id.member),
        stop_reason=completion.stop_reason,
        routes_TLK=completion.routes,
        kept=kept,
    )


def _packs(pairs: list[tuple[Request, Completion]], per_batch: int) -> list[PackedBatch]:
    by_prompt: dict[tuple[int, int], list[Trajectory]] = {}
    for request, completion in pairs:
        by_prompt.setdefault((request.id.step, request.id.prompt), []).append(_trajectory(request, completion))
    groups = [
        Group(step=step, prompt=prompt, trajectories=tuple(members)) for (step, prompt), members in by_prompt.items()
    ]
    parts = build_step_batch(groups, normalisation="token_mean").trajectories
    return [concatenate(parts[start : start + per_batch]) for start in range(0, len(parts), per_batch)]


def _train(trainer: Trainer, batches: list[ScoringBatch]) -> list[Tensor]:
    """Take one optimizer step and return the log-probs that its backward went through."""
    seen: list[Tensor] = []

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        seen.append(logprobs_T.detach().clone())
        return LossPart(loss=-logprobs_T.mean(), name=f"micro-batch {index}")

    trainer.train_step(batches, loss, temperature=TEMPERATURE)
    return seen


def _different(packs: list[PackedBatch], seen: list[Tensor]) -> int:
    """Trained tokens whose log-prob has not the engine's bits."""
    return sum(
        int((pack.behavior_logprobs_T.view(np.int32) != logprobs_T.numpy().view(np.int32))[pack.trained_mask_T].sum())
        for pack, logprobs_T in zip(packs, seen, strict=True)
    )


@pytest.mark.parametrize(("keep_routing", "per_batch"), [(True, 5), (False, 12)])
def test_training_log_probs_are_the_engines_over_kept_sets_and_replayed_routes(
    trainer: Trainer, tmp_path: Path, keep_routing: bool, per_batch: int
) -> None:
    environment = ScriptedEnvironment(CONFIG.vocab_size, order=3)
    engine, log = open_engine(
        tmp_path / "log", trainer.published(), model_config=CONFIG, environment=environment, max_batch_requests=5
    )
    with log:
        for version in (1, 2):
            if version > 1:
                engine.load_weights(version, trainer.published())
            packs = _packs(_generate(engine, version), per_batch)
            assert sum(int((pack.kept_counts_T > 0).sum()) for pack in packs if pack.kept_counts_T is not None) > 20
            seen = _train(trainer, [scoring_batch(pack, keep_routing=keep_routing) for pack in packs])
            assert _different(packs, seen) == 0
    assert any(turn > 1 for _, turn in environment.begun), "some sequence went on after an observation"


def test_without_the_kept_sets_the_log_probs_differ(trainer: Trainer, tmp_path: Path) -> None:
    environment = ScriptedEnvironment(CONFIG.vocab_size)
    engine, log = open_engine(tmp_path / "log", trainer.published(), model_config=CONFIG, environment=environment)
    with log:
        packs = _packs(_generate(engine), 12)
    whole = [replace(scoring_batch(pack), kept_counts_T=None, kept_ids=None) for pack in packs]
    assert _different(packs, _train(trainer, whole)) > 50


def test_after_an_update_a_recorded_route_still_holds_and_live_routers_choose_otherwise(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Two trainers take the same first step on the same samples and score them again: only one keeps the experts."""
    environment = ScriptedEnvironment(CONFIG.vocab_size)
    engine, log = open_engine(tmp_path / "log", trainer.published(), model_config=CONFIG, environment=environment)
    with log:
        packs = _packs(_generate(engine), 12)
    results = []
    for keep_routing in (True, False):
        twin = Trainer(CONFIG, random_params(CONFIG), precision="native", optim=AdamW(lr=3e-2))
        batches = [scoring_batch(pack, keep_routing=keep_routing) for pack in packs]
        assert _different(packs, _train(twin, batches)) == 0
        results.append((twin.masters(), _train(twin, batches)))
    (kept_masters, kept), (live_masters, live) = results
    for name, master in kept_masters.items():
        assert torch.equal(master, live_masters[name]), name
    assert any(not torch.equal(one, other) for one, other in zip(kept, live, strict=True))


def test_the_reference_chooses_its_own_routes_over_the_same_kept_sets(tmp_path: Path) -> None:
    join_alone(tmp_path)
    write_checkpoint(
        tmp_path / "model", CONFIG, random_params(CONFIG), precision="fp32", extra_files={TOKENIZER_NAME: b"unread"}
    )
    settings = LearnerSettings(
        model_dir=str(tmp_path / "model"),
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=TEMPERATURE,
        threads=torch.get_num_threads(),
    )
    learner = Learner(settings)
    size, layers, slots = 12, CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok
    plain = ScoringBatch(
        token_ids_T=torch.arange(size),
        sequence_lengths=(size,),
        target_ids_T=torch.arange(size),
        scored_mask_T=torch.ones(size, dtype=torch.bool),
    )
    forced = replace(plain, routes_TLK=torch.arange(slots).expand(size, layers, slots))
    pairs = torch.stack((torch.arange(size), torch.arange(size).flip(0)), 1).sort(1).values.flatten()
    kept = replace(forced, kept_counts_T=torch.full((size,), 2), kept_ids=pairs)
    alone, with_routes, over_sets = (learner._reference_logprobs(batch) for batch in (plain, forced, kept))
    assert alone is not None
    assert with_routes is not None
    assert over_sets is not None
    assert torch.equal(alone, with_routes)
    assert (over_sets > alone).all()
