"""Proves that calls are read as DeepSeek writes them, that white space is free, and that no text makes reading fail.

Does not prove that a tool accepts the arguments.
"""

import json
import random
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.dsml import AssistantTurn, Problem, parse_turn
from rollforward.model.encoding import plain_texts
from rollforward.model.messages import Message, ToolCall
from rollforward.model.tokenizer import CONTROL_TOKENS, DSML

CALL = (
    "Let me see.\n\n"
    "<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="calculator">\n'
    '<｜DSML｜parameter name="expression" string="true">1 + 2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="digits" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)


def read(text: str) -> AssistantTurn:
    return parse_turn(text, "non-think")


def arguments(turn: AssistantTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def test_a_turn_with_a_call_by_hand() -> None:
    turn = read(CALL)
    assert (turn.content, turn.problem, turn.reasoning) == ("Let me see.", None, "")
    assert arguments(turn) == [("calculator", {"expression": "1 + 2", "digits": 3})]


def test_a_turn_without_a_call_is_content() -> None:
    assert read("It is <b>3</b>.\n\n") == AssistantTurn(reasoning="", content="It is <b>3</b>.\n\n")
    assert read("") == AssistantTurn(reasoning="", content="")


def test_reasoning_ends_at_its_control_token() -> None:
    turn = parse_turn("think</think>" + CALL, "low")
    assert (turn.reasoning, turn.content, len(turn.calls)) == ("think", "Let me see.", 1)
    assert parse_turn("never ends", "low") == AssistantTurn(reasoning="never ends", content="")


def test_a_call_within_unfinished_reasoning_is_a_problem() -> None:
    turn = parse_turn(CALL, "low")
    assert turn.calls == ()
    assert turn.problem == "the call stands in the reasoning; end it with </think> first"


def test_several_calls_keep_their_order_and_a_call_may_have_no_parameters() -> None:
    text = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="b"></｜DSML｜invoke><｜DSML｜invoke name="a">\n\n</｜DSML｜invoke>'
        "</｜DSML｜tool_calls>\n"
    )
    assert arguments(read(text)) == [("b", {}), ("a", {})]


def test_white_space_between_tags_is_free_and_within_a_text_value_kept() -> None:
    text = CALL.replace("\n", "").replace("><", "> \t\n <").replace("1 + 2", "\n1 + 2 ").replace("<｜", "< ｜")
    assert arguments(read(text)) == [("calculator", {"expression": "\n1 + 2 ", "digits": 3})]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("</｜DSML｜tool_calls>", "", "tag tool_calls is not closed"),
        ("</｜DSML｜invoke>\n", "", "tag invoke is not closed"),
        ("2</｜DSML｜parameter>", "2", "parameter 'expression' of calculator is not closed"),
        ("<｜DSML｜tool_calls>\n", "", "<｜DSML｜invoke> stands where <｜DSML｜tool_calls> must"),
        (
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls> stands where <｜DSML｜tool_calls> must",
        ),
        ('"digits"', '"expression"', "parameter 'expression' of calculator is given twice"),
        ('string="false"', 'string="no"', "parameter 'digits' of calculator has string='no'"),
        ('string="false"', "", "tag parameter has 'name'; it must have name and string"),
        ('string="false"', 'string="false" type="int"', "tag parameter has 'name, string, type'"),
        ('string="false"', "string=false", "the attributes of tag 'parameter' cannot be read"),
        ('string="false"', 'string="true" string="false"', "tag 'parameter' has attribute 'string' twice"),
        (">3<", ">3 4<", "parameter 'digits' of calculator has string=\"false\", but its value is no JSON"),
        (">3<", ">NaN<", "its value is no JSON"),
        (">3<", '>"\\ud800"<', "its value is no JSON"),
        (">3<", f">{'[' * 101}{']' * 101}<", "parameter 'digits' of calculator is nested deeper than 100"),
        (">3<", f">{'1' * 5000}<", "its value is no JSON"),
        (">1 + 2<", ">\ud800<", "parameter 'expression' of calculator is no valid Unicode"),
        ('"calculator"', '"a b"', "'a b' is no name of a tool"),
        ('"calculator"', f'"{"a" * 65}"', f"'{'a' * 40}...' is no name of a tool"),
        ("invoke name", "call name", "<｜DSML｜call> stands where <｜DSML｜invoke> must"),
        ("3</", "3</｜DSML｜parameter>x</", "text stands before"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls>.", "something follows the tool_calls block"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls>" + CALL, "something follows the tool_calls block"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls> ｜DSML｜", "a DSML marker stands outside a tag"),
        ("Let", "｜DSML｜ Let", "text stands before <｜DSML｜tool_calls>"),
        ("</｜DSML｜tool_calls>", '</｜DSML｜tool_calls a="b">', "the closing tag of tool_calls has attributes"),
    ],
)
def test_a_malformed_call_is_named(old: str, new: str, problem: str) -> None:
    assert old in CALL
    turn = read(CALL.replace(old, new, 1))
    assert turn.calls == ()
    assert turn.problem is not None
    assert problem in turn.problem


