"""Edits files for a model."""

from pathlib import Path


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file, which must stand there exactly once, with another. Paths are relative to /workspace or
    absolute."""
    if not old:
        raise ValueError("old is empty; give the text to replace, with enough around it to be the only one")
    file = Path(path)
    data, found = file.read_bytes(), old.encode()
    count = data.count(found)
    if count == 0:
        raise ValueError(f"old does not stand in {path}; read the file and copy the text exactly, white space too")
    if count > 1:
        lines = [data.count(b"\n", 0, start) + 1 for start in _starts(data, found)]
        where = ", ".join(map(str, lines[:20]))
        raise ValueError(f"old stands {count} times in {path}, in lines {where}; give more of the text around it")
    start = data.index(found)
    file.write_bytes(data[:start] + new.encode() + data[start + len(found) :])
    line = data.count(b"\n", 0, start) + 1
    return f"edited {path}, line {line}"


def _starts(data: bytes, found: bytes) -> list[int]:
    starts = [data.index(found)]
    while (following := data.find(found, starts[-1] + len(found))) >= 0:
        starts.append(following)
    return starts
