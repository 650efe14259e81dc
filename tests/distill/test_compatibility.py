"""Proves: a teacher whose ids mean something else than the student's is refused before any weight is read, by teacher,
thing and both values; one that differs in architecture alone is not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.distill.compatibility import check_teacher
from rollforward.distill.errors import TeacherError, TeacherMismatchError
from rollforward.model.config import ModelConfig, config_json
from rollforward.model.errors import TokenizerError
from rollforward.model.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from tests.helpers.tiny import oracle_config, tiny_config

TOKENIZER = train_tokenizer(["7 plus 8 is 15", "9 plus 6 is 15"] * 20, TokenizerConfig(vocab_size=320))
STUDENT = msgspec.structs.replace(tiny_config(), vocab_size=TOKENIZER.vocab_size)


def write(directory: Path, config: ModelConfig = STUDENT, tokenizer: str = TOKENIZER.serialized) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    (directory / "tokenizer.json").write_text(tokenizer)
    return directory


def edited(change: Callable[[dict[str, Any]], None]) -> str:
    entries = json.loads(TOKENIZER.serialized)
    change(entries)
    return json.dumps(entries)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write(tmp_path / "student")


def refusal(student: Path, teacher: Path, longest_tokens: int = 16) -> str:
    with pytest.raises(TeacherMismatchError) as caught:
        check_teacher("maths", teacher, student_dir=student, longest_tokens=longest_tokens)
    message = str(caught.value)
    assert message.startswith(f"teacher maths in {teacher}: "), message
    return message


def test_an_equal_and_a_wider_deeper_teacher_pass(student: Path) -> None:
    other = msgspec.structs.replace(oracle_config(), vocab_size=STUDENT.vocab_size)
    assert (other.hidden_size, other.num_hidden_layers) != (STUDENT.hidden_size, STUDENT.num_hidden_layers)
    for teacher in (student, write(student.parent / "alike"), write(student.parent / "other", other)):
        check_teacher("a", teacher, student_dir=student, longest_tokens=STUDENT.max_position_embeddings)


@pytest.mark.parametrize("field", ["vocab_size", "bos_token_id", "eos_token_id"])
def test_another_number_in_the_configuration(student: Path, field: str) -> None:
    value = getattr(STUDENT, field)
    other = msgspec.structs.replace(STUDENT, **{field: value + 64 if field == "vocab_size" else value + 5})
    message = refusal(student, write(student.parent / "teacher", other))
    assert f"{field} is {getattr(other, field)}, of the student in {student} it is {value}; both must" in message


def test_the_first_id_that_is_another_text_is_named_with_both(student: Path) -> None:
    tokens = TOKENIZER.encode("79")
    assert len(set(tokens)) == 2

    def swapped(entries: dict[str, Any]) -> None:
        vocab = entries["model"]["vocab"]
        vocab["7"], vocab["9"] = vocab["9"], vocab["7"]

    message = refusal(student, write(student.parent / "teacher", tokenizer=edited(swapped)))
    first = min(tokens)
    assert f"entry {first} of tokenizer.json is text '9', of the student in {student} it is text '7'; an id" in message


def test_an_entry_that_one_of_them_lacks(student: Path) -> None:
    last = max(json.loads(TOKENIZER.serialized)["added_tokens"], key=lambda entry: entry["id"])

    def shorter(entries: dict[str, Any]) -> None:
        entries["added_tokens"] = [entry for entry in entries["added_tokens"] if entry["id"] != last["id"]]

    message = refusal(student, write(student.parent / "teacher", tokenizer=edited(shorter)))
    assert re.search(rf"entry {last['id']} .* is absent, of the .* is control token '{last['content']}'", message)
    with pytest.raises(TeacherMismatchError, match=f"is control token '{last['content']}', of .* is absent"):
        check_teacher("a", student, student_dir=student.parent / "teacher", longest_tokens=8)


def test_a_control_token_that_is_plain_text_to_the_teacher(student: Path) -> None:
    entry = next(one for one in json.loads(TOKENIZER.serialized)["added_tokens"] if one["content"] == "<｜title｜>")

    def plain(entries: dict[str, Any]) -> None:
        entries["added_tokens"].remove(entry)
        entries["model"]["vocab"]["<｜title｜>"] = entry["id"]

    message = refusal(student, write(student.parent / "teacher", tokenizer=edited(plain)))
    assert "is text '<｜title｜>', of" in message
    assert "is control token '<｜title｜>'; an id" in message


def _at(entries: dict[str, Any], *path: str | int) -> Any:
    for key in path:
        entries = entries[key]  # type: ignore[index]
    return entries


SPLIT = {"Regex": r"\p{N}{1,3}"}
SEQUENCE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("path", "value", "what", "of_teacher", "of_student"),
    [
        (("normalizer",), {"type": "NFC"}, "normalizer", '{"type": "NFC"}', "null"),
        (
            ("pre_tokenizer", "pretokenizers", 0, "pattern"),
            SPLIT,
            "pre_tokenizer.pretokenizers[0].pattern.Regex",
            None,
            None,
        ),
        (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True, None, "true", "false"),
        (
            ("pre_tokenizer",),
            {"type": "Metaspace", "replacement": "_"},
            "pre_tokenizer",
            None,
            None,
        ),
        (("decoder",), {"type": "Fuse"}, "decoder", '{"type": "Fuse"}', None),
        (("decoder",), None, "decoder", "null", None),
        (("post_processor",), SEQUENCE, "post_processor", None, "null"),
        (("model", "dropout"), 0.5, "model.dropout", "0.5", "null"),
        (("model", "ignore_merges"), True, "model.ignore_merges", "true", "false"),
        (("model", "byte_fallback"), True, "model.byte_fallback", "true", "false"),
        (("added_tokens", 3, "lstrip"), True, "added_tokens[3].lstrip", "true", "false"),
    ],
)
def test_another_rule_is_named_with_both_values(
    student: Path,
    path: tuple[str | int, ...],
    value: object,
    what: str | None,
    of_teacher: str | None,
    of_student: str | None,
) -> None:
    def changed(entries: dict[str, Any]) -> None:
        _at(entries, *path[:-1])[path[-1]] = value

    message = refusal(student, write(student.parent / "teacher", tokenizer=edited(changed)))
    place = what or ".".join(map(str, path)).replace(".1.", "[1].")
    found = re.search(
        rf": {re.escape(place)} of tokenizer\.json is (.*), of the student in \S+ it is (.*); a text", message
    )
    assert found is not None, message
    assert of_teacher in (None, found[1]), message
    assert of_student in (None, found[2]), message
    assert "put the student's tokenizer.json in its place" in message


def test_other_merges_and_their_order(student: Path) -> None:
    """The same entries, of which a text becomes others."""

    def swapped(entries: dict[str, Any]) -> None:
        merges = entries["model"]["merges"]
        merges[1], merges[3] = merges[3], merges[1]

    def fewer(entries: dict[str, Any]) -> None:
        del entries["model"]["merges"][-1]

    assert Tokenizer(edited(fewer)).encode(" plus ") != TOKENIZER.encode(" plus ")
    message = refusal(student, write(student.parent / "swapped", tokenizer=edited(swapped)))
    assert ": model.merges[1][0] of tokenizer.json is " in message
    merges = json.loads(TOKENIZER.serialized)["model"]["merges"]
    message = refusal(student, write(student.parent / "fewer", tokenizer=edited(fewer)))
    shown = json.dumps(merges[-1], ensure_ascii=False)
    assert (
        f": model.merges[{len(merges) - 1}] of tokenizer.json is absent, of the student in {student} it is {shown};"
        in message
    )


def test_what_changes_neither_ids_nor_text_is_no_difference(student: Path) -> None:
    def other_form(entries: dict[str, Any]) -> None:
        """As another version of the library, or a call that cut and filled a batch, leaves the file behind."""
        entries["model"]["merges"] = [" ".join(pair) for pair in entries["model"]["merges"]]
        entries["model"]["vocab"] = dict(reversed(entries["model"]["vocab"].items()))
        entries["truncation"] = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        entries["padding"] = {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "x",
        }
        entries["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False
        for entry in entries["added_tokens"]:
            entry["special"] = False
        for key in list(entries)[::2]:
            entries[key] = entries.pop(key)

    other = edited(other_form)
    assert other != TOKENIZER.serialized
    text = "7 plus 8 is 15"
    assert Tokenizer(other).encode(text) == TOKENIZER.encode(text)
    assert Tokenizer(other).decode(range(320)) == TOKENIZER.decode(range(320))
    check_teacher("a", write(student.parent / "teacher", tokenizer=other), student_dir=student, longest_tokens=8)


def test_a_long_value_is_cut_in_the_message(student: Path) -> None:
    def changed(entries: dict[str, Any]) -> None:
        entries["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}

    assert len(refusal(student, write(student.parent / "teacher", tokenizer=edited(changed)))) < 1000


def test_no_tensor_is_looked_at(student: Path) -> None:
    """They may not be there yet, or half of them."""
    teacher = write(student.parent / "teacher")
    (teacher / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    (teacher / "model-2.safetensors").write_bytes(b"half")
    check_teacher("a", teacher, student_dir=student, longest_tokens=8)


def test_another_encoding_and_one_that_is_not_stated(student: Path) -> None:
    teacher = write(student.parent / "teacher")
    (teacher / "encoding.json").write_text('{"encoding": "v4-0731"}')
    check_teacher("a", teacher, student_dir=student, longest_tokens=8)
    (teacher / "encoding.json").write_text('{"encoding": "v4-0424"}')
    message = refusal(student, teacher)
    assert "the encoding of conversations is v4-0424, of" in message
    assert "it is v4-0731; both must" in message


def test_a_teacher_that_cannot_read_the_longest_sequence(student: Path) -> None:
    short = write(student.parent / "teacher", msgspec.structs.replace(STUDENT, max_position_embeddings=64))
    check_teacher("a", short, student_dir=student, longest_tokens=64)
    assert "max_position_embeddings is 64, sequences of this run have up to 65 tokens" in refusal(student, short, 65)


def test_a_directory_without_what_is_compared_is_named_by_teacher(student: Path) -> None:
    teacher = write(student.parent / "teacher")
    (teacher / "tokenizer.json").unlink()
    with pytest.raises(TeacherError, match=f"teacher maths: {teacher}/tokenizer.json: the tokenizer cannot be read"):
        check_teacher("maths", teacher, student_dir=student, longest_tokens=8)
    (teacher / "config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"teacher maths: .*config\.json"):
        check_teacher("maths", teacher, student_dir=student, longest_tokens=8)
    (student / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError):
        check_teacher("maths", student, student_dir=student, longest_tokens=8)


def test_the_helper_writes_what_it_says(student: Path) -> None:
    assert Tokenizer.load(student).serialized == TOKENIZER.serialized
