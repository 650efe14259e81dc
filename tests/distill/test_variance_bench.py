"""The statistics behind "the whole vocabulary has less variance", and the gradients that they are fed with.

Not proven here: the claim itself, which tests/bench/bench_distill_variance.py measures.
"""

import itertools
import json

import numpy as np
import pytest
import torch

from rollforward.kernels.loss.sampled_kl_ref import sampled_kl_rows_ref
from tests.bench.bench_distill_variance import (
    FULL,
    Bench,
    Sketch,
    bias_p,
    closed_form,
    holm,
    main,
    ratio_interval,
    seeded_pair,
    sign_flip_p,
    split_half_distances,
    totals,
)


def normals(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_permutation_test_is_the_enumeration():
    values = normals(9, seed=3) + 0.8
    sums = np.array([np.dot(signs, values) for signs in itertools.product((-1, 1), repeat=9)])
    exact = float((sums >= values.sum() - 1e-12).mean())
    assert 0.01 < exact < 0.3
    found = sign_flip_p(values, np.random.default_rng(0), permutations=40000)
    assert found == pytest.approx(exact, abs=0.01)


def test_the_permutation_test_is_one_sided():
    generator = np.random.default_rng(0)
    assert sign_flip_p(np.ones(20), generator, permutations=5000) < 0.001
    assert sign_flip_p(-np.ones(20), generator, permutations=5000) > 0.999
    assert sign_flip_p(np.zeros(20), generator, permutations=5000) == 1.0


def test_the_permutation_test_keeps_its_level_and_has_power():
    generator = np.random.default_rng(1)
    null = [sign_flip_p(normals(32, seed=seed), generator, permutations=500) for seed in range(400)]
    assert 0.02 < np.mean(np.array(null) <= 0.05) < 0.09
    # A ratio of 2 with a coefficient of variation of 0.3, 32 mini-batches.
    power = [sign_flip_p(0.3 * normals(32, seed=s) + np.log(2), generator, permutations=1000) for s in range(50)]
    assert max(power) <= 0.01


def test_bias_has_its_level_and_power_over_many_directions():
    generator = np.random.default_rng(1)
    # Directions that depend on each other, as projections of one gradient do.
    mixing = normals(5, 64, seed=99)
    null = [bias_p(normals(24, 5, seed=seed) @ mixing, generator, permutations=300) for seed in range(200)]
    assert 0.01 < np.mean(np.array(null) <= 0.05) < 0.1
    shifted = normals(24, 5, seed=7) @ mixing
    shifted[:, 10] += 2 * shifted[:, 10].std()
    assert bias_p(shifted, generator, permutations=2000) < 0.01
    assert bias_p(np.zeros((4, 3)), generator, permutations=100) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]


def test_distances_by_hand():
    # Even ones 0 and 2, odd ones 1 and 5: centres 1 and 3.
    distances = split_half_distances(np.array([[0.0], [1.0], [2.0], [5.0]]))
    assert distances.tolist() == [9.0, 0.0, 1.0, 16.0]


def test_the_interval_of_a_ratio_covers_it():
    covered, above_one = 0, 0
    for seed in range(100):
        scale = np.exp(0.3 * normals(40, seed=seed))  # what both share: mini-batches differ
        above = 2 * scale * np.exp(0.2 * normals(40, seed=1000 + seed))
        below = scale * np.exp(0.2 * normals(40, seed=2000 + seed))
        low, high = ratio_interval(above, below, np.random.default_rng(seed), resamples=1000, level=0.9)
        covered += low <= 2 <= high
        above_one += low > 1
    assert 82 <= covered <= 97
    assert above_one == 100


