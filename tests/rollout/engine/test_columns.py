"""Proves: routes and kept sets that a completion carries are its own tokens', through groups, turns and crashes.

Not here: that the trainer uses them (tests/parity), the bytes of their columns (test_wal_*.py).
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.routing import Routing
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import build_weights
from rollforward.rollout.engine.sampler import draw_tokens, kept_mask, signed_seed
from rollforward.rollout.types import Completion, Request, ToolUse
from rollforward.rollout.wal_recovery import recover
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.replicas import make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config

CONFIG = msgspec.structs.replace(tiny_config(), vocab_size=12)
TOOLS = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
NATIVE: Precision = "native"
CUTS = [(0.7, 0), (1.0, 3), (0.9, 5), (1.0, 0)]


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    return packed_params(CONFIG)


def _requests() -> list[Request]:
    """Members of a group differ in how they cut the vocabulary; the last of each records no routes."""
    requests = make_requests([1, 17, 66], members=len(CUTS), max_new_tokens=14, vocab_size=12, tools=TOOLS)
    changed: list[Request] = []
    for request in requests:
        top_p, top_k = CUTS[request.id.member]
        sampling = msgspec.structs.replace(request.sampling, top_p=top_p, top_k=top_k)
        is_recording = request.id.member + 1 < len(CUTS)
        changed.append(msgspec.structs.replace(request, sampling=sampling, record_routes=is_recording))
    return changed


def _sample(
    directory: Path, packed: dict[str, PackedTensor], order: int | None = None, **limits: int
) -> list[Completion]:
    environment = ScriptedEnvironment(12, order=order)
    engine, log = open_engine(directory, packed, model_config=CONFIG, environment=environment, **limits)
    with log:
        return engine.generate(_requests())


@pytest.fixture(scope="module")
def undisturbed(packed: dict[str, PackedTensor], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    return _sample(tmp_path_factory.mktemp("log"), packed)


def test_columns_are_what_a_dense_forward_says(packed: dict[str, PackedTensor], undisturbed: list[Completion]) -> None:
    transformer = Transformer(CONFIG, NATIVE)
    weights = build_weights(CONFIG, {name: unpack_published(tensor) for name, tensor in packed.items()})
    assert any(len(completion.turns) > 1 for completion in undisturbed)
    for request, completion in zip(_requests(), undisturbed, strict=True):
        num_prompt = request.prompt_ids.size
        tokens = torch.tensor(np.concatenate((request.prompt_ids, completion.token_ids)), dtype=torch.int64)
        routing = Routing(CONFIG)
        with torch.no_grad():
            streams = transformer.streams(weights, tokens, packed_batch(CONFIG, [len(tokens)]), routing=routing)
            logits_TV = transformer.logits(weights, transformer.hidden(weights, streams))
        if request.record_routes:
            assert completion.routes is not None
            assert completion.routes.dtype == np.int16
            assert (completion.routes[-1] == -1).all()
            assert completion.routes[:-1].tolist() == routing.taken_TLK()[:-1].tolist()
        else:
            assert completion.routes is None
        top_p, top_k = CUTS[request.id.member]
        if (top_p, top_k) == (1.0, 0):
            assert completion.kept is None
            continue
        assert completion.kept is not None
        sets = np.split(completion.kept.token_ids, np.cumsum(completion.kept.counts_T))[:-1]
        for index in range(completion.token_ids.size):
            if not completion.sampled_mask[index]:
                assert sets[index].size == 0
                continue
            position = num_prompt + index
            row = logits_TV[position - 1 : position]
            mask = kept_mask(row, torch.tensor([top_p], dtype=torch.float64), torch.tensor([top_k]))
            assert sets[index].tolist() == ([] if mask.all() else torch.nonzero(mask[0])[:, 0].tolist())
            cut = row.masked_fill(~mask, -torch.inf)
            seed = torch.tensor([signed_seed(request.seed)])
            drawn = draw_tokens(cut, seed, torch.tensor([position]), torch.ones(1))
            assert drawn.item() == completion.token_ids[index]
            logprob, _ = token_logprob(cut, drawn, temperature=1.0)
            assert logprob.numpy().tobytes() == completion.behavior_logprobs[index].tobytes()


@pytest.mark.parametrize(("limits", "order"), [({"max_batch_requests": 3}, 1), ({"prefill_chunk_tokens": 7}, 2)])
def test_limits_change_no_column(
    packed: dict[str, PackedTensor],
    undisturbed: list[Completion],
    tmp_path: Path,
    limits: dict[str, int],
    order: int,
) -> None:
    assert _sample(tmp_path, packed, order, **limits) == undisturbed


@pytest.mark.parametrize("number", [5, 13, 16, 21, 30])
def test_a_crash_changes_no_column(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, number: int
) -> None:
    engine, log = open_engine(tmp_path, packed, model_config=CONFIG, environment=ScriptedEnvironment(12, order=number))
    crash_at(log, number)
    with pytest.raises(CrashError):
        engine.generate(_requests())
    log.close()
    assert _sample(tmp_path, packed) == undisturbed
    assert recover(tmp_path).problems == ()
    assert _sample(tmp_path, packed) == undisturbed  # all from the log
