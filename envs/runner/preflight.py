"""`python -m outloop.envs.runner.preflight SETTINGS_JSON`: checks the user's code and tasks.

Exits with 0 or 2; the last line of stderr is the sentence to show. It starts nothing. It runs as a
process of its own, so that importing the user's code does not affect other parts.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.settings import Settings, build_settings
from outloop.buffer.settings.env import EnvSettings
from outloop.buffer.trackers.tracker import factory_of
from outloop.buffer.user_code import nearest
from outloop.envs.command_agent.agent import CommandAgent, load_player
from outloop.envs.command_agent.confinement import hidden_paths
from outloop.envs.tasks.sft_conversations import load_conversations
from outloop.envs.tasks.task_files import load_run_tasks


def check_rollout(settings: Settings) -> None:
    """Load everything that the runner will load.

    Raises:
        SettingsError: one line that says what to change.
    """
    for tracker in settings.telemetry.trackers:
        factory_of(tracker, settings.env.import_dir)
    if settings.trainer.mode == "sft":
        for _ in load_conversations(settings):
            pass
        return
    env = settings.env
    if env.num_runners == 0 and env.rollout_function_path is None and env.agent_command is None:
        return
    hidden = hidden_paths(settings)
    load_player(env, hidden)
    found = load_run_tasks(settings)
    if env.agent_command is not None:
        CommandAgent(env, hidden).check_tasks(found.tasks + found.eval_tasks)
    _check_context_key(settings, [task.payload for task in found.tasks])
    _check_sandboxes(env)


def _check_context_key(settings: Settings, payloads: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a key under which no task has a text for the teacher."""
    teacher = settings.trainer.teacher
    key = None if teacher is None else teacher.context_key
    if key is None or not payloads or any(key in payload for payload in payloads):
        return
    known = sorted({name for payload in payloads for name in payload})
    raise SettingsError(
        f"trainer.teacher.context_key={key!r}: no task has such a field; {nearest(key, known)}"
        f"tasks have {', '.join(known)}"
    )


def _check_sandboxes(env: EnvSettings) -> None:
    """Open the sandbox of each verifier of ours that the user's modules hold."""
    paths = (
        ("env.rollout_function_path", env.rollout_function_path),
        ("env.verifier", env.verifier),
    )
    for setting, path in paths:
        # A verifier may be a command, which is no module.
        module = sys.modules.get((path or "").partition(":")[0])
        for value in list(vars(module).values()) if module else ():
            # Of the class: an object of the user's may have attributes of any name.
            if not inspect.iscoroutinefunction(getattr(type(value), "check_sandbox", None)):
                continue
            named = f"{setting}={path!r}: {type(value).__name__}"
            try:
                asyncio.run(value.check_sandbox())
            except (SettingsError, EnvironmentFailure) as error:
                raise SettingsError(f"{named}: its sandbox cannot be used here: {error}") from error


def main(arguments: list[str]) -> int:
    """Check the settings given as JSON; a sentence goes to stderr when they are wrong."""
    try:
        check_rollout(build_settings(json.loads(arguments[0]), source="settings"))
    except SettingsError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
