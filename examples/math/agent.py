"""An arithmetic agent, as its author wrote it: one question, one answer.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py "4 - 1 - 7 ="

It knows an OpenAI-compatible endpoint, nothing else.
"""

import argparse
import asyncio

from openai import AsyncOpenAI

SYSTEM_PROMPT = "Answer in a \\boxed{}."


async def solve(question: str, client: AsyncOpenAI, model: str = "policy") -> str:
    """What the model says."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
    )
    return completion.choices[0].message.content or ""


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answer an arithmetic problem.")
    parser.add_argument("question")
    parser.add_argument("--model", default="policy")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        print(await solve(options.question, client, options.model))


if __name__ == "__main__":
    asyncio.run(main())
