"""A guessing agent, as its author wrote it: it plays against whoever says higher or lower.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py --low 10 --high 40          # you think of a number and answer

It knows an OpenAI-compatible endpoint and the rules of the game, nothing else.
"""

import argparse
import asyncio
from collections.abc import Callable

from openai import AsyncOpenAI

SYSTEM_PROMPT = "Find my number. Answer with a guess."


async def play_game(
    opening: str,
    host: Callable[[str], str | None],
    client: AsyncOpenAI,
    model: str = "policy",
) -> list[str]:
    """Guess until `host`, which is told each guess and answers it, answers None; the guesses."""
    messages: list = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": opening},
    ]
    guesses: list[str] = []
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages)
        guess = completion.choices[0].message.content or ""
        guesses.append(guess)
        answer = host(guess)
        if answer is None:
            return guesses
        messages += [
            {"role": "assistant", "content": guess},
            {"role": "user", "content": answer},
        ]


def ask_person(guess: str) -> str | None:
    """The person at the terminal hosts the game."""
    answer = input(f"{guess}? (higher, lower, or Enter for yes) ").strip()
    return answer or None


async def main() -> None:
    parser = argparse.ArgumentParser(description="Guess a number that you think of.")
    parser.add_argument("--low", type=int, required=True)
    parser.add_argument("--high", type=int, required=True)
    parser.add_argument("--model", default="policy")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        opening = f"{options.low} to {options.high}"
        guesses = await play_game(opening, ask_person, client, options.model)
    print(f"found in {len(guesses)} guesses")


if __name__ == "__main__":
    asyncio.run(main())
