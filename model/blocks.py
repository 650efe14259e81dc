"""Muon's matrices as places in tensors: cut out, laid one after another in a flat buffer, and put back.

What lives here: views, copies and square norms. What does not: which matrices there are (`matrices.py`), who holds
which (`assignment.py`).

A flat buffer holds its matrices in the order given, each row-major, without gaps, from the start; what is beyond the
last one is padding.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollforward.kernels.rowwise import tree_sum
from rollforward.model.matrices import LogicalMatrix


def block(tensor: Tensor, matrix: LogicalMatrix) -> Tensor:
    """Return a matrix as a view of its tensor.

    Args:
        tensor: canonical, [R, C], or [E, R, C] where experts are stacked.
        matrix: a block inside it.

    Returns:
        [num_rows, num_columns], sharing memory.

    Example: expert 1, column 2, 3 x 2 of a [4, 3, 4] tensor is tensor[1, 0:3, 2:4].
    """
    assert tensor.dim() in (2, 3), f"{matrix.tensor} has shape {list(tensor.shape)}: no matrix and no stack of them"
    num_experts = tensor.shape[0] if tensor.dim() == 3 else 1
    last_row, last_column = matrix.row + matrix.num_rows, matrix.column + matrix.num_columns
    is_inside = matrix.expert < num_experts and last_row <= tensor.shape[-2] and last_column <= tensor.shape[-1]
    # A slice beyond the end would be silently shorter, and so would every matrix after it lie elsewhere.
    assert is_inside, f"{matrix} lies outside {list(tensor.shape)}"
    rows = tensor[matrix.expert] if tensor.dim() == 3 else tensor
    return rows[matrix.row : last_row, matrix.column : last_column]


def flat_views(flat: Tensor, matrices: Sequence[LogicalMatrix]) -> Iterator[Tensor]:
    """Yield each matrix of a flat buffer as a view [num_rows, num_columns].

    Args:
        flat: one dimension, at least as long as the matrices together.
        matrices: in the buffer's order; may be none.

    Example: two 2 x 3 matrices of a buffer of 14: elements 0 to 5, 6 to 11; two are padding.
    """
    needed = sum(matrix.num_elements for matrix in matrices)
    assert flat.dim() == 1, f"a flat buffer has one dimension, not shape {list(flat.shape)}"
    assert flat.numel() >= needed, f"a buffer of {flat.numel()} elements cannot hold {needed}"
    start = 0
    for matrix in matrices:
        stop = start + matrix.num_elements
        yield flat[start:stop].view(matrix.num_rows, matrix.num_columns)
        start = stop


@torch.no_grad()
def flatten_blocks(named: Mapping[str, Tensor], matrices: Sequence[LogicalMatrix], out: Tensor) -> None:
    """Copy matrices out of their tensors into the start of a flat buffer; its padding is left alone.

    Args:
        named: canonical tensors by name, of the buffer's dtype.
        matrices: in the order wanted; may be none.
        out: one dimension, long enough.
    """
    for matrix, view in zip(matrices, flat_views(out, matrices), strict=True):
        view.copy_(_block_of(named, matrix, out.dtype))


@torch.no_grad()
def write_blocks(flat: Tensor, matrices: Sequence[LogicalMatrix], named: Mapping[str, Tensor]) -> None:
    """Copy matrices from the start of a flat buffer to their places in tensors: the inverse of `flatten_blocks`.

    Args:
        flat: one dimension.
        matrices: in the buffer's order; may be none.
        named: canonical tensors by name, of the buffer's dtype; what no matrix covers stays as it is.
    """
    for matrix, view in zip(matrices, flat_views(flat, matrices), strict=True):
        _block_of(named, matrix, flat.dtype).copy_(view)


@torch.no_grad()
def square_norms(flat: Tensor, matrices: Sequence[LogicalMatrix]) -> Tensor:
    """Return the sum of squares of each matrix of a flat buffer.

    Args:
        flat: one dimension, float32.
        matrices: in the buffer's order; may be none.

    Returns:
        [number of matrices] float64. Squares are exact; NaN or infinity where the matrix has one.

    Invariants: a matrix's bits depend on its own values alone, not on the others, the threads or the rank.
    """
    norms = [tree_sum(view.reshape(-1).double().square(), 0) for view in flat_views(flat, matrices)]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=flat.device)


def _block_of(named: Mapping[str, Tensor], matrix: LogicalMatrix, dtype: torch.dtype) -> Tensor:
    tensor = named[matrix.tensor]
    # A copy between dtypes would round silently.
    assert tensor.dtype == dtype, f"{matrix.tensor} is {tensor.dtype}, its flat buffer {dtype}"
    return block(tensor, matrix)
