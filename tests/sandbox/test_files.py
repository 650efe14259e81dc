"""Proves: of whoever failed the last line is told, however much it has said; whoever writes on is not disturbed."""

import os
import tempfile

from rollforward.sandbox.bubblewrap import unavailable
from rollforward.sandbox.files import last_line


def test_the_last_line_is_at_the_end() -> None:
    with tempfile.TemporaryFile() as said:
        assert last_line(said.fileno()) == ""
        assert str(unavailable(said, "it did not come up")).startswith("sandbox: it did not come up. ")
        said.write(b"first\n" + b"a warning\n" * 20_000 + b"\xffwhy it failed\n \n")
        said.flush()
        assert last_line(said.fileno()) == "\ufffdwhy it failed"
        assert "(\ufffdwhy it failed)" in str(unavailable(said, "it did not come up"))
        os.write(said.fileno(), b"and more")  # whoever has the file open with it is where it was
        assert last_line(said.fileno()) == "and more"
        said.truncate(0)
        assert last_line(said.fileno()) == ""
