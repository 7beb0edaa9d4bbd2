"""Makes the files that an agent program left safe to open, before a verifier looks at them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from outloop.buffer import untrusted_tree

_MAX_ENTRIES = 200_000


class TooManyFiles(Exception):
    """The agent left more files than a verifier should look through."""


def make_harmless(folder: Path) -> list[str]:
    """Remove links that leave the folder, sockets, FIFOs and devices; make all else readable.

    No process of the agent may be alive.

    Returns:
        The paths of what was removed, relative to the folder.

    Raises:
        TooManyFiles: what is left is not checked.
        OSError: a part cannot be removed.
    """
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        folder.mkdir()
    root = folder.resolve()
    removed = []
    for count, entry in enumerate(untrusted_tree.walk(root, unlocks=True), 1):
        if count > _MAX_ENTRIES:
            raise TooManyFiles(f"the agent left more than {_MAX_ENTRIES} files in its folder")
        mode = entry.found.st_mode
        if stat.S_ISLNK(mode):
            is_safe = _is_inside(root, entry)
        else:
            is_safe = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not is_safe:
            removed.append("/".join((*entry.parents, entry.name)))
            entry.remove()
        elif stat.S_ISREG(mode) and mode & 0o600 != 0o600:
            os.chmod(entry.name, 0o600 | stat.S_IMODE(mode) & 0o777, dir_fd=entry.folder)
    return removed


def _is_inside(root: Path, entry: untrusted_tree.Entry) -> bool:
    """Whether a link leads to something in the folder."""
    path = os.path.join(root, *entry.parents, entry.name)
    try:
        return Path(os.path.realpath(path, strict=True)).is_relative_to(root)
    except (OSError, ValueError, RecursionError):  # Nothing there, too long, or links in a circle.
        return False
