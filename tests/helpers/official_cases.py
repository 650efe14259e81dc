"""Holds the April encoding against the cases that DeepSeek publishes with the weights, in `encoding/tests/`.

A case is `test_input_N.json`, messages as an API gives them, and `test_output_N.txt`, what is rendered from them. The
suite runs it on cases of its own in that form; on the published ones it is run by hand, where the weights are:

    python -m tests.helpers.official_cases MODEL_DIR/encoding/tests
"""

import json
import sys
from pathlib import Path
from typing import Any

from rollforward.model.encoding_order import Rendering
from rollforward.model.encoding_render import answer_pieces, prompt_pieces
from rollforward.model.encoding_version import APRIL
from rollforward.model.messages import Message, ReasoningEffort, ToolCall
from rollforward.sandbox.types import ToolSpec

_CHAT_CASES = ("4",)  # by DeepSeek's own test; the others are rendered in the thinking mode


def render_case(text: str, effort: ReasoningEffort) -> str:
    """What the April encoding makes of a case's input, whose last message is an assistant's."""
    document = json.loads(text)
    given: list[dict[str, Any]] = document["messages"] if isinstance(document, dict) else document
    listed = document.get("tools", []) if isinstance(document, dict) else []
    for message in given:
        listed = listed or message.get("tools", [])
    tools = tuple(ToolSpec(**{name: one["function"][name] for name in ToolSpec.__struct_fields__}) for one in listed)
    messages = [_message(one) for one in given]
    how = Rendering(version=APRIL, effort=effort, tools=tools)
    *history, answer = messages
    pieces = [*prompt_pieces(history, how), *answer_pieces(answer, how, history[-1])]
    return "".join(text for text, _ in pieces)


def failed_cases(directory: Path) -> list[str]:
    """Numbers of the cases in `directory` that are rendered in another way than it says."""
    failed: list[str] = []
    for path in sorted(directory.glob("test_input_*.json")):
        number = path.stem.removeprefix("test_input_")
        expected = (directory / f"test_output_{number}.txt").read_text(encoding="utf-8")
        effort: ReasoningEffort = "non-think" if number in _CHAT_CASES else "high"
        if render_case(path.read_text(encoding="utf-8"), effort) != expected:
            failed.append(number)
    return failed


def _message(given: dict[str, Any]) -> Message:
    calls = [
        ToolCall(name=one["function"]["name"], arguments=one["function"]["arguments"], id=one.get("id", ""))
        for one in given.get("tool_calls") or ()
    ]
    return Message(
        role=given["role"],
        content=given.get("content") or "",
        reasoning=given.get("reasoning_content") or "",
        tool_calls=tuple(calls),
        tool_call_id=given.get("tool_call_id", ""),
        task=given.get("task"),
    )


if __name__ == "__main__":
    failures = failed_cases(Path(sys.argv[1]))
    sys.exit(f"rendered otherwise: cases {', '.join(failures)}" if failures else None)
