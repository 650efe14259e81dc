"""What a schema class says about itself: its dotted fields, their types, defaults and documentation.

Pure functions of msgspec.Struct classes and plain data, used for help and error messages. Decoding is in conf/load.py.
"""

import ast
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, cast

import msgspec

__all__ = [
    "Field",
    "Step",
    "dotted_key",
    "element_fields",
    "field_at",
    "field_docs",
    "has_parts",
    "movable_keys",
    "nearest",
    "schema_fields",
    "type_text",
    "unknown_keys",
    "value_at",
]

Step = str | int
"""One step of a path into a configuration: a key or a list index."""


class Field(NamedTuple):
    """One settable value of a schema."""

    path: str
    """Dotted name, as an override writes it: `algo.group_size`."""
    type: str
    """Type and range in words: `int >= 2`."""
    default: str
    """The default as an override would write it, or `required`."""
    doc: str
    """First paragraph of the string below the field, on one line; empty where there is none."""
    choices: tuple[tuple[str, str], ...] = ()
    """(tag, its values) of the choices that have the setting, or have it with this default: `("algo.type", "dapo |
    gspo")`, from the outermost in. Empty where every choice has the same."""

    @property
    def choices_text(self) -> str:
        """The choices in a user's words: `algo.type=dapo | gspo` is `type=dapo | gspo` beside `algo.cap`."""
        if not self.choices:
            return ""
        place = self.choices[0][0].rpartition(".")[0] + "."
        return ", ".join(f"{tag.removeprefix(place)}={values}" for tag, values in self.choices)


def _strip(annotation: object) -> object:
    """Annotated[T, ...] -> T."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _is_struct(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _structs(annotation: object) -> tuple[type[msgspec.Struct], ...]:
    """The Struct classes that a value of this type may be: one, the members of a tagged union, or none."""
    annotation = _strip(annotation)
    if _is_struct(annotation):
        return (cast("type[msgspec.Struct]", annotation),)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(struct for member in typing.get_args(annotation) for struct in _structs(member))
    return ()


def has_parts(schema: type[msgspec.Struct], name: str) -> bool:
    """Whether the top-level field `name` holds fields of its own, so that a group file can fill it."""
    return any(field.encode_name == name and _structs(field.type) for field in msgspec.structs.fields(schema))


def _element(annotation: object) -> object:
    """The type of a container's elements or mapping's values; None for anything else."""
    annotation = _strip(annotation)
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (list, tuple, set, frozenset) and arguments:
        return arguments[0]
    if _is_mapping(annotation) and len(arguments) == 2:
        return arguments[1]
    return None


def _is_mapping(annotation: object) -> bool:
    origin = typing.get_origin(_strip(annotation))
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _tag(struct: type[msgspec.Struct]) -> tuple[str, str] | None:
    """(tag field, tag) of a member of a tagged union."""
    config = struct.__struct_config__
    return (config.tag_field, str(config.tag)) if config.tag_field is not None else None


def _range_text(meta: msgspec.Meta) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "a multiple of"))
    lengths = (("min_length", "length >="), ("max_length", "length <="), ("pattern", "matching"))
    bounds = [(sign, getattr(meta, name)) for name, sign in (*signs, *lengths)]
    # typing keeps one of Meta(gt=0) and Meta(gt=0.0), whichever came first, as they are equal: both are written 0.
    whole = [(sign, int(bound) if isinstance(bound, float) and bound.is_integer() else bound) for sign, bound in bounds]
    return ", ".join(f"{sign} {bound}" for sign, bound in whole if bound is not None)


def type_text(annotation: object) -> str:
    """The type in a user's words: `int >= 2`, `fp32 | native`, `list of str`."""
    if typing.get_origin(annotation) is Annotated:
        base, *extras = typing.get_args(annotation)
        ranges = [_range_text(extra) for extra in extras if isinstance(extra, msgspec.Meta)]
        return " ".join([type_text(base), *[text for text in ranges if text]])
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(member) for member in typing.get_args(annotation))
    element = _element(annotation)
    if element is not None:
        return f"list of {type_text(element)}" if origin in (list, tuple) else f"mapping to {type_text(element)}"
    if annotation is type(None):
        return "null"
    tags = [tag[1] for tag in map(_tag, _structs(annotation)) if tag]
    return tags[0] if tags else str(getattr(annotation, "__name__", annotation))


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return _value_text(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return _value_text(field.default_factory())
    return "required"


def _value_text(value: object) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, str) else value


