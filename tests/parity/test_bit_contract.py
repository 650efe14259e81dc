"""The bit contract on the CPU: decode in random batches = chunked prefill = packed training forward with autograd.

The reference of every test is one packed forward over a pool of sequences, from FP32 masters that require gradients. A
row of it, at any length (a causal model's rows do not know what follows), must come out with the same bits from every
other route, in logits and in log-probs. One cache serves all cases of a mode: slots and blocks keep what earlier cases
left there, and what nobody wrote is NaN.

Not proven here: that the values are right (test_oracle.py); other machine types; the engine's scheduler and sampler.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.config import ModelConfig
from rollforward.model.transformer import Model, packed_batch
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.cached import CachedSequences
from tests.helpers.tiny import oracle_config, random_params, random_tokens, tiny_config

LENGTH = 141
SEQUENCES = 5
SLOTS = 3
TEMPERATURE = 0.7
# Around every boundary of the tiny preset: ratios 4 and 32, window 16, tiles of 64, top-k full with 8 entries.
EDGES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 18, 31, 32, 33, 35, 36, 37, 63, 64, 65, 66, 79, 80, 95, 96, 97, 127, 128, 129)
lengths = st.one_of(st.sampled_from(EDGES), st.integers(1, LENGTH - 1))
many_cases = settings(
    max_examples=105, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@dataclass(frozen=True)
class Setup:
    """A model, its training forward over the pool, and a cache that every case uses."""

    model: Model
    training: Model
    token_BT: Tensor
    logits_BTV: Tensor
    logprob_BT: Tensor
    cache: CachedSequences


def logits_of(model: Model, token_T: Tensor, sequence_lengths: list[int]) -> Tensor:
    """Run the packed forward, without switching autograd off."""
    batch = packed_batch(model.config, sequence_lengths)
    streams = model.transformer.streams(model.weights, token_T, batch)
    return model.transformer.logits(model.weights, model.transformer.hidden(model.weights, streams))


def logprobs_of(logits_TV: Tensor, next_T: Tensor) -> Tensor:
    return token_logprob(logits_TV, next_T, temperature=TEMPERATURE)[0]


def make_setup(config: ModelConfig, precision: str, length: int = LENGTH) -> Setup:
    params = random_params(config)
    masters = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in params.items()}
    training = Model(config, masters, precision=precision)
    token_BT = random_tokens(config, (SEQUENCES, length))
    with torch_threads(1):
        logits_TV = logits_of(training, token_BT[:, :-1].reshape(-1), [length - 1] * SEQUENCES)
    assert logits_TV.requires_grad
    logprob_T = logprobs_of(logits_TV, token_BT[:, 1:].reshape(-1))
    model = Model(config, params, precision=precision)
    return Setup(
        model,
        training,
        token_BT,
        logits_TV.detach().view(SEQUENCES, length - 1, -1),
        logprob_T.detach().view(SEQUENCES, length - 1),
        CachedSequences(model, num_slots=SLOTS, max_tokens=length),
    )


@pytest.fixture(scope="module", params=["native", "fp32"])
def setup(request) -> Setup:
    return make_setup(tiny_config(), request.param)


def check_rows(setup: Setup, sequence: int, start: int, logits_TV: Tensor) -> None:
    """Compare logits and log-probs of rows start, start + 1, ... with the training forward, bit by bit."""
    rows = slice(start, start + len(logits_TV))
    assert different_bits(logits_TV, setup.logits_BTV[sequence, rows]) == 0, (sequence, rows)
    next_T = setup.token_BT[sequence, 1:][rows]
    assert different_bits(logprobs_of(logits_TV, next_T), setup.logprob_BT[sequence, rows]) == 0, (sequence, rows)


@st.composite
def schedules(draw):
    """Draw which sequences run, how far, cut into which pieces, and which pieces share a forward."""
    sequences = draw(st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=SLOTS))
    pieces = []
    for _ in sequences:
        length = draw(lengths)
        cuts = {cut for cut in draw(st.lists(lengths, max_size=2)) if cut < length}
        if draw(st.booleans()):  # end with single tokens: decode
            cuts |= {cut for cut in range(length - 3, length) if cut > 0}
        bounds = [0, *sorted(cuts), length]
        pieces.append([stop - start for start, stop in pairwise(bounds)])
    forwards, rest = [], [list(sizes) for sizes in pieces]
    while any(rest):
        waiting = [slot for slot, sizes in enumerate(rest) if sizes]
        order = draw(st.permutations(waiting))
        chosen = order[: draw(st.integers(max(1, len(order) - 1), len(order)))]
        forwards.append([(slot, rest[slot].pop(0)) for slot in chosen])
    return sequences, forwards


def run_schedule(setup: Setup, schedule: tuple, threads: int) -> None:
    sequences, forwards = schedule
    setup.cache.restart(*range(SLOTS))
    position = [0] * len(sequences)
    with torch_threads(threads):
        for forward in forwards:
            batch = []
            for slot, size in forward:
                tokens = setup.token_BT[sequences[slot], position[slot] : position[slot] + size]
                batch.append((slot, tokens))
            for (slot, size), logits_TV in zip(forward, setup.cache.step(batch), strict=True):
                check_rows(setup, sequences[slot], position[slot], logits_TV)
                position[slot] += size


@many_cases
@given(schedule=schedules())
def test_random_batches_on_a_cache(setup, schedule):
    run_schedule(setup, schedule, threads=1)


@settings(many_cases, max_examples=5)  # few: threads that wait for a core cost a hundred times their work
@given(schedule=schedules())
def test_random_batches_with_two_threads(setup, schedule):
    run_schedule(setup, schedule, threads=2)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pack=st.lists(st.tuples(st.integers(0, SEQUENCES - 1), lengths), min_size=1, max_size=4),
    threads=st.sampled_from([1, 1, 1, 1, 2]),
    with_grad=st.booleans(),
)
def test_random_packs(setup, pack, threads, with_grad):
    token_T = torch.cat([setup.token_BT[sequence, :length] for sequence, length in pack])
    sizes = [length for _, length in pack]
    with torch_threads(threads), torch.set_grad_enabled(with_grad):
        logits_TV = logits_of(setup.training, token_T, sizes)
    assert logits_TV.requires_grad == with_grad
    for (sequence, _), rows in zip(pack, logits_TV.split(sizes), strict=True):
        check_rows(setup, sequence, 0, rows)


def test_token_by_token_from_the_first_one(setup):
    setup.cache.restart(*range(SLOTS))
    for position in range(70):
        order = [(position + slot) % SLOTS for slot in range(SLOTS)]
        rows = setup.cache.step([(slot, setup.token_BT[slot, position : position + 1]) for slot in order])
        for slot, logits_TV in zip(order, rows, strict=True):
            check_rows(setup, slot, position, logits_TV)


def test_two_threads_equal_one(setup):
    with torch_threads(2):
        logits_TV = logits_of(setup.training, setup.token_BT[:, :-1].reshape(-1), [LENGTH - 1] * SEQUENCES)
    assert different_bits(logits_TV.view_as(setup.logits_BTV), setup.logits_BTV) == 0


@pytest.mark.parametrize("prefix", [1, 2, 5, 17, 33, 38, 70, 129])
def test_copied_prefill_equals_the_own_one(setup, prefix):
    # Members of a group share their prompt's prefill. The prefix ends inside windows of every kind.
    setup.cache.restart(*range(SLOTS))
    prompt = setup.token_BT[0, :prefix]
    setup.cache.step([(1, prompt)])
    setup.cache.copy(1, [0, 2])
    others = [setup.token_BT[1, :9], setup.token_BT[0, prefix : prefix + 9], setup.token_BT[2, :9]]
    shared = [[] for _ in range(SLOTS)]
    for part in ((0, 5), (5, 6), (6, 9)):
        pieces = [(slot, others[slot][slice(*part)]) for slot in range(SLOTS)]
        for slot, logits_TV in enumerate(setup.cache.step(pieces)):
            shared[slot].append(logits_TV)
    for slot in range(SLOTS):
        own = logits_of(setup.training, torch.cat((prompt, others[slot])), [prefix + 9])
        assert different_bits(torch.cat(shared[slot]), own[prefix:].detach()) == 0, slot


def test_a_neighbour_full_of_nan_changes_nothing(setup):
    poison = 511
    params = random_params(setup.model.config)
    assert not bool((setup.token_BT == poison).any())
    model = Model(setup.model.config, params, precision=setup.model.transformer.numerics.precision)
    weights = type(model.weights)(**{**vars(model.weights), "embed": model.weights.embed.clone()})
    weights.embed[poison] = torch.nan
    model.weights = weights
    bad = torch.full((70,), poison)
    packed = logits_of(model, torch.cat((bad, setup.token_BT[0, :90], bad, setup.token_BT[1, :33])), [70, 90, 70, 33])
    assert packed[:70].isnan().all()
    check_rows(setup, 0, 0, packed[70:160])
    check_rows(setup, 1, 0, packed[230:])
    cache = CachedSequences(model, num_slots=2, max_tokens=LENGTH)
    cache.step([(0, bad), (1, bad)])
    cache.restart(0)  # a slot that a poisoned sequence leaves behind
    for start, stop in ((0, 2), (2, 40), (40, 41), (41, 90)):
        logits_TV = cache.step([(1, bad[:1]), (0, setup.token_BT[0, start:stop])])[1]
        check_rows(setup, 0, start, logits_TV)


@pytest.mark.parametrize("kind", ["flash", "pro", "other"])
def test_other_shapes(kind):
    # Head counts, widths, windows and ratios that are no multiples of a vector or of a tile.
    setup = make_setup(oracle_config(kind), "native", length=270)
    for threads, cuts in ((1, (1, 3, 130, 131, 257, 269)), (2, (5, 6, 41, 128, 200, 201, 269))):
        setup.cache.restart(*range(SLOTS))
        with torch_threads(threads):
            for start, stop in zip((0, *cuts), cuts, strict=False):
                pieces = [(slot, setup.token_BT[slot, start:stop]) for slot in range(SLOTS)]
                for (slot, _), logits_TV in zip(pieces, setup.cache.step(pieces), strict=True):
                    check_rows(setup, slot, start, logits_TV)


@pytest.mark.slow
@settings(many_cases, max_examples=1500, derandomize=False)
@given(schedule=schedules(), threads=st.sampled_from([1, 2]))
def test_many_more_random_batches(setup, schedule, threads):
    run_schedule(setup, schedule, threads)
