"""Files of JSON objects, one a line, of processes that may be killed in the middle of a write.

Owns: how a line is appended and read. A kill leaves the beginning of a line; who appends next
begins a line of its own, and readers leave the other out. Does not own: what is in a line.
"""

from __future__ import annotations

import errno
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any


def open_for_appending(path: Path) -> FileIO:
    """The file, without a buffer, for `append_line`."""
    return FileIO(path, "a+")


def append_line(file: FileIO, line: bytes) -> None:
    """Append it; nothing of it is left there if it does not fit.

    Raises:
        OSError: it could not be written.
    """
    size = os.fstat(file.fileno()).st_size
    is_cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    data = (b"\n" if is_cut else b"") + line + b"\n"
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """What every whole line says."""
    return [row for line in data.split(b"\n")[:-1] if (row := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """What it says; None: a kill left it without its end."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What every whole line says; nothing where there is no file."""
    return rows_of(path.read_bytes()) if path.exists() else []
