"""The tool `bash`: a policy's commands in a session of a sandbox, one after another.

They are inputs of one shell: what one sets, the next ones find.
"""

from __future__ import annotations

import json
import time
from asyncio import timeout
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Interpreter, Limits, RunResult, Session

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command and return its output. Variables, the working folder "
        "and background processes are kept from call to call.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
PATH = "/usr/local/bin:/usr/bin:/bin"
_ENVIRON = {"HOME": "/work", "PATH": PATH}
_MAX_SHOWN_CHARS = 4000


def open_shell(
    session: Session, limits: Limits, environ: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Interpreter]:
    """A shell of the session for a policy's commands; it ends with the context."""
    return session.interpreter("bash", limits, environ={**_ENVIRON, **(environ or {})})


async def answer_call(shell: Interpreter, name: str, arguments: str, wall_s: float) -> str:
    """What a call of a tool shows the policy, whatever it wrote; never raises for that."""
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if name != "bash" or not isinstance(command, str):
        return 'Error: the only tool is bash, with the arguments {"command": "..."}'
    return shown(await shell.run(command, wall_s=wall_s))


def shown(result: RunResult) -> str:
    """A command's output for the policy: at most 4,000 characters, how it ended, and whether the
    shell was begun again."""
    text = (result.stdout + result.stderr).decode(errors="replace")
    if len(text) > _MAX_SHOWN_CHARS:
        text = f"{text[:_MAX_SHOWN_CHARS]}\n[{len(text) - _MAX_SHOWN_CHARS} more characters]"
    if result.ended != "exited":
        text = f"{text}\n[ended by {result.ended}]"
    elif not result.is_ok:
        text = f"{text}\n[exit code {result.exit_code}]"
    if result.lost_state:
        files = "changes of files too" if result.ended == "killed" else "files are kept"
        text += f"\n[the shell was started again: what it held is gone; {files}]"
    return text


async def work(
    episode: Episode,
    session: Session,
    instruction: str,
    limits: Limits,
    *,
    max_turns: int,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Let the policy run commands until it stops, or its time or turns are used up."""
    async with open_shell(session, limits, environ) as shell:
        await _work_in(shell, episode, instruction, limits.wall_s, max_turns, timeout_s)


async def _work_in(
    shell: Interpreter,
    episode: Episode,
    instruction: str,
    wall_s: float,
    max_turns: int,
    timeout_s: float,
) -> None:
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
            text = await answer_call(
                shell, call.function.name, call.function.arguments, min(wall_s, left_s)
            )
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
