"""A player, as its author wrote it: it is told what is left and says what it takes.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py --stones 9          # you begin

It knows an OpenAI-compatible endpoint and nothing else.
"""

import argparse
import asyncio

from openai import AsyncOpenAI
from verifier import Heap

SYSTEM_PROMPT = "Take 1 to 3. The last one wins."


async def choose(shown: str, client: AsyncOpenAI, model: str = "policy") -> str:
    """What a model answers to the state of the game."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": shown},
        ],
    )
    return completion.choices[0].message.content or ""


def ask_person(shown: str) -> str:
    """The person at the terminal moves."""
    return input(f"{shown}; you take? ")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Play against the policy.")
    parser.add_argument("--stones", type=int, default=9)
    parser.add_argument("--model", default="policy")
    options = parser.parse_args()
    heap = Heap(options.stones)
    async with AsyncOpenAI() as client:
        while heap.winner is None:
            if heap.mover == 0:
                heap.take(ask_person(heap.shown))
            else:
                answer = await choose(heap.shown, client, options.model)
                print(f"{heap.shown}; it takes {answer}")
                heap.take(answer)
    print("you win" if heap.winner == 0 else "it wins")


if __name__ == "__main__":
    asyncio.run(main())
