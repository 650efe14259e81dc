"""Whether a teacher speaks of the student's tokens, told before anything is allocated.

A divergence compares two distributions id by id, so an id must be the same text to both; and a text must be the same
ids to both, or a teacher reads sequences as it never saw them. Architectures may differ: width, layers and experts are
a teacher's own affair. No tensor is read, so this can be told before they are fetched.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rollforward.distill.errors import TeacherError, TeacherMismatchError
from rollforward.distill.teacher_files import check_regular
from rollforward.model.config import ModelConfig, load_model_config
from rollforward.model.encoding_version import LATER, EncodingVersion, find_encoding_version
from rollforward.model.errors import ModelError
from rollforward.model.tokenizer import Tokenizer

_ANOTHER = "Take a teacher that was trained with the student's tokenizer"

_IGNORED = frozenset({"version", "vocab", "truncation", "padding", "special", "trim_offsets"})
"""Keys of tokenizer.json that change neither ids nor text, and differ between two savings of one tokenizer: the form of
the file; how the batch of the last call was cut and filled, which nothing here does; which control tokens a decoder
leaves out if asked to, which nothing here asks; where offsets begin. Entries of the vocabulary are compared by id."""

_ABSENT = object()

_SHOWN_CHARACTERS = 200


class _Speaker(NamedTuple):
    """What a model directory says of its tokens."""

    config: ModelConfig
    spellings: Mapping[int, str]
    """Of every entry, by id."""
    control_ids: frozenset[int]
    """Ids that plain text never becomes."""
    encoding: EncodingVersion
    rules: Mapping[str, Any]
    """How text becomes ids and ids text: tokenizer.json as its library writes it, whatever the file's own form."""


class _Difference(NamedTuple):
    """What the teacher has otherwise than the student."""

    what: str
    of_teacher: object
    of_student: object
    rule: str
    """What must hold, and the way out."""


def check_teacher(name: str, directory: Path, *, student_dir: Path, longest_tokens: int) -> None:
    """Refuse a teacher whose distribution would be read at the wrong ids, or that cannot read the longest sequence.

    Args:
        name: of the configuration. directory: its local model directory. student_dir: the student's.
        longest_tokens: most tokens of a sequence of the run, prompt and completion together.

    Raises:
        TeacherMismatchError: names the teacher, what differs, both values, the rule and the way out.
        TeacherError: the teacher's directory lacks a file that says so, or has an unusable one.
        ConfigError, CheckpointError, TokenizerError, EncodingError: the student's does.
    """
    student = _speaker(student_dir)
    check_regular(directory)
    try:
        teacher = _speaker(directory)
    except ModelError as error:
        raise TeacherError(f"teacher {name}: {error}") from error
    found = next(_differences(teacher, student), None)
    if found is not None:
        raise TeacherMismatchError(
            f"teacher {name} in {directory}: {found.what} is {found.of_teacher}, of the student in {student_dir} it"
            f" is {found.of_student}; {found.rule}"
        )
    longest = teacher.config.max_position_embeddings
    if longest < longest_tokens:
        raise TeacherMismatchError(
            f"teacher {name} in {directory}: max_position_embeddings is {longest}, sequences of this run have up to"
            f" {longest_tokens} tokens; a teacher reads all of them. Lower the run's limits on prompts and"
            " completions, or take a teacher that reads more"
        )


def _speaker(directory: Path) -> _Speaker:
    config = load_model_config(directory)
    entries = tokenizers.Tokenizer.from_str(Tokenizer.load(directory).serialized)
    spellings = {index: spelling for spelling, index in entries.get_vocab(with_added_tokens=True).items()}
    control_ids = frozenset(entries.get_added_tokens_decoder())
    encoding = find_encoding_version(directory) or LATER
    return _Speaker(config, spellings, control_ids, encoding, json.loads(entries.to_str()))


def _differences(teacher: _Speaker, student: _Speaker) -> Iterator[_Difference]:
    for field in ("vocab_size", "bos_token_id", "eos_token_id"):
        of_teacher, of_student = getattr(teacher.config, field), getattr(student.config, field)
        if of_teacher != of_student:
            yield _Difference(field, of_teacher, of_student, f"both must have the same. {_ANOTHER}")
    for index in sorted(teacher.spellings.keys() | student.spellings.keys()):
        of_teacher, of_student = _entry(teacher, index), _entry(student, index)
        if of_teacher != of_student:
            rule = f"an id must be the same text to both. {_ANOTHER}"
            yield _Difference(f"entry {index} of tokenizer.json", of_teacher, of_student, rule)
    for place, of_teacher, of_student in _unlike(teacher.rules, student.rules, ""):
        rule = (
            f"a text must be the same ids to both, and ids the same text. {_ANOTHER}; if it was, and only its file was"
            " written otherwise, put the student's tokenizer.json in its place"
        )
        yield _Difference(f"{place} of tokenizer.json", _shown(of_teacher), _shown(of_student), rule)
    if teacher.encoding != student.encoding:
        rule = (
            "both must read the same text of a conversation. Take a teacher of that encoding, or correct encoding.json"
        )
        yield _Difference("the encoding of conversations", teacher.encoding.name, student.encoding.name, rule)


def _entry(speaker: _Speaker, index: int) -> str:
    if index not in speaker.spellings:
        return "absent"
    kind = "control token" if index in speaker.control_ids else "text"
    return f"{kind} {speaker.spellings[index]!r}"


def _unlike(of_teacher: object, of_student: object, place: str) -> Iterator[tuple[str, object, object]]:
    """Where two JSON values differ, in depth, and how."""
    if of_teacher == of_student:
        return
    if (
        isinstance(of_teacher, dict)
        and isinstance(of_student, dict)
        and of_teacher.get("type") == of_student.get("type")
    ):
        for key in sorted((of_teacher.keys() | of_student.keys()) - _IGNORED):
            values = of_teacher.get(key, _ABSENT), of_student.get(key, _ABSENT)
            yield from _unlike(*values, f"{place}.{key}" if place else key)
    elif isinstance(of_teacher, list) and isinstance(of_student, list):
        for index, values in enumerate(itertools.zip_longest(of_teacher, of_student, fillvalue=_ABSENT)):
            yield from _unlike(*values, f"{place}[{index}]")
    else:
        yield place, of_teacher, of_student


def _shown(value: object) -> str:
    said = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return said if len(said) <= _SHOWN_CHARACTERS else said[:_SHOWN_CHARACTERS] + "..."
