"""The schema of `rollforward convert`. No torch and no ray."""

from typing import Annotated

import msgspec

from rollforward.model.spellings import Layout


class ConvertRun(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"source": "from", "target": "to"},
):
    """Root of `convert`: a checkpoint in another layout, or the same with canonical bytes."""

    source: str
    """A model directory: tensors named by DeepSeek, by its converter's input or by transformers."""
    target: str
    """Directory to write; must not exist."""
    layout: Layout = "official"
    """official is DeepSeek's, with quantised weights. transformers has its names and plain BF16 values, which its
    `from_pretrained` loads; the MTP module, which it has not, stays in the files under official names."""
    max_shard_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2 * 2**30
    """Most bytes of tensors in a file, unless one tensor is larger."""
