"""The same, with the agent as a program of its own: any language would do.

A process per episode costs more than the episode itself; `rollout.py` is the fast way.
"""

import asyncio
import os
import sys
from pathlib import Path

from verifier import score

AGENT = Path(__file__).with_name("agent.py")


async def play(task, episode):
    question = task.payload["question"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(AGENT),
        question,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **episode.environ()},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"agent.py ended with exit code {process.returncode}")
    return score(question, output.decode())
