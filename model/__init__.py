"""DeepSeek-V4: configuration, arithmetic, caches, checkpoints, tokens, training.

`load_model` is importable from here. It is resolved when it is first asked for: schemas lie in this package, and
importing one must not cost torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollforward.model.transformer import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    if name == "load_model":
        from rollforward.model.transformer import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
