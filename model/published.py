"""The published weights as a trainer holds them: the bytes that engines load, and the values that its forward reads.

    master --pack--> bytes --unpack--> value (a leaf of autograd)        the bytes are also what is published

The forward reads nothing but values unpacked from the bytes that are handed out, so the weights trained are the
weights sampled (docs/design.md, P4). Straight-through: the gradient of a value is that of its master. Masters
themselves are the optimizer's (`optim_hybrid.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.errors import TrainerError
from rollforward.model.fingerprint import is_same_value
from rollforward.model.matrices import LogicalMatrix
from rollforward.model.precision import PackedTensor, pack_counted, unpack_published
from rollforward.model.shapes import TensorFormat, TensorSpec, param_specs, unstacked
from rollforward.model.train_config import Precision

QUANTISED: tuple[TensorFormat, ...] = ("mxfp4", "fp8", "bf16")
"""Formats in which a value loses digits; the others hold a master as it is."""


class PublishedWeights:
    """Bytes and values of every tensor of a model, by canonical name; the same on every rank.

    In ``fp32`` precision, which quantises nothing, both are the masters.
    """

    def __init__(self, config: ModelConfig, named: Mapping[str, Tensor], precision: Precision) -> None:
        """Pack canonical float32 tensors (int64 tables) and unpack them again."""
        self._specs = {spec.name: spec for spec in param_specs(config)}
        self._is_native = precision == "native"
        self._packed: dict[str, PackedTensor] = {}
        self._values: dict[str, Tensor] = {}
        self._num_flipped = self._num_codes = self._num_clamped = 0
        for spec in self._specs.values():
            packed = self.pack(spec.name, named[spec.name])
            self._packed[spec.name] = packed
            # Never the bytes' own storage, which plain formats share.
            self._values[spec.name] = unpack_published(packed).clone().requires_grad_(spec.trained)
        self._num_clamped = 0

    @property
    def values(self) -> Mapping[str, Tensor]:
        """What the forward reads; trained ones collect a gradient. The tensors stay, their contents change."""
        return self._values

    @property
    def quantised(self) -> dict[str, int]:
        """Official tensors whose value passed through a format that loses digits, by format."""
        counts: Counter[str] = Counter()
        for name, packed in self._packed.items():
            if packed.format in QUANTISED:
                counts[packed.format] += len(unstacked(self._specs[name]))
        return dict(counts)

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every trained value since the last call, 0 where no backward pass reached it, and
        forget it."""
        found: dict[str, Tensor] = {}
        for name, value in self._values.items():
            if value.requires_grad:
                found[name] = torch.zeros_like(value) if value.grad is None else value.grad
                value.grad = None
        return found

    def pack(self, name: str, master: Tensor) -> PackedTensor:
        """Return the bytes that a master of the whole tensor, or of one of its stacked experts, becomes; a copy."""
        packed, num_clamped = pack_counted(self._format_of(name), master)
        self._num_clamped += num_clamped
        if packed.data.data_ptr() != master.data_ptr():
            return packed
        # Plain formats share the master's memory, which the next step writes to.
        return PackedTensor(format=packed.format, data=packed.data.clone(), scale=packed.scale)

    def replace(self, name: str, packed: PackedTensor) -> None:
        """Take new bytes of a whole tensor; what was handed out before keeps the old ones."""
        before = self._packed[name]
        if packed.format == "mxfp4":
            flipped = torch.bitwise_xor(before.data, packed.data)
            self._num_flipped += int(((flipped & 0x0F) != 0).sum()) + int(((flipped & -16) != 0).sum())
            self._num_codes += 2 * flipped.numel()
        self._packed[name] = packed
        with torch.no_grad():
            self._values[name].copy_(unpack_published(packed))

    def num_bytes(self, experts: Sequence[LogicalMatrix]) -> int:
        """Return the bytes of some expert matrices, as `packed_bytes` puts them end to end."""
        return sum(part[0].nbytes for matrix in experts for part in _parts(self._packed[matrix.tensor]))

    def replace_experts(self, shares: Iterable[tuple[Sequence[LogicalMatrix], Tensor]]) -> None:
        """Take new bytes of routed experts.

        Args:
            shares: expert matrices and their `packed_bytes`, which may be longer; together all experts of each tensor
                that is named.
        """
        stacked: dict[str, PackedTensor] = {}
        for matrices, raw in shares:
            position = 0
            for matrix in matrices:
                target = stacked.setdefault(matrix.tensor, _empty_like(self._packed[matrix.tensor]))
                for part in _parts(target):
                    destination = part[matrix.expert].view(torch.uint8)
                    end = position + destination.numel()
                    destination.copy_(raw[position:end].view(destination.shape))
                    position = end
        for name, packed in stacked.items():
            self.replace(name, packed)

    def take_clamped(self) -> int:
        """Return how many FP4 groups had their scale raised in `pack` since the last call."""
        count, self._num_clamped = self._num_clamped, 0
        return count

    def take_flips(self) -> tuple[int, int]:
        """Return how many FP4 codes `replace` changed since the last call, and of how many."""
        counts = self._num_flipped, self._num_codes
        self._num_flipped = self._num_codes = 0
        return counts

    @property
    def formats(self) -> dict[str, TensorFormat]:
        """The format in which each tensor is published."""
        return {name: packed.format for name, packed in self._packed.items()}

    def proven(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the forward reads of every tensor, in order, each once it is proven to be what its bytes say.

        Raises:
            TrainerError: it is not; names the tensor. Nothing may be published.
        """
        for name, packed in self._packed.items():
            if not is_same_value(unpack_published(packed), self._values[name]):
                raise TrainerError(
                    f"{name}: the forward's values are not those of the bytes to be published. Something wrote to them;"
                    " resume from the last checkpoint"
                )
            yield name, self._values[name].detach()

    def published(self) -> dict[str, PackedTensor]:
        """Return the bytes of every tensor, all of them proven.

        Raises:
            TrainerError: as `proven`.
        """
        return {name: self._packed[name] for name, _ in self.proven()}

    def _format_of(self, name: str) -> TensorSpec:
        spec = self._specs[name]
        if self._is_native or spec.format == "int64":
            return spec
        return TensorSpec(name=name, shape=spec.shape, format="fp32", trained=spec.trained)


def packed_bytes(matrices: Sequence[PackedTensor]) -> Tensor:
    """Return the bytes of packed matrices one after another, uint8 [S]: data, then scales, of each."""
    parts = [part.contiguous().view(torch.uint8).reshape(-1) for packed in matrices for part in _parts(packed)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def _parts(packed: PackedTensor) -> tuple[Tensor, ...]:
    return (packed.data,) if packed.scale is None else (packed.data, packed.scale)


def _empty_like(packed: PackedTensor) -> PackedTensor:
    scale = None if packed.scale is None else torch.empty_like(packed.scale)
    return PackedTensor(format=packed.format, data=torch.empty_like(packed.data), scale=scale)
