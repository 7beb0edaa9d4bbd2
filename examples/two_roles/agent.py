"""Two agents, as their author wrote them: one describes a number without naming it, one guesses.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py 7

They know an OpenAI-compatible endpoint, nothing else, and share its model.
"""

import asyncio
import sys

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

DESCRIBE = "Describe the number without writing it."
GUESS = "Which number from 0 to 9 is described?"


async def ask(role: str, text: str, client: AsyncOpenAI) -> ChatCompletion:
    """What one role answers, in a conversation of its own."""
    messages = [{"role": "system", "content": role}, {"role": "user", "content": text}]
    return await client.chat.completions.create(model="policy", messages=messages)


def text_of(answer: ChatCompletion) -> str:
    """The words of an answer."""
    return (answer.choices[0].message.content or "").strip()


async def main() -> None:
    async with AsyncOpenAI() as client:
        description = await ask(DESCRIBE, sys.argv[1], client)
        print(text_of(description))
        print(text_of(await ask(GUESS, text_of(description) or "?", client)))


if __name__ == "__main__":
    asyncio.run(main())
