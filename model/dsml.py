"""Reads what a model said in one turn: reasoning, content, and the tool calls behind it.

DeepSeek's calls are tags marked with the control token `DSML`:

```
content

<｜DSML｜tool_calls>
<｜DSML｜invoke name="calculator">
<｜DSML｜parameter name="expression" string="true">1 + 2</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>
```

A policy in training writes this in every wrong way, so reading never fails: a turn has calls, has none, or has a
`problem` that the policy is told. White space between tags is free, everything else is as DeepSeek writes it; where one
call is malformed none of the turn counts. Not here: rendering (`model/encoding.py`), the meaning of names and arguments
(the tools).
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

import msgspec

from rollforward.model.messages import TOOL_NAME, ReasoningEffort, ToolCall
from rollforward.model.tokenizer import DSML, END_THINK

# Possessive quantifiers: a text that nearly matches must not be tried in many ways.
_FIRST_MARKER: Final = re.compile(rf"(?:<\s*+(?:/\s*+)?+)?+{DSML}")
_TAG: Final = re.compile(rf"<\s*+(/?+)\s*+{DSML}\s*+(\w*+)([^<>]*+)>")
_ATTRIBUTES: Final = re.compile(r'(?:\s++\w++="[^"]*+")*+\s*+')
_ATTRIBUTE: Final = re.compile(r'(\w++)="([^"]*+)"')
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[\]{}]")
_MAX_JSON_DEPTH: Final = 100  # far below the depth at which decoding depends on the caller's own stack
_MAX_SHOWN_CHARS: Final = 40
_BEGUN_CALL: Final = f"<{DSML}tool_calls>\n"


class Problem(StrEnum):
    """What can be wrong with the calls of a turn."""

    CALL_IN_REASONING = "call_in_reasoning"
    """A call stands in reasoning that does not end."""
    CONTROL_TOKEN = "control_token"
    """A control token stands in a turn that calls, where only text and calls may; `ChatEncoding.read_turn` alone can
    see it."""
    CONTROL_TOKEN_IN_ANSWER = "control_token_in_answer"
    """The same in a turn that calls nothing, which is no malformed call."""
    MARKER = "marker"
    """A marker is in no tag."""
    ATTRIBUTES = "attributes"
    """A tag's attributes are not those that it must have."""
    ORDER = "order"
    """A tag stands where another must."""
    UNCLOSED = "unclosed"
    """A tag is not closed, often because the budget of tokens ended."""
    TEXT = "text"
    """Text stands between tags or behind the block."""
    EMPTY = "empty"
    """The block holds no call."""
    NAME = "name"
    """A call's name cannot be a tool's."""
    DUPLICATE = "duplicate"
    """A parameter is given twice."""
    VALUE = "value"
    """A parameter's value is not what it says that it is."""


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn says."""

    reasoning: str
    """Text before the end of the reasoning; empty in the chat mode."""
    content: str
    """Text behind it and before the calls."""
    calls: tuple[ToolCall, ...] = ()
    """Calls in order; empty where there are none or one is malformed."""
    problem: str | None = None
    """What is wrong with the calls, in a short sentence for the policy; the same text for the same mistake. None where
    nothing is.
    """
    problem_kind: Problem | None = None
    """Of which kind the problem is, for who counts them."""

    @property
    def is_malformed_call(self) -> bool:
        """Whether the turn tries to call, and none of its calls counts."""
        return self.problem_kind not in (None, Problem.CONTROL_TOKEN_IN_ANSWER)

    @property
    def is_call(self) -> bool:
        """Whether the turn calls tools, well-formed or not."""
        return bool(self.calls) or self.is_malformed_call


class _MalformedCallError(Exception):
    """Carries what becomes the turn's problem."""

    def __init__(self, kind: Problem, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class _Tag(msgspec.Struct, frozen=True):
    name: str
    is_closing: bool
    attributes: dict[str, str]
    text_before: str


def parse_turn(text: str, effort: ReasoningEffort, *, is_call_begun: bool = False) -> AssistantTurn:
    """Read a turn, without its EOS.

    Args:
        text: anything, every marker in it a control token; what was sampled is read by `ChatEncoding.read_turn`.
        effort: of the prompt; in `non-think` there is no reasoning to look for.
        is_call_begun: whether the prompt itself opened the block of calls (`tool_choice="required"`): the turn goes on
            in it, in every effort.

    Returns:
        The parts of the turn. Reasoning that never ends makes the whole turn reasoning.

    Invariants: never raises; time linear in the text; evaluates nothing.
    """
    if is_call_begun:
        effort, text = "non-think", _BEGUN_CALL + text
    reasoning, content = "", text
    if effort != "non-think":
        reasoning, end_think, content = text.partition(END_THINK)
        if not end_think:
            if DSML not in text:
                return AssistantTurn(reasoning=reasoning, content="")
            problem = f"the call stands in the reasoning; end it with {END_THINK} first"
            kind = Problem.CALL_IN_REASONING
            return AssistantTurn(reasoning=reasoning, content="", problem=problem, problem_kind=kind)
    first = _FIRST_MARKER.search(content)
    if first is None:
        return AssistantTurn(reasoning=reasoning, content=content)
    before = content[: first.start()]
    try:
        calls = tuple(_calls(_tags(content[first.start() :])))
        problem = kind = None
    except _MalformedCallError as error:
        calls, problem, kind = (), str(error), error.kind
    return AssistantTurn(
        reasoning=reasoning,
        content=before.removesuffix("\n\n"),
        calls=calls,
        problem=problem,
        problem_kind=kind,
    )


def _calls(tags: Iterator[_Tag]) -> Iterator[ToolCall]:
    """Yield the calls of one block; the last tag is the end, which `_tags` makes up.

    Raises:
        _MalformedCallError: at the first tag or text that is not where it must be.
    """
    _expect(next(tags), "tool_calls", ())
    num_calls = 0
    while not (tag := next(tags)).is_closing:
        _expect(tag, "invoke", ("name",))
        yield _call(tag.attributes["name"], tags)
        num_calls += 1
    _expect_closing(tag, "tool_calls")
    if num_calls == 0:
        raise _MalformedCallError(Problem.EMPTY, "the tool_calls block holds no invoke")
    if (tag := next(tags)).name or tag.text_before.strip():
        raise _MalformedCallError(Problem.TEXT, "something follows the tool_calls block; the turn must end with it")


def _call(name: str, tags: Iterator[_Tag]) -> ToolCall:
    """The call whose opening tag was read, up to its closing tag."""
    if TOOL_NAME.fullmatch(name) is None:
        raise _MalformedCallError(Problem.NAME, f"{_shown(name)} is no name of a tool")
    arguments: dict[str, Any] = {}
    while not (tag := next(tags)).is_closing:
        _expect(tag, "parameter", ("name", "string"))
        parameter = tag.attributes["name"]
        if not _is_unicode(parameter):
            raise _MalformedCallError(Problem.VALUE, f"the name of a parameter of {name} is no valid Unicode")
        if parameter in arguments:
            raise _MalformedCallError(Problem.DUPLICATE, f"parameter {_shown(parameter)} of {name} is given twice")
        closing = next(tags)
        if not closing.is_closing or closing.name != "parameter":
            raise _MalformedCallError(Problem.UNCLOSED, f"parameter {_shown(parameter)} of {name} is not closed")
        arguments[parameter] = _value(name, parameter, tag.attributes["string"], closing.text_before)
    _expect_closing(tag, "invoke")
    return ToolCall(name=name, arguments=msgspec.json.encode(arguments).decode())


def _value(name: str, parameter: str, is_string: str, text: str) -> Any:
    """The value of a parameter: its text, or what the text says as JSON."""
    where = f"parameter {_shown(parameter)} of {name}"
    if not _is_unicode(text):
        raise _MalformedCallError(Problem.VALUE, f"{where} is no valid Unicode")
    if is_string == "true":
        return text
    if is_string != "false":
        raise _MalformedCallError(
            Problem.VALUE, f'{where} has string={_shown(is_string)}; it must be "true" or "false"'
        )
    depth = deepest = 0
    for bracket in _BRACKET.findall(_JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_JSON_DEPTH:
        raise _MalformedCallError(Problem.VALUE, f"{where} is nested deeper than {_MAX_JSON_DEPTH}")
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _MalformedCallError(Problem.VALUE, f'{where} has string="false", but its value is no JSON') from error


def _tags(text: str) -> Iterator[_Tag]:
    """Yield the tags of a text that begins with one, then for ever a nameless tag with the text behind the last one.

    Raises:
        _MalformedCallError: a marker is in no tag, or a tag's attributes cannot be read.
    """
    num_markers = 0
    position = 0
    for match in _TAG.finditer(text):
        slash, name, rest = match.groups()
        if _ATTRIBUTES.fullmatch(rest) is None:
            raise _MalformedCallError(Problem.ATTRIBUTES, f"the attributes of tag {_shown(name)} cannot be read")
        attributes: dict[str, str] = {}
        for key, value in _ATTRIBUTE.findall(rest):
            if key in attributes:
                raise _MalformedCallError(Problem.ATTRIBUTES, f"tag {_shown(name)} has attribute {_shown(key)} twice")
            attributes[key] = value
        yield _Tag(name, bool(slash), attributes, text[position : match.start()])
        num_markers += match.group().count(DSML)
        position = match.end()
    if text.count(DSML) != num_markers:
        raise _MalformedCallError(Problem.MARKER, "a DSML marker stands outside a tag")
    while True:
        yield _Tag("", is_closing=True, attributes={}, text_before=text[position:])


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _expect(tag: _Tag, name: str, attributes: tuple[str, ...]) -> None:
    """Refuse an opening tag that is not the one that must come, or has other attributes."""
    _expect_blank(tag)
    if tag.name != name or tag.is_closing:
        raise _MalformedCallError(Problem.ORDER, f"{_spelled(tag)} stands where <{DSML}{name}> must")
    if set(tag.attributes) != set(attributes):
        required = " and ".join(attributes) or "no attribute"
        raise _MalformedCallError(
            Problem.ATTRIBUTES, f"tag {name} has {_shown(', '.join(tag.attributes))}; it must have {required}"
        )


def _expect_closing(tag: _Tag, name: str) -> None:
    """Refuse a closing tag that is not the one that must come."""
    _expect_blank(tag)
    if tag.name != name:
        raise _MalformedCallError(Problem.UNCLOSED, f"tag {name} is not closed")
    if tag.attributes:
        raise _MalformedCallError(Problem.ATTRIBUTES, f"the closing tag of {name} has attributes")


def _expect_blank(tag: _Tag) -> None:
    if tag.text_before.strip():
        raise _MalformedCallError(Problem.TEXT, f"text stands before {_spelled(tag)}; only white space may")


def _spelled(tag: _Tag) -> str:
    if not tag.name:
        return "the end"
    return f"<{'/' if tag.is_closing else ''}{DSML}{_cut(tag.name)}>"


def _shown(text: str) -> str:
    """A few characters of what the model wrote, quoted."""
    return f"'{_cut(text)}'"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
