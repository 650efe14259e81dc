"""Proves: what is rendered in either version is read back from its ids, whatever the texts spell; the later version's
ids are those of deepseek-recipe, also where this code assembles them itself.

Does not prove the April version's texts (`test_encoding_versions.py`).
"""

import functools
import random
import time

import deepseek_recipe
import msgspec
import pytest

from rollforward.model import encoding_render
from rollforward.model.encoding import ChatEncoding
from rollforward.model.encoding_order import Rendering
from rollforward.model.encoding_version import APRIL, LATER, EncodingVersion
from rollforward.model.messages import Message, ToolCall
from rollforward.model.tokenizer import (
    ASSISTANT,
    BOS,
    CONTROL_TOKENS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    TokenizerConfig,
    train_tokenizer,
)
from tests.helpers.conversations import Asked, Turn, expected_turns, random_answer, random_prompt

NUM_CONVERSATIONS = 300
REMINDER = "<｜latest_reminder｜>"
TASKS = ("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>")


@functools.cache
def encoding(name: str) -> ChatEncoding:
    tokenizer = train_tokenizer(["What is 1 + 2?", "It is 3."] * 20, TokenizerConfig(vocab_size=384))
    return ChatEncoding(tokenizer, {"later": LATER, "april": APRIL}[name])


def read_conversation(chat: ChatEncoding, token_ids: tuple[int, ...], asked: Asked) -> list[Turn]:
    """A reader of its own: walks over control ids, and reads what an assistant said by the parser."""
    tokenizer = chat.tokenizer
    pieces = tokenizer.decode_pieces(token_ids)
    turns: list[Turn] = []
    position = 0
    while position < len(pieces):
        text, is_control = pieces[position]
        position += 1
        after = pieces[position] if position < len(pieces) and not pieces[position][1] else None
        if is_control and text in (USER, REMINDER):
            turns.append(Turn({USER: "user", REMINDER: "latest_reminder"}[text], after[0] if after else ""))
            position += after is not None
        elif is_control and (text == ASSISTANT or text in TASKS):
            is_thinking = text == ASSISTANT and pieces[position] == (THINK, True)
            position += text == ASSISTANT
            if position < len(pieces) and pieces[position] == (TASKS[0], True):
                continue  # `action`, whose own opener this was
            end = next(index for index in range(position, len(pieces)) if pieces[index] == (EOS, True))
            said = [
                id_
                for part, is_one in pieces[position:end]
                for id_ in ([tokenizer.control_id(part)] if is_one else tokenizer.encode(part))
            ]
            read = chat.read_turn(said, asked.effort if is_thinking else "non-think")
            assert read.problem is None
            calls = tuple((call.name, call.decode_arguments()) for call in read.calls)
            turns.append(Turn("assistant", read.content, read.reasoning, calls))
            position = end + 1
        elif not is_control and turns:
            turns.append(Turn("system", text))
    return turns


@pytest.mark.parametrize("has_tasks", [False, True])
@pytest.mark.parametrize("name", ["later", "april"])
def test_a_rendered_conversation_is_read_back(name: str, has_tasks: bool) -> None:
    """Roles, texts, results in the order of their calls, kept reasoning, calls with their arguments."""
    chat, rng = encoding(name), random.Random(f"{name} {has_tasks}")
    num_calls = num_thoughts = 0
    for number in range(NUM_CONVERSATIONS):
        asked, answer = random_prompt(rng, chat.version, has_tasks=has_tasks), random_answer(rng)
        encoded = chat.encode_conversation((*asked.messages, answer), asked.effort, asked.tools)
        read = read_conversation(chat, encoded.token_ids, asked)
        expected = expected_turns(asked, answer, chat.version)
        assert _without_empty(read) == _without_empty(expected), f"conversation {number}: {asked}"
        prompt = chat.encode_prompt(asked.messages, asked.effort, asked.tools)
        assert list(encoded.token_ids[: len(prompt)]) == prompt
        assert all(encoded.trained_mask[len(prompt) :])
        num_calls += sum(len(turn.calls) for turn in read)
        num_thoughts += sum(bool(turn.reasoning) for turn in read)
    assert num_calls > 200, "the generator makes calls"
    assert num_thoughts > 200, "the generator reasons"


def _without_empty(turns: list[Turn]) -> list[Turn]:
    """Empty and neighbouring texts of systems leave no trace of where one ends; URLs are read with their question."""
    joined: list[Turn] = []
    for turn in turns:
        if turn.role == "system" and joined and joined[-1].role in ("system", "latest_reminder", "user"):
            joined[-1] = msgspec.structs.replace(joined[-1], text=joined[-1].text + turn.text)
        elif turn.role != "system" or turn.text:
            joined.append(turn)
    return joined


@pytest.mark.parametrize("name", ["later", "april"])
def test_trained_is_what_assistants_say_and_nothing_else(name: str) -> None:
    chat, rng = encoding(name), random.Random(name)
    given = {ASSISTANT, USER, BOS, THINK, REMINDER, *TASKS}
    for _ in range(100):
        asked, answer = random_prompt(rng, chat.version, has_tasks=True), random_answer(rng)
        encoded = chat.encode_conversation((*asked.messages, answer), asked.effort, asked.tools)
        trained = [id_ for id_, flag in zip(encoded.token_ids, encoded.trained_mask, strict=True) if flag]
        pieces = chat.tokenizer.decode_pieces(trained)
        assert not [text for text, is_control in pieces if is_control and text in given]
        num_said = sum(message.role == "assistant" for message in asked.messages) + 1
        assert pieces.count((EOS, True)) == num_said


