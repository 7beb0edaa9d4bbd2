"""Plays an episode by starting agent.py as it is, and scores the digits that it prints."""

import asyncio
import os
import sys
from pathlib import Path

AGENT = Path(__file__).with_name("agent.py")


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


async def play(task, episode):
    """A random policy differs within a group, so there is signal."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(AGENT),
        task.payload["question"],
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_API_KEY": episode.api_key},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"agent.py ended with exit code {process.returncode}")
    return float(sum(character.isdigit() for character in output.decode()))
