"""The tool `bash`: a policy's commands in a session of a sandbox, one after another."""

from __future__ import annotations

import json
import time
from asyncio import timeout
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Limits, RunResult, Session

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the working folder and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_MAX_SHOWN_CHARS = 4000


async def run_bash(
    session: Session,
    command: str,
    limits: Limits,
    files: Mapping[str, bytes | str] | None = None,
    collect: Sequence[str] = (),
) -> RunResult:
    """Run `command` in the session's kept folder."""
    return await session.run(
        files or {},
        ("bash", "-c", command),
        limits,
        keep_files=True,
        collect=collect,
        environ={"HOME": "/work", "PATH": "/usr/local/bin:/usr/bin:/bin"},
    )


async def answer_call(session: Session, name: str, arguments: str, limits: Limits) -> str:
    """What a call of a tool shows the policy, whatever it wrote; never raises for that."""
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if name != "bash" or not isinstance(command, str):
        return 'Error: the only tool is bash, with the arguments {"command": "..."}'
    return shown(await run_bash(session, command, limits))


def shown(result: RunResult) -> str:
    """A command's output for the policy: at most 4,000 characters, and how it ended."""
    text = (result.stdout + result.stderr).decode(errors="replace")
    if len(text) > _MAX_SHOWN_CHARS:
        text = f"{text[:_MAX_SHOWN_CHARS]}\n[{len(text) - _MAX_SHOWN_CHARS} more characters]"
    if result.ended != "exited":
        return f"{text}\n[ended by {result.ended}]"
    return text if result.is_ok else f"{text}\n[exit code {result.exit_code}]"


async def work(
    episode: Episode,
    session: Session,
    instruction: str,
    limits: Limits,
    *,
    max_turns: int,
    timeout_s: float,
) -> None:
    """Let the policy run commands until it stops, or its time or turns are used up."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    end = time.monotonic() + timeout_s
    for _ in range(max_turns):
        try:
            async with timeout(end - time.monotonic()):
                answer = await episode.client.chat.completions.create(
                    model="policy",
                    messages=messages,  # type: ignore[arg-type]  # plain dictionaries
                    tools=[BASH],  # type: ignore[list-item]
                )
        except TimeoutError:
            return
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            left_s = end - time.monotonic()
            if call.type != "function" or left_s <= 0:
                return
            bounds = replace(limits, wall_s=min(limits.wall_s, left_s))
            text = await answer_call(session, call.function.name, call.function.arguments, bounds)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
