"""Muon for the whole matrices that one rank owns: masters and momenta flat, directions batched by shape.

What lives here: the arithmetic of an update. What does not: the reduction of gradients and their clipping
(`optim_hybrid.py`), who owns which matrix (`assignment.py`), AdamW for the rest (`optim_adamw.py`).

Local letters: B matrices of one shape, N their smaller and M their larger side.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollforward.kernels.optim.newton_schulz import orthogonalise
from rollforward.model.blocks import flat_views, flatten_blocks
from rollforward.model.matrices import LogicalMatrix
from rollforward.model.train_config import HybridMuon

MAX_BATCH_ELEMENTS = 1 << 25
"""Most elements that are orthogonalised at once (a single larger matrix still is); bounds what a step allocates."""

_PRODUCTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Muon:
    """Masters, momenta and updates of some matrices.

    Between calls of ``step`` the caller may read or overwrite ``masters`` and ``momenta`` in place: that is how a
    checkpoint is loaded.
    """

    def __init__(
        self,
        matrices: Sequence[LogicalMatrix],
        named: Mapping[str, Tensor],
        config: HybridMuon,
        *,
        max_batch_elements: int = MAX_BATCH_ELEMENTS,
    ) -> None:
        """Copy the matrices out of their tensors.

        Args:
            matrices: each once, in the order of the flat buffers; may be none.
            named: canonical float32 tensors by name, at least those that the matrices lie in.
            config: momentum, gamma, decay and the format of the products.
            max_batch_elements: bounds memory; has no influence on any bit.
        """
        assert len(set(matrices)) == len(matrices), "each matrix once"
        self.matrices = tuple(matrices)
        device = named[self.matrices[0].tensor].device if self.matrices else torch.device("cpu")
        num_elements = sum(matrix.num_elements for matrix in self.matrices)
        self.masters = torch.empty(num_elements, dtype=torch.float32, device=device)
        flatten_blocks(named, self.matrices, self.masters)
        self.momenta = torch.zeros_like(self.masters)
        self._config = config
        self._batches = _batches(self.matrices, max_batch_elements)

    @torch.no_grad()
    def step(self, gradient: Tensor, *, lr: float) -> None:
        """Update every matrix.

        M <- mu M + G;  O = orthogonalise(mu M + G);  W <- (1 - lr wd) W - lr gamma sqrt(longer side) O.

        Args:
            gradient: flat like ``masters``, float32, finite; may be longer (padding, ignored). Not written to.
            lr: learning rate of this step.

        Invariants: a matrix's bits depend on its own state and gradient alone: neither on the other matrices here nor
        on their order, for a fixed thread count.
        Source: DeepSeek-V4 report, 2.4.
        """
        assert gradient.dtype == torch.float32, f"the gradient is {gradient.dtype}, masters are float32"
        config = self._config
        gradients = list(flat_views(gradient, self.matrices))
        masters = list(flat_views(self.masters, self.matrices))
        momenta = list(flat_views(self.momenta, self.matrices))
        # Products and sums apart: an addition with a factor rounds once or twice, depending on an element's place.
        self.momenta.mul_(config.momentum).add_(gradient[: self.momenta.numel()])
        self.masters.mul_(1.0 - lr * config.weight_decay)
        for batch in self._batches:
            nesterov_BNM = torch.stack([_wide(momenta[i] * config.momentum + gradients[i]) for i in batch])
            direction_BNM = orthogonalise(nesterov_BNM, dtype=_PRODUCTS[config.ns_precision])
            direction_BNM.mul_(lr * config.gamma * math.sqrt(direction_BNM.shape[2]))
            for i, direction_NM in zip(batch, direction_BNM, strict=True):
                _wide(masters[i]).sub_(direction_NM)


def _wide(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has no more rows than columns; a view."""
    return matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix


def _batches(matrices: Sequence[LogicalMatrix], max_elements: int) -> tuple[tuple[int, ...], ...]:
    """Indices of matrices of one Newton-Schulz shape, together as large as allowed, at least one."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.ns_shape].append(index)
    found: list[tuple[int, ...]] = []
    for (small, large), indices in by_shape.items():
        size = max(1, max_elements // (small * large))
        found.extend(tuple(indices[start : start + size]) for start in range(0, len(indices), size))
    return tuple(found)
