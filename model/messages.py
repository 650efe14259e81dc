"""Records of a conversation, as tasks write them and `model/encoding.py` renders them."""

import re
from typing import Any, Final, Literal

import msgspec

ReasoningEffort = Literal["non-think", "low", "high", "max"]
"""How long the model may reason before it answers. `non-think` is DeepSeek's chat mode; the others choose the text that
opens the prompt.
"""

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What a tool in a call may be named; nothing that would have to be quoted in a tag."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call that an assistant makes at the end of its turn."""

    name: str
    """Name of the tool."""
    arguments: str
    """Text of a JSON object: the arguments by name."""

    def __post_init__(self) -> None:
        """Refuse a name that cannot be rendered, and arguments that are no JSON object."""
        if TOOL_NAME.fullmatch(self.name) is None:
            raise ValueError(f"a tool call has name {self.name[:80]!r}; it must match {TOOL_NAME.pattern}. Rename it.")
        try:
            self.decode_arguments()
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ValueError(
                f"a call of {self.name} has arguments {self.arguments[:80]!r}, which are no JSON object ({error})."
                ' Write one, such as {"x": 1}.'
            ) from error

    def decode_arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return msgspec.json.decode(self.arguments, type=dict[str, Any])


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation, or the result of one tool call."""

    role: Literal["system", "user", "assistant", "tool"]
    """Who speaks. Messages of `tool` follow the assistant whose calls they answer, in the order of the calls."""
    content: str
    """What is said; plain text, in which the spelling of a control token is text as well."""
    reasoning: str = ""
    """What an assistant thought before `content`; rendered only where the effort and the rules of retention let it be.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant calls after `content`."""

    def __post_init__(self) -> None:
        """Refuse reasoning and calls by anyone but the assistant."""
        if self.reasoning and self.role != "assistant":
            raise ValueError(
                f"a message of role {self.role!r} carries reasoning; only an assistant reasons. Move it into content "
                "or drop it."
            )
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"a message of role {self.role!r} carries tool_calls; only an assistant calls tools. Give them to the "
                "assistant's message before it."
            )
