"""Proves that text survives the tokenizer, that text never becomes a control id, and that training repeats bit for bit.

Does not prove anything about the official tokenizer.json, which is not at hand.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.errors import TokenizerError
from rollforward.model.tokenizer import (
    ASSISTANT,
    BOS,
    CONTROL_TOKENS,
    EOS,
    PAD,
    USER,
    Tokenizer,
    TokenizerConfig,
    train_tokenizer,
)

TEXTS = [f"State the final answer to the problem: {a} + {b} - {a * b} =" for a in range(12) for b in range(12)]
SMALL = TokenizerConfig(vocab_size=384)

TRAIN_IN_A_NEW_PROCESS = """
from rollforward.model.tokenizer import TokenizerConfig, train_tokenizer
import hashlib, pathlib, sys
texts = pathlib.Path(sys.argv[1]).read_text().split("|")
tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=384))
tokenizer.save(pathlib.Path(sys.argv[2]))
"""


@functools.cache
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, SMALL)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return trained()


# What breaks tokenizers: characters of every plane, spellings of control tokens and pieces of them, digits, line ends.
pieces = st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL_TOKENS, "<｜", "｜>", "▁", " 12", "\r\n", "\0", "é́"]))
texts = st.lists(pieces, max_size=8).map("".join)


@given(texts)
def test_any_text_survives_and_holds_no_control_id(text: str) -> None:
    tokenizer = trained()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(len(CONTROL_TOKENS)))
    assert all(id_ < tokenizer.vocab_size for id_ in ids)


def test_control_tokens_have_the_official_first_ids(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert [tokenizer.control_id(token) for token in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
    assert BOS == "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    assert EOS == "<\uff5cend\u2581of\u2581sentence\uff5c>"
    assert PAD == "<\uff5c\u2581pad\u2581\uff5c>"
    assert (USER, ASSISTANT) == ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")


def test_control_ids_decode_to_their_spelling(tokenizer: Tokenizer) -> None:
    for spelling in CONTROL_TOKENS:
        assert tokenizer.decode([tokenizer.control_id(spelling)]) == spelling


def test_a_spelling_that_is_no_control_token_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="no control token"):
        tokenizer.control_id("State")


def test_a_lone_surrogate_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"character 2 .* lone surrogate"):
        tokenizer.encode("ab\ud800")


def test_the_vocabulary_is_a_multiple_and_within_its_limit() -> None:
    for limit in (384, 512):
        for multiple in (64, 128):
            tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=limit, size_multiple=multiple))
            assert tokenizer.vocab_size % multiple == 0
            assert tokenizer.vocab_size <= limit


def test_a_limit_that_is_no_multiple_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 400; .* Use 384\."):
        TokenizerConfig(vocab_size=400)


@pytest.mark.parametrize(("digit_run", "expected"), [(1, ["1", "2", "3", "4"]), (3, ["123", "4"])])
def test_digits_are_cut_into_runs(digit_run: int, expected: list[str]) -> None:
    tokenizer = train_tokenizer(["1234"] * 10, TokenizerConfig(vocab_size=384, digit_run=digit_run))
    assert [tokenizer.decode([id_]) for id_ in tokenizer.encode("1234")] == expected


def test_phrases_merge_over_words_and_words_do_not() -> None:
    texts = ["State the final answer"] * 10
    phrases = train_tokenizer(texts, TokenizerConfig(vocab_size=384))
    words = train_tokenizer(texts, TokenizerConfig(vocab_size=384, split="words"))
    assert len(phrases.encode("State the final answer")) == 1
    assert [words.decode([id_]) for id_ in words.encode("State the final answer")] == [
        "State",
        " the",
        " final",
        " answer",
    ]


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_training_gives_the_same_bytes_in_every_process(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("|".join(TEXTS))
    tokenizer.save(tmp_path)
    here = (tmp_path / "tokenizer.json").read_bytes()
    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", TRAIN_IN_A_NEW_PROCESS, tmp_path / "texts", tmp_path],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert (tmp_path / "tokenizer.json").read_bytes() == here


def test_files_that_are_no_tokenizer_are_errors_that_name_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        Tokenizer.load(tmp_path)
    for broken in ("", "[]", "{}", '{"added_tokens": []}', "\0"):
        with pytest.raises(TokenizerError, match="cannot be read"):
            Tokenizer(broken)
    tokenizer.save(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["content"] != USER]
    with pytest.raises(TokenizerError, match="lacks the control tokens <｜User｜>"):
        Tokenizer(json.dumps(document))
