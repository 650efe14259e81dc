"""Conversations to token ids, in DeepSeek-V4's own rendering.

Here: what a prompt is in tokens, which tokens of a conversation are trained, and the text of what the model answered.
Not here: the grammar of the text, which is deepseek-recipe's (DeepSeek's encoder, called at run time), and the ids of
text (`model/tokenizer.py`).

deepseek-recipe says which ranges of its text are control tokens. Only those become control ids; all between them is
encoded as plain text.

```
BOS [effort] [system] USER question ASSISTANT END_THINK answer EOS      non-think
BOS [effort] [system] USER question ASSISTANT THINK reasoning END_THINK answer EOS
└────────────── prompt_token_ids ─────────────────────┘└─ trained ──┘
```

With tools a turn may end with calls; what the tools say comes as a user's turn, which is never trained:

```
… ASSISTANT END_THINK content calls EOS USER <tool_result>result</tool_result> ASSISTANT END_THINK answer EOS
                      └── trained ────┘└───────────── encode_observation ────────────────────┘└─ trained ┘
```

In a thinking mode all reasoning is kept as soon as tools are listed or a turn called one; otherwise only that of turns
behind the last question, as DeepSeek does. So the ids of a prompt that goes on after a call are those of the prompt
before, the turn, and the observation: nothing that was sampled is ever rendered again in another way.
"""

from collections.abc import Iterator, Sequence

import deepseek_recipe
import msgspec

from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, ReasoningEffort
from rollforward.model.tokenizer import ASSISTANT, END_THINK, EOS, USER, Tokenizer
from rollforward.sandbox.types import ToolSpec

_Pieces = Iterator[tuple[str, bool]]  # text, and whether it is one control token


class EncodedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole conversation in tokens, and which of them an assistant said."""

    token_ids: tuple[int, ...]
    """From BOS to the last EOS."""
    trained_mask: tuple[bool, ...]
    """True where the token is an assistant's: what follows the opener of its turn, up to and including EOS. As long as
    `token_ids`.
    """


def plain_texts(
    messages: Sequence[Message], effort: ReasoningEffort = "non-think", tools: Sequence[ToolSpec] = ()
) -> list[str]:
    """The texts between the control tokens of a rendered conversation, which is what a tokenizer is trained on.

    Raises:
        EncodingError: as `ChatEncoding.encode_conversation`.
    """
    return [text for text, is_control in _conversation_pieces(messages, effort, tools) if not is_control]


class ChatEncoding:
    """Renders conversations and encodes them with one tokenizer. Immutable; the same ids in every process.

    Args:
        tokenizer: gives the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that gives the ids."""
        return self._tokenizer

    def encode_prompt(
        self, messages: Sequence[Message], effort: ReasoningEffort = "non-think", tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """The ids that an engine continues: the conversation up to and including the opener of the assistant's turn.

        Args:
            messages: must end with a message that is not an assistant's.
            effort: chooses the opener and the text after BOS.
            tools: what the prompt lists, in DeepSeek's words. Empty lists nothing, also where turns call tools.

        Raises:
            EncodingError: there are no messages, the last one is an assistant's, or a tool speaks first.
        """
        return self._encode(_prompt_pieces(messages, effort, tools))

    def encode_conversation(
        self, messages: Sequence[Message], effort: ReasoningEffort = "non-think", tools: Sequence[ToolSpec] = ()
    ) -> EncodedConversation:
        """The ids of a finished conversation and which of them are trained: every assistant's, its calls included.

        Earlier turns are rendered as the model will meet them in a history (without tools: without their reasoning). In
        the last turn `encode_prompt` of the other messages is a prefix of the ids, and all behind it is trained.

        Raises:
            EncodingError: the last message is not an assistant's, or the one before it is missing or an assistant's.
        """
        token_ids: list[int] = []
        trained_mask: list[bool] = []
        in_answer = is_opener_next = False
        for text, is_control in _conversation_pieces(messages, effort, tools):
            ids = [self._tokenizer.control_id(text)] if is_control else self._tokenizer.encode(text)
            token_ids += ids
            trained_mask += [in_answer] * len(ids)
            if is_opener_next:  # THINK or END_THINK: the last token that the assistant is given
                is_opener_next, in_answer = False, True
            elif is_control:
                is_opener_next = text == ASSISTANT
                in_answer = in_answer and text != EOS
        return EncodedConversation(token_ids=tuple(token_ids), trained_mask=tuple(trained_mask))

    def encode_observation(self, results: Sequence[str], effort: ReasoningEffort = "non-think") -> list[int]:
        """The ids between the EOS of a turn with calls and the first token of the next turn.

        Args:
            results: at least one text, in the order of the calls. Plain text: it cannot spell a control token.
            effort: chooses the opener, as in `encode_prompt`.

        Raises:
            EncodingError: there is no result, or one is no valid Unicode.
        """
        if not results:
            raise EncodingError("an observation holds no result; give the text that answers each call.")
        turn = (
            Message(role="user", content=""),
            Message(role="assistant", content=""),
            *(Message(role="tool", content=result) for result in results),
        )
        pieces = list(_rendered(turn, effort, ()))
        return self._encode(iter(pieces[pieces.index((EOS, True)) + 1 :]))

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """The text that sampled ids say: up to the first EOS, other control tokens by their spelling."""
        eos_id = self._tokenizer.eos_id
        ids = list(token_ids)
        return self._tokenizer.decode(ids[: ids.index(eos_id)] if eos_id in ids else ids)

    def _encode(self, pieces: _Pieces) -> list[int]:
        token_ids: list[int] = []
        for text, is_control in pieces:
            token_ids += [self._tokenizer.control_id(text)] if is_control else self._tokenizer.encode(text)
        return token_ids


def _conversation_pieces(messages: Sequence[Message], effort: ReasoningEffort, tools: Sequence[ToolSpec]) -> _Pieces:
    """Yield a finished conversation in order: the prompt of its last turn, then what the assistant says in it."""
    if not messages or messages[-1].role != "assistant":
        raise EncodingError(
            "a conversation to learn from must end with an assistant's message; this one does not. Add the answer."
        )
    *history, answer = messages
    yield from _prompt_pieces(history, effort, tools)
    if effort != "non-think":
        yield answer.reasoning, False
        yield END_THINK, True
    yield from _content_pieces(answer)
    yield EOS, True


def _content_pieces(answer: Message) -> _Pieces:
    """Yield what an assistant says behind its reasoning, its calls included."""
    if not answer.tool_calls:
        yield answer.content, False
        return
    turn = (
        Message(role="user", content=""),
        Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls),
        Message(role="user", content=""),
    )
    pieces = list(_rendered(turn, "non-think", ()))
    yield from pieces[pieces.index((ASSISTANT, True)) + 2 : pieces.index((EOS, True))]


def _prompt_pieces(messages: Sequence[Message], effort: ReasoningEffort, tools: Sequence[ToolSpec]) -> _Pieces:
    """Yield the rendered prompt in order, each piece with whether it is one control token."""
    if not messages or messages[-1].role == "assistant":
        raise EncodingError(
            "a prompt must end with a user's, a system's or a tool's message, for the assistant to answer; this one "
            "does not. Drop the last turn or add a question."
        )
    for before, message in zip((None, *messages), messages, strict=False):
        if message.role == "tool" and (before is None or before.role not in ("assistant", "tool")):
            raise EncodingError(
                "a message of role 'tool' follows no assistant's; it answers a call of the turn before it. Put it "
                "behind the assistant's message with the call."
            )
    if tools or effort == "non-think" or not any(message.tool_calls for message in messages):
        yield from _rendered(messages, effort, tools)
        return
    # DeepSeek keeps reasoning where tools are listed. Here none shall be listed, so the head comes from a rendering
    # without tools and the turns from one with a tool that nobody sees.
    for with_tools in (False, True):
        pieces = list(_rendered(messages, effort, (_UNSEEN_TOOL,) if with_tools else ()))
        first_turn = pieces.index((USER, True))
        yield from pieces[first_turn:] if with_tools else pieces[:first_turn]


_UNSEEN_TOOL = ToolSpec(name="unseen", description="", parameters={})


def _rendered(messages: Sequence[Message], effort: ReasoningEffort, tools: Sequence[ToolSpec]) -> _Pieces:
    """Yield deepseek-recipe's rendering in order."""
    conversation = deepseek_recipe.Conversation(
        [_convert(message, effort) for message in messages],
        thinking_mode=effort != "non-think",
        reasoning_effort=None if effort == "non-think" else effort,
        tools=[deepseek_recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in tools],
    )
    rendered = deepseek_recipe.DeepseekV4Encoding().render_conversation(conversation)
    prompt = rendered.prompt
    position = 0
    for start, end in rendered.special_ranges:
        if position < start:
            yield prompt[position:start], False
        yield prompt[start:end], True
        position = end
    if position < len(prompt):
        yield prompt[position:], False


def _convert(message: Message, effort: ReasoningEffort) -> deepseek_recipe.Message:
    try:
        match message.role:
            case "system":
                return deepseek_recipe.SystemMessage(message.content)
            case "user":
                return deepseek_recipe.UserMessage(message.content)
            case "tool":
                return deepseek_recipe.ToolMessage(message.content)
            case "assistant":
                calls = [deepseek_recipe.ToolCall("", call.name, call.arguments) for call in message.tool_calls]
                # Empty reasoning is reasoning: in a thinking mode the turn closes it behind its opener.
                reasoning = None if effort == "non-think" else message.reasoning
                return deepseek_recipe.AssistantMessage(
                    message.content, reasoning_content=reasoning, tool_calls=calls or None
                )
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"character {error.start} of a message of role {message.role!r} is a lone surrogate; text must be valid "
            "Unicode. Decode its source again."
        ) from error
