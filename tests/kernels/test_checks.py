"""Proves that shape letters bind across arguments and that a disagreement names op, argument, sizes and origin."""

import pickle

import pytest
import torch

from rollforward.kernels.checks import bind_shapes, check_dtype, check_multiple, check_shapes
from rollforward.kernels.errors import DtypeError, ShapeError


def test_letters_bind_across_arguments() -> None:
    x, w = torch.zeros(5, 64), torch.zeros(8, 64)
    assert bind_shapes("linear", x=(x, "T K"), w=(w, "N K")) == {"T": 5, "K": 64, "N": 8}


def test_disagreement_names_everything() -> None:
    with pytest.raises(ShapeError) as caught:
        bind_shapes("linear", x=(torch.zeros(5, 64), "T K"), w=(torch.zeros(8, 65), "N K"))
    message = str(caught.value)
    for part in ("linear", "w has shape [8, 65]", "K is 65 here but 64 in x"):
        assert part in message


def test_leading_dimensions_agree_and_may_be_absent() -> None:
    assert bind_shapes("op", a=(torch.zeros(2, 3, 4), "... K"), b=(torch.zeros(2, 3), "...")) == {"K": 4}
    assert bind_shapes("op", a=(torch.zeros(4), "... K")) == {"K": 4}
    with pytest.raises(ShapeError, match=r"differ from \[2, 3\] of a"):
        bind_shapes("op", a=(torch.zeros(2, 3, 4), "... K"), b=(torch.zeros(2, 4), "..."))


def test_literal_sizes_and_wildcards() -> None:
    assert bind_shapes("op", a=(torch.zeros(3, 7), "3 *"), b=(torch.zeros(9), "*")) == {}
    with pytest.raises(ShapeError, match="4 is not 3"):
        bind_shapes("op", a=(torch.zeros(4), "3"))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 4)])
def test_wrong_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"it has {len(shape)} dimensions"):
        bind_shapes("op", a=(torch.zeros(shape), "T D"))


def test_suffixes_are_patterns() -> None:
    x_TD, comb_TMM, q_GQNh = torch.zeros(5, 6), torch.zeros(5, 4, 4), torch.zeros(1, 2, 3, 9)
    assert check_shapes("op", x_TD=x_TD, comb_TMM=comb_TMM) == {"T": 5, "D": 6, "M": 4}
    assert check_shapes("op", q_GQNh=q_GQNh) == {"G": 1, "Q": 2, "N": 3, "h": 9}
    assert check_shapes("op", scale_3=torch.zeros(3)) == {}
    with pytest.raises(ShapeError, match="M is 5 here but 4"):
        check_shapes("op", comb_TMM=torch.zeros(5, 4, 5))


def test_dtype_and_multiple() -> None:
    check_dtype("op", "x", torch.zeros(1), torch.float32, torch.bfloat16)
    with pytest.raises(DtypeError, match="x is float16; the op takes float32 or bfloat16"):
        check_dtype("op", "x", torch.zeros(1, dtype=torch.float16), torch.float32, torch.bfloat16)
    check_multiple("op", "K", 64, 32)
    with pytest.raises(ShapeError, match="K is 65; it must be a multiple of 32"):
        check_multiple("op", "K", 65, 32)


def test_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(ShapeError("what")))
    assert isinstance(error, ShapeError)
    assert str(error) == "what"
