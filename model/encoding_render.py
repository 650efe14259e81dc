"""Renders conversations: texts, and which of them are control tokens.

deepseek-recipe, DeepSeek's own encoder, renders the later version at run time. What it has no words for (quick
instructions, and the whole April version) is assembled here turn by turn. The text of a turn is deepseek-recipe's even
then; ours are their order, the openers and the control tokens behind a turn:

```
BOS [effort] [system [TOOLS] [FORMAT]]
(LATEST_REMINDER reminder)* USER question ASSISTANT THINK reasoning END_THINK answer EOS ...
                            USER question QUERY           query EOS                            a quick instruction
                            USER question ASSISTANT END_THINK ACTION action EOS                the one with an opener
ASSISTANT END_THINK answer EOS TITLE title EOS                                                 the one behind an answer
```

Not here: which messages may follow each other (`model/encoding_order.py`); ids, and which tokens are trained
(`model/encoding.py`); what differs between versions (`model/encoding_version.py`).
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import deepseek_recipe
import msgspec

from rollforward.model.encoding_order import QUESTION, QUESTION_ROLES, Rendering, check_order
from rollforward.model.encoding_version import LATER
from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, QuickInstruction, ReasoningEffort
from rollforward.model.tokenizer import ASSISTANT, END_THINK, EOS, THINK, USER

Piece = tuple[str, bool]
"""A text, and whether it is one control token."""

LATEST_REMINDER: Final = "<｜latest_reminder｜>"
"""Opens a reminder."""
EXTRACTED_URL: Final = "<｜extracted_url｜>"
"""Opens the address that `read_url` asks about."""
TASK_TOKENS: Final[dict[QuickInstruction, str]] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""The control token of each quick instruction; the model answers behind it."""

_EMPTY_CALL: Final = re.compile(r'invoke name="[^"]*">\n</')


def prompt_pieces(messages: Sequence[Message], how: Rendering) -> list[Piece]:
    """The prompt that ends with `messages`, up to and including the opener of the assistant's turn.

    Raises:
        EncodingError: nothing is there to be answered, or a message stands where the version has no place for it.
    """
    check_order(messages, how)
    # Without listed tools deepseek-recipe drops the reasoning of turns that call one.
    drops = how.keeps_reasoning(messages) and not how.listed_tools
    if how.version.hoists_system and not drops and not any(message.task for message in messages):
        return _rendered(messages, how)
    return list(assembled(messages, how))


def answer_pieces(answer: Message, how: Rendering, before: Message) -> list[Piece]:
    """What an assistant says in its turn behind the opener, up to and including EOS.

    Args:
        answer: an assistant's finished message.
        how: in a thinking mode the turn begins with its reasoning.
        before: the message before it; one with a quick instruction is answered without reasoning.
    """
    is_thinking = how.is_thinking and before.task is None
    return [*_said(answer, how, is_thinking=is_thinking), (EOS, True)]


def observation_pieces(results: Sequence[str], how: Rendering) -> list[Piece]:
    """Results of tools as the turn behind a turn with calls, and the opener of the next."""
    turn = (
        QUESTION,
        Message(role="assistant", content=""),
        *(Message(role="tool", content=result) for result in results),
    )
    pieces = _rendered(turn, Rendering(effort="low" if how.is_thinking else "non-think"))
    return pieces[pieces.index((EOS, True)) + 1 :]


def assembled(messages: Sequence[Message], how: Rendering) -> Iterator[Piece]:
    """Yield the prompt turn by turn, neighbouring plain texts as one; `messages` are in an order that is checked."""
    text = ""
    for piece, is_control in _assembled_parts(messages, how):
        if not is_control:
            text += piece
            continue
        if text:
            yield text, False
        text = ""
        yield piece, True
    if text:
        yield text, False


def _assembled_parts(messages: Sequence[Message], how: Rendering) -> Iterator[Piece]:
    if how.version.hoists_system:
        systems = [message for message in messages if message.role == "system"]
        body = [message for message in messages if message.role != "system"]
    else:
        num_systems = int(messages[0].role == "system")
        systems, body = messages[:num_systems], messages[num_systems:]
    silent = msgspec.structs.replace(how, tools=(), response_format=None, tool_choice="auto")
    # A developer's message takes the place of the system's for tools and format.
    unlisted = how if any(message.role == "developer" for message in body) else None
    yield from _head(systems, how if unlisted is None else silent)
    keeps_all = how.keeps_reasoning(messages)
    turns = list(_turns(body))
    last_question = max((index for index, turn in enumerate(turns) if turn[0].role in QUESTION_ROLES), default=-1)
    before = [QUESTION]
    for index, turn in enumerate(turns):
        is_thinking = how.is_thinking and (keeps_all or index > last_question)
        if turn[0].role == "assistant":
            if before[-1].task is None:
                yield from _opener(is_thinking=is_thinking)
            yield from _said(turn[0], how, is_thinking=is_thinking and before[-1].task is None)
            if not turn[0].prefix:
                yield EOS, True
        else:
            is_developer = turn[0].role == "developer"
            yield from _heard(turn, before, unlisted if is_developer and unlisted is not None else silent)
            unlisted = None if is_developer else unlisted
        yield from _instruction(turn[-1], is_thinking=how.is_thinking)
        before = turn
    if before[-1].task is None and not before[-1].prefix:
        yield from _opener(is_thinking=how.is_thinking)
    if how.tool_choice == "required":
        begun = _rendered([QUESTION], msgspec.structs.replace(how, version=LATER, effort="non-think"))
        yield from begun[_last(begun, END_THINK) + 1 :]


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield what is rendered as one turn: a user's texts and results that follow each other, or one message."""
    for is_heard, group in groupby(messages, lambda message: message.role in ("user", "tool")):
        if is_heard:
            yield list(group)
        else:
            yield from ([message] for message in group)


