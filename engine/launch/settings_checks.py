"""Refusals of settings before anything of a run is started."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

from outloop.buffer.chat_format import chat_format_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.model_ids import read_vocabulary, refuse_ids_without_rows
from outloop.buffer.run import HIDES_ALL, make_run_folder, read_secret
from outloop.buffer.settings import Settings
from outloop.buffer.tls import check_certificate
from outloop.buffer.trackers.tracker import check_tracker
from outloop.buffer.trajectories.trained import keeps_trajectories
from outloop.buffer.user_code import nearest
from outloop.engine.launch.nccl_release import check_nccl
from outloop.engine.publish.handed_over_memory import refuse_servers_elsewhere
from outloop.engine.serve.sglang.arguments import check_arguments
from outloop.engine.serve.sglang.gpu_environment import refuse_torch_without_cuda

_MODEL_FILES = {
    "config.json": "config.json",
    "tokenizer.json": "tokenizer.json",
    "model.safetensors": "model*.safetensors",
}
"""What a model folder must hold: the name for the user, and the pattern that finds it."""


def check_before_start(settings: Settings, *, plays: bool = True) -> None:
    """Refuse what can be refused before any model is loaded, then make the run's folder.

    That is: the model's folder and limits, SGLang's arguments, rollout function, agent command,
    verifier and tasks where they are given. The user's code is imported in a process of its own, so
    that it cannot disturb the launcher.

    Args:
        plays: as `check_settings`.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    check_settings(settings, plays=plays)
    folder = settings.run.dir / settings.run.name
    _refuse_other_folder(folder)
    make_run_folder(settings, folder)


