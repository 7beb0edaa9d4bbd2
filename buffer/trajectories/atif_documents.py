"""Archived episodes as ATIF documents (Agent Trajectory Interchange Format, version 1.8), and back.

A document has the conversation for other viewers, the token ids and logprobs in the format's own
fields, and what the format does not know (versions, sampling, loss spans, rewards) under
`extra.outloop`, so that reading a written document gives the same trajectory bit by bit.
Documents of others have no versions: they are read as conversations, for supervised training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import atif
import msgspec
from pydantic import ValidationError

from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Episode, Trajectory, Turn, check_turns, facts_of, turn_with
from outloop.buffer.trajectories.query import query
from outloop.buffer.trajectories.reading import read_trajectories
from outloop.buffer.whole_file import whole_file

SCHEMA_VERSION = "ATIF-v1.8"
OWN = "outloop"
"""Key of what is ours in `extra`."""
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|$)", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)
_STOP = re.compile(r"<\|[^|<>]*\|>\s*$")


def write_documents(folder: Path, to: Path, episode_ids: Collection[str]) -> int:
    """Write a file `EPISODE_ID.json` for each of `episode_ids`; how many they are.

    Raises:
        SettingsError: `to` cannot be written.
    """
    texts: dict[str, tuple[str, str]] = {}
    sql = "SELECT turn_id, episode_id, prompt_text, output_text FROM turns"
    for row in query(folder, sql):
        if row["episode_id"] in episode_ids:
            texts[f"{row['episode_id']} {row['turn_id']}"] = (
                row["prompt_text"],
                row["output_text"],
            )
    number = 0
    try:
        to.mkdir(parents=True, exist_ok=True)
        for trajectory in read_trajectories(folder, episode_ids):
            document = document_of(trajectory, texts)
            text = json.dumps(document.to_json_dict(), ensure_ascii=False)
            (to / f"{trajectory.episode.episode_id}.json").write_text(text + "\n")
            number += 1
    except OSError as error:
        raise SettingsError(f"path={str(to)!r} cannot be written: {error}") from error
    return number


def document_of(trajectory: Trajectory, texts: dict[str, tuple[str, str]]) -> atif.Trajectory:
    """One episode: its first branch, and its other branches as embedded trajectories.

    Args:
        texts: "EPISODE TURN" -> prompt and output as text.
    """
    episode = trajectory.episode
    order = {turn.turn_id: index for index, turn in enumerate(trajectory.turns)}
    shown: set[str] = set()
    branches = []
    for branch in trajectory.branches():
        steps: list[atif.Step] = []
        prompt: list[int] = []
        for turn in branch:
            is_copy = turn.turn_id in shown
            shown.add(turn.turn_id)
            prompt += turn.prompt_ids.tolist()
            text = texts.get(f"{episode.episode_id} {turn.turn_id}", ("", ""))
            _add_prompt(steps, text[0], is_copy)
            steps.append(_agent_step(turn, order[turn.turn_id], text[1], list(prompt), is_copy))
            prompt += turn.output_ids.tolist()
        branches.append([step.model_copy(update={"step_id": i}) for i, step in enumerate(steps, 1)])
    agent = atif.Agent(name="agent", version="unknown", model_name="policy")
    first, *others = branches or [[]]
    reward = episode.reward
    return atif.Trajectory(
        schema_version=SCHEMA_VERSION,
        session_id=episode.group_id or episode.episode_id,
        trajectory_id=episode.episode_id,
        agent=agent,
        steps=first,
        final_metrics=atif.FinalMetrics(
            total_prompt_tokens=sum(len(turn.prompt_ids) for turn in trajectory.turns),
            total_completion_tokens=sum(len(turn.output_ids) for turn in trajectory.turns),
            total_steps=len(first),
            extra=None if reward is None else {"reward": reward.value, **reward.components},
        ),
        subagent_trajectories=[
            atif.Trajectory(
                schema_version=SCHEMA_VERSION,
                trajectory_id=f"{episode.episode_id}-branch-{index}",
                agent=agent,
                steps=steps,
            )
            for index, steps in enumerate(others, 1)
        ]
        or None,
        extra={OWN: {"episode": msgspec.to_builtins(episode)}},
    )


def _add_prompt(steps: list[atif.Step], text: str, is_copy: bool) -> None:
    """The messages that a turn was asked with after its parent's."""
    found = [(m[1], m[2]) for m in _CHATML.finditer(text) if m[3] or m[1] != "assistant"]
    if not found and text.strip():
        found = [("user", text)]
    for role, content in found:
        results = _TOOL_RESPONSE.findall(content) if role == "user" else []
        if role == "tool":
            results = [content]
        if results and steps and steps[-1].source == "agent":
            observed = [atif.ObservationResult(content=result) for result in results]
            before = steps[-1].observation
            observed = [*(before.results if before else ()), *observed]
            steps[-1] = steps[-1].model_copy(
                update={"observation": atif.Observation(results=observed)}
            )
            continue
        source: Any = {"system": "system", "assistant": "agent"}.get(role, "user")
        steps.append(
            atif.Step(
                step_id=1,
                source=source,
                message=content,
                # An answer that the client wrote into the history was sampled by nobody.
                llm_call_count=0 if source == "agent" else None,
                is_copied_context=True if is_copy or source == "agent" else None,
            )
        )


