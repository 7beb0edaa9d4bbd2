"""Reads and checks conversations for SFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.envs.tasks.task_files import read_rows, refuse_unstorable

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def load_conversations(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the rows {"messages", "tools"?, "metadata"?} of env.conversations.

    For a reward model also rows {"chosen", "rejected", "tools"?}, two conversations each, and
    {"messages", "reward", "tools"?}; what they are worth is in their metadata.

    Raises:
        SettingsError: no source, no row, or a row of another shape (named by line or index), or one
            that this run could not use.
    """
    source, setting = settings.env.conversations, "env.conversations"
    if source is None:
        raise SettingsError(
            'trainer.mode="sft" needs env.conversations; give a JSONL file, '
            "or package.module:function that returns {messages, tools} rows"
        )
    wants_rewards = settings.trainer.reward_model is not None
    for row in read_conversations(source, setting=setting, import_dir=settings.env.import_dir):
        has_reward = "reward" in row.get("metadata", {})
        if wants_rewards != has_reward:
            raise SettingsError(
                f"{setting}={source!r} gives a row {'without' if wants_rewards else 'with'} a "
                "preference or reward, and trainer.reward_model="
                f"{settings.trainer.reward_model!r}; a reward model takes rows "
                '{"chosen", "rejected"} or {"messages", "reward"}, SFT takes {"messages"}'
            )
        yield row


def read_conversations(
    source: str, *, setting: str, import_dir: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield checked rows of a JSONL file or of what package.module:function returns.

    Raises:
        SettingsError: no row, or a row of another shape (named by line or index).
    """
    empty = True
    for place, row in read_rows(source, setting=setting, import_dir=import_dir):
        for conversation in _conversations_of(row, place):
            _check_row(conversation, place)
            refuse_unstorable(conversation, place)
            empty = False
            yield conversation
    if empty:
        raise SettingsError(f"{setting}={source!r} gives no row; at least one is needed")


def _conversations_of(row: Any, place: str) -> Iterator[Any]:
    """The row, or the two conversations of a pair; a reward as metadata."""
    if not isinstance(row, dict):
        yield row
        return
    metadata = dict(row.get("metadata", {}))
    common = {key: row[key] for key in ("tools",) if key in row}
    if "chosen" in row or "rejected" in row:
        for key, reward in (("chosen", "1"), ("rejected", "0")):
            of_one = metadata | {"pair": place, "reward": reward}
            yield {"messages": row.get(key)} | common | {"metadata": of_one}
    elif "reward" in row:
        reward = row["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise SettingsError(f"{place}: reward={reward!r} is no number")
        yield (
            {"messages": row.get("messages")}
            | common
            | {"metadata": metadata | {"reward": str(reward)}}
        )
    else:
        yield row


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
