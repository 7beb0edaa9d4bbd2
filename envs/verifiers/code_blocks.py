"""Finds the code in an answer, as models write it: in fences, and where fences are missing.

Of several blocks, the last counts that the verifier can use: one that defines what the tests call,
or that reads the input. Without any such, the last one counts. Blocks of Python go before blocks
without a language, and those before blocks of other languages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_FENCE = re.compile(
    r"(?P<prefix>[ \t>]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})"
    r"(?P<info>[^`\n\r]*)[\n\r]*\Z"
)
_GLUED = re.compile(r"^([^`\n]*[^`\s])(`{3,}\w*)[ \t\r]*$", re.MULTILINE)
"""A fence that opens at the end of a sentence."""
_LANGUAGE = re.compile(r"[{. \t]*(\w*)")
_ONE_LINE = re.compile(r"```(?:(?:python3?|py)\s)?([^`]+)```")
_TRIPLE_QUOTE = re.compile(r"\"\"\"|'''")
_LOOKS_LIKE_CODE = re.compile(r"\s|#|@|(?:import|from|def|class|async|for|while|if|print)\b")
_PYTHON = ("python", "py", "python3")
_MARKDOWN = ("markdown", "md")
_END_OF_REASONING = "</think>"


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    code: str


def find_code(text: str, is_wanted: Callable[[str], bool]) -> str:
    """Find the code in a text: all of it, if it has no fence.

    A fence that is never closed reaches to the end. A fence without a partner at the end closes the
    text before it. The indent of a fence is taken from its block. Reasoning before `</think>` is
    skipped if a block that the verifier can use follows.

    Args:
        is_wanted: whether the verifier can use a block.
    """
    _, found_end, after = text.rpartition(_END_OF_REASONING)
    if found_end and is_wanted(code := find_code(after, is_wanted)):
        return code
    blocks = _blocks(text, is_wanted)
    glued = _GLUED.search(text)
    if glued and glued.start(2) == text.find("```"):
        apart = _blocks(_GLUED.sub(r"\1\n\2", text), is_wanted)
        blocks = apart if any(is_wanted(one.code) for one in apart) else blocks
    if not blocks:
        return text
    ranks = (
        lambda one: one.language in _PYTHON and is_wanted(one.code),
        lambda one: not one.language and is_wanted(one.code),
        lambda one: one.language in _PYTHON,
        lambda one: not one.language,
        lambda one: True,
    )
    found = next(some for is_of in ranks if (some := [one for one in blocks if is_of(one)]))
    return found[-1].code


def _blocks(text: str, is_wanted: Callable[[str], bool]) -> list[_Block]:
    lines = text.splitlines(keepends=True)
    blocks: list[_Block] = []
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            index += 1
            continue
        end, body = _body(lines, index, opening)
        is_closed = end < len(lines)
        language = _LANGUAGE.match(opening["info"])
        assert language is not None
        if not (is_closed or blocks or language[1]):
            before = "".join(lines[:index])
            if not "".join(body).strip() or _is_code(before, is_wanted):
                return [_Block("", before)]
        code = "".join(body)
        if language[1].lower() in _MARKDOWN and (inner := _blocks(code, is_wanted)):
            blocks += inner
        elif code.strip() or not blocks:
            blocks.append(_Block(language[1].lower(), code))
        index = end + 1
    if not blocks:
        blocks = [_Block("", found) for found in _ONE_LINE.findall(text)]
    return blocks


def _is_code(text: str, is_wanted: Callable[[str], bool]) -> bool:
    """Whether the text before a lone fence is the code that it closes."""
    start = text.lstrip("\r\n")
    return bool(start.strip() and _LOOKS_LIKE_CODE.match(start) and is_wanted(text))


def _body(lines: list[str], start: int, opening: re.Match[str]) -> tuple[int, list[str]]:
    """The index of the closing line, or the number of lines, and the lines between."""
    prefix, fence = opening["prefix"], opening["fence"]
    body: list[str] = []
    quote = ""
    first: tuple[int, list[str]] | None = None
    for index in range(start + 1, len(lines)):
        line = _without(lines[index], len(prefix))
        closing = line.strip()
        if set(closing) == {fence[0]} and len(closing) >= len(fence) and _indent(line) <= 3:
            if not quote:
                return index, body
            first = first or (index, list(body))
        elif not quote and fence[0] == "`" and re.fullmatch(f"[^`]+{fence}", closing):
            return index, [*body, line.rstrip().removesuffix(fence) + "\n"]
        body.append(line)
        for found in _TRIPLE_QUOTE.findall(line):
            quote = "" if quote == found else quote or found
    # A quote that never ends says nothing about fences.
    if quote and first is not None:
        return first
    for index, line in enumerate(body):
        # Words may follow a fence that closes, if nothing else does.
        if line.startswith(fence) and (line[len(fence) :].strip()):
            return start + 1 + index, body[:index]
    return len(lines), body


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _without(line: str, width: int) -> str:
    """The line without the indent and the marks of quotations that its fence has too."""
    start = 0
    while start < width and line[start : start + 1] in (" ", "\t", ">"):
        start += 1
    return line[start:]
