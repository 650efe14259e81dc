"""The files of a trainer's saved state: tensors by name that say of which step they are, checked when they are read.

safetensors itself notices a file that is cut short. Here: what is whole and yet wrong, such as files of two saves side
by side, a name that is missing, or a shape that torch would silently stretch. Not here: bytes that changed (the hashes
of `rl/checkpoints.py`), what is saved (`trainer.py`, `optim_hybrid.py`).
"""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollforward.model.errors import TrainerError
from rollforward.model.matrices import LogicalMatrix

MatrixState = tuple[Tensor, Tensor]
"""Master and momentum of a matrix, as flat places to read into."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
    """Write tensors as the state after ``num_steps`` steps."""
    save_file(dict(tensors), path, metadata={"num_steps": str(num_steps)})


def read_tensors(path: Path, shapes: Mapping[str, Sequence[int]], *, num_steps: int) -> dict[str, Tensor]:
    """Return the tensors of these names.

    Args:
        path: of `write_tensors`; may hold others too.
        shapes: name -> shape that the tensor must have.
        num_steps: steps that the state must be of.

    Raises:
        TrainerError: it is of another step or no such file, a tensor is absent, or has another shape.
    """
    with safe_open(path, framework="pt") as file:
        _check_step(path, file, num_steps)
        stored = set(file.keys())
        if absent := [name for name in shapes if name not in stored]:
            raise TrainerError(_absent(path, absent, len(absent)))
        found = {name: file.get_tensor(name) for name in shapes}
    for name, shape in shapes.items():
        _check_shape(path, name, found[name].shape, shape)
    return found


def write_matrices(
    path: Path, matrices: Sequence[LogicalMatrix], masters: Tensor, momenta: Tensor, *, num_steps: int
) -> None:
    """Write matrices, which lie in two flat buffers one after another, as the state after ``num_steps`` steps."""
    names = json.dumps([msgspec.to_builtins(matrix) for matrix in matrices])
    save_file({"masters": masters, "momenta": momenta}, path, metadata={"num_steps": str(num_steps), "matrices": names})


def read_matrices(
    directory: Path, pattern: str, wanted: MutableMapping[LogicalMatrix, MatrixState], *, num_steps: int
) -> None:
    """Copy matrices to where they are wanted, from all the files that ranks wrote with `write_matrices`.

    Args:
        directory, pattern: where these files are, and their names.
        wanted: matrix -> places; emptied of what is found.
        num_steps: steps that the state must be of.

    Raises:
        TrainerError: a file is of another step, not of this kind or shorter than it says, or a matrix is in none.
    """
    for path in sorted(directory.glob(pattern)):
        with safe_open(path, framework="pt") as file:
            metadata = _check_step(path, file, num_steps)
            matrices = msgspec.json.decode(metadata.get("matrices", ""), type=list[LogicalMatrix])
            masters, momenta = file.get_slice("masters"), file.get_slice("momenta")
            length = sum(matrix.num_elements for matrix in matrices)
            for name, part in (("masters", masters), ("momenta", momenta)):
                _check_shape(path, name, part.get_shape(), [length])
            start = 0
            for matrix in matrices:
                end = start + matrix.num_elements
                if (places := wanted.pop(matrix, None)) is not None:
                    places[0].copy_(masters[start:end])
                    places[1].copy_(momenta[start:end])
                start = end
    if wanted:
        names = [f"the state of {name}" for name in dict.fromkeys(matrix.tensor for matrix in wanted)]
        raise TrainerError(_absent(directory, names, len(wanted)))


def _check_step(path: Path, file: Any, num_steps: int) -> dict[str, str]:
    """Return the file's metadata, which say the step that is expected."""
    metadata: dict[str, str] = file.metadata() or {}
    if metadata.get("num_steps") != str(num_steps):
        raise TrainerError(
            f"{path} is of step {metadata.get('num_steps', 'unknown')}, the state beside it of step {num_steps}; files"
            " of one save belong together. Resume from another checkpoint"
        )
    return metadata


def _check_shape(path: Path, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise TrainerError(
            f"{path}: {name} has shape {list(found)}, this model and optimizer need {list(expected)}. Repeat the"
            " settings that the run was begun with, or resume from another checkpoint"
        )


def _absent(place: Path, names: Sequence[str], number: int) -> str:
    return (
        f"{place} does not hold {', '.join(names[:3])} ({number} in all), which this model and optimizer have; a run"
        " goes on with the settings that it was begun with. Repeat them, or begin another run_dir"
    )
