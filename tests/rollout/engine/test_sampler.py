"""Proves: draws follow softmax(logits / T), depend on their key alone, and greedy ties go to the smaller id."""

import numpy as np
import pytest
import torch

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.rollout.engine.sampler import (
    cut_vocabulary,
    draw_tokens,
    kept_mask,
    kept_sets,
    keyed_uniform,
    scaled_logits,
    signed_seed,
)


def test_frequencies_follow_the_distribution() -> None:
    """40,000 draws of 5 tokens; each count lies within 5 standard deviations of its binomial mean."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    count = 40_000
    for temperature in (1.0, 0.5, 2.0):
        probs = torch.softmax(logits.double() / temperature, 0).numpy()
        drawn = draw_tokens(
            logits.expand(count, -1),
            torch.full((count,), signed_seed(2**64 - 5)),
            torch.arange(count),
            torch.full((count,), temperature),
        )
        counts = np.bincount(drawn.numpy(), minlength=5)
        assert np.all(np.abs(counts - count * probs) <= 5 * np.sqrt(count * probs * (1 - probs)))
        assert counts[4] == 0


def test_uniforms_are_inside_the_open_interval_and_pinned() -> None:
    """The bits are part of the contract with logs that exist: these values were computed by hand-written SplitMix64."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 2**63 + 11, mask], [0, 5, 1000, 7]
    got = keyed_uniform(torch.tensor([signed_seed(s) for s in seeds]), torch.tensor(positions), 6)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        state = mix((seed + golden * (position + 1)) & mask)
        for token in range(6):
            bits = mix((state + golden * (token + 1)) & mask) >> 41
            assert float(got[row, token]) == (bits + 0.5) * 2.0**-23
    many = keyed_uniform(torch.arange(2000), torch.arange(2000), 512)
    assert float(many.min()) > 0.0
    assert float(many.max()) < 1.0
    assert abs(float(many.double().mean()) - 0.5) < 0.002


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 512, generator=generator)
    seeds, positions, temperature = torch.arange(64) * 977, torch.arange(64), torch.ones(64)
    whole = draw_tokens(logits, seeds, positions, temperature)
    for row in (0, 1, 33, 63):
        part = slice(row, row + 1)
        assert draw_tokens(logits[part], seeds[part], positions[part], temperature[part]).tolist() == [int(whole[row])]


def test_greedy_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0]])
    drawn = draw_tokens(logits, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    assert drawn.tolist() == [1, 0]


def _kept(logits: list[float], top_p: float, top_k: int) -> list[int]:
    mask = kept_mask(torch.tensor([logits]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([top_k]))
    return torch.nonzero(mask[0]).flatten().tolist()


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, [0, 1, 2, 3, 4]),
        (1.0, 1, [3]),
        (1.0, 3, [1, 3, 4]),
        (1.0, 99, [0, 1, 2, 3, 4]),
        (0.4, 0, [3]),
        (0.65, 0, [1, 3]),
        (0.75, 0, [1, 3, 4]),
        (0.89, 0, [1, 3, 4]),
        (0.95, 0, [0, 1, 3, 4]),
        (1e-9, 0, [3]),
        # Of the two most likely, which weigh 5 and 2, the first has 5/7 of the mass.
        (0.7, 2, [3]),
        (0.72, 2, [1, 3]),
    ],
)
def test_kept_sets_worked_by_hand(top_p: float, top_k: int, expected: list[int]) -> None:
    """Probabilities of tokens 0 to 4: 0.06, 0.2, 0.04, 0.5, 0.2; of the equal ones 1 comes before 4."""
    logits = np.log(np.array([0.06, 0.2, 0.04, 0.5, 0.2])) + 3.0
    assert _kept(logits.tolist(), top_p, top_k) == expected


def test_equal_tokens_are_kept_by_smaller_id_up_to_the_exact_mass() -> None:
    """Four equal tokens hold a quarter each: half of the mass is two of them, a hair more is three."""
    assert _kept([2.0] * 4, 0.5, 0) == [0, 1]
    assert _kept([2.0] * 4, 0.5000001, 0) == [0, 1, 2]
    assert _kept([2.0] * 4, 1.0, 3) == [0, 1, 2]
    assert _kept([2.0, 2.0, 2.0, 2.0], 0.5, 3) == [0, 1]


def test_a_row_keeps_something_whatever_its_logits() -> None:
    assert _kept([-torch.inf, 5.0, -torch.inf], 0.1, 0) == [1]
    assert _kept([torch.nan, torch.nan], 0.5, 1) == [0]
    assert _kept([1e38, -1e38], 0.5, 0) == [0]


def test_a_kept_set_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(40, 700, generator=generator)
    top_p = torch.rand(40, generator=generator, dtype=torch.float64).clamp(min=0.01)
    top_k = torch.randint(0, 60, (40,), generator=generator)
    whole = kept_mask(logits, top_p, top_k)
    for row in (0, 1, 17, 39):
        part = slice(row, row + 1)
        assert torch.equal(kept_mask(logits[part], top_p[part], top_k[part]), whole[part])
    for row in range(40):
        probs = torch.softmax(logits[row].double(), 0)
        kept = torch.nonzero(whole[row]).flatten()
        assert 1 <= len(kept) <= (int(top_k[row]) or 700)
        assert probs[kept].min() >= probs[~whole[row]].max()


def test_sets_are_listed_row_by_row_and_a_full_row_is_not() -> None:
    sets = kept_sets(torch.tensor([[True, False, True], [True, True, True], [False, True, False]]))
    assert sets.counts_T.tolist() == [2, 0, 1]
    assert sets.token_ids.tolist() == [0, 2, 1]
    assert (sets.counts_T.dtype, sets.token_ids.dtype) == (np.int32, np.int32)


def test_draws_and_their_log_probs_are_of_the_cut_distribution() -> None:
    """Probabilities 0.5, 0.3, 0.2 at temperature 2: square roots over their sum; top_k = 2 leaves the first two."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    count = 20_000
    logits = probs.log().float().expand(count, -1)
    temperature = torch.full((count,), 2.0)
    cut, sets = cut_vocabulary(logits, temperature, torch.ones(count, dtype=torch.float64), torch.full((count,), 2))
    assert sets is not None
    assert sets.token_ids.tolist() == [0, 1] * count
    drawn = draw_tokens(cut, torch.full((count,), 9), torch.arange(count), temperature)
    inside = probs.sqrt()[:2] / probs.sqrt()[:2].sum()
    assert set(drawn.tolist()) == {0, 1}
    assert abs(float((drawn == 0).double().mean()) - float(inside[0])) < 5 * 0.5 / count**0.5
    logprob, _ = token_logprob(scaled_logits(cut, temperature), drawn, temperature=1.0)
    torch.testing.assert_close(logprob, inside.log().float()[drawn], rtol=0, atol=1e-6)


def test_rows_that_ask_for_no_cut_are_left_as_they_are() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    temperature = torch.ones(2)
    whole = torch.ones(2, dtype=torch.float64)
    same, sets = cut_vocabulary(logits, temperature, whole, torch.zeros(2, dtype=torch.int64))
    assert same is logits
    assert sets is None
    mixed, sets = cut_vocabulary(logits, temperature, whole, torch.tensor([0, 3]))
    assert torch.equal(mixed[0], logits[0])
    assert sets is not None
    assert sets.counts_T.tolist() == [0, 3]
