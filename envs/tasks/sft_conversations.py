"""Reads and checks conversations for SFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.envs.tasks.task_files import read_rows

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def load_conversations(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the rows {"messages", "tools"?, "metadata"?} of env.conversations.

    Raises:
        SettingsError: no source, no row, or a row of another shape (named by line or index).
    """
    source, setting = settings.env.conversations, "env.conversations"
    if source is None:
        raise SettingsError(
            'trainer.mode="sft" needs env.conversations; give a JSONL file, '
            "or package.module:function that returns {messages, tools} rows"
        )
    return read_conversations(source, setting=setting, import_dir=settings.env.import_dir)


def read_conversations(
    source: str, *, setting: str, import_dir: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield checked rows of a JSONL file or of what package.module:function returns.

    Raises:
        SettingsError: no row, or a row of another shape (named by line or index).
    """
    empty = True
    for place, row in read_rows(source, setting=setting, import_dir=import_dir):
        _check_row(row, place)
        empty = False
        yield row
    if empty:
        raise SettingsError(f"{setting}={source!r} gives no row; at least one is needed")


def _check_row(row: object, place: str) -> None:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise SettingsError(
            f"{place}: {str(row)[:80]!r} holds no list of messages; "
            '{"messages": [...], "tools": [...]} is allowed'
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise SettingsError(
                f"{place}: messages[{number}]={str(message)[:80]!r} has no role among "
                f"{', '.join(sorted(_ROLES))}"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise SettingsError(f"{place}: no assistant message, so there is nothing to learn from")
