"""An agent that asks the model once.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "Is a fig an animal or a fruit?"

The question is all that the model is shown: its chat template has a system prompt of its own.
"""

import asyncio
import sys

import openai


async def solve(question: str, client: openai.AsyncOpenAI) -> str:
    """What the model says."""
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return answer.choices[0].message.content or ""


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        print(await solve(sys.argv[1], client))


if __name__ == "__main__":
    asyncio.run(main())
