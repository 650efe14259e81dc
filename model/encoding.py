"""Conversations to token ids, in DeepSeek-V4's own rendering.

Here: what a prompt is in tokens, which tokens of a conversation are trained, and the text of what the model answered.
Not here: the text (`model/encoding_render.py`, by deepseek-recipe, which is DeepSeek's own encoder), the order of
messages (`model/encoding_order.py`), what its versions differ in (`model/encoding_version.py`), and the ids of text
(`model/tokenizer.py`).

The rendering says which of its pieces are control tokens. Only those become control ids; all between them is encoded as
plain text, so nobody can type one.

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

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from rollforward.model.dsml import AssistantTurn, Problem, parse_turn
from rollforward.model.encoding_order import Rendering
from rollforward.model.encoding_render import (
    TASK_TOKENS,
    Piece,
    answer_pieces,
    observation_pieces,
    prompt_pieces,
)
from rollforward.model.encoding_version import ENCODING_FILE, LATER, EncodingVersion, find_encoding_version
from rollforward.model.errors import EncodingError
from rollforward.model.messages import Message, ReasoningEffort, ResponseFormat, ToolChoice
from rollforward.model.tokenizer import ASSISTANT, DSML, END_THINK, EOS, Tokenizer
from rollforward.sandbox.types import ToolSpec

__all__ = ["ENCODING_FILE", "ChatEncoding", "EncodedConversation", "plain_texts"]

_GIVEN = frozenset(TASK_TOKENS.values())


class EncodedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole conversation in tokens, and which of them an assistant said."""

    token_ids: tuple[int, ...]
    """From BOS to the last EOS."""
    trained_mask: tuple[bool, ...]
    """True where the token is an assistant's: what follows the opener of its turn, up to and including EOS. As long as
    `token_ids`.
    """


def plain_texts(
    messages: Sequence[Message],
    effort: ReasoningEffort = "non-think",
    tools: Sequence[ToolSpec] = (),
    version: EncodingVersion = LATER,
) -> list[str]:
    """The texts between the control tokens of a rendered conversation, which is what a tokenizer is trained on.

    Raises:
        EncodingError: as `ChatEncoding.encode_conversation`.
    """
    how = Rendering(version=version, effort=effort, tools=tuple(tools))
    return [text for text, is_control in _conversation_pieces(messages, how) if not is_control]


