"""Proves: preempted at any token, with its key-values, with damaged ones or without, alone or among others, a request
has the uninterrupted tokens, log-probs, routes and kept sets; and key-values that are usable are used.

Routes and kept sets are recorded, turns call a scripted tool, the model has a vocabulary of 12 so that turns end. Not
here: files and what happens to them (test_kv_store.py).
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from rollforward.model.cache import allocate_cache
from rollforward.model.precision import PackedTensor
from rollforward.rollout.engine.kv_file import WeightsId, weights_digest
from rollforward.rollout.engine.kv_store import export_sequence
from rollforward.rollout.errors import EngineInputError
from rollforward.rollout.types import Completion, Request, ResumeStats, StopReason, ToolUse, request_seed
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_recovery import recover
from tests.helpers.environments import ScriptedEnvironment
from tests.helpers.preemption import preempt, store_of
from tests.helpers.replicas import PROCESS, make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config

CONFIG = msgspec.structs.replace(tiny_config(), vocab_size=12)
TOOLS = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
STEPS = 10_000  # more than any test takes


def _requests() -> list[Request]:
    """Two members of a long prompt and one of a short one; the first of each records routes, all cut the
    vocabulary."""
    changed: list[Request] = []
    for one in make_requests([40, 3], members=2, max_new_tokens=24, vocab_size=12, tools=TOOLS):
        identity = msgspec.structs.replace(one.id, step=8)
        changed.append(
            msgspec.structs.replace(
                one,
                id=identity,
                seed=request_seed(7, identity.step, identity.prompt, identity.member),
                sampling=msgspec.structs.replace(one.sampling, top_p=0.95),
                record_routes=identity.member == 0,
            )
        )
    return changed


@pytest.fixture(scope="module")
def packed() -> dict[str, PackedTensor]:
    return packed_params(CONFIG)


def _environment() -> ScriptedEnvironment:
    return ScriptedEnvironment(12)


def _go_on(
    directory: Path,
    packed: dict[str, PackedTensor],
    requests: list[Request],
    *,
    steps: int = STEPS,
    **limits: int,
) -> tuple[list[Completion] | None, int, ResumeStats]:
    return preempt(directory, packed, requests, steps=steps, config=CONFIG, environment=_environment, **limits)


@pytest.fixture(scope="module")
def undisturbed(packed: dict[str, PackedTensor], tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    completions = _go_on(tmp_path_factory.mktemp("undisturbed") / "engine-0", packed, _requests())[0]
    assert completions is not None
    return completions


def test_turns_routes_and_kept_sets_occur(undisturbed: list[Completion]) -> None:
    """Keeps the tests below from proving nothing."""
    assert [one.routes is not None for one in undisturbed] == [True, False, True, False]
    assert [(one.num_sampled_tokens, len(one.turns)) for one in undisturbed] == [(24, 2), (12, 3), (24, 3), (7, 1)]
    assert {one.stop_reason for one in undisturbed} == {StopReason.LENGTH, StopReason.TURNS, StopReason.EOS}
    assert all(one.kept is not None and (one.kept.counts_T > 0).any() for one in undisturbed)


def _damage(directory: Path) -> None:
    """Flip a bit of every file of planes, each in another place."""
    for index, path in enumerate(sorted(directory.with_name(directory.name + ".kv").glob("*.safetensors"))):
        data = bytearray(path.read_bytes())
        data[-1 - 7919 * index % len(data)] ^= 16
        path.write_bytes(data)


MANNERS = ("kept", "damaged", "none")


def _check_step(
    directory: Path,
    packed: dict[str, PackedTensor],
    requests: list[Request],
    expected: list[Completion],
    *,
    steps: int,
    manners: tuple[str, ...] = MANNERS,
    **limits: int,
) -> bool:
    """Preempt after so many steps and go on in each manner from there; return whether anything was left to go on
    with."""
    first = directory / "first" / "engine-0"
    done, num_saved, _ = _go_on(first, packed, requests, steps=steps, **limits)
    if done is not None:
        assert done == expected
        return False
    assert num_saved > 0 or steps == 0
    for manner in manners:
        again = directory / manner / "engine-0"
        shutil.copytree(first.parent, again.parent)
        if manner == "damaged":
            _damage(again)
        elif manner == "none":
            shutil.rmtree(store_of(again, CONFIG).directory)
        completions, _, stats = _go_on(again, packed, requests)
        assert completions == expected, (manner, steps)
        counts = (stats.kv_restored, stats.kv_damaged, stats.kv_missing)
        assert counts == tuple(num_saved * (manner == one) for one in MANNERS), (manner, steps)
        assert stats.kv_foreign + stats.kv_beyond_log + stats.kv_other_weights + stats.kv_other_layout == 0
        if manner == "kept" and len(requests) == 1 and steps > 0:
            # Nothing but what an answer added after the last forward is computed again.
            assert stats.prefilled_tokens <= TOOLS.max_observation_tokens, steps
        assert recover(again).problems == ()
        assert list(store_of(again, CONFIG).directory.iterdir()) == [], "all requests are closed"
    return True


def test_alone_preempted_at_some_tokens(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    for steps, manners in ((0, MANNERS), (1, ("kept",)), (6, ("kept",)), (13, MANNERS), (23, ("kept",))):
        directory = tmp_path / str(steps)
        assert _check_step(directory, packed, _requests()[:1], undisturbed[:1], steps=steps, manners=manners)


def test_among_others_preempted_at_some_tokens(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    for steps, manners in ((2, ("kept",)), (5, MANNERS), (19, ("kept",))):
        directory = tmp_path / str(steps)
        assert _check_step(
            directory, packed, _requests(), undisturbed, steps=steps, manners=manners, prefill_chunk_tokens=9
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("index", range(4))
def test_alone_preempted_at_every_token(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, index: int
) -> None:
    steps, which = 0, slice(index, index + 1)
    while _check_step(tmp_path / str(steps), packed, _requests()[which], undisturbed[which], steps=steps):
        steps += 1
    assert steps == undisturbed[index].num_sampled_tokens


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "limits", [{"max_batch_requests": 2}, {"prefill_chunk_tokens": 5}, {"cache_blocks": 5}], ids=str
)
def test_among_others_preempted_at_every_step(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, limits: dict[str, int]
) -> None:
    """With two at once, with a prefill that takes steps of others, and where the cache is too small for all."""
    steps = 0
    while _check_step(tmp_path / str(steps), packed, _requests(), undisturbed, steps=steps, manners=MANNERS, **limits):
        steps += 1
    assert steps >= 24


def test_preempted_again_and_again(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Every life takes three steps; the states of a life replace those of the one before."""
    directory = tmp_path / "engine-0"
    num_lives, num_restored = 0, 0
    while True:
        completions, _, stats = _go_on(directory, packed, _requests(), steps=3, max_batch_requests=3)
        num_restored += stats.kv_restored
        if completions is not None:
            break
        assert len(list(directory.with_name("engine-0.kv").iterdir())) <= 2 * len(_requests())
        num_lives += 1
    assert completions == undisturbed
    assert num_lives > 5
    assert num_restored > num_lives
    assert recover(directory).problems == ()


