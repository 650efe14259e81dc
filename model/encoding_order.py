"""Which messages of a conversation may follow each other, and how a conversation is to be rendered.

Here: the record of what is asked of a rendering, and the refusal of prompts that would leave the model without an
opener, or with results that answer nothing. Not here: the rendering (`model/encoding_render.py`).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec

from rollforward.model.encoding_version import LATER, EncodingVersion
from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, ReasoningEffort, ResponseFormat, ToolChoice
from rollforward.sandbox.types import ToolSpec

QUESTION_ROLES: Final = ("user", "tool", "developer")
"""Who says what an assistant answers."""
QUESTION: Final = Message(role="user", content="")
"""A question that only stands for one."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation is rendered."""

    version: EncodingVersion = LATER
    """Of the model's encoding."""
    effort: ReasoningEffort = "non-think"
    """Chooses the opener and the text after BOS."""
    tools: tuple[ToolSpec, ...] = ()
    """What the prompt lists."""
    response_format: ResponseFormat | None = None
    """What the prompt asks the answer to look like."""
    tool_choice: ToolChoice = "auto"
    """Whether tools are listed and a call is begun."""

    def __post_init__(self) -> None:
        """Refuse what the version has no text for, and a call of no tool."""
        if self.is_thinking and self.effort not in self.version.efforts:
            raise EncodingError(
                f"effort {self.effort!r} is not in encoding {self.version.name}; it must be one of non-think,"
                f" {', '.join(self.version.efforts)}. Choose one of these."
            )
        is_object = self.response_format is not None and self.response_format.kind == "json_object"
        if is_object and not self.version.has_json_object:
            raise EncodingError(
                f"response format 'json_object' is not in encoding {self.version.name}; it must be a 'json_schema'."
                ' Use one, such as {"type": "object"}.'
            )
        if self.tool_choice == "required" and not self.tools:
            raise EncodingError("tool_choice is 'required' and there are no tools; list at least one, or use 'auto'.")

    @property
    def is_thinking(self) -> bool:
        """Whether the model reasons before it answers."""
        return self.effort != "non-think"

    @property
    def listed_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that are in the prompt."""
        return () if self.tool_choice == "none" else self.tools

    def keeps_reasoning(self, messages: Sequence[Message]) -> bool:
        """Whether all earlier reasoning stays in the prompt: where tools are listed or a turn called one."""
        return self.is_thinking and bool(self.listed_tools or any(message.tool_calls for message in messages))


def check_order(messages: Sequence[Message], how: Rendering) -> None:
    """Refuse a prompt that leaves nothing to be answered, or a message that the version renders in no place.

    Raises:
        EncodingError: names the message and where it belongs.
    """
    last = messages[-1] if messages else None
    if last is None or (last.role == "assistant" and not last.prefix and last.task is None):
        raise EncodingError(
            "a prompt must end with a user's, a system's or a tool's message, for the assistant to answer; this one "
            "does not. Drop the last turn or add a question."
        )
    if how.tool_choice == "required" and (last.prefix or last.task):
        raise EncodingError(
            "tool_choice is 'required' and the last message has prefix or a task; the model cannot go on with both."
            " Drop one."
        )
    for before, message in zip((None, *messages), messages, strict=False):
        _check_pair(before, message, how.version)
        if not how.version.hoists_system:
            _check_place(before, message, how.version)
    if not how.version.hoists_system and last.role in ("system", "latest_reminder"):
        raise EncodingError(
            f"the prompt ends with a message of role {last.role!r}, behind which encoding {how.version.name} opens no"
            " turn. Put it before the question."
        )
    _check_ids(messages)
    _check_developers(messages, how)


def _check_pair(before: Message | None, message: Message, version: EncodingVersion) -> None:
    """Refuse a message that no version renders in this place."""
    if message.role == "developer" and not version.has_developer:
        raise EncodingError(
            f"a message has role 'developer', which encoding {version.name} does not have; only DeepSeek's own search"
            " pipeline used it, with the first release. Use 'system' for rules or 'user' for a question."
        )
    if message.role == "tool" and (before is None or before.role not in ("assistant", "tool")):
        raise EncodingError(
            "a message of role 'tool' follows no assistant's; it answers a call of the turn before it. Put it "
            "behind the assistant's message with the call."
        )
    if before is None:
        return
    if before.tool_calls and message.role == "assistant":
        raise EncodingError(
            "an assistant's message follows one with tool_calls, whose results are missing. Put them between, each as a"
            " message of role 'tool'."
        )
    if before.prefix:
        raise EncodingError("a message follows one with prefix; only the last turn is continued. Drop prefix.")
    if before.task is not None and message.role != "assistant":
        raise EncodingError(
            f"a message of role {message.role!r} follows one with task {before.task!r}; the assistant's answer to that"
            " must. Put it there, or drop the task."
        )


def _check_place(before: Message | None, message: Message, version: EncodingVersion) -> None:
    """Refuse a message before which a version that renders system messages in place opens no turn, or one too many."""
    is_asked = before is not None and (before.role in QUESTION_ROLES or before.task is not None)
    if message.role == "assistant" and not is_asked:
        what = "nothing" if before is None else f"one of role {before.role!r}"
        raise EncodingError(
            f"an assistant's message follows {what}, behind which encoding {version.name} opens no turn. Put a user's"
            " message before it."
        )
    if message.role == "latest_reminder" and is_asked:
        raise EncodingError(
            f"a latest_reminder follows the question, and encoding {version.name} opens the answer before it. Put it"
            " before the question."
        )


def _check_ids(messages: Sequence[Message]) -> None:
    """Refuse results whose ids do not say in which order they belong."""
    ids: list[str] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            answered = [message.tool_call_id for message in group]
            if any(answered) and (len({*answered}) < len(answered) or not {*answered} <= {*ids}):
                raise EncodingError(
                    f"results have the tool_call_ids {_listed(answered)} and the calls before them the ids"
                    f" {_listed(ids)}; each result must answer another one of these calls. Correct the ids, or leave"
                    " all of them away and give results in the order of the calls."
                )
            continue
        for message in group:
            ids = [call.id for call in message.tool_calls]
            if any(ids) and (len({*ids}) < len(ids) or not all(ids)):
                raise EncodingError(
                    f"a turn has calls with the ids {_listed(ids)}; each must have an id of its own, or none. Correct"
                    " them."
                )


def _check_developers(messages: Sequence[Message], how: Rendering) -> None:
    """Refuse a developer's message that is empty, or that DeepSeek leaves out of a prompt that keeps its answer."""
    if any(message.role == "developer" and not message.content for message in messages):
        raise EncodingError("a message of role 'developer' is empty; it must ask something. Fill it or drop it.")
    earlier = [message for message in messages if message.role in QUESTION_ROLES][:-1]
    drops = how.is_thinking and not how.keeps_reasoning(messages)
    if drops and any(message.role == "developer" for message in earlier):
        raise EncodingError(
            f"a message of role 'developer' stands before the last question; encoding {how.version.name} leaves it out"
            " in a thinking mode without tools. List tools, or use the role 'user'."
        )


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids))[:200]