class ChatEncoding:
    """Renders conversations and encodes them with one tokenizer. Immutable; the same ids in every process.

    Args:
        tokenizer: gives the ids.
        version: of the encoding that the model learned.
    """

    def __init__(self, tokenizer: Tokenizer, version: EncodingVersion = LATER) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer
        self._version = version

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """The encoding of a model directory: its tokenizer, and the version in its `encoding.json`, else the later one.

        Raises:
            TokenizerError: the directory has no usable tokenizer.
            EncodingError: its `encoding.json` names no known version.
        """
        return cls(Tokenizer.load(model_dir), find_encoding_version(model_dir) or LATER)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that gives the ids."""
        return self._tokenizer

    @property
    def version(self) -> EncodingVersion:
        """The version of the encoding."""
        return self._version

    def check_effort(self, effort: ReasoningEffort) -> None:
        """Refuse an effort that the version does not know.

        Raises:
            EncodingError: names those that it knows.
        """
        self._rendering(effort)

    def encode_prompt(
        self,
        messages: Sequence[Message],
        effort: ReasoningEffort = "non-think",
        tools: Sequence[ToolSpec] = (),
        *,
        response_format: ResponseFormat | None = None,
        tool_choice: ToolChoice = "auto",
    ) -> list[int]:
        """The ids that an engine continues: the conversation up to and including the opener of the assistant's turn.

        Args:
            messages: must end with a message that is not an assistant's, with a `prefix` that the model continues, or
                with one that has a `task`.
            effort: chooses the opener and the text after BOS.
            tools: what the prompt lists, in DeepSeek's words. Empty lists nothing, also where turns call tools.
            response_format: what the prompt asks the answer to look like.
            tool_choice: `none` lists no tools; `required` puts the beginning of a call behind the opener, so that the
                model neither reasons nor answers before it (`read_turn` must be told).

        Raises:
            EncodingError: there are no messages, one stands where the version has no place for it, or the version does
                not know the effort or format.
        """
        how = self._rendering(effort, tools, response_format=response_format, tool_choice=tool_choice)
        return self._encode(prompt_pieces(messages, how))

    def encode_conversation(
        self,
        messages: Sequence[Message],
        effort: ReasoningEffort = "non-think",
        tools: Sequence[ToolSpec] = (),
        *,
        response_format: ResponseFormat | None = None,
    ) -> EncodedConversation:
        """The ids of a finished conversation and which of them are trained: every assistant's, its calls included.

        Earlier turns are rendered as the model will meet them in a history (without tools: without their reasoning). In
        the last turn `encode_prompt` of the other messages is a prefix of the ids, and all behind it is trained.

        Raises:
            EncodingError: the last message is not an assistant's finished one, or as `encode_prompt`.
        """
        token_ids: list[int] = []
        trained_mask: list[bool] = []
        in_answer = is_opener_next = False
        for text, is_control in _conversation_pieces(
            messages, self._rendering(effort, tools, response_format=response_format)
        ):
            ids = [self._tokenizer.control_id(text)] if is_control else self._tokenizer.encode(text)
            is_given = is_control and text in _GIVEN  # asks a quick instruction: the answer begins behind it
            token_ids += ids
            trained_mask += [in_answer and not is_given] * len(ids)
            if is_opener_next or is_given:  # THINK or END_THINK: the last token that the assistant is given
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
        return self._encode(observation_pieces(results, self._rendering(effort)))

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """The text that sampled ids say: up to the first EOS, other control tokens by their spelling."""
        return self._tokenizer.decode(self._said(token_ids))

    def read_turn(
        self, token_ids: Sequence[int], effort: ReasoningEffort, *, is_call_begun: bool = False
    ) -> AssistantTurn:
        """What sampled ids say. Other than `parse_turn` of their text, it tells a control token from its spelling in
        plain text: the spelling is text, and a control token that has no place in a turn is a problem.

        Args:
            token_ids: of one turn; what follows the first EOS is left away.
            effort: of the prompt.
            is_call_begun: whether the prompt had `tool_choice="required"`.

        Invariants: never raises; time linear in the ids; evaluates nothing.
        """
        pieces = self._tokenizer.decode_pieces(self._said(token_ids))
        guard = _unused_character("".join(text for text, _ in pieces))
        turn = parse_turn(
            "".join(text if is_control else _guarded(text, guard) for text, is_control in pieces),
            effort,
            is_call_begun=is_call_begun,
        )
        turn = _unguarded(turn, guard)
        num_thinks = 0 if effort == "non-think" or is_call_begun else 1
        for text, is_control in pieces:
            if is_control and text == END_THINK and num_thinks:
                num_thinks = 0
            elif is_control and text != DSML and turn.problem is None:
                sentence = f"the control token {text} stands in the turn"
                kind = Problem.CONTROL_TOKEN if turn.calls else Problem.CONTROL_TOKEN_IN_ANSWER
                return msgspec.structs.replace(turn, calls=(), problem=sentence, problem_kind=kind)
        return turn

    def _said(self, token_ids: Sequence[int]) -> list[int]:
        eos_id = self._tokenizer.eos_id
        ids = list(token_ids)
        return ids[: ids.index(eos_id)] if eos_id in ids else ids

    def _rendering(
        self,
        effort: ReasoningEffort,
        tools: Sequence[ToolSpec] = (),
        *,
        response_format: ResponseFormat | None = None,
        tool_choice: ToolChoice = "auto",
    ) -> Rendering:
        return Rendering(
            version=self._version,
            effort=effort,
            tools=tuple(tools),
            response_format=response_format,
            tool_choice=tool_choice,
        )

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        token_ids: list[int] = []
        for text, is_control in pieces:
            token_ids += [self._tokenizer.control_id(text)] if is_control else self._tokenizer.encode(text)
        return token_ids


def _conversation_pieces(messages: Sequence[Message], how: Rendering) -> list[Piece]:
    """A finished conversation in order: the prompt of its last turn, then what the assistant says in it."""
    if not messages or messages[-1].role != "assistant" or messages[-1].prefix:
        raise EncodingError(
            "a conversation to learn from must end with an assistant's message; this one does not. Add the answer."
        )
    *history, answer = messages
    if answer.task is not None:
        raise EncodingError(f"the last message has task {answer.task!r}, which nothing answers. Add the answer.")
    return [*prompt_pieces(history, how), *answer_pieces(answer, how, history[-1])]


def _unused_character(text: str) -> str:
    """A character that does not occur in `text`, from those that mean nothing."""
    used = set(text)
    return next(character for character in map(chr, range(0xE000, 0x110000)) if character not in used)


def _guarded(text: str, guard: str) -> str:
    """Plain text in which the parser finds no control token."""
    for spelling in (DSML, END_THINK):
        text = re.sub(f"{spelling[0]}(?={re.escape(spelling[1:])})", spelling[0] + guard, text)
    return text


def _unguarded(turn: AssistantTurn, guard: str) -> AssistantTurn:
    calls = [msgspec.structs.replace(call, arguments=call.arguments.replace(guard, "")) for call in turn.calls]
    return msgspec.structs.replace(
        turn,
        reasoning=turn.reasoning.replace(guard, ""),
        content=turn.content.replace(guard, ""),
        calls=tuple(calls),
        problem=None if turn.problem is None else turn.problem.replace(guard, ""),
    )