def theirs(asked: Asked) -> list[int]:
    """deepseek-recipe's own ids of a prompt."""
    chat = encoding("later")
    encoder = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(
        deepseek_recipe.Tokenizer.from_str(chat.tokenizer.serialized)
    )
    messages: list[deepseek_recipe.Message] = []
    for message in asked.messages:
        match message.role:
            case "system":
                messages.append(deepseek_recipe.SystemMessage(message.content))
            case "latest_reminder":
                messages.append(deepseek_recipe.LatestReminderMessage(message.content))
            case "tool":
                messages.append(deepseek_recipe.ToolMessage(message.content, message.tool_call_id or None))
            case "user":
                messages.append(deepseek_recipe.UserMessage(message.content))
            case _:
                calls = [deepseek_recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
                reasoning = None if asked.effort == "non-think" else message.reasoning
                messages.append(deepseek_recipe.AssistantMessage(message.content, reasoning, calls or None))
    conversation = deepseek_recipe.Conversation(
        messages,
        thinking_mode=asked.effort != "non-think",
        reasoning_effort=None if asked.effort == "non-think" else asked.effort,
        tools=[deepseek_recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in asked.tools],
    )
    return encoder.encode(conversation)


def test_the_later_version_is_deepseek_recipes_ids() -> None:
    chat, rng = encoding("later"), random.Random("recipe")
    for number in range(NUM_CONVERSATIONS):
        asked = random_prompt(rng, LATER)
        assert chat.encode_prompt(asked.messages, asked.effort, asked.tools) == theirs(asked), f"{number}: {asked}"


def test_what_is_assembled_here_is_what_deepseek_recipe_renders() -> None:
    """The way on which the April version and quick instructions go, held against deepseek-recipe in its own version."""
    rng = random.Random("assembled")
    for number in range(NUM_CONVERSATIONS):
        asked = random_prompt(rng, LATER)
        how = Rendering(effort=asked.effort, tools=asked.tools)
        rendered = encoding_render.prompt_pieces(asked.messages, how)
        assembled = list(encoding_render.assembled(asked.messages, how))
        assert assembled == rendered, f"{number}: {asked}"


@pytest.mark.parametrize("version", [LATER, APRIL])
def test_a_prompt_behind_a_call_is_prompt_turn_and_observation(version: EncodingVersion) -> None:
    """In each version and effort, with and without listed tools: nothing that was sampled is rendered another way."""
    chat = ChatEncoding(encoding("later").tokenizer, version)
    rng = random.Random(version.name)
    for _ in range(100):
        asked = random_prompt(rng, version)
        turn = _without_ids(random_answer(rng))
        if not turn.tool_calls:
            continue
        results = [f"<｜User｜>{index}" for index in range(len(turn.tool_calls))]
        messages = (*asked.messages, turn, *(Message(role="tool", content=text) for text in results))
        has_history = any(message.role == "assistant" for message in asked.messages)
        if not asked.tools and has_history:
            continue  # the first call keeps reasoning that was dropped before
        ids = [
            *chat.encode_conversation((*asked.messages, turn), asked.effort, asked.tools).token_ids,
            *chat.encode_observation(results, asked.effort),
        ]
        assert chat.encode_prompt(messages, asked.effort, asked.tools) == ids


def _without_ids(message: Message) -> Message:
    calls = tuple(msgspec.structs.replace(call, id="") for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls) if calls else message


def test_a_turn_ends_at_its_first_eos_and_stray_control_tokens_are_a_problem() -> None:
    chat = encoding("later")
    tokenizer = chat.tokenizer
    said = [*tokenizer.encode("a"), tokenizer.control_id(END_THINK), *tokenizer.encode("b"), tokenizer.eos_id, 5]
    assert chat.read_turn(said, "high").problem is None
    for stray in (chat.read_turn(said, "non-think"), chat.read_turn([tokenizer.control_id(USER), *said], "high")):
        assert (stray.problem_kind, stray.is_call) == ("control_token_in_answer", False)


def test_a_turn_that_calls_with_a_stray_control_token_calls_nothing() -> None:
    chat = encoding("later")
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="share", arguments="{}"),))
    question = Message(role="user", content="?")
    said = chat.encode_conversation([question, call]).token_ids[len(chat.encode_prompt([question])) :]
    assert chat.read_turn(said, "non-think").calls
    stray = chat.read_turn([chat.tokenizer.control_id(USER), *said], "non-think")
    assert (stray.problem_kind, stray.calls, stray.is_malformed_call) == ("control_token", (), True)


def test_any_ids_are_read() -> None:
    """Also ids beyond the vocabulary, and control tokens anywhere; a turn that says nothing wrong has no problem."""
    chat, rng = encoding("later"), random.Random("ids")
    num_control = len(CONTROL_TOKENS)
    for _ in range(500):
        ids = [rng.choice((rng.randrange(num_control), rng.randrange(1000), 7)) for _ in range(rng.randint(0, 60))]
        for effort in ("non-think", "max"):
            is_call_begun = rng.random() < 0.2
            turn = chat.read_turn(ids, effort, is_call_begun=is_call_begun)
            assert turn.problem is None or not turn.calls
            assert not turn.is_call or is_call_begun or chat.tokenizer.control_id(DSML) in ids


@pytest.mark.parametrize("unit", [[7], [300, 7], [6], [300, 6, 44], list(range(256, 384))])
def test_time_is_linear_in_the_ids(unit: list[int]) -> None:
    """Two hundred thousand ids; a quadratic reader takes hours."""
    chat = encoding("later")
    start_s = time.process_time()
    chat.read_turn(unit * (200_000 // len(unit)), "max")
    assert time.process_time() - start_s < 10.0
