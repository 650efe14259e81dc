"""Proves: the orthogonal factor against a float64 SVD, on random and on ill-conditioned matrices of every orientation,
in float32 and bfloat16; and that a matrix's bits are its own.

Does not prove that the direction of small singular values survives bfloat16: it does not, only their size becomes 1.
"""

import pytest
import torch
from torch import Tensor

from rollforward.kernels.errors import DtypeError, ShapeError
from rollforward.kernels.optim.newton_schulz import orthogonalise
from rollforward.kernels.optim.newton_schulz_ref import COEFFICIENTS, frobenius_norm_ref, newton_schulz_ref
from tests.helpers.bits import different_bits, torch_threads

LOW = 1e-3
"""Smallest singular value, relative to the Frobenius norm, for which the bars hold."""
BARS = {torch.float32: 0.01, torch.bfloat16: 0.02}
SHAPES = [(1, 1), (1, 7), (4, 4), (4, 64), (64, 4), (3, 5), (17, 40), (100, 100), (64, 128), (128, 64), (256, 1024)]
SPECTRA = ("gauss", "flat", "geometric", "one large", "two levels")


def orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64))[0]


def singular_values(spectrum: str, count: int) -> Tensor:
    """Every one at least LOW of the Frobenius norm."""
    steps = torch.arange(count, dtype=torch.float64) / max(1, count - 1)
    values = {
        "flat": torch.ones(count),
        "geometric": (4 * LOW) ** steps,
        "one large": torch.where(steps == 0, 1.0, 1.1 * LOW),
        "two levels": torch.where(steps < 0.5, 1.0, 0.02),
    }[spectrum].double()
    return values if count == 1 else values.clamp(min=1.01 * LOW * float(values.norm()))


def matrix_of(spectrum: str, rows: int, columns: int) -> Tensor:
    """[rows, columns] float32 with that spectrum and random singular vectors."""
    if spectrum == "gauss":
        return torch.randn(rows, columns)
    count = min(rows, columns)
    values = singular_values(spectrum, count)
    scale = 10 ** float(torch.randint(-6, 7, ()))
    return (scale * orthonormal(rows, count) @ torch.diag(values) @ orthonormal(columns, count).t()).float()


