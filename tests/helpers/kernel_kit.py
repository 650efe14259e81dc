"""What every tile form has to stand: repeats, rows alone, garbage in its memory, float64.

A test gives `run(rows)`: the op on those rows of its problem alone -> outputs by name. Outputs of rows are named in
`of_rows`; the rest sum over rows.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rollforward.kernels.bench import Outputs, different

Run = Callable[[Tensor], Outputs]


def repeats(run: Run, count: int, times: int = 10) -> None:
    """The same input gives the same bits."""
    every = torch.arange(count)
    first = {name: one.clone() for name, one in run(every).items()}
    for _ in range(times - 1):
        assert different(first, run(every)) == []


def rows_alone(run: Run, count: int, of_rows: Iterable[str]) -> None:
    """A row's bits depend on neither its neighbours, nor how many there are, nor its place."""
    whole = {name: one.clone() for name, one in run(torch.arange(count)).items()}
    order = torch.randperm(count)
    groups = [
        order,
        order[:1],
        order[:2],
        order[:63],
        order[:64],
        order[:65],
        order[:129],
        torch.arange(count - 1, count),
    ]
    for rows in groups:
        part = run(rows)
        for name in of_rows:
            expected = whole[name][rows.to(whole[name].device)]
            assert different({name: expected}, {name: part[name]}) == [], (name, len(rows))


def near(mine: Tensor, exact: Tensor, bound: float) -> None:
    """The norm of the difference is at most `bound` of the norm of what is exact; NaN never passes."""
    assert torch.isfinite(mine).all()
    error = (mine.double() - exact).norm() / exact.norm().clamp(min=1e-300)
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}"


def near_entries(mine: Tensor, exact: Tensor, of_entry: float, of_row: float) -> None:
    """Each entry's error is at most `of_entry` of the entry and `of_row` of its row's root mean square; NaN never
    passes. Rows are of the first dimension; a vector is one row."""
    assert mine.shape == exact.shape
    rows = exact.unsqueeze(0) if exact.dim() == 1 else exact.flatten(1)
    root_mean_square = rows.square().mean(1, keepdim=True).sqrt()
    error = (mine.double().reshape(rows.shape) - rows).abs()
    bound = of_entry * rows.abs() + of_row * root_mean_square
    at = tuple(int(one) for one in torch.unravel_index((error - bound).argmax(), error.shape))
    found = (
        f"{float(mine.reshape(rows.shape)[at]):.6g} for {float(rows[at]):.6g}, row {float(root_mean_square[at[0]]):.3g}"
    )
    assert bool((error <= bound).all()), f"entry {at}: {found}; the bound is {float(bound[at]):.3g}"
