"""A coding agent, as its author wrote it: reads an issue and works on it by the tool `bash`.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    cd repository && python agent.py < issue.md

It knows an OpenAI-compatible endpoint and a function that runs a command, nothing else.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from openai import AsyncOpenAI

SYSTEM_PROMPT = "Fix the issue. Run commands with the tool bash; say DONE when it is fixed."
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the repository and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


async def fix(
    issue: str, client: AsyncOpenAI, run: Callable[[str], Awaitable[str]], max_turns: int = 8
) -> str:
    """Work until the model calls no tool; its last words."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": issue}]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=[BASH]
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                output = await run(json.loads(call.function.arguments)["command"])
            except (ValueError, KeyError, TypeError) as error:
                output = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    return ""


async def run_here(command: str) -> str:
    """A shell in this folder."""
    shell = await asyncio.create_subprocess_shell(command, stdout=-1, stderr=-2)
    output, _ = await shell.communicate()
    return output.decode(errors="replace")


async def main() -> None:
    async with AsyncOpenAI() as client:
        print(await fix(sys.stdin.read(), client, run_here))


if __name__ == "__main__":
    asyncio.run(main())
