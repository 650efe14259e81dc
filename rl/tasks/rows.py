"""The rows of a user's file, or made here: checked at the start, read one at a time, never all of them in Python
objects.

A .jsonl file stays on disk: its index is one offset a row, and a row is read and decoded when it is asked for. The
columns of a .parquet file, which cannot be read a row at a time, are held as Arrow buffers. A hash of every
row's question is in `indexed_rows.py`.
"""

import difflib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from rollforward.model.messages import Message
from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.evens import Evens
from rollforward.rl.tasks.unit_tests import UnitTest, check_tests

_BOM: Final = b"\xef\xbb\xbf"
_MAX_SHOWN_CHARS: Final = 60
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXTS: Final = ("string", "large_string")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One question with its answer."""

    messages: tuple[Message, ...]
    """What is asked, as it stands in the file; the last message is the user's."""
    answer: str | None
    """The right answer; None where the file has none."""
    demonstration: tuple[Message, ...] | None = None
    """Turns to learn from; None where the file has none."""
    files: dict[str, str] | None = None
    """What a completion's sandbox begins with, text by path; None where the file has none."""
    tests: tuple[UnitTest, ...] = ()
    """Hidden tests."""
    label: Any = None
    """What is known of the answer's worth, as it stands in the file; None where the file says nothing."""
    rationale: str | None = None
    """Why it is worth that; None where the file does not say."""


class Rows(Protocol):
    """Rows of one source. Every row that `scan` gives is checked."""

    def scan(self) -> Iterator[Row]:
        """All rows in order, one at a time.

        Raises:
            TaskError: a row has the wrong shape; the message names file, row, column and the way out.
        """
        ...

    def row(self, index: int) -> Row:
        """One row, 0 ... number of rows - 1, after `scan` has come to its end."""
        ...


def open_rows(
    source: str | Evens,
    *,
    question_column: str,
    answer_column: str | None,
    messages_column: str | None = None,
    files_column: str | None = None,
    tests_column: str | None = None,
    label_column: str | None = None,
    rationale_column: str | None = None,
    tools: Mapping[str, bool] | None = None,
    owner: str,
) -> Rows:
    """The rows of a file, of the format that its name ends with, or rows that are made here.

    Args:
        source: path of a .jsonl or .parquet file, or how rows are made.
        question_column, answer_column, messages_column, files_column, tests_column, label_column, rationale_column:
            where question, answer, turns to learn from, files, hidden tests, labels and their reasons are; None where
            the file has none.
        tools: names of the tools that the turns to learn from may call, and whether a call ends the completion.
        owner: begins every error message, such as `task sums`.

    Raises:
        TaskError: the file is absent, of another format, or has not the columns (the message names the nearest).
    """
    settings = {
        "question_column": question_column,
        "answer_column": answer_column,
        "messages_column": messages_column,
        "files_column": files_column,
        "tests_column": tests_column,
        "label_column": label_column,
        "rationale_column": rationale_column,
    }
    if isinstance(source, Evens):
        return MadeRows(_Columns(Path(), settings, tools or {}, owner, str(source)), source)
    path = Path(source)
    if path.is_dir():
        files = sorted(one.name for one in path.iterdir() if one.suffix.lower() in (".jsonl", ".parquet"))
        held = f"it holds {', '.join(files[:6])}{', ...' if len(files) > 6 else ''}" if files else "it holds none"
        raise TaskError(
            f"{owner}: {path} is a directory; a dataset is a .jsonl or .parquet file, and {held}. Name the file"
        )
    if not path.is_file():
        raise TaskError(
            f"{owner}: there is no file {path} (from the directory {Path.cwd()}). {_nearest_file(path)}Correct the path"
        )
    columns = _Columns(path, settings, tools or {}, owner, source)
    match path.suffix.lower():
        case ".jsonl":
            return JsonlRows(columns)
        case ".parquet":
            return ParquetRows(columns)
        case suffix:
            raise TaskError(
                f"{owner}: {path} ends with {suffix!r}; a dataset is a .jsonl file, one object a line, or a .parquet"
                " file. Convert it"
            )