def field_docs(schema: type[msgspec.Struct]) -> dict[str, str]:
    """Field name -> first paragraph of the string below it, from the source of `schema` and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not _is_struct(base) or base is msgspec.Struct:
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, below in itertools.pairwise(statements):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.strip().split("\n\n")[0].split())
                case _:
                    pass
    return docs


def movable_keys(config: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a configuration that say where its run works, not what it computes: a class names its own in a
    ClassVar `may_change`. They may differ when a run directory goes on."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from movable_keys(value, f"{prefix}{name}.")
        elif name in getattr(config, "may_change", ()):
            yield prefix + name


def element_fields(schema: type[msgspec.Struct]) -> Iterator[Field]:
    """The fields of what top-level lists and mappings of `schema` hold: `tasks[].dataset`, of which no override sets
    one alone, and `teachers.NAME.weight`."""
    for field in msgspec.structs.fields(schema):
        if members := _structs(_element(field.type)):
            path = field.encode_name + (".NAME" if _is_mapping(field.type) else "[]")
            if tags := [tag for tag in map(_tag, members) if tag]:
                yield Field(f"{path}.{tags[0][0]}", " | ".join(tag for _, tag in tags), "required", "")
            yield from _member_fields(members, path + ".")


def schema_fields(schema: type[msgspec.Struct], prefix: str = "") -> Iterator[Field]:
    """Every settable value under `schema`, depth first, as declared; a union's members follow its tag.

    A part that may be null comes before what it holds. What all members of a union have alike comes once; what one has
    alone, or otherwise, follows with its `choices`, the settings of one name together.
    """
    docs = field_docs(schema)
    for field in msgspec.structs.fields(schema):
        path = prefix + field.encode_name
        doc = docs.get(field.name, "")
        members = _structs(field.type)
        if not members:
            yield Field(path, type_text(field.type), _default_text(field), doc)
            continue
        tags = [tag for tag in map(_tag, members) if tag]
        if tags:
            default = field.default if field.default is not msgspec.NODEFAULT else None
            if default is None and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            chosen = _tag(type(default)) if isinstance(default, msgspec.Struct) else None
            kinds = " | ".join(tag for _, tag in tags)
            yield Field(f"{path}.{tags[0][0]}", kinds, chosen[1] if chosen else "required", doc)
        elif type(None) in typing.get_args(_strip(field.type)):
            yield Field(path, "settings as below | null", _default_text(field), doc)
        yield from _member_fields(members, path + ".")


def _member_fields(members: tuple[type[msgspec.Struct], ...], prefix: str) -> Iterator[Field]:
    """The fields of a value that is one of `members`: common ones, then the others, each with the members' tags."""
    owners: dict[Field, list[str]] = {}
    for member in members:
        tag = _tag(member)
        for field in schema_fields(member, prefix):
            owners.setdefault(field, []).append(tag[1] if tag else "")
    differing = {field.path for field, tags in owners.items() if len(tags) < len(members)}
    rank = {path: index for index, path in enumerate(dict.fromkeys(field.path for field in owners))}

    def place(field: Field) -> tuple[bool, int, int]:
        """Below the outermost part that differs, if any, with what else it holds."""
        parts = field.path.split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        head = next((path for path in heads if path in differing), None)
        return head is not None, rank[head or field.path], rank[field.path]

    tag_path = prefix + next((tag[0] for tag in map(_tag, members) if tag), "")
    for field in sorted(owners, key=place):
        tags = owners[field]
        choices = ((tag_path, " | ".join(tags)), *field.choices) if len(tags) < len(members) else field.choices
        yield field._replace(choices=choices)


