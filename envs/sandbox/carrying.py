"""Takes what a policy left in one session to another, which it never ran in.

Files, folders, links that stay inside, and modes are taken; devices, FIFOs and sockets are not.
Contents go in pieces, so that no tree is in memory whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.api import Entry, RunResult, Session

MAX_FILE_BYTES = 64 * 2**20
MAX_BYTES = 256 * 2**20
_PIECE_BYTES = 8 * 2**20
_PIECE_FILES = 512
_NOTHING = ("true",)


class TooMuch(Exception):
    """The policy left more than is taken to the tests: a result, and no failure of the sandbox."""


async def left_in(session: Session, names: Sequence[str] = (".",)) -> list[Entry]:
    """What the session's kept folder holds among and below `names`.

    Raises:
        TooMuch: the session cannot say, for what is in it.
    """
    listed = await session.run({}, _NOTHING, keep_files=True, listed=names)
    if not listed.is_ok:
        raise TooMuch(f"what is left cannot be listed ({_how(listed)})")
    return list(listed.entries)


async def contents(
    session: Session,
    entries: Sequence[Entry],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    max_bytes: int = MAX_BYTES,
) -> AsyncIterator[dict[str, bytes]]:
    """The contents of the files among `entries`, in pieces of some mebibytes.

    Raises:
        TooMuch: a file, or all together, are over the limit.
    """
    files = [entry for entry in entries if entry.kind == "file"]
    for entry in files:
        if entry.size > max_file_bytes:
            raise TooMuch(
                f"{entry.path!r} has {entry.size} bytes; at most {max_file_bytes} are taken"
            )
    if (total := sum(entry.size for entry in files)) > max_bytes:
        raise TooMuch(f"the files have {total} bytes; at most {max_bytes} are taken")
    for piece in _pieces(files):
        paths = [entry.path for entry in piece]
        held = await session.run({}, _NOTHING, keep_files=True, collect=paths)
        if not held.is_ok or len(held.files) < len(paths):
            raise TooMuch(f"what is left cannot be read ({_how(held)})")
        yield dict(held.files)


async def carry(source: Session, target: Session, without: Sequence[str] = ()) -> None:
    """Copy the kept folder of one session into that of another.

    Args:
        without: names in the folder that stay behind.

    Raises:
        TooMuch: see `contents`.
        EnvironmentFailure: the other session does not take what the limits allow.
    """
    entries = [e for e in await left_in(source) if e.path.split("/")[0] not in without]
    async for files in contents(source, entries):
        _check(await target.run(files, _NOTHING, keep_files=True))
    _check(await target.run({}, _NOTHING, keep_files=True, arrange=entries))


def _check(put: RunResult) -> None:
    if not put.is_ok:
        raise EnvironmentFailure(f"a session does not take another's files: {_how(put)}")


def _how(result: RunResult) -> str:
    return f"{result.ended}: {result.stderr[:300].decode(errors='replace')}"


def _pieces(files: Sequence[Entry]) -> Iterator[list[Entry]]:
    piece: list[Entry] = []
    size = 0
    for entry in files:
        if piece and (size + entry.size > _PIECE_BYTES or len(piece) == _PIECE_FILES):
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += entry.size
    if piece:
        yield piece
