"""Reads files for a model."""

import itertools
from pathlib import Path

_MAX_LINE_CHARS = 4096


def read_file(path: str, first_line: int = 1, num_lines: int = 200) -> str:
    """Return lines of a text file, from first_line on, num_lines of them at most. Paths are relative to /workspace or
    absolute."""
    if first_line < 1 or num_lines < 1:
        raise ValueError(f"first_line is {first_line} and num_lines {num_lines}; lines count from 1, and one is read")
    file = Path(path)
    if file.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in file.iterdir())
        raise IsADirectoryError(f"{path} is a directory with {', '.join(names[:100]) or 'nothing'}")
    with file.open(encoding="utf-8", errors="replace") as lines:
        wanted = itertools.islice(lines, first_line - 1, first_line - 1 + num_lines)
        return "".join(_shortened(line) for line in wanted)


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]} ... (cut)\n"
