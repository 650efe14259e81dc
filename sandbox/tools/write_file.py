"""Writes files for a model."""

from pathlib import Path


def write_file(path: str, text: str) -> str:
    """Write a text file, in place of what is there; directories are made. Paths are relative to /workspace or
    absolute."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    file.write_bytes(data)
    return f"wrote {len(data)} bytes to {path}"
