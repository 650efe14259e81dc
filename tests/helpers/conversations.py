"""Random conversations that a version of the encoding can render, and what must be read back from their rendering."""

import json
import random
from typing import Any

import msgspec

from rollforward.model.encoding_version import EncodingVersion
from rollforward.model.messages import Message, ReasoningEffort, ToolCall
from rollforward.model.tokenizer import CONTROL_TOKENS
from rollforward.sandbox.types import ToolSpec

TOOLS = (
    ToolSpec(name="sum", description="Adds.", parameters={"type": "object", "properties": {"ünits": {"b": 1, "a": 2}}}),
    ToolSpec(name="look-up", description="Finds <｜User｜>.", parameters={"type": "object"}),
)
_WORDS = (
    *("", "a", "Is it 3?", " x ", "\n\n", "é漢\n", "<", "</tool_result>", "｜", "\ue000", "</｜DSML｜tool_calls>"),
    *CONTROL_TOKENS,
)
_VALUES: tuple[Any, ...] = (
    1,
    -2.5,
    True,
    None,
    [1, "b"],
    {"k": [None]},
    "text",
    "1",
    "",
    " é\n",
    "</｜DSML｜parameter>",
)


class Asked(msgspec.Struct, frozen=True):
    """A generated prompt."""

    messages: tuple[Message, ...]
    effort: ReasoningEffort
    tools: tuple[ToolSpec, ...]


class Turn(msgspec.Struct, frozen=True):
    """What one turn of a rendered conversation must say; reasoning and calls are an assistant's."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def random_prompt(rng: random.Random, version: EncodingVersion, *, has_tasks: bool = False) -> Asked:
    """A prompt with one to four questions; `has_tasks` puts quick instructions behind some of them."""
    effort = rng.choice(("non-think", *version.efforts))
    tools = rng.choice(((), TOOLS[:1], TOOLS))
    messages: list[Message] = [_system(rng)] if rng.random() < 0.5 else []
    for _ in range(rng.randint(0, 3)):
        messages += _question(rng, version)
        if has_tasks and rng.random() < 0.5:
            messages += _asked_and_answered(rng, messages.pop())
            continue
        for _ in range(rng.choice((0, 0, 1, 2)) if tools else 0):
            messages += _call_and_results(rng)
            if rng.random() < 0.2:
                messages.append(Message(role="user", content=_text(rng)))  # joins the results
        messages.append(_answer(rng))
    return Asked((*messages, *_question(rng, version)), effort, tools)


def expected_turns(asked: Asked, answer: Message, version: EncodingVersion) -> list[Turn]:
    """What must be read back from the conversation that `answer` ends, behind its system message and effort."""
    messages = [one for one in (*asked.messages, answer) if one.role != "system" or not version.hoists_system]
    questions = [index for index, message in enumerate(messages) if message.role in ("user", "tool")]
    keeps = bool(asked.tools) or any(message.tool_calls for message in asked.messages)
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        before = messages[index - 1] if index else None
        match message.role:
            case "system":
                if turns:  # else a part of what is before all turns
                    turns.append(Turn("system", message.content))
            case "latest_reminder":
                turns.append(Turn("latest_reminder", message.content))
            case "user" | "tool":
                text = f"<tool_result>{message.content}</tool_result>" if message.role == "tool" else message.content
                if before is not None and before.role in ("user", "tool"):
                    keeps_empty = version.joins_empty_texts or before.role == "tool"
                    parts = [turns.pop().text, text]
                    text = "\n\n".join(part for part in parts if part or keeps_empty)
                turns.append(Turn("user", text + message.url))
            case _:
                is_thinking = asked.effort != "non-think" and (before is None or before.task is None)
                shown = message.reasoning if is_thinking and (keeps or index > questions[-1]) else ""
                calls = tuple((call.name, call.decode_arguments()) for call in message.tool_calls)
                turns.append(Turn("assistant", message.content, shown, calls))
    return _sorted_results(turns, messages)


def _sorted_results(turns: list[Turn], messages: list[Message]) -> list[Turn]:
    """Results whose ids say so in the order of their calls; the generator numbers the texts of such results."""
    if not any(message.tool_call_id for message in messages):
        return turns
    sorted_turns: list[Turn] = []
    for turn in turns:
        blocks = turn.text.split("\n\n")
        results = sorted(block for block in blocks if block.startswith("<tool_result>#"))
        others = [block for block in blocks if not block.startswith("<tool_result>#")]
        text = "\n\n".join([*results, *others]) if results and turn.role == "user" else turn.text
        sorted_turns.append(msgspec.structs.replace(turn, text=text))
    return sorted_turns


def random_answer(rng: random.Random) -> Message:
    """An answer, some with calls."""
    return _call_and_results(rng)[0] if rng.random() < 0.4 else _answer(rng)


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(0, 4)))


def _system(rng: random.Random) -> Message:
    return Message(role="system", content="Rules " + _text(rng))


def _answer(rng: random.Random) -> Message:
    return Message(role="assistant", content=_text(rng), reasoning=_text(rng))


def _question(rng: random.Random, version: EncodingVersion) -> list[Message]:
    """What stands before an answer, and the question."""
    messages = [_system(rng)] if rng.random() < 0.2 else []
    messages += [Message(role="latest_reminder", content=_text(rng))] if rng.random() < 0.2 else []
    return [*messages, *(Message(role="user", content=_text(rng)) for _ in range(rng.choice((1, 1, 2))))]


def _call_and_results(rng: random.Random) -> list[Message]:
    count = rng.randint(1, 3)
    arguments = [{f"k{key}": rng.choice(_VALUES) for key in range(rng.randint(0, 3))} for _ in range(count)]
    order = list(range(count))
    has_ids = rng.random() < 0.5
    if has_ids:
        rng.shuffle(order)
    calls = tuple(
        ToolCall(
            name=rng.choice(TOOLS).name,
            arguments=json.dumps(given, ensure_ascii=rng.random() < 0.5),
            id=f"id{index}" if has_ids else "",
        )
        for index, given in enumerate(arguments)
    )
    results = [
        Message(role="tool", content=f"#{index}", tool_call_id=f"id{index}")
        if has_ids
        else Message(role="tool", content=_text(rng))
        for index in order
    ]
    return [Message(role="assistant", content=_text(rng), reasoning=_text(rng), tool_calls=calls), *results]


def _asked_and_answered(rng: random.Random, question: Message) -> list[Message]:
    """The question with a quick instruction, and the answer to that."""
    task = rng.choice(("action", "query", "authority", "domain", "read_url", "title"))
    told = Message(role="assistant", content=_text(rng))
    if task == "title":
        return [question, msgspec.structs.replace(_answer(rng), task="title"), told]
    url = "https://a.example/" + _text(rng) if task == "read_url" else ""
    return [msgspec.structs.replace(question, task=task, url=url), told]
