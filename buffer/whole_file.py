"""Files that readers, and processes that begin after a kill, find whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new path beside `path` to write to, which takes its place when the block ends.

    If the block raises, or is killed, what was at `path` stays. Of several processes that write
    one file at once the last to end wins.
    """
    writing = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield writing
        writing.replace(path)
    finally:
        writing.unlink(missing_ok=True)
