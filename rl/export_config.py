"""The schema of `rollforward export`. No torch and no ray."""

from typing import ClassVar

import msgspec


class ExportRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"target": "to"}):
    """Root of `export`: a run's weights as a checkpoint in the official layout."""

    reads_run_dir: ClassVar[bool] = True
    """run_dir is another command's, which is only read."""

    run_dir: str
    """Directory of a run, also one at work, or of a recipe: then of its last run that has weights. Its final model is
    exported, or the newest weights that it has published."""
    target: str
    """Directory to write; must not exist."""
    base: str | None = None
    """The checkpoint that the run started from, whose bytes untrained tensors have. null: what the run's settings say.
    """