def field_at(schema: type[msgspec.Struct], data: object, path: tuple[Step, ...]) -> Field | None:
    """The setting at `path` as it is under the choices that `data` makes, also inside lists and mappings; None where
    there is none."""
    dotted = dotted_key(path)

    def is_chosen(tag: str, values: str) -> bool:
        try:
            return str(value_at(data, tuple(tag.split(".")))) in values.split(" | ")
        except (KeyError, IndexError, TypeError):
            return False

    fields = (field for field in schema_fields(schema) if field.path == dotted)
    found = next((field for field in fields if all(is_chosen(*choice) for choice in field.choices)), None)
    return found or _field_inside(schema, data, path)


def _field_inside(annotation: object, value: object, path: tuple[Step, ...]) -> Field | None:
    """What `field_at` says of a path of which a step leads into a list or a mapping."""
    step, *below = path
    members = _structs(annotation)
    if members and isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        tags = [tag for tag in map(_tag, members) if tag]
        if tags and step == tags[0][0] and not below:
            return Field(str(step), " | ".join(tag for _, tag in tags), "required", "")
        member = _member(members, mapping)
        fields = () if member is None else msgspec.structs.fields(member)
        field = next((field for field in fields if field.encode_name == step), None)
        if field is None or below:
            return None if field is None else _field_inside(field.type, mapping.get(str(step)), tuple(below))
        if _structs(field.type):
            return None  # what is settable is inside it
        return Field(field.encode_name, type_text(field.type), _default_text(field), "")
    for one in typing.get_args(_strip(annotation)) if _is_union(annotation) else (annotation,):
        element = _element(one)
        if element is None:
            continue
        if not below:
            return None if _structs(element) else Field(str(step), type_text(element), "required", "")
        try:
            return _field_inside(element, value_at(value, (step,)), tuple(below))
        except (KeyError, IndexError, TypeError):
            return None
    return None


def _is_union(annotation: object) -> bool:
    return typing.get_origin(_strip(annotation)) in (Union, types.UnionType)


def dotted_key(path: tuple[Step, ...]) -> str:
    """The path as an override writes it: Hydra takes `tasks.0.type`, and no brackets."""
    return ".".join(map(str, path))


def _member(members: tuple[type[msgspec.Struct], ...], value: Mapping[str, Any]) -> type[msgspec.Struct] | None:
    """The member of a tagged union that `value` names; None if it names none."""
    for struct in members:
        tag = _tag(struct)
        if tag is None or str(value.get(tag[0])) == tag[1]:
            return struct
    return None


def unknown_keys(
    schema: type[msgspec.Struct], data: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """(dotted key, dotted keys valid in its place) for every key of `data` that `schema` does not have.

    Values of the wrong type are passed over: decoding reports them.
    """
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(schema)}
    tag = _tag(schema)
    valid = [*fields, tag[0]] if tag else list(fields)
    for key, value in data.items():
        if key not in valid:
            yield prefix + key, [prefix + name for name in valid]
        elif key in fields:
            yield from _unknown_inside(fields[key], value, prefix + key)


def _unknown_inside(annotation: object, value: object, path: str) -> Iterator[tuple[str, list[str]]]:
    members = _structs(annotation)
    if members and isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        member = _member(members, mapping)
        if member is not None:
            yield from unknown_keys(member, mapping, path + ".")
        return
    element = _element(annotation)
    if element is None:
        return
    if isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _unknown_inside(element, item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield from _unknown_inside(element, item, f"{path}.{key}")


def nearest(name: str, candidates: list[str]) -> str | None:
    """The candidate most like `name`, or None if none is at all like it; the last part of a dotted name weighs most."""
    last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(candidates)}
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if not found:
        found = [last[key] for key in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6)]
    return found[0] if found else None


def value_at(data: object, path: tuple[Step, ...]) -> object:
    """The value at `path`; KeyError, IndexError or TypeError where there is none."""
    for step in path:
        data = cast("Any", data)[step]
    return data
