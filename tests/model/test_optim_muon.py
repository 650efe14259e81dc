"""Proves: Muon's update against a float64 implementation matrix by matrix; the size of an update; and that a matrix's
bits depend neither on who else is there, nor on batches, nor on the run.

Does not prove that it learns faster than AdamW.
"""

import math
import zlib

import pytest
import torch
from torch import Tensor

from rollforward.kernels.optim.newton_schulz_ref import COEFFICIENTS
from rollforward.model.blocks import flat_views, flatten_blocks
from rollforward.model.config import ModelConfig
from rollforward.model.matrices import (
    NS_STEPS,
    LogicalMatrix,
    MuonSplit,
    dense_matrices,
    expert_matrices,
    tensor_roles,
)
from rollforward.model.optim_muon import Muon
from rollforward.model.train_config import HybridMuon
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.tiny import oracle_config, random_params, tiny_config

CONFIG = HybridMuon(lr=0.02, momentum=0.9, gamma=0.2, weight_decay=0.1)


def every_matrix(config: ModelConfig) -> tuple[LogicalMatrix, ...]:
    roles = tensor_roles(config, MuonSplit())
    return (*expert_matrices(roles), *dense_matrices(roles))


def small_matrices() -> tuple[dict[str, Tensor], tuple[LogicalMatrix, ...]]:
    """Experts tall and wide of one Newton-Schulz shape, row blocks, column halves, a square and a row."""
    named = {
        "up": torch.randn(3, 8, 20),
        "down": torch.randn(3, 20, 8),
        "rows": torch.randn(24, 16),
        "columns": torch.randn(4, 24),
        "square": torch.randn(16, 16),
        "row": torch.randn(1, 9),
    }
    matrices = [
        LogicalMatrix(tensor=name, expert=expert, num_rows=named[name].shape[1], num_columns=named[name].shape[2])
        for name in ("down", "up")
        for expert in range(3)
    ]
    matrices += [
        LogicalMatrix(tensor="rows", row=row, num_rows=rows, num_columns=16) for row, rows in ((0, 8), (8, 16))
    ]
    matrices += [LogicalMatrix(tensor="columns", column=start, num_rows=4, num_columns=12) for start in (0, 12)]
    matrices += [LogicalMatrix(tensor="square", num_rows=16, num_columns=16)]
    matrices += [LogicalMatrix(tensor="row", num_rows=1, num_columns=9)]
    return named, tuple(matrices)


def plain_direction(x: Tensor) -> Tensor:
    """8 + 2 Newton-Schulz of one float64 matrix in whatever orientation it has."""
    x = x / x.norm() if x.norm() > 0 else x
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2:
        gram = x @ x.t()
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def plain_step(w: Tensor, m: Tensor, g: Tensor, config: HybridMuon, lr: float) -> tuple[Tensor, Tensor]:
    m = config.momentum * m + g
    update = plain_direction(config.momentum * m + g) * config.gamma * math.sqrt(max(w.shape))
    return w * (1 - lr * config.weight_decay) - lr * update, m


def gradient_of(matrices: tuple[LogicalMatrix, ...], seed: int, padding: int = 0) -> Tensor:
    """Flat; a matrix's part depends on the matrix and the seed alone."""
    parts = [
        torch.randn(
            matrix.num_elements, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {matrix}".encode()))
        )
        for matrix in matrices
    ]
    return torch.cat([*parts, torch.full((padding,), float("nan"))])


