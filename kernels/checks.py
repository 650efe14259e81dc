"""Executed shape notation: one call binds dimension letters across an op's arguments and raises when they disagree.

What lives here: checks for public boundaries (`kernels/**/op.py`, `rl/losses/*`). A call costs a few microseconds.
What does not: the letters' meaning, which is project-wide (CONTRIBUTING.md).

Pattern language, space separated:
    letter or word  a dimension; equal names must have equal sizes in the whole call
    integer         exactly that size
    ...             any number of leading dimensions; the same ones wherever it appears (first position only)
    *               any size, bound to nothing
"""

from functools import lru_cache

import torch

from rollforward.kernels.errors import DtypeError, ShapeError


@lru_cache(maxsize=512)
def _parse(pattern: str) -> tuple[bool, tuple[str | int, ...]]:
    words = pattern.split()
    has_leading = bool(words) and words[0] == "..."
    names = words[1:] if has_leading else words
    if "..." in names:
        raise AssertionError(f"pattern {pattern!r}: '...' may only come first")
    return has_leading, tuple(int(word) if word.isdigit() else word for word in names)


def bind_shapes(op: str, /, **arguments: tuple[torch.Tensor, str]) -> dict[str, int]:
    """Bind the letters of each argument's pattern to its sizes and return them.

    Args:
        op: name of the calling op, for the message.
        **arguments: argument name -> (tensor, pattern); see the module docstring for the pattern language.

    Returns:
        letter -> size. Leading dimensions of `...` are not in it.

    Raises:
        ShapeError: a rank or a size disagrees; names the op, the argument, its shape and where the letter was bound.

    Invariants: reads shapes only, never data.
    Example: `bind_shapes("linear", x=(x_TK, "T K"), weight=(weight_NK, "N K"))` -> {"T": 5, "K": 64, "N": 128}
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    leading: torch.Size | None = None
    leading_origin = ""
    for argument, (tensor, pattern) in arguments.items():
        has_leading, names = _parse(pattern)
        shape = tensor.shape
        num_leading = len(shape) - len(names)
        if num_leading < 0 or (num_leading and not has_leading):
            raise ShapeError(_message(op, argument, shape, pattern, f"it has {len(shape)} dimensions"))
        if has_leading:
            if leading is None:
                leading, leading_origin = shape[:num_leading], argument
            elif leading != shape[:num_leading]:
                why = f"its leading dimensions differ from {list(leading)} of {leading_origin}"
                raise ShapeError(_message(op, argument, shape, pattern, why))
        for name, size in zip(names, shape[num_leading:], strict=True):
            if isinstance(name, int):
                if size != name:
                    raise ShapeError(_message(op, argument, shape, pattern, f"{size} is not {name}"))
            elif name != "*":
                bound = sizes.setdefault(name, size)
                if bound != size:
                    why = f"{name} is {size} here but {bound} in {origin[name]}"
                    raise ShapeError(_message(op, argument, shape, pattern, why))
                origin.setdefault(name, argument)
    return sizes


def check_dtype(op: str, argument: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise DtypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        raise DtypeError(f"{op}: {argument} is {got}; the op takes {names}. Cast it where the value is made.")


def check_multiple(op: str, what: str, size: int, multiple: int) -> None:
    """Raise ShapeError unless `size` is a multiple of `multiple`."""
    if size % multiple:
        raise ShapeError(f"{op}: {what} is {size}; it must be a multiple of {multiple}. Pad or choose another size.")


@lru_cache(maxsize=512)
def _suffix_pattern(argument: str) -> str:
    suffix = argument.rpartition("_")[2]
    if not suffix or not suffix.isalnum():
        raise AssertionError(f"argument {argument!r} has no shape suffix; name it like x_TD")
    return " ".join(suffix)


def check_shapes(op: str, /, **tensors: torch.Tensor) -> dict[str, int]:
    """Bind the letters that the arguments' own names carry: `x_TD` has two dimensions, T and D.

    Args:
        op: name of the calling op, for the message.
        **tensors: argument name with a shape suffix -> tensor. Each character is a dimension, case matters, a digit
            is an exact size.

    Returns:
        letter -> size.

    Raises:
        ShapeError: as `bind_shapes`.

    Example: `check_shapes("linear", x_TK=x_TK, w_NK=w_NK)` -> {"T": 5, "K": 64, "N": 128}
    """
    return bind_shapes(op, **{name: (tensor, _suffix_pattern(name)) for name, tensor in tensors.items()})


def _message(op: str, argument: str, shape: torch.Size, pattern: str, why: str) -> str:
    return f"{op}: {argument} has shape {list(shape)}, expected [{pattern}]: {why}. Pass tensors whose letters agree."