def _head(systems: Sequence[Message], how: Rendering) -> list[Piece]:
    """BOS, the text of the effort, and what systems say, with tools and format behind it."""
    pieces = _rendered(systems, msgspec.structs.replace(how, tool_choice="auto", tools=how.listed_tools))
    return pieces[: _last(pieces, ASSISTANT)]


def _opener(*, is_thinking: bool) -> Iterator[Piece]:
    yield ASSISTANT, True
    yield THINK if is_thinking else END_THINK, True


def _heard(turn: Sequence[Message], before: Sequence[Message], how: Rendering) -> Iterator[Piece]:
    """Yield a turn that is no assistant's, without what follows it.

    Args:
        turn: one message, or those of a user and of tools that are one.
        before: the turn before it, whose calls say in which order results belong.
        how: lists what a developer's message lists.
    """
    text = turn[0].content
    match turn[0].role:
        case "system":
            yield text, False
        case "latest_reminder":
            yield LATEST_REMINDER, True
            yield text, False
        case "developer":
            yield USER, True
            system = Message(role="system", content=text)
            yield from _head([system], msgspec.structs.replace(how, effort="non-think"))[1:]
        case _:
            calls = Message(role="assistant", content="", tool_calls=before[-1].tool_calls)
            if how.version.joins_empty_texts:
                yield USER, True
                yield "\n\n".join(_blocks(turn, calls)), False
                return
            pieces = _rendered([calls, *turn], Rendering())
            yield from pieces[pieces.index((USER, True)) : _last(pieces, ASSISTANT)]


def _blocks(turn: Sequence[Message], calls: Message) -> Iterator[str]:
    """Yield the text of each block of a user's turn, results in the order of the calls."""
    order = {call.id: index for index, call in enumerate(calls.tool_calls) if call.id}
    for message in sorted(turn, key=lambda one: (one.role != "tool", order.get(one.tool_call_id, 0))):
        pieces = _rendered([message], Rendering())
        yield "".join(text for text, _ in pieces[pieces.index((USER, True)) + 1 : _last(pieces, ASSISTANT)])


def _said(answer: Message, how: Rendering, *, is_thinking: bool) -> Iterator[Piece]:
    """Yield what an assistant says behind its opener, without EOS."""
    if is_thinking:
        yield answer.reasoning, False
        if answer.prefix and not answer.content:
            return
        yield END_THINK, True
    if not answer.tool_calls:
        yield answer.content, False
        return
    turn = (QUESTION, Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls), QUESTION)
    pieces = _rendered(turn, Rendering())
    for text, is_control in pieces[pieces.index((ASSISTANT, True)) + 2 : pieces.index((EOS, True))]:
        is_empty_call = not is_control and how.version.pads_empty_call and _EMPTY_CALL.fullmatch(text) is not None
        yield text.replace("\n", "\n\n") if is_empty_call else text, is_control


def _instruction(message: Message, *, is_thinking: bool) -> Iterator[Piece]:
    """Yield the control tokens of a message's quick instruction, if it has one."""
    if message.task is None:
        return
    if message.task == "action":
        yield from _opener(is_thinking=is_thinking)
    if message.task == "read_url":
        yield EXTRACTED_URL, True
        yield message.url, False
    yield TASK_TOKENS[message.task], True


def _last(pieces: Sequence[Piece], control: str) -> int:
    """Where a control token stands for the last time."""
    return len(pieces) - 1 - pieces[::-1].index((control, True))


def _rendered(messages: Sequence[Message], how: Rendering) -> list[Piece]:
    """deepseek-recipe's rendering, in order."""
    format_ = how.response_format
    conversation = deepseek_recipe.Conversation(
        [_convert(message, how.effort) for message in messages],
        thinking_mode=how.is_thinking,
        reasoning_effort=how.version.efforts[how.effort] if how.is_thinking else None,
        tools=[deepseek_recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in how.tools],
        tool_choice=how.tool_choice,
        response_format="json_object" if format_ is not None and format_.kind == "json_object" else "text",
        response_schema=None if format_ is None else format_.schema,
    )
    rendered = deepseek_recipe.DeepseekV4Encoding().render_conversation(conversation)
    prompt = rendered.prompt
    pieces: list[Piece] = []
    position = 0
    for start, end in rendered.special_ranges:
        if position < start:
            pieces.append((prompt[position:start], False))
        pieces.append((prompt[start:end], True))
        position = end
    if position < len(prompt):
        pieces.append((prompt[position:], False))
    return pieces


def _convert(message: Message, effort: ReasoningEffort) -> deepseek_recipe.Message:
    text = message.content
    try:
        match message.role:
            case "system":
                return deepseek_recipe.SystemMessage(text)
            case "user":
                return deepseek_recipe.UserMessage(text)
            case "latest_reminder":
                return deepseek_recipe.LatestReminderMessage(text)
            case "tool":
                return deepseek_recipe.ToolMessage(text, message.tool_call_id or None)
            case "assistant":
                calls = [deepseek_recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
                # Empty reasoning is reasoning: in a thinking mode the turn closes it behind its opener.
                reasoning = None if effort == "non-think" else message.reasoning
                return deepseek_recipe.AssistantMessage(
                    text, reasoning_content=reasoning, tool_calls=calls or None, prefix=message.prefix
                )
            case "developer":
                raise AssertionError("a developer's message is assembled, not rendered")
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"character {error.start} of a message of role {message.role!r} is a lone surrogate; text must be valid "
            "Unicode. Decode its source again."
        ) from error
