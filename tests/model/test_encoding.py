"""Proves that conversations become the ids that DeepSeek's own encoder gives, and that only answers are trained.

Does not prove the grammar itself: its text is deepseek-recipe's.
"""

import functools
import json

import deepseek_recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.dsml import parse_turn
from rollforward.model.encoding import ChatEncoding, plain_texts
from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, ReasoningEffort, ToolCall
from rollforward.model.tokenizer import CONTROL_TOKENS, TokenizerConfig, train_tokenizer
from rollforward.sandbox.types import ToolSpec

EFFORTS: tuple[ReasoningEffort, ...] = ("non-think", "low", "high", "max")


@functools.cache
def encoding() -> ChatEncoding:
    return ChatEncoding(train_tokenizer(["What is 1 + 2?", "It is 3."] * 20, TokenizerConfig(vocab_size=384)))


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def ids(*parts: str) -> list[int]:
    """Control tokens by their spelling, everything else as text."""
    tokenizer = encoding().tokenizer
    return [
        id_
        for part in parts
        for id_ in ([tokenizer.control_id(part)] if part in CONTROL_TOKENS else tokenizer.encode(part))
    ]


BOS, EOS, USER, ASSISTANT, THINK, END_THINK = (CONTROL_TOKENS[index] for index in (0, 1, 3, 4, 5, 6))


def test_a_prompt_without_thinking_by_hand() -> None:
    messages = [Message(role="system", content="Be short."), user("What is 1 + 2?")]
    expected = ids(BOS, "Be short.", USER, "What is 1 + 2?", ASSISTANT, END_THINK)
    assert encoding().encode_prompt(messages) == expected


def test_a_prompt_with_thinking_ends_with_the_thinking_opener() -> None:
    assert encoding().encode_prompt([user("Hi")], "low") == ids(BOS, USER, "Hi", ASSISTANT, THINK)


def test_a_conversation_by_hand() -> None:
    encoded = encoding().encode_conversation([user("a"), assistant("b"), user("c"), assistant("d")])
    first, second = ids(BOS, USER, "a", ASSISTANT, END_THINK), ids("b", EOS)
    third, fourth = ids(USER, "c", ASSISTANT, END_THINK), ids("d", EOS)
    assert list(encoded.token_ids) == first + second + third + fourth
    expected_mask = [
        flag for flag, part in zip((0, 1, 0, 1), (first, second, third, fourth), strict=True) for _ in part
    ]
    assert list(encoded.trained_mask) == [bool(flag) for flag in expected_mask]


def test_reasoning_is_trained_with_the_answer() -> None:
    encoded = encoding().encode_conversation([user("a"), assistant("b", reasoning="r")], "low")
    prompt, answer = ids(BOS, USER, "a", ASSISTANT, THINK), ids("r", END_THINK, "b", EOS)
    assert list(encoded.token_ids) == prompt + answer
    assert list(encoded.trained_mask) == [False] * len(prompt) + [True] * len(answer)


conversations = st.lists(
    st.one_of(st.text(max_size=10), st.sampled_from([f"x{token}y" for token in CONTROL_TOKENS])), min_size=2, max_size=4
)


@given(conversations, st.sampled_from(EFFORTS))
def test_prompts_are_what_deepseeks_own_encoder_gives(texts: list[str], effort: ReasoningEffort) -> None:
    """Also with control tokens in the text. The last message is the user's, as in a prompt."""
    roles = [("user", "assistant")[(len(texts) - 1 - index) % 2] for index in range(len(texts))]
    messages = [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]  # type: ignore[arg-type]
    theirs = [
        deepseek_recipe.UserMessage(text) if role == "user" else deepseek_recipe.AssistantMessage(text)
        for role, text in zip(roles, texts, strict=True)
    ]
    conversation = deepseek_recipe.Conversation(
        theirs,
        thinking_mode=effort != "non-think",
        reasoning_effort=None if effort == "non-think" else effort,
    )
    assert encoding().encode_prompt(messages, effort) == their_encoder().encode(conversation)


@functools.cache
def their_encoder() -> deepseek_recipe.DeepseekV4Encoding:
    serialized = encoding().tokenizer.serialized
    return deepseek_recipe.DeepseekV4Encoding().with_tokenizer(deepseek_recipe.Tokenizer.from_str(serialized))


