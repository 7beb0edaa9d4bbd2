"""Creates a run in Redis, and checks that a process may join it.

Run, schema and settings must be those that the launcher entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from outloop.buffer.codec.records_codec import SCHEMA
from outloop.buffer.errors import BufferLost, Conflict, SchemaMismatch, SettingsError
from outloop.buffer.redis.client import connect_sync, translated
from outloop.buffer.redis.keys import key
from outloop.buffer.redis.scripts import load_script, refuse
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings

CLOSE_GRACE_S = 5.0
"""An attempt is lost this long after its deadline; the runner closes it before, as truncated."""


def init_run(run: Run, *, connect_client: Callable[[str], redis.Redis] = connect_sync) -> bool:
    """Create the run in Redis, or enter its settings again; True if it was created.

    Only the launcher calls it, before it starts any part: it empties the registry of processes.
    Idempotent.

    Raises:
        BufferUnavailable: Redis is unreachable or full.
        SchemaMismatch: the data was written by another release.
        SettingsError: a setting differs that a run cannot change.
    """
    settings = run.settings
    rules = script_rules(settings)
    arguments: list[str | int] = [
        run.run_id,
        settings.digest(),
        SCHEMA,
        settings.run.seed,
        len(rules),
    ]
    for name, value in rules.items():
        arguments += [name, value]
    client = connect_client(run.redis_url)
    what = f"run_id={run.run_id}: creating the run"
    try:
        with translated(what):
            answer: Any = client.eval(
                load_script("init_run").text,
                1,
                key(run.run_id, "meta"),
                0,
                *arguments,
            )
    finally:
        client.close()
    code = answer[0].decode()
    if code == "schema":
        raise _schema_mismatch(run, answer[1].decode())
    if code != "ok":
        try:
            refuse(code, answer[1].decode(), what)
        except Conflict as error:
            raise SettingsError(str(error)) from error
    return bool(answer[1])


def check_joinable(run: Run, meta: dict[bytes, bytes]) -> None:
    """Refuse to join unless `meta` is that of `run` as this process knows it.

    Raises:
        BufferLost: Redis does not hold the run.
        SchemaMismatch: its data was written by another release.
        SettingsError: it was started with other settings.
    """
    if not meta:
        raise BufferLost(
            f"run_id={run.run_id}: Redis holds nothing of this run; it was emptied, or "
            "buffer.redis_url names another server. Start the run with `outloop train` or "
            "`outloop serve`, which resume from the last checkpoint"
        )
    if meta[b"schema"] != str(SCHEMA).encode():
        raise _schema_mismatch(run, meta[b"schema"].decode())
    digest = run.settings.digest()
    if meta[b"digest"].decode() != digest:
        raise SettingsError(
            f"run_id={run.run_id}: this process has settings digest={digest[:12]}, the run was "
            f"started with digest={meta[b'digest'].decode()[:12]}; start it from the run folder's "
            "settings.json, with the same OUTLOOP_* environment"
        )


def script_rules(settings: Settings) -> dict[str, int | str]:
    """The settings that scripts read, in their units."""
    buffer, env = settings.buffer, settings.env
    return {
        "group_size": buffer.group_size,
        "groups_per_step": settings.trainer.groups_per_step,
        "pipeline_depth": str(buffer.pipeline_depth),
        "over_provision_ppm": round(buffer.over_provision * 1e6),
        "max_staleness": buffer.max_staleness,
        "max_replacements": env.max_replacements,
        "max_resumptions": env.max_resumptions,
        "max_replaced_ppm": round(env.max_replaced_share * 1e6),
        "max_silence_ms": int(env.max_runner_silence_s * 1000),
        "attempt_ms": int((env.episode_deadline_s + CLOSE_GRACE_S) * 1000),
        "group_ms": int((buffer.group_deadline_s or 0.0) * 1000),
        "lease_ms": int(buffer.lease_s * 1000),
        "incomplete": buffer.incomplete,
        "gives_claims": int(settings.trainer.mode == "rl"),
    }


def _schema_mismatch(run: Run, schema: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"run_id={run.run_id}: Redis holds schema={schema}, this release reads schema={SCHEMA}; "
        "use the release that wrote it, or choose another run.name"
    )