class _Columns:
    """Names of the columns, and what is done with their values, whatever the format."""

    def __init__(
        self, path: Path, settings: Mapping[str, str | None], tools: Mapping[str, bool], owner: str, place: str
    ) -> None:
        self.path, self._place = path, place
        self.question = settings["question_column"] or ""
        self.answer, self.turns = settings["answer_column"], settings["messages_column"]
        self.files, self.tests = settings["files_column"], settings["tests_column"]
        self.label, self.rationale = settings["label_column"], settings["rationale_column"]
        self._settings = {name: setting for setting, name in settings.items() if name is not None}
        self._tools, self._owner = tools, owner

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return list(self._settings)

    def fault(self, what: str, row: int | None = None) -> TaskError:
        """An error about this source, or about one row of it, counted from 1 as editors do."""
        place = self._place if row is None else f"{self._place}, row {row + 1}"
        return TaskError(f"{self._owner}: {place}: {what}")

    def absent(self, column: str, have: list[str], row: int | None = None) -> TaskError:
        close = difflib.get_close_matches(column, have, n=1, cutoff=0.5)
        found = f"the nearest is {close[0]!r}" if close else f"it has {', '.join(map(repr, have)) or 'none'}"
        return self.fault(f"there is no column {column!r}; {found}. Set {self._settings[column]} to one of them", row)

    def read(self, values: dict[str, Any], row: int) -> Row:
        """The checked row of these values.

        Raises:
            TaskError: a value is of the wrong type or empty.
        """
        answer = None if self.answer is None else self._answer(values[self.answer], row)
        turns = None if self.turns is None else self._turns(self.turns, values[self.turns], row)
        return Row(
            messages=self._question(values[self.question], row),
            answer=answer,
            demonstration=turns,
            files=None if self.files is None else self._files(self.files, values[self.files], row),
            tests=() if self.tests is None else self._tests(self.tests, values[self.tests], row),
            label=None if self.label is None else _nested(values[self.label]),
            rationale=None if self.rationale is None else self._rationale(self.rationale, values[self.rationale], row),
        )

    def _question(self, value: Any, row: int) -> tuple[Message, ...]:
        if isinstance(value, str):
            messages = (Message(role="user", content=value),)
        elif isinstance(value, list):
            messages = self._messages(self.question, cast("list[object]", value), row)
        else:
            raise self._wrong_type(self.question, value, "a text or a list of messages", row)
        if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
            raise self.fault(
                f"column {self.question!r} is {_shown(value)}; it must end with what the user asks. Correct the row or"
                " leave it out",
                row,
            )
        return messages

    def _turns(self, column: str, value: Any, row: int) -> tuple[Message, ...]:
        if not isinstance(value, list):
            raise self._wrong_type(column, value, "a list of messages", row)
        messages = self._messages(column, cast("list[object]", value), row)
        roles = [message.role for message in messages]
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant" or {*roles} - {"assistant", "tool"}:
            raise self.fault(
                f"column {column!r} has messages of the roles {', '.join(roles) or 'none'}; they must be assistant and"
                " tool, and begin and end with assistant. What comes before the first answer belongs into the question",
                row,
            )
        for index, message in enumerate(messages[:-1]):
            if message.role != "assistant":
                continue
            num_results = next(count for count, role in enumerate(roles[index + 1 :]) if role == "assistant")
            if num_results != len(message.tool_calls) or not num_results:
                raise self.fault(
                    f"column {column!r}: message {index + 1} has {len(message.tool_calls)} tool_calls and is followed"
                    f" by {num_results} messages of the role tool; each call has one result, and a message that is"
                    " followed by another has calls. Correct the row or leave it out",
                    row,
                )
        if messages[-1].tool_calls and not any(self._tools.get(call.name) for call in messages[-1].tool_calls):
            raise self.fault(
                f"column {column!r}: the last message has tool_calls that nothing answers. Add the results and the"
                " answer, end with a tool that ends a completion, such as submit, or leave the row out",
                row,
            )
        for call in (call for message in messages for call in message.tool_calls):
            if call.name not in self._tools:
                raise self.fault(
                    f"column {column!r} calls {call.name!r}; the task's tools are"
                    f" {', '.join(self._tools) or 'none'}. Add it to tools, or leave the row out",
                    row,
                )
        return messages

    def _messages(self, column: str, value: list[object], row: int) -> tuple[Message, ...]:
        try:
            messages = msgspec.convert([_without_nulls(one) for one in value], tuple[Message, ...])
            _check_fields(messages)
            return messages
        except msgspec.ValidationError as error:
            raise self.fault(
                f"column {column!r} is no list of messages: {error}. Each has a role, one of system, user, assistant"
                " and tool, and a text as content; an assistant's may have reasoning and tool_calls, each call a name"
                ' and arguments, a text such as {"x": 1}',
                row,
            ) from None

    def _files(self, column: str, value: Any, row: int) -> dict[str, str]:
        try:
            files = msgspec.convert(_plain(value), dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.fault(
                f"column {column!r} is no files: {error}. It is an object of texts by path, or such an object as JSON."
                " Correct the row or leave it out",
                row,
            ) from None
        for path in files:
            if not path.strip("/") or "\0" in path or {"..", "."} & {*path.split("/")} or path.endswith("/"):
                raise self.fault(
                    f"column {column!r} has a file {path!r}; its name must be a path without `..`, relative to"
                    " /workspace. Correct the row or leave it out",
                    row,
                )
        return files

    def _tests(self, column: str, value: Any, row: int) -> tuple[UnitTest, ...]:
        try:
            return check_tests(_plain(value))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.fault(
                f"column {column!r} is no hidden tests: {error}. It is a list of objects with argv, stdin, files,"
                " stdout, compare, exit_code, timeout_s, or script, or such a list as JSON. Correct the row or leave it"
                " out",
                row,
            ) from None

    def _rationale(self, column: str, value: Any, row: int) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self._wrong_type(column, value, "a text that says something", row)
        return value.strip()

    def _answer(self, value: Any, row: int) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self._wrong_type(self.answer, value, "a text or a whole number", row)
        if not value.strip():
            raise self.fault(f"column {self.answer!r} is empty; no answer equals it. Leave the row out", row)
        return value

    def _wrong_type(self, column: str | None, value: Any, rule: str, row: int) -> TaskError:
        kind = "null" if value is None else type(value).__name__
        return self.fault(
            f"column {column!r} is {_shown(value)}, of type {kind}; it must be {rule}. Correct the row or leave it out",
            row,
        )


class MadeRows:
    """Rows that are made when they are asked for."""

    def __init__(self, columns: _Columns, made: Evens) -> None:
        """Keep how.

        Raises:
            TaskError: a column is asked for that they have not.
        """
        self._columns, self._made = columns, made
        have = list(made.values(0))
        for name in columns.names:
            if name not in have:
                raise columns.absent(name, have)

    def scan(self) -> Iterator[Row]:
        """All rows; see `Rows.scan`."""
        return map(self.row, range(self._made.rows))

    def row(self, index: int) -> Row:
        """One row."""
        return self._columns.read(self._made.values(index), index)


class JsonlRows:
    """Rows of a file with one JSON object a line; lines without any text are passed over."""

    def __init__(self, columns: _Columns) -> None:
        """Nothing is read yet."""
        self._columns = columns
        self._offsets = array("q")  # 8 bytes a row
        self._lines = array("q")

    def scan(self) -> Iterator[Row]:
        """All rows; see `Rows.scan`. Remembers where each begins."""
        offsets, lines = array("q"), array("q")
        offset = 0
        with self._columns.path.open("rb") as file:
            for number, line in enumerate(file):
                if line.removeprefix(_BOM).strip():
                    offsets.append(offset)
                    lines.append(number)
                    yield self._decode(line, number)
                offset += len(line)
        self._offsets, self._lines = offsets, lines

    def row(self, index: int) -> Row:
        """One row, read from the file."""
        with self._columns.path.open("rb") as file:
            file.seek(self._offsets[index])
            return self._decode(file.readline(), self._lines[index])

    def _decode(self, line: bytes, number: int) -> Row:
        try:
            values = msgspec.json.decode(line.removeprefix(_BOM))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._columns.fault(f"this is not JSON ({error}). Write one object on one line", number) from None
        if not isinstance(values, dict):
            raise self._columns.fault(f"this is {_shown(values)}, not an object. Write one object on a line", number)
        for name in self._columns.names:
            if name not in values:
                raise self._columns.absent(name, list(values), number)
        return self._columns.read(values, number)


class ParquetRows:
    """Rows of a parquet file, its columns held by Arrow."""

    _ROWS_AT_ONCE: Final = 1024

    def __init__(self, columns: _Columns) -> None:
        """Read the columns.

        Raises:
            TaskError: the file is damaged, or a column is absent or of the wrong type.
        """
        import pyarrow
        import pyarrow.parquet

        self._columns = columns
        try:
            file = pyarrow.parquet.ParquetFile(columns.path, memory_map=True)
            have = list(file.schema_arrow.names)
            for name in columns.names:
                if name not in have:
                    raise columns.absent(name, have)
            self._check_types(file.schema_arrow)
            self._table: Any = file.read(columns=columns.names)
        except (pyarrow.ArrowException, OSError) as error:
            raise columns.fault(f"this is no parquet file that can be read ({error}). Write it again") from None

    def scan(self) -> Iterator[Row]:
        """All rows; see `Rows.scan`."""
        first = 0
        for batch in self._table.to_batches(max_chunksize=self._ROWS_AT_ONCE):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                rows = [self._values(index) for index in range(first, first + batch.num_rows)]  # names the row
            for index, values in enumerate(rows, first):
                yield self._columns.read(values, index)
            first += batch.num_rows

    def row(self, index: int) -> Row:
        """One row."""
        return self._columns.read(self._values(index), index)

    def _values(self, index: int) -> dict[str, Any]:
        try:
            return {name: self._table[name][index].as_py() for name in self._columns.names}
        except UnicodeDecodeError as error:
            raise self._columns.fault(f"there are bytes that are no text ({error}). Correct the row", index) from None

    def _check_types(self, schema: Any) -> None:
        question, answer = self._columns.question, self._columns.answer
        kind = str(schema.field(question).type)
        if kind not in _TEXTS and not kind.startswith(("list<", "large_list<")):
            raise self._columns.fault(
                f"column {question!r} has the type {kind}; it must be a string or a list of messages. Convert it, or"
                " set question_column"
            )
        turns = self._columns.turns
        if turns is not None and not (kind := str(schema.field(turns).type)).startswith(("list<", "large_list<")):
            raise self._columns.fault(
                f"column {turns!r} has the type {kind}; it must be a list of messages. Convert it, or set"
                " messages_column"
            )
        if answer is not None and (kind := str(schema.field(answer).type)) not in _TEXTS + _INTEGERS:
            raise self._columns.fault(
                f"column {answer!r} has the type {kind}; it must be a string or an integer. Convert it, or set"
                " answer_column"
            )


def _check_fields(messages: tuple[Message, ...]) -> None:
    """Refuse what a message may have but a row may not."""
    for message in messages:
        if message.role in ("latest_reminder", "developer"):
            raise msgspec.ValidationError(f"Invalid enum value {message.role!r}")
        unused = {
            "id": any(call.id for call in message.tool_calls),
            "tool_call_id": message.tool_call_id,
            "task": message.task,
            "prefix": message.prefix,
        }
        for field in (field for field, value in unused.items() if value):
            raise msgspec.ValidationError(f"Object contains unknown field `{field}`")


def _plain(value: Any) -> Any:
    """A value of a column of files or tests: what it says as JSON, if it is a text."""
    return _nested(msgspec.json.decode(value) if isinstance(value, str) else value)


def _nested(value: Any) -> Any:
    """Without nulls, which Arrow fills what is absent with; and its maps, which come as lists of pairs, as objects."""
    if isinstance(value, dict):
        return {key: _nested(one) for key, one in cast("dict[Any, Any]", value).items() if one is not None}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if items and all(isinstance(one, tuple) for one in items):
            return _nested(dict(items))
        return [_nested(one) for one in items]
    return value


def _without_nulls(message: Any) -> Any:
    """Arrow fills what a message lacks with None."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no directory {path.parent} either. "
    close = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1, cutoff=0.5)
    return f"The nearest is {path.parent / close[0]}. " if close else ""
