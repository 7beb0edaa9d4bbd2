"""A research agent, as its author wrote it: answers a question by searching a corpus.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py "Which function computes the median of numbers?"

It knows an OpenAI-compatible endpoint and a function that searches, nothing else.
"""

import asyncio
import json
import sys
from collections.abc import Callable

from openai import AsyncOpenAI

MAX_TURNS = 4
SYSTEM_PROMPT = "Search, then answer with the full name alone."
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find documents by words",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


async def answer(question: str, client: AsyncOpenAI, search: Callable[[str], str]) -> str:
    """Search as often as the model likes, at most MAX_TURNS times; empty when it gave no answer."""
    messages: list = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=[SEARCH]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return (message.content or "").strip()
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                found = search(str(json.loads(call.function.arguments)["query"]))
            except (ValueError, KeyError, TypeError) as error:
                found = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return ""


async def main() -> None:
    from tasks import Corpus

    async with AsyncOpenAI() as client:
        print(await answer(sys.argv[1], client, Corpus().search))


if __name__ == "__main__":
    asyncio.run(main())