def _agent_step(
    turn: Turn, index: int, text: str, prompt_ids: list[int], is_copy: bool
) -> atif.Step:
    text = _STOP.sub("", text)
    thought = _THOUGHT.match(text)
    message = text[thought.end() :] if thought else text
    calls = []
    for number, match in enumerate(_TOOL_CALL.finditer(message)):
        try:
            asked = json.loads(match[1])
            calls.append(
                atif.ToolCall(
                    tool_call_id=f"{turn.turn_id}-{number}",
                    function_name=asked["name"],
                    arguments=asked.get("arguments") or {},
                )
            )
        except (ValueError, KeyError, TypeError):
            # What is no call stays in the message.
            continue
    if calls:
        message = _TOOL_CALL.sub("", message).strip()
    logprobs = turn.behavior_logprobs
    facts = facts_of(turn)
    del facts["episode_id"]
    return atif.Step(
        step_id=1,
        timestamp=datetime.fromtimestamp(turn.finished_at, UTC).isoformat(),
        source="agent",
        message=message,
        reasoning_content=thought[1].strip() if thought else None,
        tool_calls=calls or None,
        metrics=atif.Metrics(
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(turn.output_ids),
            prompt_token_ids=prompt_ids,
            completion_token_ids=turn.output_ids.tolist(),
            logprobs=None if logprobs is None else logprobs.tolist(),
        ),
        extra={OWN: {"index": index} | facts},
        llm_call_count=1,
        is_copied_context=True if is_copy else None,
    )


