"""Reads what a model is told about a tool from the tool's source, by its syntax alone: nothing of it runs here."""

import ast
from pathlib import Path
from typing import Any, Final

import msgspec

from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import ToolError
from rollforward.sandbox.types import ToolSpec

_SHIPPED: Final = Path(__file__).parent / "tools"
_JSON_TYPES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_MAX_SOURCE_BYTES: Final = 1 << 20


def tool_path(config: ToolConfig) -> Path:
    """Where the tool's file lies; it may be missing."""
    return _SHIPPED / f"{config.name}.py" if config.file is None else Path(config.file).expanduser()


def tool_source(config: ToolConfig) -> str:
    """Returns the text of the tool's file.

    Raises:
        ToolError: there is no such file or shipped tool, or it is no UTF-8 text of at most 1 MiB.
    """
    path = tool_path(config)
    if config.file is None and not path.is_file():
        shipped = sorted(p.stem for p in _SHIPPED.glob("*.py") if p.stem != "__init__")
        raise ToolError(
            f"tool {config.name}: there is no shipped tool of this name; there are {', '.join(shipped)}."
            " Name one of them, or set file to the Python file with the function"
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise _fault(config, f"cannot be read ({error.strerror}). Correct the path") from None
    if len(source) > _MAX_SOURCE_BYTES:
        raise _fault(config, f"has {len(source)} bytes; a tool has at most {_MAX_SOURCE_BYTES}. Shorten it")
    try:
        return source.decode()
    except UnicodeDecodeError as error:
        raise _fault(config, f"is not UTF-8 at byte {error.start}. Save it as UTF-8") from None


def load_tool(config: ToolConfig) -> ToolSpec:
    """Returns what a model is told about the tool.

    Example: `def add(a: int, b: int = 1) -> int` with the docstring "Adds." gives name "add", description "Adds." and
    parameters {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
    "required": ["a"]}. A file with `FINAL = True` at its top level holds a tool whose call ends a completion.

    Raises:
        ToolError: the file cannot be read or parsed, or its function cannot be offered: not there, async, without a
            docstring, or with parameters that JSON cannot fill.

    Invariants: never imports or runs the file.
    """
    tree = _parse(config)
    function = _find(config, tree)
    description = ast.get_docstring(function)
    if not description:
        raise _fault(config, f"{config.name}() has no docstring; it is what the model reads. Write one")
    arguments = function.args
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise _fault(
            config,
            f"{config.name}() takes positional-only, *args or **kwargs parameters; a call names every argument. Give"
            " each a name of its own",
        )
    positional = arguments.args
    no_default: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*no_default, *arguments.defaults, *arguments.kw_defaults]
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        properties[parameter.arg] = _schema(config, parameter)
        if default is None:
            required.append(parameter.arg)
        else:
            properties[parameter.arg]["default"] = _default(config, parameter.arg, default)
    schema = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name=config.name, description=description, parameters=schema, is_final=_is_final(config, tree))


def _parse(config: ToolConfig) -> ast.Module:
    source = tool_source(config)
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = f"{error.msg} (line {error.lineno})" if isinstance(error, SyntaxError) else error
        raise _fault(config, f"is no Python: {said}. Correct it") from None


def _is_final(config: ToolConfig, tree: ast.Module) -> bool:
    """Whether the file says `FINAL = True`."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "FINAL" for target in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if not isinstance(value, ast.Constant) or not isinstance(value.value, bool):
                raise _fault(config, "sets FINAL to something else than True or False. Write one of them")
            return value.value
    return False


def _find(config: ToolConfig, tree: ast.Module) -> ast.FunctionDef:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = functions.get(config.name)
    if found is None:
        have = ", ".join(name for name in functions if not name.startswith("_")) or "none"
        raise _fault(config, f"has no function {config.name!r}; it has {have}. Set name to one of them")
    if isinstance(found, ast.AsyncFunctionDef):
        raise _fault(config, f"{config.name}() is async; a tool is called and waited for. Write it with def")
    return found


def _schema(config: ToolConfig, parameter: ast.arg) -> dict[str, Any]:
    schema = None if parameter.annotation is None else _of_annotation(parameter.annotation)
    if schema is None:
        has = "no annotation" if parameter.annotation is None else f"annotation {ast.unparse(parameter.annotation)}"
        raise _fault(
            config,
            f"parameter {parameter.arg} of {config.name}() has {has}; it must be one of {', '.join(_JSON_TYPES)},"
            " list[...] of one, or dict[str, ...] of one",
        )
    return schema


def _of_annotation(node: ast.expr) -> dict[str, Any] | None:
    """JSON schema of an annotation, or None where JSON has no such type."""
    if isinstance(node, ast.Name) and node.id in _JSON_TYPES:
        return {"type": _JSON_TYPES[node.id]}
    if isinstance(node, ast.Subscript):
        container, inner = ast.unparse(node.value), node.slice
        if container == "list" and (items := _of_annotation(inner)) is not None:
            return {"type": "array", "items": items}
        if container == "dict" and isinstance(inner, ast.Tuple) and len(inner.elts) == 2:
            values = _of_annotation(inner.elts[1])
            if ast.unparse(inner.elts[0]) == "str" and values is not None:
                return {"type": "object", "additionalProperties": values}
    return None


def _default(config: ToolConfig, name: str, node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
        is_json = msgspec.json.decode(msgspec.json.encode(value)) == value
    except (ValueError, TypeError, RecursionError):
        is_json, value = False, None
    if not is_json:
        raise _fault(
            config, f"default of parameter {name} of {config.name}() is {ast.unparse(node)}; write a JSON literal"
        )
    return value


def _fault(config: ToolConfig, what: str) -> ToolError:
    return ToolError(f"tool {config.name}: {tool_path(config)} {what}")