def test_a_state_of_older_weights_is_not_used(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """Weights 2 are those of 1 under another number: equal bits prove that it is the number that counts."""
    directory = tmp_path / "engine-0"
    _go_on(directory, packed, _requests(), steps=12)
    newer = [msgspec.structs.replace(request, policy_version=2) for request in _requests()]
    store = store_of(directory, CONFIG)
    engine, log = open_engine(
        directory, packed, version=2, model_config=CONFIG, environment=_environment(), kv_store=store
    )
    assert store.num_bytes == 0
    with log:
        completions = engine.generate(newer)
        stats = engine.resume_stats()
    assert [one.token_ids.tolist() for one in completions] == [one.token_ids.tolist() for one in undisturbed]
    assert (stats.kv_restored, stats.kv_missing) == (0, stats.resumed)
    assert stats.prefilled_tokens > 0
    # Begun under 1 and ended under 2: the oldest counts, also for whoever asks a process after this one.
    assert {one.policy_version for one in completions} == {1}
    last = [msgspec.structs.replace(request, policy_version=3) for request in newer]
    engine, log = open_engine(directory, packed, version=3, model_config=CONFIG, environment=_environment())
    with log:
        assert engine.generate(last) == completions


def test_a_state_of_other_weights_of_the_same_number_is_not_used(
    packed: dict[str, PackedTensor], tmp_path: Path
) -> None:
    """A model directory that was trained again, say, for an evaluation in the same run_dir: the log says so first (that
    the states name their weights too is in test_kv_store.py). The right weights go on from them."""
    directory = tmp_path / "engine-0"
    _, num_saved, _ = _go_on(directory, packed, _requests(), steps=6)
    with pytest.raises(EngineInputError, match="weights 1 are others than those of that number in the log"):
        _go_on(directory, packed_params(CONFIG, seed=2), _requests())
    _, _, stats = _go_on(directory, packed, _requests())
    assert stats.kv_restored == num_saved > 0


def test_a_damaged_manifest_is_counted_as_damage(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    directory = tmp_path / "engine-0"
    _, num_saved, _ = _go_on(directory, packed, _requests(), steps=12)
    for path in store_of(directory, CONFIG).directory.glob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"1", b"3", 1))
    completions, _, stats = _go_on(directory, packed, _requests())
    assert completions == undisturbed
    assert (stats.kv_restored, stats.kv_damaged, stats.kv_missing) == (0, num_saved, 0)
    assert list(store_of(directory, CONFIG).directory.iterdir()) == []