@given(conversations, st.sampled_from(EFFORTS), st.text(max_size=5))
def test_a_prompt_is_the_untrained_head_of_its_conversation(
    texts: list[str], effort: ReasoningEffort, reasoning: str
) -> None:
    """What an engine continues is what SFT conditions on, token by token."""
    question, answer = user(texts[0]), assistant(texts[1], reasoning if effort != "non-think" else "")
    prompt = encoding().encode_prompt([question], effort)
    encoded = encoding().encode_conversation([question, answer], effort)
    assert list(encoded.token_ids[: len(prompt)]) == prompt
    assert list(encoded.trained_mask) == [False] * len(prompt) + [True] * (len(encoded.token_ids) - len(prompt))
    assert encoded.token_ids[-1] == encoding().tokenizer.eos_id


@pytest.mark.parametrize("spelling", CONTROL_TOKENS)
def test_a_control_token_in_a_text_stays_text(spelling: str) -> None:
    harmless = encoding().encode_conversation([user("ab"), assistant("cd")])
    attacked = encoding().encode_conversation([user(f"a{spelling}b"), assistant(f"c{spelling}d")])
    control_ids = set(range(len(CONTROL_TOKENS)))
    assert [id_ for id_ in attacked.token_ids if id_ in control_ids] == [
        id_ for id_ in harmless.token_ids if id_ in control_ids
    ]


def test_plain_texts_hold_what_is_between_control_tokens() -> None:
    assert plain_texts([user("a<｜User｜>"), assistant("b")]) == ["a<｜User｜>", "b"]


def test_the_answer_ends_at_the_first_end_of_sequence() -> None:
    assert encoding().decode_turn(ids("It is 3.", EOS, "more", EOS)) == "It is 3."
    assert encoding().decode_turn(ids("It is 3.")) == "It is 3."
    assert encoding().decode_turn([]) == ""


@pytest.mark.parametrize("messages", [[], [user("a"), assistant("b")]])
def test_a_prompt_must_end_with_a_question(messages: list[Message]) -> None:
    with pytest.raises(EncodingError, match="a prompt must end"):
        encoding().encode_prompt(messages)


def test_a_conversation_must_hold_a_question() -> None:
    with pytest.raises(EncodingError, match="a prompt must end"):
        encoding().encode_conversation([assistant("a")])


@pytest.mark.parametrize("messages", [[], [user("a")]])
def test_a_conversation_must_end_with_an_answer(messages: list[Message]) -> None:
    with pytest.raises(EncodingError, match="must end with an assistant's message"):
        encoding().encode_conversation(messages)


def test_a_lone_surrogate_is_an_error() -> None:
    with pytest.raises(EncodingError, match="lone surrogate"):
        encoding().encode_prompt([user("\ud800")])


def test_only_an_assistant_reasons() -> None:
    with pytest.raises(ValueError, match="role 'user' carries reasoning"):
        Message(role="user", content="a", reasoning="b")


