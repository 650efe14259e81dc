"""Proves: every matrix is cut out of its tensor and put back exactly, for every choice of what a matrix is, and its
square norm is its own."""

import itertools
import math
from typing import get_args, get_type_hints

import pytest
import torch

from rollforward.model.blocks import block, flat_views, flatten_blocks, square_norms, write_blocks
from rollforward.model.config import ModelConfig
from rollforward.model.matrices import LogicalMatrix, MuonSplit, dense_matrices, expert_matrices, tensor_roles
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.tiny import oracle_config, random_params, tiny_config

CHOICES = {name: get_args(literal) for name, literal in get_type_hints(MuonSplit).items()}
EVERY_SPLIT = [MuonSplit(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]
CONFIGS = {
    "tiny": tiny_config,
    "flash": lambda: oracle_config("flash"),
    "pro": lambda: oracle_config("pro"),
    "other": lambda: oracle_config("other"),
}


def matrix(name: str = "w", expert: int = 0, row: int = 0, column: int = 0, rows: int = 1, columns: int = 1):
    return LogicalMatrix(tensor=name, expert=expert, row=row, column=column, num_rows=rows, num_columns=columns)


def every_matrix(config: ModelConfig, split: MuonSplit) -> tuple[LogicalMatrix, ...]:
    roles = tensor_roles(config, split)
    return (*expert_matrices(roles), *dense_matrices(roles))


def total(matrices: tuple[LogicalMatrix, ...]) -> int:
    return sum(each.num_elements for each in matrices)


def test_blocks_by_hand() -> None:
    plain = torch.arange(24.0).view(4, 6)
    assert block(plain, matrix(row=1, column=2, rows=2, columns=3)).tolist() == [[8, 9, 10], [14, 15, 16]]
    stacked = torch.arange(24.0).view(2, 3, 4)
    assert block(stacked, matrix(expert=1, rows=3, columns=4)).tolist() == stacked[1].tolist()
    assert block(stacked, matrix(expert=1, row=2, column=1, rows=1, columns=2)).tolist() == [[21, 22]]
    block(stacked, matrix(expert=1, row=2, column=3)).fill_(-1)
    assert stacked[1, 2, 3] == -1  # a view


def test_a_flat_buffer_by_hand() -> None:
    named = {"a": torch.arange(6.0).view(2, 3), "b": 10 + torch.arange(8.0).view(2, 2, 2)}
    matrices = (matrix("b", expert=1, rows=2, columns=2), matrix("a", column=1, rows=2, columns=2), matrix("a", rows=2))
    flat = torch.full((13,), 99.0)
    flatten_blocks(named, matrices, flat)
    assert flat.tolist() == [14, 15, 16, 17, 1, 2, 4, 5, 0, 3, 99, 99, 99]
    assert [view.tolist() for view in flat_views(flat, matrices)] == [
        [[14, 15], [16, 17]],
        [[1, 2], [4, 5]],
        [[0], [3]],
    ]
    write_blocks(-flat, matrices, named)
    assert named["a"].tolist() == [[0, -1, -2], [-3, -4, -5]]
    assert named["b"].tolist() == [[[10, 11], [12, 13]], [[-14, -15], [-16, -17]]]
    assert square_norms(flat, matrices).tolist() == [14**2 + 15**2 + 16**2 + 17**2, 1 + 4 + 16 + 25, 9]


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_of_every_tensor_for_every_choice(name: str) -> None:
    config = CONFIGS[name]()
    params = random_params(config)
    for split in EVERY_SPLIT:
        matrices = every_matrix(config, split)
        touched = {each.tensor for each in matrices}
        flat = torch.full((total(matrices) + 7,), float("nan"))
        flatten_blocks(params, matrices, flat)
        assert flat[-7:].isnan().all()
        assert not flat[:-7].isnan().any()
        empty = {tensor: torch.full_like(value, float("nan")) for tensor, value in params.items() if tensor in touched}
        write_blocks(flat, matrices, empty)
        for tensor, value in empty.items():
            assert different_bits(value, params[tensor]) == 0, tensor


def test_a_share_lies_where_its_matrices_are_in_any_order() -> None:
    config, params = tiny_config(), random_params(tiny_config())
    share = every_matrix(config, MuonSplit())[::-3]
    flat = torch.empty(total(share))
    flatten_blocks(params, share, flat)
    for each, view in zip(share, flat_views(flat, share), strict=True):
        assert torch.equal(view, block(params[each.tensor], each))
    changed = {name: value.clone() for name, value in params.items()}
    write_blocks(flat + 1, share, changed)
    assert sum(int((changed[name] != params[name]).sum()) for name in params) == total(share)


def test_strided_tensors_and_no_matrices() -> None:
    wide = torch.arange(12.0).view(3, 4)
    flat = torch.zeros(12)
    flatten_blocks({"w": wide.t()}, (matrix(rows=4, columns=3),), flat)
    assert flat.tolist() == wide.t().flatten().tolist()
    target = torch.zeros(3, 4)
    write_blocks(flat, (matrix(rows=4, columns=3),), {"w": target.t()})
    assert torch.equal(target, wide)
    flatten_blocks({}, (), torch.zeros(0))
    write_blocks(torch.zeros(3), (), {})
    assert square_norms(torch.zeros(5), ()).tolist() == []
    assert square_norms(torch.zeros(5), ()).dtype == torch.float64


def test_leaves_of_autograd_are_written_in_place() -> None:
    leaf = torch.zeros(2, 3, requires_grad=True)
    write_blocks(torch.ones(6), (matrix(rows=2, columns=3),), {"w": leaf})
    assert leaf.tolist() == [[1, 1, 1], [1, 1, 1]]
    flat = torch.zeros(6)
    flatten_blocks({"w": leaf}, (matrix(rows=2, columns=3),), flat)
    assert not flat.requires_grad


@pytest.mark.parametrize(
    "outside",
    [
        matrix(expert=2, rows=3, columns=4),
        matrix(row=1, rows=3, columns=4),
        matrix(column=4, rows=3, columns=1),
    ],
)
def test_a_matrix_outside_its_tensor_is_a_bug(outside: LogicalMatrix) -> None:
    with pytest.raises(AssertionError, match="lies outside"):
        block(torch.zeros(2, 3, 4), outside)
    with pytest.raises(AssertionError, match="lies outside"):
        flatten_blocks({"w": torch.zeros(2, 3, 4)}, (outside,), torch.zeros(99))


def test_what_does_not_fit_is_a_bug() -> None:
    whole = (matrix(rows=2, columns=3),)
    with pytest.raises(AssertionError, match="lies outside"):
        block(torch.zeros(2, 3), matrix(expert=1, rows=2, columns=3))
    with pytest.raises(AssertionError, match="no matrix and no stack"):
        block(torch.zeros(6), matrix(rows=1, columns=6))
    with pytest.raises(AssertionError, match="5 elements cannot hold 6"):
        flatten_blocks({"w": torch.zeros(2, 3)}, whole, torch.zeros(5))
    with pytest.raises(AssertionError, match="one dimension"):
        write_blocks(torch.zeros(2, 3), whole, {"w": torch.zeros(2, 3)})
    for flat, tensor in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        with pytest.raises(AssertionError, match="its flat buffer"):
            flatten_blocks({"w": torch.zeros(2, 3, dtype=tensor)}, whole, torch.zeros(6, dtype=flat))
        with pytest.raises(AssertionError, match="its flat buffer"):
            write_blocks(torch.zeros(6, dtype=flat), whole, {"w": torch.zeros(2, 3, dtype=tensor)})


def test_square_norms_are_exact_to_float64() -> None:
    matrices = (matrix("a", rows=7, columns=300), matrix("b", rows=1, columns=1), matrix("c", rows=64, columns=64))
    flat = torch.randn(total(matrices) + 3) * 10.0 ** torch.randint(-30, 30, (total(matrices) + 3,))
    got = square_norms(flat, matrices)
    for norm, view in zip(got.tolist(), flat_views(flat, matrices), strict=True):
        want = math.fsum(value * value for value in view.double().flatten().tolist())
        assert norm == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_square_norm_is_the_matrix_s_own(bad: float) -> None:
    matrices = tuple(matrix(str(i), rows=i + 1, columns=97) for i in range(60))
    flat = torch.randn(total(matrices))
    whole = square_norms(flat, matrices)
    start = 0
    for index, each in enumerate(matrices):
        part = flat[start : start + each.num_elements].clone()
        start += each.num_elements
        assert float(square_norms(part, (each,))) == float(whole[index])
    with torch_threads(2):
        assert different_bits(square_norms(flat, matrices), whole) == 0
    flat[3] = bad
    spoilt = square_norms(flat, matrices)
    assert not spoilt[0].isfinite()
    assert different_bits(spoilt[1:], whole[1:]) == 0
