"""Proves: the fixed texts are the published ones; each version's efforts, places of system messages, reminders, quick
instructions, formats, choices of tools and prefixes render as its grammar says, by hand; what a version has no place
for is refused with the way out; a model directory says its version.

Does not prove agreement over many conversations (`test_encoding_round_trip.py`).
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.model.encoding import ChatEncoding
from rollforward.model.encoding_version import (
    APRIL,
    ENCODING_FILE,
    LATER,
    EncodingVersion,
    encoding_file,
    encoding_files,
    find_encoding_version,
)
from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, ReasoningEffort, ResponseFormat, ToolCall
from rollforward.model.tokenizer import DSML, TokenizerConfig, train_tokenizer
from rollforward.sandbox.types import ToolSpec
from tests.helpers.official_cases import failed_cases

BOS, EOS, OPEN, SHUT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
EITHER = pytest.mark.parametrize("version", [LATER, APRIL])
NOW = ToolCall(name="now", arguments="{}")
SHARES = ToolSpec(name="share", description="Price.", parameters={"type": "object", "properties": {"of": {}}})


@functools.cache
def tokenizer() -> Any:
    return train_tokenizer(["What is 1 + 2?", "It is 3."] * 20, TokenizerConfig(vocab_size=384))


def prompt(
    messages: list[Message], version: EncodingVersion = LATER, effort: ReasoningEffort = "non-think", **options: Any
) -> str:
    chat = ChatEncoding(tokenizer(), version)
    return chat.tokenizer.decode(chat.encode_prompt(messages, effort, **options))


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str, **fields: Any) -> Message:
    return Message(role="user", content=text, **fields)


def said(text: str, reasoning: str = "", **fields: Any) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning, **fields)


def effort_text(version: EncodingVersion, effort: ReasoningEffort) -> str:
    return prompt([user("?")], version, effort).removeprefix(BOS).removesuffix(f"{USER}?{ASSISTANT}{OPEN}")


TEXT_A = (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7")
TEXT_B = (526, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c")
NO_TEXT = (0, hashlib.sha256(b"").hexdigest())


def digest(text: str) -> tuple[int, str]:
    return len(text), hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("version", "effort", "expected"),
    [
        (LATER, "low", NO_TEXT),
        (LATER, "high", TEXT_A),
        (LATER, "max", TEXT_B),
        (APRIL, "high", NO_TEXT),
        (APRIL, "max", TEXT_A),
    ],
)
def test_the_text_of_an_effort_is_the_published_one(
    version: EncodingVersion, effort: ReasoningEffort, expected: tuple[int, str]
) -> None:
    """The same word is another text in each version."""
    assert digest(effort_text(version, effort)) == expected


@EITHER
def test_the_text_around_listed_tools_is_the_published_one(version: EncodingVersion) -> None:
    text = prompt([system("S"), user("?")], version, tools=(SHARES,))
    schema = '{"name": "share", "description": "Price.", "parameters": {"type": "object", "properties": {"of": {}}}}'
    head, found, tail = text.removeprefix(BOS + "S\n\n").removesuffix(f"{USER}?{ASSISTANT}{SHUT}").partition(schema)
    assert found
    assert digest(head) == (854, "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c")
    assert digest(tail) == (99, "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7")


def test_april_has_no_low_effort() -> None:
    for encode in (
        lambda chat: chat.encode_prompt([user("?")], "low"),
        lambda chat: chat.encode_observation("a", "low"),
    ):
        with pytest.raises(EncodingError, match=r"effort 'low' is not in encoding v4-0424; .* non-think, high, max"):
            encode(ChatEncoding(tokenizer(), APRIL))


def test_system_messages_stand_at_the_front_or_in_their_places() -> None:
    messages = [system("A"), system("B"), user("1"), said("2"), system("C"), user("3")]
    assert prompt(messages) == f"{BOS}A\n\nB\n\nC{USER}1{ASSISTANT}{SHUT}2{EOS}{USER}3{ASSISTANT}{SHUT}"
    assert prompt(messages, APRIL) == f"{BOS}AB{USER}1{ASSISTANT}{SHUT}2{EOS}C{USER}3{ASSISTANT}{SHUT}"


def test_neighbouring_system_messages_are_encoded_as_one_text() -> None:
    """As the model learned them: a tokenizer may merge across the seam."""
    chat = ChatEncoding(tokenizer(), APRIL)
    split = chat.encode_prompt([system("What is 1"), system(" + 2?"), user("x")])
    assert split == chat.encode_prompt([system("What is 1 + 2?"), user("x")])


def test_the_same_system_message_twice_is_rendered_twice() -> None:
    rule = system("R")
    text = prompt([rule, user("1"), said("2"), rule, user("3")], APRIL)
    assert text == f"{BOS}R{USER}1{ASSISTANT}{SHUT}2{EOS}R{USER}3{ASSISTANT}{SHUT}"


@EITHER
def test_a_reminder_stands_before_the_question(version: EncodingVersion) -> None:
    text = prompt([system("S"), Message(role="latest_reminder", content="today"), user("?")], version, "high")
    assert text == f"{BOS}{effort_text(version, 'high')}S{REMINDER}today{USER}?{ASSISTANT}{OPEN}"


@EITHER
def test_results_come_in_the_order_of_their_calls_and_the_users_text_behind(version: EncodingVersion) -> None:
    calls = tuple(ToolCall(name="share", arguments='{"of": "é"}', id=id_) for id_ in ("x", "y", "z"))
    results = [Message(role="tool", content=id_.upper(), tool_call_id=id_) for id_ in ("z", "x", "y")]
    text = prompt([user("?"), said("", tool_calls=calls), *results, user("and?")], version)
    heard = "\n\n".join(f"<tool_result>{name}</tool_result>" for name in "XYZ")
    assert text.endswith(f"{EOS}{USER}{heard}\n\nand?{ASSISTANT}{SHUT}")
    assert text.count(f'<{DSML}parameter name="of" string="true">é</{DSML}parameter>') == 3


def test_a_call_without_arguments_holds_an_empty_line_in_april() -> None:
    messages = [
        user("?"),
        said("", tool_calls=(NOW,)),
        Message(role="tool", content=""),
    ]
    for version, gap in ((LATER, "\n"), (APRIL, "\n\n")):
        block = f'<{DSML}tool_calls>\n<{DSML}invoke name="now">{gap}</{DSML}invoke>\n</{DSML}tool_calls>'
        assert prompt(messages, version) == (
            f"{BOS}{USER}?{ASSISTANT}{SHUT}\n\n{block}{EOS}{USER}<tool_result></tool_result>{ASSISTANT}{SHUT}"
        )


@EITHER
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("q", task="query")], f"{USER}q<｜query｜>"),
        ([user("q", task="authority")], f"{USER}q<｜authority｜>"),
        ([user("q", task="domain")], f"{USER}q<｜domain｜>"),
        ([user("q", task="action")], f"{USER}q{ASSISTANT}{OPEN}<｜action｜>"),
        ([user("q", task="read_url", url="u")], f"{USER}q<｜extracted_url｜>u<｜read_url｜>"),
        ([user("q"), said("a", "r", task="title")], f"{USER}q{ASSISTANT}{OPEN}r{SHUT}a{EOS}<｜title｜>"),
        (
            [user("q", task="action"), said("Search"), user("p")],
            f"{USER}q{ASSISTANT}{OPEN}<｜action｜>Search{EOS}{USER}p{ASSISTANT}{OPEN}",
        ),
        (
            [user("q", task="query"), said("k"), user("p"), said("a", "r"), user("o")],
            f"{USER}q<｜query｜>k{EOS}{USER}p{ASSISTANT}{SHUT}a{EOS}{USER}o{ASSISTANT}{OPEN}",
        ),
    ],
)
def test_a_quick_instruction_is_a_token_behind_its_message(
    version: EncodingVersion, messages: list[Message], expected: str
) -> None:
    assert prompt(messages, version, "high") == BOS + effort_text(version, "high") + expected


@EITHER
def test_the_answer_to_a_quick_instruction_is_trained_without_its_token(version: EncodingVersion) -> None:
    chat = ChatEncoding(tokenizer(), version)
    encoded = chat.encode_conversation([user("q", task="action"), said("Search", "unused")], "max")
    trained = [id_ for id_, flag in zip(encoded.token_ids, encoded.trained_mask, strict=True) if flag]
    assert chat.tokenizer.decode(trained) == "Search" + EOS


@EITHER
def test_a_schema_stands_behind_the_tools(version: EncodingVersion) -> None:
    wanted = ResponseFormat(kind="json_schema", schema={"type": "object", "é": [1, None]})
    text = prompt([system("S"), user("?")], version, response_format=wanted)
    assert text.startswith(f"{BOS}S\n\n## Response Format:\n\n")
    assert text.endswith(f'\n{{"type": "object", "é": [1, null]}}{USER}?{ASSISTANT}{SHUT}')
    both = prompt([system("S"), user("?")], version, response_format=wanted, tools=(SHARES,))
    assert both.index("### Available Tool Schemas") < both.index("## Response Format:")


def test_any_json_object_can_be_asked_for_in_the_later_version_only() -> None:
    wanted = ResponseFormat(kind="json_object")
    assert "## Response Format:" in prompt([user("?")], response_format=wanted)
    with pytest.raises(EncodingError, match="'json_object' is not in encoding v4-0424; it must be a 'json_schema'"):
        prompt([user("?")], APRIL, response_format=wanted)


@EITHER
def test_tools_can_be_left_out_or_a_call_begun(version: EncodingVersion) -> None:
    history = [user("?"), said("a", "r"), user("!")]
    silent = prompt(history, version, "high", tools=(SHARES,), tool_choice="none")
    assert silent == prompt(history, version, "high")
    begun = prompt(history, version, "high", tools=(SHARES,), tool_choice="required")
    assert begun == prompt(history, version, "high", tools=(SHARES,)) + f"\n\n<{DSML}tool_calls>\n"


@EITHER
def test_a_begun_call_is_read_on(version: EncodingVersion) -> None:
    chat = ChatEncoding(tokenizer(), version)
    turn = said("", tool_calls=(ToolCall(name="share", arguments='{"of":"a"}'),))
    begun = chat.encode_prompt([user("?")], "non-think", (SHARES,), tool_choice="required")
    whole = chat.encode_conversation([user("?"), turn], "non-think", (SHARES,)).token_ids
    assert list(whole[: len(begun)]) == begun
    for effort in ("non-think", "high"):
        assert chat.read_turn(whole[len(begun) :], effort, is_call_begun=True).calls == turn.tool_calls


@EITHER
@pytest.mark.parametrize(
    ("effort", "begun", "expected"),
    [
        ("non-think", said("So", prefix=True), f"{ASSISTANT}{SHUT}So"),
        ("high", said("", "Hm", prefix=True), f"{ASSISTANT}{OPEN}Hm"),
        ("high", said("So", "Hm", prefix=True), f"{ASSISTANT}{OPEN}Hm{SHUT}So"),
        ("high", said("So", prefix=True), f"{ASSISTANT}{OPEN}{SHUT}So"),
        ("high", said("", prefix=True), f"{ASSISTANT}{OPEN}"),
    ],
)
def test_a_prefix_is_continued(
    version: EncodingVersion, effort: ReasoningEffort, begun: Message, expected: str
) -> None:
    start = "" if effort == "non-think" else effort_text(version, effort)
    assert prompt([user("?"), begun], version, effort) == f"{BOS}{start}{USER}?{expected}"


def test_a_developer_stands_in_the_place_of_the_user_in_april_only() -> None:
    messages = [system("S"), Message(role="developer", content="find")]
    listed = prompt([system("find"), user("?")], tools=(SHARES,)).removeprefix(BOS)
    expected = f"{BOS}S{USER}{listed.removesuffix(f'{USER}?{ASSISTANT}{SHUT}')}{ASSISTANT}{SHUT}"
    assert prompt(messages, APRIL, tools=(SHARES,)) == expected
    with pytest.raises(EncodingError, match=r"role 'developer', which encoding v4-0731 does not have; .*'system'"):
        prompt(messages)


@pytest.mark.parametrize(
    ("version", "messages", "fault"),
    [
        (APRIL, [said("a"), user("?")], "follows nothing, behind which encoding v4-0424 opens no turn"),
        (APRIL, [user("?"), said("a"), said("b"), user("?")], "follows one of role 'assistant'"),
        (APRIL, [user("?"), system("S"), said("a"), user("?")], "follows one of role 'system'"),
        (APRIL, [user("?"), system("S")], "ends with a message of role 'system'"),
        (APRIL, [user("?"), Message(role="latest_reminder", content="r")], "Put it before the question"),
        (APRIL, [Message(role="developer", content="")], "role 'developer' is empty"),
        (LATER, [user("?", task="query"), user("?")], "role 'user' follows one with task 'query'"),
        (LATER, [user("?"), said("a", prefix=True), user("?")], "follows one with prefix"),
        (LATER, [user("?"), said("", tool_calls=(NOW,)), said("b"), user("?")], "are missing"),
    ],
)  # fmt: skip
def test_a_message_out_of_place_is_refused(version: EncodingVersion, messages: list[Message], fault: str) -> None:
    with pytest.raises(EncodingError, match=fault):
        prompt(messages, version)


def test_a_developer_that_april_would_drop_is_refused() -> None:
    messages = [Message(role="developer", content="find"), said("a"), user("?")]
    with pytest.raises(EncodingError, match="leaves it out in a thinking mode without tools"):
        prompt(messages, APRIL, "high")
    assert "find" in prompt(messages, APRIL)
    assert "find" in prompt(messages, APRIL, "high", tools=(SHARES,))


@pytest.mark.parametrize("ids", [("x", "x"), ("x", "q"), ("x", "")])
def test_results_that_answer_no_call_are_refused(ids: tuple[str, str]) -> None:
    calls = tuple(ToolCall(name="a", arguments="{}", id=id_) for id_ in ("x", "y"))
    results = [Message(role="tool", content="", tool_call_id=id_) for id_ in ids]
    with pytest.raises(EncodingError, match="each result must answer another one of these calls"):
        prompt([user("?"), said("", tool_calls=calls), *results])


def test_a_required_call_needs_a_tool_and_a_turn_of_its_own() -> None:
    with pytest.raises(EncodingError, match="there are no tools"):
        prompt([user("?")], tool_choice="required")
    for last in (said("a", prefix=True), said("a", task="title")):
        with pytest.raises(EncodingError, match="has prefix or a task"):
            prompt([user("?"), last], tools=(SHARES,), tool_choice="required")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"role": "user", "task": "title"}, "belongs on a finished message of role 'assistant'"),
        ({"role": "assistant", "task": "query"}, "belongs on a finished message of role 'user'"),
        ({"role": "user", "task": "read_url"}, "go together"),
        ({"role": "user", "url": "u"}, "go together"),
        ({"role": "user", "prefix": True}, "only an assistant's text is continued"),
        ({"role": "user", "tool_call_id": "x"}, "only a tool answers a call"),
    ],
)
def test_a_message_carries_only_what_its_role_can(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Message(content="a", **fields)


@pytest.mark.parametrize("fields", [{"kind": "json_schema"}, {"kind": "json_object", "schema": {}}])
def test_a_format_has_a_schema_or_is_any_object(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="json_schema has one and json_object none"):
        ResponseFormat(**fields)


@EITHER
def test_a_model_directory_says_its_version(version: EncodingVersion, tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    assert ChatEncoding.load(tmp_path).version == LATER, "absent is the later one"
    assert (find_encoding_version(tmp_path), encoding_files(tmp_path)) == (None, {})
    (tmp_path / ENCODING_FILE).write_bytes(encoding_file(version))
    assert json.loads((tmp_path / ENCODING_FILE).read_text()) == {"encoding": version.name}
    assert ChatEncoding.load(tmp_path).version == find_encoding_version(tmp_path) == version
    assert encoding_files(tmp_path) == {"encoding.json": encoding_file(version)}


@pytest.mark.parametrize(
    "content", ['{"encoding": "v5"}', "{}", "[]", "", '{"encoding": "v4-0731", "x": 1}', '{"encoding": null}', "\xff"]
)
def test_an_encoding_file_that_says_nothing_known_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / ENCODING_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(EncodingError, match=r"encoding\.json: .*v4-0731, v4-0424"):
        find_encoding_version(tmp_path)


CALLS = [{"id": "c", "type": "function", "function": {"name": "share", "arguments": '{"of": "Zürich", "days": 2}'}}]
LISTED = [{"type": "function", "function": msgspec.to_builtins(SHARES)}]
CASES: dict[str, tuple[Any, str]] = {
    "1": (  # tools and thinking: all reasoning is kept
        {
            "tools": LISTED,
            "messages": [
                {"role": "system", "content": "Advise."},
                {"role": "user", "content": "What does it cost?"},
                {"role": "assistant", "reasoning_content": "Look it up.", "tool_calls": CALLS},
                {"role": "tool", "tool_call_id": "c", "content": '{"chf": 7}'},
                {"role": "assistant", "reasoning_content": "Seven.", "content": "It costs 7 °."},
            ],
        },
        f"{BOS}Advise.\n\nTOOLS{USER}What does it cost?{ASSISTANT}{OPEN}Look it up.{SHUT}\n\n"
        f'<{DSML}tool_calls>\n<{DSML}invoke name="share">\n'
        f'<{DSML}parameter name="of" string="true">Zürich</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>{EOS}'
        f'{USER}<tool_result>{{"chf": 7}}</tool_result>{ASSISTANT}{OPEN}Seven.{SHUT}It costs 7 °.{EOS}',
    ),
    "2": (  # thinking without tools: only the last reasoning is kept
        [
            {"role": "system", "content": "Advise."},
            {"role": "user", "content": "Morning"},
            {"role": "assistant", "reasoning_content": "A greeting.", "content": "Good morning."},
            {"role": "user", "content": "Which river is in Basel?"},
            {"role": "assistant", "reasoning_content": "The Rhine.", "content": "The Rhine is."},
        ],
        f"{BOS}Advise.{USER}Morning{ASSISTANT}{SHUT}Good morning.{EOS}"
        f"{USER}Which river is in Basel?{ASSISTANT}{OPEN}The Rhine.{SHUT}The Rhine is.{EOS}",
    ),
    "3": (  # DeepSeek's search pipeline: a reminder, and a developer's message that lists the tools
        [
            {"role": "system", "content": "Advise."},
            {"role": "latest_reminder", "content": "Basel, 1 June"},
            {"role": "developer", "content": "Is it open?", "tools": LISTED},
            {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": CALLS},
            {"role": "tool", "content": "[0]"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "So it is.", "tool_calls": []},
        ],
        f"{BOS}Advise.{REMINDER}Basel, 1 June{USER}Is it open?\n\nTOOLS{ASSISTANT}{OPEN}Look.{SHUT}\n\n"
        f'<{DSML}tool_calls>\n<{DSML}invoke name="share">\n'
        f'<{DSML}parameter name="of" string="true">Zürich</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>{EOS}'
        f"{USER}<tool_result>[0]</tool_result>{ASSISTANT}{OPEN}So it is.{SHUT}Yes.{EOS}",
    ),
    "4": (  # a quick instruction in the chat mode
        [
            {"role": "system", "content": "Advise."},
            {"role": "latest_reminder", "content": "Basel"},
            {"role": "user", "content": "Is the Rhine long?"},
            {"role": "assistant", "content": "**Yes**.\n\n| km |", "mask": 1},
            {"role": "user", "content": "Which are longer?", "task": "action"},
            {"role": "assistant", "content": "Search"},
        ],
        f"{BOS}Advise.{REMINDER}Basel{USER}Is the Rhine long?{ASSISTANT}{SHUT}**Yes**.\n\n| km |{EOS}"
        f"{USER}Which are longer?{ASSISTANT}{SHUT}<｜action｜>Search{EOS}",
    ),
}


def test_cases_of_the_official_kinds_by_hand(tmp_path: Path) -> None:
    """The four published cases are of these kinds; these have our own texts, and outputs from the grammar."""
    listing = prompt([user("?")], tools=(SHARES,)).removeprefix(BOS + "\n\n").removesuffix(f"{USER}?{ASSISTANT}{SHUT}")
    for number, (given, expected) in CASES.items():
        (tmp_path / f"test_input_{number}.json").write_text(json.dumps(given))
        (tmp_path / f"test_output_{number}.txt").write_text(expected.replace("TOOLS", listing))
    assert failed_cases(tmp_path) == []
    (tmp_path / "test_output_2.txt").write_text(CASES["2"][1].replace("Rhine", "Rhone", 1))
    assert failed_cases(tmp_path) == ["2"]
