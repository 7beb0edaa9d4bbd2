"""Writes a folder that trains: settings, tasks, an agent, a verifier, and a policy."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from outloop.buffer.errors import SettingsError

_FILES = {
    "function": ("rollout.py", "tasks.jsonl", "verifier.py"),
    "program": ("agent.py", "tasks.jsonl", "verifier.py"),
}
_WAYS = {
    "function": 'rollout_function_path = "rollout:play"',
    "program": 'agent_command = "python agent.py --task {task_file}"\n'
    'verifier = "verifier:verify"\n'
    "# A process for each episode: a few at a time.\nmax_concurrent_episodes = 4",
}


def write_project(folder: Path, *, agent: str, policy: str) -> None:
    """Write the folder.

    Args:
        agent: function or program.
        policy: "random": a small one is made; otherwise model.path.

    Raises:
        SettingsError: the folder is there and not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(
            f"folder={str(folder)!r} is there already and not empty; give the name of a new one"
        )
    templates = files("outloop.project").joinpath("files")
    model = "policy" if policy == "random" else policy
    is_folder = policy != "random" and Path(policy).is_dir()
    values = {
        # JSON's strings are TOML's.
        "NAME": json.dumps("".join(c if c.isalnum() or c in "._-" else "-" for c in folder.name)),
        "MODEL": json.dumps(str(Path(policy).absolute()) if is_folder else model),
        "WAY": _WAYS[agent],
        "TOKENS": "512" if policy == "random" else "2048",
        "ANSWER": "16" if policy == "random" else "256",
        "RATE": "2e-3" if policy == "random" else "1e-6",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES[agent]:
            (folder / name).write_text(templates.joinpath(name).read_text())
        text = templates.joinpath("run.toml").read_text()
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        (folder / "run.toml").write_text(text)
    except OSError as error:
        raise SettingsError(
            f"folder={str(folder)!r} cannot be written ({error}); give one that you may write"
        ) from error
    if policy == "random":
        from outloop.engine.models.random_init import Sizes, write_policy

        write_policy(folder / "policy", 0, (), Sizes())