def _refuse_other_folder(folder: Path) -> None:
    """Refuse a folder that holds files and is no run's: they would be hidden and mixed up."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    mark = folder / ".gitignore"
    is_run = "run.json" in names or (mark.is_file() and mark.read_text() == HIDES_ALL)
    # A disk for the run's Redis may be mounted before the run begins.
    is_run = is_run or names == ["redis"]
    if names and not is_run:
        raise SettingsError(
            f"run.dir={str(folder.parent)!r} with run.name={folder.name!r} is a folder with other "
            f"files ({', '.join(names[:3])}); choose another run.name"
        )


def check_settings(settings: Settings, *, plays: bool = True) -> None:
    """The refusals of `check_before_start`; makes no folder.

    Args:
        plays: False for a run without runners of its own: it needs neither a rollout function nor
            an agent command.

    Raises:
        SettingsError: with the sentence that says what to change.
    """
    _check_watchers(settings)
    _check_files(settings)
    _check_variables(settings)
    for section, endpoint in (("router", settings.router), ("server", settings.server)):
        check_certificate(section, endpoint, ca_file=settings.run.tls_ca_file)
    _check_model(settings)
    if settings.server.num_servers or settings.server.urls:
        if settings.server.kind == "sglang" and settings.server.num_servers:
            refuse_torch_without_cuda(settings)
            check_arguments(settings)
            check_nccl(settings)
        refuse_servers_elsewhere(settings)
        env = settings.env
        if plays or env.rollout_function_path is not None or env.agent_command is not None:
            _check_environment(settings)


def _check_watchers(settings: Settings) -> None:
    """What would only be found out while the run goes on, without stopping it."""
    trackers = settings.telemetry.trackers
    for name in trackers:
        check_tracker(name)
    if "otlp" in trackers and not keeps_trajectories(settings.trajectories):
        raise SettingsError(
            'telemetry.trackers="otlp" makes spans of kept trajectories, and none are kept; set '
            "trajectories.enabled = true, and install outloop[view]"
        )
    if settings.alarms.enabled and settings.alarms.webhook_file is not None:
        read_secret(settings.alarms.webhook_file, "alarms.webhook_file")


def _check_files(settings: Settings) -> None:
    """Files and folders that settings name, other than model.path."""
    trainer, server, buffer = settings.trainer, settings.server, settings.buffer
    teacher = trainer.teacher
    named = {
        "trainer.reference_path": trainer.reference_path,
        "trainer.critic.path": trainer.critic.path,
        "trainer.teacher.path": teacher.path if teacher else None,
        "trainer.teacher.api_key_file": teacher.api_key_file if teacher else None,
        "server.api_key_file": server.api_key_file,
        "server.sglang_python": server.sglang_python,
        "buffer.redis_password_file": buffer.redis_password_file,
        "buffer.redis_ca_file": buffer.redis_ca_file,
        "buffer.redis_cert_file": buffer.redis_cert_file,
        "buffer.redis_cert_key_file": buffer.redis_cert_key_file,
    }
    for name, path in named.items():
        if path is not None and not path.exists():
            others = [other.name for other in path.absolute().parent.glob("*")]
            raise SettingsError(
                f"{name}={str(path)!r} does not exist; {nearest(path.name, others)}give the path "
                "of what is there"
            )
    for path in settings.env.agent_read_only:
        if not path.exists():
            raise SettingsError(
                f"env.agent_read_only={str(path)!r} does not exist; leave it out, or name a folder"
            )


def _check_variables(settings: Settings) -> None:
    """Variables of the environment that settings name, which parts have from here."""
    named = {
        f"router.upstreams.{name}.api_key_env": upstream.api_key_env
        for name, upstream in settings.router.upstreams.items()
    }
    if settings.env.num_runners:
        named |= {
            f"env.agent_environment[{number}]": variable
            for number, variable in enumerate(settings.env.agent_environment)
        }
    for name, variable in named.items():
        if variable is not None and variable not in os.environ:
            raise SettingsError(
                f"{name}={variable!r}: the environment has no such variable; "
                f"{nearest(variable, os.environ)}set it where the command is started"
            )


def _check_model(settings: Settings) -> None:
    """Files of the model, and limits that contradict it or each other."""
    folder, limit = settings.model.path, settings.model.max_context_tokens
    if not folder.is_dir():
        near = difflib.get_close_matches(
            folder.name, [path.name for path in folder.parent.glob("*/")], n=1
        )
        hint = f"did you mean {str(folder.parent / near[0])!r}? " if near else ""
        raise SettingsError(
            f"model.path={str(folder)!r} does not exist; {hint}give a Hugging Face folder, or a "
            'repository of their hub such as "Qwen/Qwen3-0.6B", or make a small one with '
            "`outloop new-policy --out DIR`"
        )
    for name, pattern in _MODEL_FILES.items():
        if not any(path.is_file() for path in folder.glob(pattern)):
            raise SettingsError(
                f"model.path={str(folder)!r} holds no {name}; "
                "give a Hugging Face folder with config.json, tokenizer.json and model.safetensors"
            )
    refuse_ids_without_rows(folder, read_vocabulary(folder))
    if settings.model.renderer == "auto":
        chat_format_of(folder)
    known = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if isinstance(known, int) and limit > known:
        raise SettingsError(
            f"model.max_context_tokens={limit} exceeds max_position_embeddings={known} of "
            f"{folder / 'config.json'}: the model knows no later position. Lower the setting, or "
            "take a model with a longer context (`outloop new-policy --max-context-tokens`)"
        )
    if settings.sampling.max_new_tokens >= limit:
        raise SettingsError(
            f"sampling.max_new_tokens={settings.sampling.max_new_tokens} with "
            f"model.max_context_tokens={limit} leaves no room for a prompt; lower the first or "
            "raise the second"
        )
    trainer = settings.trainer
    if trainer.mode == "rl" and limit > trainer.max_microbatch_tokens:
        raise SettingsError(
            f"model.max_context_tokens={limit} exceeds trainer.max_microbatch_tokens="
            f"{trainer.max_microbatch_tokens}: an episode could not be trained. Raise the second "
            "or lower the first."
        )


def _check_environment(settings: Settings) -> None:
    """What the user wrote: code, command and tasks."""
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "outloop.envs.runner.preflight", settings.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if answer.returncode != 0:
        sentence = answer.stderr.strip().splitlines()
        raise SettingsError(sentence[-1] if sentence else "the rollout function check failed")
