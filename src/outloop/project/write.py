"""Writes a folder that trains: settings, tasks, an agent, a verifier, and a policy."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.launch.model_folder import read_model_config
from outloop.project.size_defaults import BY_SIZE, RANDOM, SizeDefaults, defaults_for

_FILES = {
    "function": ("rollout.py", "tasks.jsonl", "verifier.py"),
    "program": ("agent.py", "tasks.jsonl", "verifier.py"),
}
_WAYS = {
    "function": 'rollout_function_path = "rollout:play"',
    "program": 'agent_command = "python agent.py --task {task_file}"\n'
    'verifier = "verifier:verify"\n'
    "# The agent runs in bubblewrap and sees its own files alone. Where bubblewrap cannot be had:\n"
    '# agent_sandbox = "none"  # it has your rights, and can read the run\'s keys\n'
    "# A process for each episode: a few at a time.\nmax_concurrent_episodes = 4",
}


def write_project(folder: Path, *, agent: str, policy: str) -> None:
    """Write the folder.

    Args:
        agent: function or program.
        policy: "random": a small one is made; otherwise model.path.

    Raises:
        SettingsError: the folder is there and not empty, or cannot be written; a policy's folder
            without a model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(
            f"folder={str(folder)!r} is there already and not empty; give the name of a new one"
        )
    templates = files("outloop.project").joinpath("files")
    model = "policy" if policy == "random" else policy
    is_folder = policy != "random" and Path(policy).is_dir()
    defaults, size = _defaults(policy)
    values = {
        # JSON's strings are TOML's.
        "NAME": json.dumps("".join(c if c.isalnum() or c in "._-" else "-" for c in folder.name)),
        "MODEL": json.dumps(str(Path(policy).absolute()) if is_folder else model),
        "WAY": _WAYS[agent],
        "TOKENS": str(defaults.max_context_tokens),
        "ANSWER": str(defaults.max_new_tokens),
        "RATE": f"{defaults.learning_rate:g}",
        "DTYPE": json.dumps(defaults.dtype),
        "SIZE": size,
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

        write_policy(folder / "policy", 0, (), Sizes(max_context_tokens=RANDOM.max_context_tokens))


def _defaults(policy: str) -> tuple[SizeDefaults, str]:
    """What a policy begins with, and in words of which size that is."""
    if policy == "random":
        return RANDOM, "a tiny model"
    try:
        config, source = read_model_config(Settings.model_validate({"model": {"path": policy}}))
        defaults, num_params = defaults_for(config, source=source)
    except SettingsError:
        if Path(policy).is_dir():
            raise
        # A repository of the hub, which may not be in reach yet.
        return BY_SIZE[-1], "a model whose size is not known here"
    return defaults, f"a model of {num_params / 1e6:,.0f} million parameters"