@pytest.mark.parametrize(("index", "steps", "ahead"), [(1, 5, 0), (1, 5, 1), (0, 0, -30)])
def test_a_state_with_more_than_the_log_is_not_used(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path, index: int, steps: int, ahead: int
) -> None:
    """A fault of whoever saved: no token left to compute, tokens that the log has not, or, before the first sampled
    token, routes that the log has not. The planes are noughts, so that using them would be seen."""
    directory, request = tmp_path / "engine-0", _requests()[index]
    _go_on(directory, packed, [request], steps=steps)
    store = store_of(directory, CONFIG)
    engine, log = open_engine(directory, packed, model_config=CONFIG)
    weights = WeightsId(1, weights_digest(engine.fingerprints()))
    log.close()
    log, recovered = open_log(directory, stream="engine-0", config=PROCESS)
    held = recovered.requests.get(request.id)
    tokens = request.prompt_ids.tolist() if held is None else held.sequence()[0].tolist()
    num_cached = len(tokens) + ahead
    with log:
        log.append_open(
            request,
            slot=0,
            resumed_tokens=0 if held is None else len(held.token_ids),
            resumed_observations=0 if held is None else len(held.observations),
        )
        storage = allocate_cache(CONFIG, num_slots=1, num_blocks=4)
        manifest = store.save(
            request.id,
            0,
            num_cached=num_cached,
            weights=weights,
            token_ids=[*tokens, 3, 3],
            planes=export_sequence(storage, 0, [1, 2, 3], num_cached, CONFIG),
        )
        assert manifest is not None
        log.append_kv_saved(0, manifest=manifest, fingerprint=store.fingerprint)
    completions, _, stats = _go_on(directory, packed, [request])
    assert completions == undisturbed[index : index + 1]
    assert (stats.kv_restored, stats.kv_beyond_log) == (0, 1)
    assert stats.prefilled_tokens == len(tokens) - 1


def test_finished_at_the_preemption_is_answered_and_its_state_is_gone(
    packed: dict[str, PackedTensor], undisturbed: list[Completion], tmp_path: Path
) -> None:
    """A request that is over is not sampled again."""
    directory = tmp_path / "engine-0"
    _, num_saved, _ = _go_on(directory, packed, _requests(), steps=16)
    held = recover(directory).requests
    finished = [identity for identity, one in held.items() if one.is_finished]
    assert finished
    assert num_saved == len(held) - len(finished)
    completions, _, stats = _go_on(directory, packed, _requests())
    assert completions == undisturbed
    assert (stats.answered, stats.kv_restored) == (len(finished), num_saved)