def test_a_block_without_a_call_is_a_problem() -> None:
    turn = read("a<｜DSML｜tool_calls></｜DSML｜tool_calls>")
    assert (turn.content, turn.problem) == ("a", "the tool_calls block holds no invoke")


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda text: DSML not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner | texts, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.builds(
        lambda name, given: ToolCall(name=name, arguments=json.dumps(given)),
        names,
        st.dictionaries(names, values | texts, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def rendered(content: str, tool_calls: list[ToolCall]) -> str:
    """The text of a turn as DeepSeek's encoder writes it, its markers put back."""
    answer = Message(role="assistant", content=content, tool_calls=tuple(tool_calls))
    return DSML.join(plain_texts([Message(role="user", content="q"), answer])[1:])


@given(texts, calls)
def test_what_deepseek_renders_is_read_back(content: str, tool_calls: list[ToolCall]) -> None:
    turn = read(rendered(content, tool_calls))
    assert (turn.problem, turn.content) == (None, content)
    assert arguments(turn) == [(call.name, json.loads(call.arguments)) for call in tool_calls]


pieces = st.sampled_from((*CONTROL_TOKENS, "<", ">", "/", '"', "=", " ", "\n", "tool_calls", "invoke", "parameter"))


@given(texts, calls, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9), pieces), max_size=4))
def test_every_mutation_is_read_without_an_exception(
    content: str, tool_calls: list[ToolCall], edits: list[tuple[int, int, str]]
) -> None:
    text = rendered(content, tool_calls)
    for position, num_removed, inserted in edits:
        position %= len(text) + 1
        text = text[:position] + inserted + text[position + num_removed :]
    for effort in ("non-think", "low"):
        turn = parse_turn(text, effort)
        assert turn == parse_turn(text, effort)
        assert turn.problem is None or not turn.calls
        assert turn.problem is None or len(turn.problem) < 200
        for call in turn.calls:
            call.decode_arguments()


@given(st.lists(pieces | st.text(max_size=4)))
def test_no_text_raises(parts: list[str]) -> None:
    parse_turn("".join(parts), "non-think")


HEAD = '<｜DSML｜tool_calls><｜DSML｜invoke name="a"><｜DSML｜parameter name="b" string="false">'