@pytest.mark.parametrize("with_baseline", [False, True])
def test_the_closed_form_is_the_enumeration(with_baseline):
    generator = torch.Generator().manual_seed(5)
    logits, teacher_logits = (2 * torch.randn(6, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    log_p, log_q = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)
    mean, squares = torch.zeros_like(logits), torch.zeros(6, dtype=torch.float64)
    for drawn in range(11):
        token, prob = torch.full((6, 1), drawn), log_p[:, drawn].exp()
        _, gradient = sampled_kl_rows_ref(logits, token, log_q.gather(1, token), kl if with_baseline else None)
        mean += prob[:, None] * gradient
        squares += prob * (gradient**2).sum(1)
    expected = squares - (mean**2).sum(1)
    torch.testing.assert_close(closed_form(log_p, log_q, with_baseline=with_baseline), expected, rtol=1e-12, atol=1e-12)


def test_a_sketch_keeps_lengths_on_average():
    gradient = torch.from_numpy(normals(30, 50, seed=2))
    lengths = [float((Sketch(1500, width=64, exact=100, seed=seed)(gradient) ** 2).sum()) for seed in range(300)]
    assert np.mean(lengths) == pytest.approx(float((gradient**2).sum()), rel=0.05)
    sketch = Sketch(1500, width=64, exact=100, seed=0)
    assert not sketch.is_exact
    np.testing.assert_allclose(sketch(2 * gradient), 2 * sketch(gradient))
    small = Sketch(1500, width=64, exact=1500, seed=0)
    assert small.is_exact
    assert np.array_equal(small(gradient), gradient.flatten().numpy())


def test_what_is_noisier_and_what_is_biased():
    full = 5 + normals(64, 200, seed=1)
    noise = normals(64, 200, seed=2)
    found = totals(
        {
            ("head", FULL): full,
            ("head", "noisy"): full + np.sqrt(3) * noise,
            ("head", "as_good"): 5 + noise,
            ("head", "biased"): full + 0.3 * noise + 0.2,
        },
        {"head": True},
        permutations=2000,
        seed=0,
    )
    noisy, as_good, biased = found
    assert noisy["interval"][0] < 4 < noisy["interval"][1]
    assert noisy["is_noisier"]
    assert noisy["bias_p"] > 0.01
    assert not as_good["is_noisier"]
    assert as_good["ratio"] == pytest.approx(1, abs=0.1)
    assert biased["bias_p"] < 0.01


@pytest.fixture(scope="module")
def bench() -> Bench:
    student, teacher = seeded_pair(3)
    prompts = [[5, 6, 7], [9], [8, 4, 3, 2, 11, 12], [200, 100]]
    return Bench(student, teacher, prompts, seed=4)


def test_draws_are_the_students_own(bench):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.bincount(bench.draw(logits.expand(20000, 4)), minlength=4)
    probs = torch.softmax(logits[0], -1)
    sigma = (20000 * probs * (1 - probs)).sqrt()
    assert bool(((counts - 20000 * probs).abs() < 4 * sigma).all())


def test_rows_are_those_that_predict_the_answers(bench):
    prompts, answers = [[5, 6, 7], [9]], [[30, 31], [40]]
    batch = bench.mini_batch(prompts, answers)
    assert batch.token_R.tolist() == [30, 31, 40]
    alone = bench.mini_batch([[9]], [[40]])
    assert torch.equal(batch.hidden_RD[2:], alone.hidden_RD)
    logits = bench.student.logits(torch.tensor([[5, 6, 7, 30]]))[0, 2:]
    assert torch.equal(bench.student.transformer.logits(bench.student.weights, batch.hidden_RD[:2]), logits)
    teacher = bench.teacher.logits(torch.tensor([[5, 6, 7, 30]]))[0, 2:]
    ours = bench.teacher.transformer.logits(bench.teacher.weights, batch.teacher_hidden_RE[:2])
    assert torch.equal(ours, teacher)


def test_answers_end_with_the_end_of_the_sequence():
    student, teacher = seeded_pair(3)
    end = student.config.eos_token_id
    student.weights.head[end] *= 4
    answers = Bench(student, teacher, [], seed=4).answers([[first] for first in range(5, 45)], 8)
    assert all(end not in answer[:-1] for answer in answers)
    assert all(len(answer) == 8 or answer[-1] == end for answer in answers)
    assert min(map(len, answers)) < max(map(len, answers)) == 8


def test_the_gradient_of_an_earlier_matrix_is_the_slope(bench):
    """The exact KL falls along the gradient of `wo_b` as fast as the gradient says."""
    prompts, answers = [[5, 6, 7], [9]], [[30, 31], [40]]
    loss, found = bench.gradients(FULL, bench.mini_batch(prompts, answers))
    matrix, gradient = bench.matrices["wo_b"], found["wo_b"]
    step = 1e-2 / float(gradient.norm())
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            matrix.add_(gradient, alpha=sign * step)
        values.append(bench.gradients(FULL, bench.mini_batch(prompts, answers))[0])
        with torch.no_grad():
            matrix.sub_(gradient, alpha=sign * step)
    slope = (values[0] - values[1]) / 2 / step
    assert values[1] < loss < values[0]
    assert slope == pytest.approx(float((gradient**2).sum()), rel=0.1)


def test_it_runs(capsys):
    words = ["--mini-batches", "4", "--sequences", "2", "--new-tokens", "5", "--draws", "8", "--permutations", "200"]
    main([*words, "--exact-entries", "10000"])
    table, line = capsys.readouterr().out.strip().rsplit("\n\n", 1)
    found = json.loads(line)
    assert found["mini_batches"] == 4
    assert [row["estimator"] for row in found["conditional"]] == ["k1", "k1+baseline"]
    assert {(row["matrix"], row["exact"]) for row in found["total"]} == {("head", False), ("wo_b", True)}
    for row in found["conditional"]:
        assert 0.5 < row["ratio_to_closed_form"] < 1.5
    for row in found["total"]:
        assert f"{row['ratio']:.3f}" in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--student", "x"], "go together"),
        (["--recipe", "tiny"], "needs --student"),
        (["--mini-batches", "3"], "give 4 or more"),
    ],
)
def test_wrong_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err
