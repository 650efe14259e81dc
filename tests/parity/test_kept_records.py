"""Proves promise P3 where the engine recorded more than log-probs: with kept sets and replayed routes, over turns with
observations, segments, preemptions, groups, batches and micro-batches, the trainer's log-probs are the engine's bit for
bit.

The replay itself is proved in tests/model/test_routing.py; what the engine records in tests/rollout/engine.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import AdamW
from rollforward.model.trainer import LossPart, Trainer
from rollforward.rl.algorithms import GRPO
from rollforward.rl.batch import PackedBatch, build_step_batch, concatenate
from rollforward.rl.learner import TOKENIZER_NAME, Learner, LearnerSettings, scoring_batch
from rollforward.rl.packing import plan_micro_batches
from rollforward.rl.samples import open_step, write_step
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.types import Completion, Group, KeptSets, Request, SamplingParams, Segment, ToolUse, Trajectory
from tests.helpers.crashes import CrashError, crash_at
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
        kernels=KernelBackends(),
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


def _rewritten_requests() -> list[Request]:
    """Requests whose context was rewritten: other prompts under numbers of their own, as a second call would ask."""
    return [
        msgspec.structs.replace(
            request,
            id=msgspec.structs.replace(request.id, prompt=10 + request.id.prompt),
            prompt_ids=np.append(request.prompt_ids[::-1], request.prompt_ids[:1] * 0 + 5).astype(np.int32),
        )
        for request in _requests()
    ]


def _segmented(first: tuple[Request, Completion], last: tuple[Request, Completion], *, recorded: bool) -> Trajectory:
    """Two completions as one trajectory: the first is its earlier segment, with or without its routes."""
    earlier, own = _trajectory(*first), _trajectory(*last)
    segment = Segment(
        token_ids_T=earlier.token_ids_T,
        trained_mask_T=earlier.trained_mask_T,
        behavior_logprobs_T=earlier.behavior_logprobs_T,
        routes_TLK=earlier.routes_TLK if recorded else None,
        kept=earlier.kept,
    )
    return msgspec.structs.replace(own, id=earlier.id, earlier_segments=(segment,))


def _preempted(directory: Path, trainer: Trainer, number: int) -> tuple[list[Completion], list[Completion]]:
    """Both segments of every member, sampled through a kill at a record of the log in the middle of each call."""
    answers: list[list[Completion]] = []
    for requests in (_requests(), _rewritten_requests()):
        environment = ScriptedEnvironment(CONFIG.vocab_size, order=number)
        engine, log = open_engine(directory, trainer.published(), model_config=CONFIG, environment=environment)
        crash_at(log, number)
        with pytest.raises(CrashError):
            engine.generate(requests)
        log.abandon()
        environment = ScriptedEnvironment(CONFIG.vocab_size)
        engine, log = open_engine(directory, trainer.published(), model_config=CONFIG, environment=environment)
        with log:
            answers.append(engine.generate(requests))
    return answers[0], answers[1]


@pytest.mark.parametrize("max_tokens", [120, 1000])
def test_every_segment_of_a_preempted_trajectory_is_trained_on_its_own_records(
    trainer: Trainer, tmp_path: Path, max_tokens: int
) -> None:
    """Through the files of a step: log-probs are the engine's in every segment, whether its routes are replayed or, for
    every third member, were never recorded; a trajectory's routes are those of its segments end to end, each known but
    for its last token; its weight is one, however many segments it has."""
    first, last = _preempted(tmp_path / "log", trainer, number=40)
    requests, rewritten = _requests(), _rewritten_requests()
    members: dict[int, list[Trajectory]] = {}
    for index, request in enumerate(requests):
        pair = (request, first[index]), (rewritten[index], last[index])
        one = _segmented(*pair, recorded=index % 3 != 2)
        # Every fourth trajectory has one segment only.
        one = msgspec.structs.replace(one, earlier_segments=()) if index % 4 == 3 else one
        members.setdefault(request.id.prompt, []).append(one)
    groups = [Group(step=1, prompt=prompt, trajectories=tuple(ones)) for prompt, ones in members.items()]
    batch = build_step_batch(groups, normalisation="trajectory_mean")
    trajectories = {one.id: one for ones in members.values() for one in ones}
    samples = open_step(write_step(tmp_path / "samples", 1, batch))
    packs = [samples.micro_batch(plan) for plan in plan_micro_batches(batch.rows, max_tokens)]
    assert (len(packs) > 1) == (max_tokens == 120)
    unknown_segments = 0
    for pack in packs:
        assert pack.routes_TLK is not None
        starts = np.cumsum(pack.sequence_lengths_B) - pack.sequence_lengths_B
        segments = [segment for identity in pack.ids for segment in trajectories[identity].segments]
        for start, length, segment in zip(starts, pack.sequence_lengths_B, segments, strict=True):
            rows = slice(start, start + length)
            assert pack.token_ids_T[rows].tolist() == segment.token_ids_T.tolist()
            assert (pack.routes_TLK[start + length - 1] == -1).all(), "the last token has no route"
            if segment.routes_TLK is None:
                assert (pack.routes_TLK[rows] == -1).all()
                unknown_segments += 1
                continue
            known = pack.routes_TLK[rows][:-1]
            assert known.shape[0] == length - 1
            assert (known >= 0).all()
            assert known.tolist() == segment.routes_TLK[:-1].tolist()
        for number in range(len(pack.ids)):
            weight = pack.token_weight_T[pack.trajectory_T == number].astype(np.float64).sum()
            assert weight == pytest.approx(1 / len(requests), rel=1e-6)
    assert unknown_segments == 3
    assert sum(len(trajectories[row.id].segments) == 2 for row in batch.rows) == 9
    assert _different(packs, _train(trainer, [scoring_batch(pack) for pack in packs])) == 0


def test_routes_one_position_off_would_be_seen(trainer: Trainer, tmp_path: Path) -> None:
    """The test above has teeth: routes that slip from one segment into the next by one position change log-probs."""
    environment = ScriptedEnvironment(CONFIG.vocab_size)
    engine, log = open_engine(tmp_path / "log", trainer.published(), model_config=CONFIG, environment=environment)
    with log:
        pairs = [(_requests()[5], _rewritten_requests()[5])]
        (first, last) = engine.generate(list(pairs[0]))
    one = _segmented((pairs[0][0], first), (pairs[0][1], last), recorded=True)
    other = msgspec.structs.replace(one, id=msgspec.structs.replace(one.id, member=0), reward=9.0)
    group = Group(step=1, prompt=one.id.prompt, trajectories=(one, other))
    (good, _) = build_step_batch([group], normalisation="token_mean").trajectories
    assert good.routes_TLK is not None
    assert _different([good], _train(trainer, [scoring_batch(good)])) == 0
    shifted = msgspec.structs.replace(good, routes_TLK=np.roll(good.routes_TLK, 1, axis=0))
    fresh = Trainer(CONFIG, random_params(CONFIG), precision="native", optim=AdamW(lr=3e-2))
    assert _different([good], _train(fresh, [scoring_batch(shifted)])) > 0
