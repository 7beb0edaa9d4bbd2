"""Text that a policy, an agent, a user's exception or a file wrote, made safe to store and to show.

Terminals obey escape sequences, C1 controls and marks of writing direction; UTF-8 cannot hold half
of a surrogate pair. Such characters become escapes that a person can read.
"""

from __future__ import annotations

import unicodedata

_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Parts of words and of emoji, which no terminal obeys."""


def storable(text: str) -> str:
    """The text with each half of a surrogate pair as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def printable(text: str) -> str:
    """The text with everything as an escape that a terminal would obey, line ends and tabs
    excepted."""
    return text if _is_plain(text) else "".join(map(_shown, text))


def one_line(text: str) -> str:
    """`printable` text without line ends, so that it cannot pretend to be a line of its own."""
    return printable(" ".join(text.split()))


def _is_plain(text: str) -> bool:
    return text.isprintable() or all(part.isprintable() for part in text.split("\n"))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t" + _JOINERS:
        return character
    if unicodedata.category(character) == "Zs":
        return character
    if character == "\x7f":
        # Lines of JSON hold it as it is, and know no \x.
        return "\\u007f"
    return character.encode("unicode_escape").decode()
