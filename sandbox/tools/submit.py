"""How a model ends its work."""

from pathlib import Path

FINAL = True


def submit(answer: str = "") -> str:
    """Submit your work and end the task. An answer, if you give one, is written to answer.txt in /workspace; what you
    left in files counts as it is."""
    if answer:
        Path("answer.txt").write_bytes(answer.encode())
    return ""
