"""Versions of DeepSeek-V4's encoding of conversations, as data, and where a model directory says which is its own.

The same word of effort is another text in each version, so a model must be asked in the version that it learned. Here:
what differs between versions. Not here: the rendering (`model/encoding_render.py`).
"""

import json
from pathlib import Path
from typing import Final, Literal

import msgspec

from rollforward.model.errors import EncodingError
from rollforward.model.messages import ReasoningEffort

ENCODING_FILE: Final = "encoding.json"
"""Beside `tokenizer.json`; holds `{"encoding": NAME}`."""


class EncodingVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of the encoding does in its own way."""

    name: str
    """As `encoding.json` says it."""
    efforts: dict[ReasoningEffort, Literal["low", "high", "max"]]
    """The efforts in which the model reasons, and the word by which deepseek-recipe, which speaks the later version,
    calls their text: `low` is no text, `high` is text A, `max` is text B. `non-think` is in every version.
    """
    hoists_system: bool
    """Whether all system messages are joined at the front; otherwise each is rendered where it stands."""
    has_developer: bool
    """Whether there is a developer's message."""
    has_json_object: bool
    """Whether there is a text that asks for any JSON object; a schema can always be asked for."""
    pads_empty_call: bool
    """Whether a call without arguments holds an empty line."""
    joins_empty_texts: bool
    """Whether a user's empty text beside another is a block as any other; otherwise it is left out."""


LATER: Final = EncodingVersion(
    name="v4-0731",
    efforts={"low": "low", "high": "high", "max": "max"},
    hoists_system=True,
    has_developer=False,
    has_json_object=True,
    pads_empty_call=False,
    joins_empty_texts=False,
)
"""0731 and later releases."""

APRIL: Final = EncodingVersion(
    name="v4-0424",
    efforts={"high": "low", "max": "high"},
    hoists_system=False,
    has_developer=True,
    has_json_object=False,
    pads_empty_call=True,
    joins_empty_texts=True,
)
"""The first release, of 24 April 2026."""

ENCODING_VERSIONS: Final = {version.name: version for version in (LATER, APRIL)}
"""Every version by its name."""


class _EncodingFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    encoding: str


def encoding_version(name: str) -> EncodingVersion:
    """The version called `name`.

    Raises:
        EncodingError: there is none.
    """
    if name not in ENCODING_VERSIONS:
        raise EncodingError(
            f"encoding {name!r} is not known; it must be one of {', '.join(ENCODING_VERSIONS)}. Name the version that"
            " the model was trained with."
        )
    return ENCODING_VERSIONS[name]


def encoding_file(version: EncodingVersion) -> bytes:
    """The content of `encoding.json` for a model of `version`."""
    return (json.dumps({"encoding": version.name}) + "\n").encode()


def encoding_files(model_dir: Path) -> dict[str, bytes]:
    """What states a model directory's version, for a directory that is derived from it: name to content; empty where
    nothing does.
    """
    version = find_encoding_version(model_dir)
    return {} if version is None else {ENCODING_FILE: encoding_file(version)}


def find_encoding_version(model_dir: Path) -> EncodingVersion | None:
    """The version that a model directory states; None where it states none, which stands for `LATER`.

    Raises:
        EncodingError: the file cannot be read or names no known version.
    """
    path = model_dir / ENCODING_FILE
    try:
        stated = msgspec.json.decode(path.read_bytes(), type=_EncodingFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise EncodingError(
            f'{path}: cannot be read ({error}); it must hold {{"encoding": NAME}} with NAME one of '
            f"{', '.join(ENCODING_VERSIONS)}. Write it anew, or remove it for {LATER.name}."
        ) from error
    try:
        return encoding_version(stated.encoding)
    except EncodingError as error:
        raise EncodingError(f"{path}: {error}") from error
