"""Proves: draws follow softmax(logits / T), depend on their key alone, and greedy ties go to the smaller id."""

import numpy as np
import torch

from rollforward.rollout.engine.sampler import draw_tokens, keyed_uniform, signed_seed


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