@pytest.mark.parametrize(
    "unit",
    [
        "<", "< ", " ", "<｜DSML｜", "<｜DSML｜ ", "<｜DSML｜a", "a", '<｜DSML｜a b="', '<｜DSML｜a b="">', HEAD, "[",
        '"', "\\", '"\\', "</｜DSML｜parameter>", CALL,
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", ["", "<", "<｜DSML｜", '<｜DSML｜a b="', HEAD])
def test_time_is_linear_in_the_text(head: str, unit: str) -> None:
    """A megabyte of what nearly matches; a quadratic reader takes hours."""
    start_s = time.process_time()
    read(head + unit * (1_000_000 // len(unit)))
    assert time.process_time() - start_s < 5.0


def mutated(rng: random.Random, text: str) -> str:
    """A few of what a policy gets wrong: pieces cut, doubled, moved, replaced by tokens, or the end missing."""
    for _ in range(rng.randint(1, 4)):
        start, stop = sorted(rng.randint(0, len(text)) for _ in range(2))
        stop = min(stop, start + rng.choice((1, 5, 40)))
        cut = text[start:stop]
        piece = rng.choice((*CONTROL_TOKENS, "<", ">", "/", '"', "=", " ", "\n", "\\", "\0", "\ud800", "[" * 50, CALL))
        lines = text.split("\n")
        match rng.randrange(6):
            case 0:
                text = text[:start] + text[stop:]
            case 1:
                text = text[:stop] + cut + text[stop:]
            case 2:
                text = cut + text[:start] + text[stop:]
            case 3:
                text = text[:start] + piece + text[stop:]
            case 4:
                line = rng.randrange(len(lines))
                text = "\n".join([*lines[: line + 1], *lines[line:]])
            case _:
                text = text[:stop] if rng.random() < 0.3 else text[:start] + piece + text[start:]
    return text


class _Watch:
    """Counts what an audit hook sees while it is on: nothing that runs code or touches the world may happen."""

    events = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "marshal.")

    def __init__(self) -> None:
        self.is_on, self.seen = False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, _: object) -> None:
        if self.is_on and event.startswith(self.events):
            self.seen.append(event)


def test_thousands_of_mutated_calls_are_read_and_none_is_evaluated() -> None:
    rng, watch = random.Random("mutated calls"), _Watch()
    bombs = ("__import__('os').system('true')", "{'a': 1}", "[x for x in ()]", "1 + 1", "True", "open('/etc/passwd')")
    kinds: set[Problem | None] = set()
    num_called = 0
    for _ in range(3000):
        text = CALL.replace(">3<", f">{rng.choice(bombs)}<" if rng.random() < 0.3 else ">3<")
        effort = rng.choice(("non-think", "low", "high", "max"))
        text = mutated(rng, text if effort == "non-think" else f"So.</think>{text}")
        start_s = time.process_time()
        watch.is_on = True
        turn = parse_turn(text, effort, is_call_begun=rng.random() < 0.1)
        watch.is_on = False
        assert time.process_time() - start_s < 5.0, "a text of a few hundred characters"
        assert (turn.problem is None) == (turn.problem_kind is None)
        assert turn.problem is None or (not turn.calls and 0 < len(turn.problem) < 200)
        for call in turn.calls:
            assert not {str(value) for value in call.decode_arguments().values()} & {"True", "2", str({"a": 1})}
        kinds.add(turn.problem_kind)
        num_called += bool(turn.calls)
    assert watch.seen == []
    assert kinds >= {*Problem, None} - {Problem.CONTROL_TOKEN, Problem.CONTROL_TOKEN_IN_ANSWER, Problem.EMPTY}, (
        "the mutations meet every kind"
    )
    assert num_called > 50, "some mutations do no harm"


def test_each_problem_has_its_kind() -> None:
    for old, new, kind in (
        ("</｜DSML｜invoke>\n", "", Problem.UNCLOSED),
        ("2</｜DSML｜parameter>", "2", Problem.UNCLOSED),
        ("<｜DSML｜tool_calls>\n", "", Problem.ORDER),
        ('"digits"', '"expression"', Problem.DUPLICATE),
        ('string="false"', "", Problem.ATTRIBUTES),
        ('"calculator"', '"a b"', Problem.NAME),
        (">3<", ">x<", Problem.VALUE),
        ("3</", "3</｜DSML｜parameter>x</", Problem.TEXT),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls> ｜DSML｜", Problem.MARKER),
    ):
        assert read(CALL.replace(old, new, 1)).problem_kind == kind
    assert read("<｜DSML｜tool_calls></｜DSML｜tool_calls>").problem_kind == Problem.EMPTY
    assert parse_turn(CALL, "max").problem_kind == Problem.CALL_IN_REASONING
    assert read(CALL).problem_kind is None


def test_a_begun_call_is_read_on_in_every_effort() -> None:
    rest = CALL.partition("tool_calls>\n")[2]
    for effort in ("non-think", "max"):
        assert parse_turn(rest, effort, is_call_begun=True).calls == read(CALL).calls
    assert parse_turn("I will not.", "max", is_call_begun=True).problem_kind == Problem.TEXT


def test_a_parameter_name_that_is_no_unicode_is_a_problem() -> None:
    assert read(CALL.replace('"digits"', '"\ud800"')).problem_kind == Problem.VALUE
