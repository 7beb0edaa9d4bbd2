"""The policy and the tasks of chaos with real parts.

Owns: a policy of 0.1M random parameters, and a rollout function that it can score on. Does not own:
the settings of a run (whole, forked). Invariant: an episode is one short call.
"""

import subprocess
import sys
from pathlib import Path

ROLLOUTS = '''
def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


async def play(task, episode):
    """Length scores: a random policy differs within a group, so there is signal."""
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
    )
    text = answer.choices[0].message.content or ""
    return float(len(text))
'''


def make_model(folder: Path) -> None:
    """Write the policy's folder."""
    words = ("new-policy", "--out", str(folder), "--conversations", "tasks:conversations")
    subprocess.run(
        [sys.executable, "-m", "outloop.cli", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2] / "examples/calculator",
        timeout=300,
    )