CALCULATOR = ToolSpec(
    name="calculator",
    description="Computes.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)


def call(expression: str) -> ToolCall:
    return ToolCall(name="calculator", arguments=json.dumps({"expression": expression}))


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


CALL_TEXT = (
    "\n\n<",
    "｜DSML｜",
    "tool_calls>\n<",
    "｜DSML｜",
    'invoke name="calculator">\n<',
    "｜DSML｜",
    'parameter name="expression" string="true">1 + 2</',
    "｜DSML｜",
    "parameter>\n</",
    "｜DSML｜",
    "invoke>\n</",
    "｜DSML｜",
    "tool_calls>",
)


def test_a_conversation_with_a_call_by_hand() -> None:
    turn = Message(role="assistant", content="", tool_calls=(call("1 + 2"),))
    encoded = encoding().encode_conversation([user("q"), turn, tool("3"), assistant("It is 3.")])
    parts = (
        ids(BOS, USER, "q", ASSISTANT, END_THINK),
        ids(*CALL_TEXT, EOS),
        ids(USER, "<tool_result>3</tool_result>", ASSISTANT, END_THINK),
        ids("It is 3.", EOS),
    )
    assert list(encoded.token_ids) == [id_ for part in parts for id_ in part]
    assert list(encoded.trained_mask) == [
        is_trained for part, is_trained in zip(parts, (False, True, False, True), strict=True) for _ in part
    ]


def test_an_observation_by_hand() -> None:
    expected = ids(USER, "<tool_result>3</tool_result>\n\n<tool_result>4</tool_result>", ASSISTANT, THINK)
    assert encoding().encode_observation(["3", "4"], "high") == expected


def test_an_observation_holds_a_result() -> None:
    with pytest.raises(EncodingError, match="holds no result"):
        encoding().encode_observation([])


def test_listed_tools_are_in_the_prompt_as_deepseek_writes_them() -> None:
    messages = [Message(role="system", content="Be short."), user("q")]
    conversation = deepseek_recipe.Conversation(
        [deepseek_recipe.SystemMessage("Be short."), deepseek_recipe.UserMessage("q")],
        thinking_mode=False,
        tools=[deepseek_recipe.ToolDefinition("calculator", "Computes.", CALCULATOR.parameters)],
    )
    prompt = encoding().encode_prompt(messages, tools=(CALCULATOR,))
    assert prompt == their_encoder().encode(conversation)
    assert '{"name": "calculator", "description": "Computes."' in encoding().tokenizer.decode(prompt)


result_texts = st.lists(st.text(max_size=8) | st.sampled_from(CONTROL_TOKENS), min_size=1, max_size=3)
turn_texts = st.text(max_size=8) | st.sampled_from([f"x{token}" for token in CONTROL_TOKENS])


@given(result_texts, turn_texts, turn_texts, st.sampled_from(EFFORTS), st.booleans(), st.booleans())
def test_a_prompt_behind_a_call_is_prompt_turn_and_observation(
    results: list[str], content: str, reasoning: str, effort: ReasoningEffort, lists_tools: bool, has_system: bool
) -> None:
    """Token-in-token-out is what rendering the whole conversation gives, turn after turn."""
    tools = (CALCULATOR,) if lists_tools else ()
    tokenizer = encoding().tokenizer
    history = [*([Message(role="system", content="s")] if has_system else []), user("q")]
    ids_so_far = encoding().encode_prompt(history, effort, tools)
    for _ in range(2):
        turn = Message(
            role="assistant",
            content=content,
            reasoning="" if effort == "non-think" else reasoning,
            tool_calls=tuple(call("1 + 2") for _ in results),
        )
        thought = [] if effort == "non-think" else [*tokenizer.encode(turn.reasoning), tokenizer.control_id(END_THINK)]
        calls = encoding().encode_conversation([user("q"), turn]).token_ids
        start = calls.index(tokenizer.control_id(END_THINK)) + 1
        ids_so_far = [*ids_so_far, *thought, *calls[start:], *encoding().encode_observation(results, effort)]
        history = [*history, turn, *(tool(result) for result in results)]
        assert encoding().encode_prompt(history, effort, tools) == ids_so_far


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_rendered_call_is_read_back_from_its_ids(effort: ReasoningEffort) -> None:
    turn = Message(role="assistant", content="So:", tool_calls=(call("1 + 2"),))
    prompt = encoding().encode_prompt([user("q")], effort)
    said = encoding().encode_conversation([user("q"), turn], effort).token_ids[len(prompt) :]
    read = parse_turn(encoding().decode_turn(said), effort)
    assert (read.content, read.calls, read.problem) == ("So:", (ToolCall(name="calculator", arguments=COMPACT),), None)


COMPACT = '{"expression":"1 + 2"}'


def test_tool_results_follow_an_assistant() -> None:
    with pytest.raises(EncodingError, match="follows no assistant's"):
        encoding().encode_prompt([user("q"), tool("3")])


def test_only_an_assistant_calls_tools() -> None:
    with pytest.raises(ValueError, match="role 'user' carries tool_calls"):
        Message(role="user", content="a", tool_calls=(call("1"),))


@pytest.mark.parametrize("arguments", ["", "[1]", "3", '{"a":', '{"a": NaN}'])
def test_arguments_are_a_json_object(arguments: str) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        ToolCall(name="a", arguments=arguments)


def test_a_call_has_a_name_that_needs_no_quoting() -> None:
    with pytest.raises(ValueError, match="must match"):
        ToolCall(name='a"', arguments="{}")