def read_documents(folder: Path) -> Iterator[tuple[Path, atif.Trajectory]]:
    """The documents in the files `*.json` of a folder, by name.

    Raises:
        SettingsError: there is none, or one cannot be read or is no ATIF document.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise SettingsError(f"folder={str(folder)!r} holds no *.json; give a folder with documents")
    for path in paths:
        try:
            yield path, atif.Trajectory.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise SettingsError(f"{path}: no ATIF document: {str(error)[:500]}") from error


def import_trajectories(folder: Path, to: Path) -> int:
    """Write the documents of a folder as lines of trajectories; how many they are.

    Raises:
        SettingsError: a document was not written by outloop, or its ids contradict each other.
    """
    rows = []
    for path, document in read_documents(folder):
        try:
            rows.append(format_line(trajectory_of(document)))
        except RecordError as error:
            raise SettingsError(f"{path}: {error}") from error
    _write(to, rows)
    return len(rows)


def import_conversations(folder: Path, to: Path) -> int:
    """Write the documents of a folder as lines of conversations, for `env.conversations`; how many.

    Raises:
        SettingsError: see read_documents.
    """
    rows = [
        json.dumps(conversation_of(document), ensure_ascii=False).encode() + b"\n"
        for _, document in read_documents(folder)
    ]
    _write(to, rows)
    return len(rows)


def trajectory_of(document: atif.Trajectory) -> Trajectory:
    """The trajectory that `document_of` made a document of.

    Raises:
        RecordError: it has no versions and sampling, as documents of others, or was changed.
    """
    own = (document.extra or {}).get(OWN)
    if not isinstance(own, dict):
        raise RecordError(
            "it has token ids at most, and nothing of versions and sampling, without which tokens "
            "cannot be trained by RL; read it as a conversation with --conversations"
        )
    try:
        episode = msgspec.convert(own.get("episode"), Episode)
        found: dict[int, Turn] = {}
        for one in (document, *(document.subagent_trajectories or ())):
            ids: list[int] = []
            for step in one.steps:
                stored = (step.extra or {}).get(OWN)
                if step.metrics is None or not isinstance(stored, dict):
                    continue
                turn = _turn(episode.episode_id, stored, step.metrics, ids)
                ids = [*(step.metrics.prompt_token_ids or ()), *turn.output_ids.tolist()]
                if not step.is_copied_context:
                    found[stored["index"]] = turn
    except (msgspec.ValidationError, KeyError, TypeError, OverflowError) as error:
        raise RecordError(f"extra.{OWN} is not as it was written: {error!r}") from error
    turns = tuple(found[index] for index in sorted(found))
    check_turns(episode.episode_id, turns)
    return Trajectory(episode=episode, turns=turns)


def _turn(
    episode_id: str, stored: dict[str, Any], metrics: atif.Metrics, before: Sequence[int]
) -> Turn:
    prompt = list(metrics.prompt_token_ids or ())
    if prompt[: len(before)] != list(before):
        raise RecordError(
            f"turn {stored['turn_id']}: its prompt_token_ids do not go on from the step before"
        )
    return turn_with(
        stored | {"episode_id": episode_id},
        prompt_ids=prompt[len(before) :],
        output_ids=metrics.completion_token_ids or (),
        behavior_logprobs=metrics.logprobs,
    )


def conversation_of(document: atif.Trajectory) -> dict[str, Any]:
    """The row {"messages", "tools", "metadata"} of a document: its steps as OpenAI's messages."""
    messages: list[dict[str, Any]] = []
    for step in document.steps:
        text = _text(step.message)
        if step.source != "agent":
            messages.append({"role": step.source, "content": text})
            continue
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if step.reasoning_content:
            message["reasoning_content"] = step.reasoning_content
        if step.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.tool_call_id,
                    "type": "function",
                    "function": {
                        "name": call.function_name,
                        "arguments": json.dumps(call.arguments),
                    },
                }
                for call in step.tool_calls
            ]
        messages.append(message)
        for number, result in enumerate(step.observation.results if step.observation else ()):
            calls = step.tool_calls or []
            called = result.source_call_id or (
                calls[number].tool_call_id if number < len(calls) else None
            )
            content = _text(result.content or "")
            answered = {"role": "tool", "tool_call_id": called, "content": content}
            messages.append(answered if called else {"role": "user", "content": content})
    return {
        "messages": messages,
        "tools": document.agent.tool_definitions or [],
        "metadata": {"atif": document.trajectory_id or document.session_id or ""},
    }


def _text(content: str | list[atif.ContentPart]) -> str:
    if isinstance(content, str):
        return content
    if any(part.type != "text" for part in content):
        raise SettingsError("an image or audio in a document; text alone is read")
    return "".join(part.text or "" for part in content)


def _write(path: Path, rows: Sequence[bytes]) -> None:
    try:
        with whole_file(path) as writing:
            writing.write_bytes(b"".join(rows))
    except OSError as error:
        raise SettingsError(f"path={str(path)!r} cannot be written: {error}") from error
