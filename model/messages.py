"""Records of a conversation, as tasks write them and `model/encoding.py` renders them."""

import re
from typing import Any, Final, Literal

import msgspec

ReasoningEffort = Literal["non-think", "low", "high", "max"]
"""How long the model may reason before it answers. `non-think` is DeepSeek's chat mode; the others choose the text that
opens the prompt.
"""

QuickInstruction = Literal["action", "query", "authority", "domain", "title", "read_url"]
"""What the model is asked about a message instead of an answer to it, by one control token behind the message: whether
to search (`action`), what for (`query`), how authoritative sources must be (`authority`), of which field it is
(`domain`), whether to read an address (`read_url`), and, behind an assistant's, what the conversation is called.
"""

ToolChoice = Literal["auto", "none", "required"]
"""`none` lists no tools; `required` opens the block of calls in the model's place, so that it must go on with one."""

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What a tool in a call may be named; nothing that would have to be quoted in a tag."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call that an assistant makes at the end of its turn."""

    name: str
    """Name of the tool."""
    arguments: str
    """Text of a JSON object: the arguments by name."""
    id: str = ""
    """What a result says that it answers; not rendered. Empty where results come in the order of the calls."""

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

    role: Literal["system", "user", "assistant", "tool", "latest_reminder", "developer"]
    """Who speaks. Messages of `tool` follow the assistant whose calls they answer, in the order of the calls or, where
    both name ids, in any. `latest_reminder` is an instruction that stands before the user's message; `developer` is
    DeepSeek's own search pipeline in the place of the user, which only the first release knows.
    """
    content: str
    """What is said; plain text, in which the spelling of a control token is text as well."""
    reasoning: str = ""
    """What an assistant thought before `content`; rendered only where the effort and the rules of retention let it be.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant calls after `content`."""
    tool_call_id: str = ""
    """The id of the call that a result answers; empty where results come in the order of the calls."""
    task: QuickInstruction | None = None
    """What the model is asked about this message; the assistant's message behind it, without reasoning, answers that.
    """
    url: str = ""
    """The address that `read_url` asks about."""
    prefix: bool = False
    """Whether an assistant's message is only the beginning of its turn, which the model continues."""

    def __post_init__(self) -> None:
        """Refuse what a message of this role cannot carry."""
        self._check_task()
        if self.tool_call_id and self.role != "tool":
            raise ValueError(
                f"a message of role {self.role!r} carries tool_call_id; only a tool answers a call. Drop it."
            )
        if self.prefix and (self.role != "assistant" or self.tool_calls):
            raise ValueError(
                "prefix stands on a message that is no assistant's or calls a tool; only an assistant's text is"
                " continued. Drop prefix, or the calls."
            )
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

    def _check_task(self) -> None:
        """Refuse a quick instruction that this message cannot carry."""
        if self.task is not None:
            owner = "assistant" if self.task == "title" else "user"
            if self.role not in (owner, "developer" if owner == "user" else owner) or self.prefix:
                raise ValueError(
                    f"a message of role {self.role!r} carries task {self.task!r}; it belongs on a finished message of"
                    f" role {owner!r}. Move it there."
                )
        if bool(self.url) != (self.task == "read_url"):
            raise ValueError(
                f"a message carries url {self.url[:80]!r} and task {self.task!r}; a url and the task 'read_url' go"
                " together. Give both or neither."
            )


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must look like, said in the prompt; nothing enforces it."""

    kind: Literal["json_object", "json_schema"]
    """Any JSON object, or JSON of a schema."""
    schema: dict[str, Any] | None = None
    """The JSON schema of `json_schema`."""

    def __post_init__(self) -> None:
        """Refuse a schema that is absent or would be ignored."""
        if (self.schema is not None) != (self.kind == "json_schema"):
            raise ValueError(
                f"response format {self.kind!r} has {'no' if self.schema is None else 'a'} schema; json_schema has one"
                " and json_object none. Add or drop it."
            )
