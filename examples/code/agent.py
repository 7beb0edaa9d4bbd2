"""A coding agent, as its author wrote it: completes a function.

    export OPENAI_BASE_URL=... OPENAI_API_KEY=...
    python agent.py < function_with_docstring.py

It knows an OpenAI-compatible endpoint, nothing else; what it is given back it does not run.
"""

import asyncio
import sys

from openai import AsyncOpenAI

SYSTEM_PROMPT = "Complete the function. Answer with Python code only."


async def write_function(prompt: str, client: AsyncOpenAI, model: str = "policy") -> str:
    """What the model says: a whole function, or how the prompt goes on."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": prompt},
        ],
    )
    text = completion.choices[0].message.content or ""
    # Servers strip white space at the ends of an answer; a body needs its first indentation.
    is_whole = "def " in text or "```" in text
    return text if is_whole else "    " + text.lstrip()


async def main() -> None:
    async with AsyncOpenAI() as client:
        print(await write_function(sys.stdin.read(), client))


if __name__ == "__main__":
    asyncio.run(main())