def by_matrix(flat: Tensor, muon: Muon) -> dict[LogicalMatrix, Tensor]:
    return dict(zip(muon.matrices, flat_views(flat, muon.matrices), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_several_steps_against_float64(precision: str) -> None:
    named, matrices = small_matrices()
    config = HybridMuon(lr=1.0, momentum=0.9, gamma=0.2, weight_decay=0.1, ns_precision=precision)
    muon = Muon(matrices, named, config)
    weights = [view.double() for view in flat_views(muon.masters.clone(), matrices)]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(4):
        lr = 0.05 / (step + 1)
        gradient = gradient_of(matrices, step, padding=5)
        before = gradient.clone()
        muon.step(gradient, lr=lr)
        assert different_bits(gradient, before) == 0
        for index, g in enumerate(flat_views(gradient, matrices)):
            weights[index], momenta[index] = plain_step(weights[index], momenta[index], g.double(), config, lr)
    # bf16: singular values within 0.01, and small ones turned by rounding; relative to the sum of four updates.
    tolerance = 2e-5 if precision == "fp32" else 5e-3
    for index, matrix in enumerate(matrices):
        got = by_matrix(muon.masters, muon)[matrix]
        torch.testing.assert_close(got.double(), weights[index], rtol=0, atol=tolerance)
        torch.testing.assert_close(by_matrix(muon.momenta, muon)[matrix].double(), momenta[index], rtol=1e-6, atol=1e-6)


def test_one_step_by_hand() -> None:
    # A diagonal gradient's orthogonal factor is the signs; 0.5 sqrt(2) per unit of rate; decay takes 1 % first.
    named = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    matrix = LogicalMatrix(tensor="w", num_rows=2, num_columns=2)
    muon = Muon((matrix,), named, HybridMuon(lr=1.0, momentum=0.5, gamma=0.5, weight_decay=0.1))
    muon.step(torch.tensor([4.0, 0.0, 0.0, -3.0]), lr=0.1)
    move = 0.1 * 0.5 * math.sqrt(2)
    want = torch.tensor([0.99 - move, 1.98, 2.97, 3.96 + move])
    torch.testing.assert_close(muon.masters, want, rtol=0, atol=1e-4)
    assert muon.momenta.tolist() == [4, 0, 0, -3]
    muon.step(torch.tensor([0.0, 1.0, 0.0, 0.0]), lr=0.0)
    assert muon.momenta.tolist() == [2, 1, 0, -1.5]
    assert named["w"].tolist() == [[1, 2], [3, 4]]  # masters are copies


def test_nesterov_looks_ahead() -> None:
    # M = 0.5 * [2, 0] + [-1, 0] = 0, so a plain momentum has no direction; 0.5 M + G = [-1, 0] has.
    matrix = LogicalMatrix(tensor="w", num_rows=1, num_columns=2)
    muon = Muon((matrix,), {"w": torch.zeros(1, 2)}, HybridMuon(lr=1.0, momentum=0.5, gamma=1.0))
    muon.momenta.copy_(torch.tensor([2.0, 0.0]))
    muon.step(torch.tensor([-1.0, 0.0]), lr=1.0)
    assert muon.momenta.tolist() == [0, 0]
    torch.testing.assert_close(muon.masters, torch.tensor([math.sqrt(2), 0.0]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_root_mean_square_of_an_update_is_lr_gamma(precision: str) -> None:
    config = oracle_config()
    params, matrices = random_params(config), every_matrix(config)
    muon = Muon(matrices, params, HybridMuon(lr=1.0, gamma=0.18, ns_precision=precision))
    before = muon.masters.clone()
    muon.step(gradient_of(matrices, 1) * 1e-6, lr=0.01)
    for matrix, update in zip(matrices, flat_views(muon.masters - before, matrices), strict=True):
        assert float(update.double().square().mean().sqrt()) == pytest.approx(0.01 * 0.18, rel=0.03), matrix


def test_lr_zero_keeps_every_weight_and_moves_the_momenta() -> None:
    named, matrices = small_matrices()
    muon = Muon(matrices, named, CONFIG)
    before = muon.masters.clone()
    gradient = gradient_of(matrices, 1)
    muon.step(gradient, lr=0.0)
    assert different_bits(muon.masters, before) == 0
    assert different_bits(muon.momenta, gradient) == 0


def test_zero_gradients_decay_alone() -> None:
    named, matrices = small_matrices()
    muon = Muon(matrices, named, CONFIG)
    before = muon.masters.clone()
    for _ in range(3):
        muon.step(torch.zeros_like(before), lr=0.5)
    torch.testing.assert_close(muon.masters.double(), before.double() * 0.95**3, rtol=1e-6, atol=0)
    assert not muon.momenta.any()


def test_one_matrix_without_a_gradient_among_others() -> None:
    # An expert that no token visited: no NaN from 0 / 0.
    named, matrices = small_matrices()
    muon = Muon(matrices, named, CONFIG)
    gradient = gradient_of(matrices, 1)
    next(flat_views(gradient, matrices)).zero_()
    before = muon.masters.clone()
    muon.step(gradient, lr=0.5)
    assert muon.masters.isfinite().all()
    unvisited = by_matrix(muon.masters, muon)[matrices[0]]
    assert different_bits(unvisited, next(flat_views(before, matrices)) * 0.95) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shares_give_the_bits_of_one_rank(precision: str, threads: int) -> None:
    config = tiny_config()
    params, matrices = random_params(config), every_matrix(config)
    optim = HybridMuon(lr=1.0, weight_decay=0.1, ns_precision=precision)

    def run(share: tuple[LogicalMatrix, ...], cap: int) -> tuple[dict[LogicalMatrix, Tensor], ...]:
        muon = Muon(share, params, optim, max_batch_elements=cap)
        for step in range(2):
            muon.step(gradient_of(share, step, padding=step), lr=0.03)
        return by_matrix(muon.masters, muon), by_matrix(muon.momenta, muon)

    with torch_threads(threads):
        whole = run(matrices, 1 << 25)
        shares = [matrices[0::2], matrices[1::2], matrices[::-3], matrices[:5], matrices[7:8]]
        runs = [run(share, 1 << 25) for share in shares]
        runs += [run(matrices, cap) for cap in (1, 5000, 20_000)]
    for one in runs:
        for ours, theirs in zip(one, whole, strict=True):
            for matrix, value in ours.items():
                assert different_bits(value, theirs[matrix]) == 0, matrix


def test_two_runs_are_one() -> None:
    config = tiny_config()
    matrices = every_matrix(config)
    ends: list[Tensor] = []
    for _ in range(2):
        muon = Muon(matrices, random_params(config), CONFIG)
        for step in range(3):
            muon.step(gradient_of(matrices, step), lr=0.01)
        ends.append(torch.cat((muon.masters, muon.momenta)))
    assert different_bits(ends[0], ends[1]) == 0


def test_a_run_continues_from_copied_state() -> None:
    named, matrices = small_matrices()
    straight = Muon(matrices, named, CONFIG)
    straight.step(gradient_of(matrices, 0), lr=0.1)
    resumed = Muon(matrices, {name: torch.zeros_like(value) for name, value in named.items()}, CONFIG)
    resumed.masters.copy_(straight.masters)
    resumed.momenta.copy_(straight.momenta)
    for muon in (straight, resumed):
        muon.step(gradient_of(matrices, 1), lr=0.1)
    assert different_bits(straight.masters, resumed.masters) == 0
    assert different_bits(straight.momenta, resumed.momenta) == 0


def test_the_transposed_problem_has_the_transposed_bits() -> None:
    weight, gradient = torch.randn(12, 40), torch.randn(12, 40)
    ends: list[Tensor] = []
    for w, g in ((weight, gradient), (weight.t().contiguous(), gradient.t().contiguous())):
        matrix = LogicalMatrix(tensor="w", num_rows=w.shape[0], num_columns=w.shape[1])
        muon = Muon((matrix,), {"w": w}, CONFIG)
        muon.step(g.flatten(), lr=0.1)
        ends.append(muon.masters.view(w.shape))
    assert different_bits(ends[0], ends[1].t().contiguous()) == 0


def test_a_rank_may_own_nothing() -> None:
    muon = Muon((), {}, CONFIG)
    muon.step(torch.full((4,), float("nan")), lr=0.1)
    assert muon.masters.shape == muon.momenta.shape == (0,)


def test_masters_start_as_the_tensors() -> None:
    named, matrices = small_matrices()
    muon = Muon(matrices, named, CONFIG)
    want = torch.empty(sum(matrix.num_elements for matrix in matrices))
    flatten_blocks(named, matrices, want)
    assert different_bits(muon.masters, want) == 0
    assert muon.matrices == matrices
    assert not muon.momenta.any()


def test_what_does_not_fit_is_a_bug() -> None:
    named, matrices = small_matrices()
    muon = Muon(matrices, named, CONFIG)
    with pytest.raises(AssertionError, match="masters are float32"):
        muon.step(torch.zeros(muon.masters.numel(), dtype=torch.bfloat16), lr=0.1)
    with pytest.raises(AssertionError, match="cannot hold"):
        muon.step(torch.zeros(muon.masters.numel() - 1), lr=0.1)
    with pytest.raises(AssertionError, match="each matrix once"):
        Muon((matrices[0], matrices[0]), named, CONFIG)
    with pytest.raises(AssertionError, match="its flat buffer"):
        Muon(matrices, {name: value.bfloat16() for name, value in named.items()}, CONFIG)


def test_the_table_counts_the_same_steps() -> None:
    assert len(COEFFICIENTS) == NS_STEPS
