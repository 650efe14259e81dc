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
