"""Public bugs in the chat of other implementations: each test is named after the report and fails where it is repeated.

Does not cover bugs of loading (`test_public_bugs.py`).
"""

import functools
import json

import pytest

from rollforward.model.dsml import Problem, parse_turn
from rollforward.model.encoding import ChatEncoding
from rollforward.model.encoding_version import APRIL, LATER, EncodingVersion
from rollforward.model.messages import Message, ReasoningEffort, ToolCall
from rollforward.model.tokenizer import DSML, END_THINK, Tokenizer, TokenizerConfig, train_tokenizer
from rollforward.sandbox.types import ToolSpec

VERSIONS = [(version, effort) for version in (LATER, APRIL) for effort in version.efforts]
TOOL = ToolSpec(name="share", description="Price.", parameters={"type": "object"})
CALL = ToolCall(name="share", arguments='{"of":"gold"}')
QUESTION = Message(role="user", content="?")


@functools.cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(["What is 1 + 2?", "It is 3."] * 20, TokenizerConfig(vocab_size=384))


@pytest.mark.parametrize("reasoning", ["", "Look it up."])
@pytest.mark.parametrize("lists_tools", [False, True])
@pytest.mark.parametrize(("version", "effort"), VERSIONS)
def test_vllm_45603_reasoning_is_closed_before_the_calls_of_a_history(
    version: EncodingVersion, effort: ReasoningEffort, lists_tools: bool, reasoning: str
) -> None:
    """A history whose turns call without `</think>` teaches the model to call from within its reasoning."""
    chat = ChatEncoding(tokenizer(), version)
    turn = Message(role="assistant", content="", reasoning=reasoning, tool_calls=(CALL,))
    result = Message(role="tool", content="7")
    ids = chat.encode_prompt((QUESTION, turn, result, turn, result), effort, (TOOL,) if lists_tools else ())
    turns = chat.tokenizer.decode(ids).split("<｜Assistant｜>")[1:3]
    assert [one.partition(f"\n\n<{DSML}tool_calls>")[0] for one in turns] == [f"<think>{reasoning}{END_THINK}"] * 2


@pytest.mark.parametrize(("version", "effort"), VERSIONS)
def test_vllm_45862_a_call_without_the_end_of_reasoning_is_told_and_not_lost(
    version: EncodingVersion, effort: ReasoningEffort
) -> None:
    """Swallowed into the reasoning it looks like a turn that says nothing, and the policy never hears of it."""
    chat = ChatEncoding(tokenizer(), version)
    said = Message(role="assistant", content="", tool_calls=(CALL,))
    prompt = chat.encode_prompt((QUESTION,), effort, (TOOL,))
    ids = chat.encode_conversation((QUESTION, said), effort, (TOOL,)).token_ids[len(prompt) :]
    assert chat.read_turn(ids, effort).calls == (CALL,)
    unclosed = [id_ for id_ in ids if id_ != chat.tokenizer.control_id(END_THINK)]
    for turn in (chat.read_turn(unclosed, effort), parse_turn(chat.decode_turn(unclosed), effort)):
        assert (turn.calls, turn.problem_kind) == ((), Problem.CALL_IN_REASONING)
        assert turn.problem is not None
        assert END_THINK in turn.problem


@pytest.mark.parametrize(("version", "effort"), VERSIONS)
def test_vllm_53831_calls_are_read_in_every_effort(version: EncodingVersion, effort: ReasoningEffort) -> None:
    """Long reasoning that speaks of calls, as deep efforts bring, then a call: the call is read, nothing is cut."""
    chat = ChatEncoding(tokenizer(), version)
    reasoning = "I could write <tool_calls> or <｜DSML｜tool_calls> or </think> now. " * 500
    said = Message(role="assistant", content="So:", reasoning=reasoning, tool_calls=(CALL, CALL))
    prompt = chat.encode_prompt((QUESTION,), effort, (TOOL,))
    ids = chat.encode_conversation((QUESTION, said), effort, (TOOL,)).token_ids[len(prompt) :]
    turn = chat.read_turn(ids, effort)
    assert (turn.reasoning, turn.content, turn.problem) == (reasoning, "So:", None)
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == [("share", {"of": "gold"})] * 2
