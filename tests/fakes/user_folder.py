"""A user's folder for tests of whole processes: what is in it, and the command line in it.

Owns: a rollout function that random weights score on, and settings that name it. Does not own: what
a test changes of them. Invariant: `write` leaves a folder from which `outloop train` works.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROLLOUTS = '''
"""Digits score: a random policy differs within a group, so there is signal."""


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


def eval_tasks():
    return [{"question": f"hold {i}"} for i in range(16)]


async def play(task, episode):
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
    )
    text = answer.choices[0].message.content or ""
    return float(sum(character.isdigit() for character in text))
'''
BASE: dict[str, dict[str, Any]] = {
    "model": {
        "path": "model",
        "renderer": "qwen3",
        "renderer_options.enable_thinking": False,
        "max_context_tokens": 256,
    },
    "env": {"rollout_function_path": "rollouts:play", "tasks": "rollouts:tasks"},
    "sampling": {"max_new_tokens": 12},
    "buffer": {"group_size": 4},
    "trainer": {"learning_rate": 5e-3},
}


def settings_text(changes: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of the base with these sections merged in."""
    lines = []
    for section in {**BASE, **changes}:
        lines.append(f"[{section}]")
        for name, value in {**BASE.get(section, {}), **changes.get(section, {})}.items():
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def write(
    folder: Path, model: Path, changes: Mapping[str, Mapping[str, Any]], more_code: str = ""
) -> None:
    """Put settings, rollout functions and a link to the model there."""
    (folder / "run.toml").write_text(settings_text(changes))
    (folder / "rollouts.py").write_text(ROLLOUTS + more_code)
    (folder / "model").symlink_to(model)


def start(folder: Path, *arguments: str, log: Path | None = None) -> subprocess.Popen[str]:
    """The command line in the background; its output is one text, at the end of `log` if given."""
    with contextlib.ExitStack() as stack:
        sink = subprocess.PIPE if log is None else stack.enter_context(log.open("a"))
        return subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=folder,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def run(folder: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """The command line to its end. What it said is printed, and so shown with a failed test."""
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(answer.stdout, answer.stderr, sep="\n")
    return answer
