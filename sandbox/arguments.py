"""Checks a call against what a tool takes, before anything of it runs. What is wrong is told to the model.

Not here: the schema (`toolset.py`), reading of calls from text (`model/dsml.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

from rollforward.sandbox.types import Call, ToolSpec

_IS_A: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


def refuse_call(call: Call, tools: Mapping[str, ToolSpec]) -> str | None:
    """Returns why a call cannot be made, in a sentence for who made it; None where it can.

    Args:
        call: what was asked for; values as JSON has them.
        tools: by name.

    Invariants: pure; the same sentence for the same mistake; time linear in the arguments.
    Example: a call of `add(a: int)` with `{"a": "1"}` gives "parameter a of add is a string; it must be an integer".
    """
    if call.tool not in tools:
        return f"there is no tool {_cut(call.tool)!r}; there are {', '.join(sorted(tools)) or 'none'}"
    schema = tools[call.tool].parameters
    properties = schema["properties"]
    takes = ", ".join(properties) or "no parameters"
    for name in call.arguments:
        if name not in properties:
            return f"{call.tool} has no parameter {_cut(name)!r}; it takes {takes}"
    for name in schema["required"]:
        if name not in call.arguments:
            return f"parameter {name} of {call.tool} is missing; it takes {takes}"
    for name, value in call.arguments.items():
        problem = _problem(f"parameter {name} of {call.tool}", value, properties[name])
        if problem is not None:
            return problem
    return None


def _problem(where: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    wanted = schema["type"]
    kind = _kind(value)
    if kind != wanted and not (kind == "integer" and wanted == "number"):
        is_a = "null" if kind == "null" else _IS_A[kind]
        hint = ' (string="false")' if kind == "string" else ""
        return f"{where} is {is_a}; it must be {_IS_A[wanted]}{hint}"
    if wanted == "array" and "items" in schema:
        parts = ((f"item {index} of {where}", item, schema["items"]) for index, item in enumerate(value))
    elif wanted == "object" and "additionalProperties" in schema:
        parts = (
            (f"entry {_cut(key)!r} of {where}", item, schema["additionalProperties"]) for key, item in value.items()
        )
    else:
        return None
    return next((problem for part in parts if (problem := _problem(*part)) is not None), None)


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