def svd(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """U, relative singular values, V^T of a float32 matrix in float64, and which the bars cover."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.norm()
    return left, values, right, values >= LOW


def test_the_polynomial_over_the_whole_range() -> None:
    # Scalars are 1 x 1 matrices before normalisation, so the map is written out here.
    value = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for index in range(10):
        a, b, c = (3.4445, -4.7750, 2.0315) if index < 8 else (2.0, -1.5, 0.5)
        value = a * value + b * value**3 + c * value**5
        assert COEFFICIENTS[index] == (a, b, c)
    assert len(COEFFICIENTS) == 10
    assert (value - 1).abs().max() < 0.002


def test_by_hand() -> None:
    x = torch.tensor([[[0.0, -3.0], [2.0, 0.0]], [[5.0, 0.0], [0.0, 5.0]]])
    torch.testing.assert_close(
        orthogonalise(x),
        torch.tensor([[[0.0, -1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]),
        rtol=0,
        atol=2e-3,
    )
    assert float(orthogonalise(torch.full((1, 1, 1), -7.0))) == pytest.approx(-1, abs=2e-3)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_become_one(shape: tuple[int, int], spectrum: str) -> None:
    x = matrix_of(spectrum, *shape)
    left, _, right, covered = svd(x)
    assert spectrum == "gauss" or covered.all()
    for dtype, bar in BARS.items():
        y = orthogonalise(x[None], dtype=dtype)
        assert y.shape == (1, *shape)
        assert y.dtype == torch.float32
        got = torch.linalg.svdvals(y[0].double())
        assert got.max() <= 1 + bar
        assert not covered.all() or got.min() >= 1 - bar
    y = orthogonalise(x[None])[0].double()
    along = (left.t() @ y @ right.t()).diagonal()
    assert (along[covered] - 1).abs().max() <= BARS[torch.float32]
    if covered.all():
        # Every element of the direction; the worst singular value is 0.0005 off.
        assert (y - left @ right).abs().max() <= 2e-3


def test_tiny_and_null_directions_harm_no_other() -> None:
    values = torch.tensor([1.0, 0.3, 2e-3, 1e-5, 0.0, 0.0], dtype=torch.float64)
    left, right = orthonormal(6, 6), orthonormal(30, 6)
    x = (left @ torch.diag(values) @ right.t()).float()
    along = (left.t() @ orthogonalise(x[None])[0].double() @ right).diagonal()
    assert (along[:3] - 1).abs().max() <= 0.01
    assert 0 < along[3] <= 1.01  # a slope of about 8e4 lifts 1e-5 to the middle
    assert along[4:].abs().max() <= 0.05
    for dtype, bar in BARS.items():
        assert torch.linalg.svdvals(orthogonalise(x[None], dtype=dtype)[0].double()).max() <= 1 + bar


@pytest.mark.parametrize("shape", [(4, 64), (17, 40), (256, 1024)], ids=str)
def test_float32_against_float64(shape: tuple[int, int]) -> None:
    for spectrum in SPECTRA:
        x = matrix_of(spectrum, *shape)[None]
        exact = newton_schulz_ref(x, torch.float64)
        assert exact.dtype == torch.float64
        # 1e-3 of the norm is amplified about a thousandfold, and with it float32's 6e-8 of the largest element.
        assert (orthogonalise(x) - exact).abs().max() < 2e-4


def test_the_reference_is_the_equation() -> None:
    x = torch.randn(5, 9, dtype=torch.float64)
    want = x / x.norm()
    for a, b, c in COEFFICIENTS:
        gram = want @ want.t()
        want = a * want + b * gram @ want + c * gram @ gram @ want
    torch.testing.assert_close(newton_schulz_ref(x[None], torch.float64)[0], want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", list(BARS), ids=str)
def test_zero_stays_zero_and_scale_does_not_matter(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 11)
    x[1] = 0.0
    x[2] *= 2.0**-100  # squares vanish in float32
    x[3] *= 2.0**100  # and overflow
    y = orthogonalise(x, dtype=dtype)
    assert different_bits(y[1], torch.zeros(6, 11)) == 0
    x[2] *= 2.0**100
    x[3] *= 2.0**-100
    assert different_bits(orthogonalise(x, dtype=dtype), y) == 0
    assert torch.linalg.svdvals(y[2:].double()).sub(1).abs().max() < BARS[dtype]


def test_norm_by_hand_and_exact() -> None:
    x = torch.tensor([[[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]], [[0.0] * 3, [0.0] * 3], [[3e38] * 3, [1e-45] * 3]])
    norm = frobenius_norm_ref(x)
    assert norm.shape == (3, 1, 1)
    assert norm.flatten().tolist()[:2] == [5.0, 0.0]
    assert float(norm[2]) == pytest.approx(3e38 * 3**0.5, rel=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_element_shows_everywhere_in_its_matrix_and_nowhere_else(bad: float) -> None:
    x = torch.randn(3, 5, 20)
    clean = orthogonalise(x)
    x[1, 2, 3] = bad
    y = orthogonalise(x)
    assert y[1].isnan().all()
    assert different_bits(y[[0, 2]], clean[[0, 2]]) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(BARS), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 5), (4, 64), (64, 4), (17, 40), (100, 33), (64, 128)], ids=str)
def test_bits_belong_to_the_matrix(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    x = torch.randn(33, *shape) * 10 ** torch.linspace(-9, 9, 33)[:, None, None]
    with torch_threads(threads):
        whole = orthogonalise(x, dtype=dtype)
        for order in ([0], [7], [32], [5, 4], [1, 2, 3], list(range(32, -1, -1)), list(range(3, 20))):
            assert different_bits(orthogonalise(x[order], dtype=dtype), whole[order]) == 0
        poisoned = torch.full((5, *shape), float("nan"))
        poisoned[2], poisoned[4] = x[9], x[10]
        assert different_bits(orthogonalise(poisoned, dtype=dtype)[[2, 4]], whole[[9, 10]]) == 0
        assert different_bits(orthogonalise(x, dtype=dtype), whole) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(BARS), ids=str)
@pytest.mark.parametrize("shape", [(9, 73), (10, 72), (16, 8192), (192, 1040)], ids=str)
def test_bits_where_the_library_changes_its_path(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    # Each found by search: with less padding these depend on the batch.
    x = torch.randn(8, *shape)
    with torch_threads(threads):
        whole = orthogonalise(x, dtype=dtype)
        norms = frobenius_norm_ref(x)
        for order in (*([index] for index in range(8)), [2, 1], [7, 3, 0]):
            assert different_bits(orthogonalise(x[order], dtype=dtype), whole[order]) == 0
            assert different_bits(frobenius_norm_ref(x[order]), norms[order]) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_strides_of_a_large_matrix_change_no_bit(threads: int) -> None:
    x = torch.randn(3, 256, 1040)
    with torch_threads(threads):
        whole = orthogonalise(x, dtype=torch.bfloat16)
        strided = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert different_bits(orthogonalise(strided, dtype=torch.bfloat16), whole) == 0


@pytest.mark.parametrize("dtype", list(BARS), ids=str)
@pytest.mark.parametrize("shape", [(16, 64), (64, 128), (5, 7), (32, 32)], ids=str)
def test_strides_and_orientation_change_no_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(4, *shape)
    whole = orthogonalise(x, dtype=dtype)
    strided = torch.randn(4, shape[1], 2 * shape[0]).transpose(1, 2)[:, ::2]
    strided.copy_(x)
    assert not strided.is_contiguous()
    assert different_bits(orthogonalise(strided, dtype=dtype), whole) == 0
    if shape[0] != shape[1]:
        assert different_bits(orthogonalise(x.transpose(1, 2), dtype=dtype).transpose(1, 2), whole) == 0


def test_the_input_is_left_alone_and_nothing_is_recorded() -> None:
    x = torch.randn(2, 16, 16, requires_grad=True)
    before = x.detach().clone()
    y = orthogonalise(x)
    assert not y.requires_grad
    y.zero_()
    assert different_bits(x, before) == 0
    assert orthogonalise(torch.zeros(0, 3, 5)).shape == (0, 3, 5)


def test_what_is_refused() -> None:
    with pytest.raises(ShapeError, match="x_BNM has shape"):
        orthogonalise(torch.zeros(3, 5))
    with pytest.raises(DtypeError, match="x_BNM is bfloat16"):
        orthogonalise(torch.zeros(1, 3, 5, dtype=torch.bfloat16))
    with pytest.raises(DtypeError, match=r"dtype is torch\.float64; .*Choose"):
        orthogonalise(torch.zeros(1, 3, 5), dtype=torch.float64)
