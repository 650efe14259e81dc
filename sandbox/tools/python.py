"""Python for a model."""

import ast
import io
import os
import sys
import traceback
from collections import deque
from contextlib import redirect_stderr, redirect_stdout

_NAME = "<program>"
_MAX_CHARS = 1 << 20


def python(code: str) -> str:
    """Run a Python program in /workspace and return what it prints; the value of an expression in its last line is
    printed too. Files stay; variables do not."""
    sys.path.insert(0, os.getcwd())
    said = _Bounded()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            _run(code)
        except SystemExit as end:
            if end.code not in (None, 0):
                said.write(f"[exit status {end.code}]\n")
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001, the code is the model's
            said.write(_traceback(error))
    return said.text()


def _run(code: str) -> None:
    program = ast.parse(code, _NAME)
    last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(program, _NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _traceback(error: BaseException) -> str:
    """The part of it that is about the program."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


class _Bounded(io.TextIOBase):
    """Keeps the first and the last characters of what is written."""

    def __init__(self) -> None:
        self._head = ""
        self._tail: deque[str] = deque()
        self._tail_chars = self._left_out = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        room = max(_MAX_CHARS // 2 - len(self._head), 0)
        self._head += text[:room]
        if rest := text[room:][-_MAX_CHARS // 2 :]:
            self._left_out += len(text) - room - len(rest)
            self._tail.append(rest)
            self._tail_chars += len(rest)
        while self._tail and self._tail_chars - len(self._tail[0]) >= _MAX_CHARS // 2:
            dropped = len(self._tail.popleft())
            self._tail_chars -= dropped
            self._left_out += dropped
        return len(text)

    def text(self) -> str:
        mark = f"\n[... {self._left_out} characters left out ...]\n" if self._left_out else ""
        return self._head + mark + "".join(self._tail)
