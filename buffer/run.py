"""The handle by which a process joins a run.

Owns: the files `settings.json`, `run.json` and `secrets.json` in the run folder. Does not own:
what is in Redis. Invariant: `settings.json` holds no secret; `secrets.json` is readable by its
owner only; a process whose settings have another digest than the run's cannot load it.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """The run's secrets; episode keys are derived from `episode_secret`."""

    runner_key: str
    admin_key: str
    episode_secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a process needs to join: where the run lives, its settings, Redis and keys."""

    run_id: str
    dir: Path
    settings: Settings
    redis_url: str
    """redis://host:port/db or unix:///path/to/socket."""
    keys: RunKeys


def create_run(settings: Settings, run_dir: Path, redis_url: str) -> Run:
    """Write the run's files and return its handle; an existing folder keeps its id and keys."""
    run_dir.mkdir(parents=True, exist_ok=True)
    secrets_path = run_dir / "secrets.json"
    if secrets_path.exists():
        keys = RunKeys(**json.loads(secrets_path.read_text()))
        run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    else:
        keys = RunKeys(
            runner_key="ol-runner-" + secrets.token_urlsafe(24),
            admin_key="ol-admin-" + secrets.token_urlsafe(24),
            episode_secret=secrets.token_urlsafe(32),
        )
        run_id = f"{settings.run.name}-{secrets.token_hex(4)}"
        descriptor = os.open(secrets_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({name: getattr(keys, name) for name in RunKeys.__slots__}, file)
    (run_dir / "settings.json").write_text(settings.model_dump_json(indent=1))
    (run_dir / "run.json").write_text(
        json.dumps({"run_id": run_id, "redis_url": redis_url, "digest": settings.digest()})
    )
    return Run(run_id=run_id, dir=run_dir, settings=settings, redis_url=redis_url, keys=keys)


def load_run(run_dir: Path) -> Run:
    """Join the run in `run_dir`.

    Raises:
        SettingsError: the folder is not a run, or its settings were changed since it was started.
    """
    run_path = run_dir / "run.json"
    if not run_path.is_file():
        raise SettingsError(
            f"run folder run_dir={str(run_dir)!r} holds no run.json; "
            "start one with `outloop train CONFIG` or `outloop serve CONFIG`"
        )
    facts = json.loads(run_path.read_text())
    tree = json.loads((run_dir / "settings.json").read_text())
    settings = build_settings(tree, source=str(run_dir / "settings.json"))
    if settings.digest() != facts["digest"]:
        raise SettingsError(
            f"run_dir={str(run_dir)!r}: settings.json has digest={settings.digest()[:12]}, the run "
            f"was started with digest={facts['digest'][:12]}; restart the run instead of editing it"
        )
    keys = RunKeys(**json.loads((run_dir / "secrets.json").read_text()))
    return Run(
        run_id=facts["run_id"],
        dir=run_dir,
        settings=settings,
        redis_url=facts["redis_url"],
        keys=keys,
    )
