"""`outloop status`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from outloop.buffer.reader import BufferReader

_SIZES = {
    "ready to be trained": "buffer/ready_groups",
    "not complete": "buffer/open_groups",
    "leased to the trainer": "buffer/leased_groups",
    "attempts in flight": "buffer/attempts_in_flight",
    "slots to be played again": "buffer/slots_to_replay",
    "dead letters": "buffer/dead_letters",
    "episodes to be archived": "buffer/waiting_for_archive",
}
_NUM_GROUP_SIZES = 3
"""The first so many of _SIZES are numbers of groups."""


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(run_dir: Path, as_json: bool) -> None:
    """Say how a run stands: every part, versions, the queue, and what is waited for since when."""
    from outloop.engine.launch.launcher import find_launcher

    launcher = find_launcher(run_dir)
    found: dict[str, Any] = {
        "run": run_dir.absolute().name,
        "launcher_pid": None if launcher is None else launcher.pid,
        "last_step": _last_step(run_dir),
    }
    num_steps, facts = _from_redis(run_dir)
    found |= {"num_steps": num_steps} | facts
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print(found)


def _last_step(run_dir: Path) -> dict[str, Any] | None:
    from outloop.buffer.telemetry import read_metrics

    rows = [row for row in read_metrics(run_dir) if "train/loss" in row]
    names = ("step", "time", "train/reward_mean", "train/step_s", "train/policy_version")
    return {name: rows[-1].get(name) for name in names} if rows else None


def _from_redis(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """(trainer.num_steps, what only Redis knows): nothing if the run's Redis does not answer."""
    from outloop.buffer.errors import BufferUnavailable
    from outloop.buffer.reader import BufferReader
    from outloop.buffer.run import load_run

    run = load_run(run_dir)
    num_steps = run.settings.trainer.num_steps
    socket = urlsplit(run.redis_url)
    if socket.scheme == "unix" and not Path(socket.path).exists():
        # An embedded server ends with its run; asking one that is gone takes seconds of retries.
        return num_steps, {}
    try:
        reader = BufferReader.connect(run)
    except BufferUnavailable as error:
        # An embedded server ends with its run.
        is_shared = run.settings.buffer.redis_url is not None
        return num_steps, {"redis": str(error)} if is_shared else {}
    try:
        return num_steps, _facts(reader)
    finally:
        reader.close()


def _facts(reader: BufferReader) -> dict[str, Any]:
    numbers = reader.stats()
    return {
        "state": reader.run_state(),
        "highest_version": reader.highest_version(),
        "parts": {name: facts.get("url", "") for name, facts in reader.registry.parts().items()},
        "servers": [
            {
                "id": entry.server_id,
                "url": entry.url,
                "version": entry.policy_version,
                "is_quarantined": entry.is_quarantined,
            }
            for entry in reader.registry.servers()
        ],
        "statuses": reader.registry.statuses(),
        "queue": {label: int(numbers[name]) for label, name in _SIZES.items()},
    }


def _print(found: dict[str, Any]) -> None:
    launcher = found["launcher_pid"]
    last = found["last_step"]
    is_over = last is not None and last["step"] >= found["num_steps"]
    state = found.get("state", "finished" if is_over else "not up")
    led = f"led by process {launcher}" if launcher else "no launcher on this machine"
    click.secho(f"{found['run']}: {state}, {led}", bold=True)
    if last is not None:
        click.echo(
            f"step {last['step']} of {found['num_steps']}, {_ago(last['time'])}; "
            f"reward {last['train/reward_mean']:.3f}; {last['train/step_s']:.1f} s a step"
        )
    if "redis" in found:
        click.echo(found["redis"])
    if "queue" not in found:
        return
    click.echo(f"newest version {found['highest_version']}")
    statuses: dict[str, dict[str, str]] = found["statuses"]
    for name in sorted({*found["parts"], *statuses}):
        click.echo(f"  {name:<12} {found['parts'].get(name, '')}")
        _print_status(statuses.get(name, {}))
    for server in found["servers"]:
        holds = "no weights yet" if server["version"] is None else f"version {server['version']}"
        quarantined = ", quarantined" if server["is_quarantined"] else ""
        click.echo(f"  {server['id']:<12} {server['url']}  {holds}{quarantined}")
    words = [f"{n} {label}" for label, n in found["queue"].items()]
    click.echo("groups: " + ", ".join(words[:_NUM_GROUP_SIZES]))
    others = [word for word in words[_NUM_GROUP_SIZES:] if not word.startswith("0 ")]
    if others:
        click.echo("besides: " + ", ".join(others))


def _print_status(fields: dict[str, str]) -> None:
    waits = fields.get("waiting_for") or fields.get("waits_for")
    if waits:
        since = f" since {_ago(float(fields['since']))}" if "since" in fields else ""
        click.echo(f"{'':<15}waits for {waits}{since}")
    left = {"waiting_for", "waits_for", "since"}
    shown = [f"{name.removeprefix('num_')} {text}" for name, text in fields.items() if text]
    rest = [word for word in shown if word.partition(" ")[0] not in left]
    if rest:
        click.echo(f"{'':<15}{', '.join(rest)}")


def _ago(unix: float) -> str:
    seconds = max(0.0, time.time() - unix)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    hours = seconds / 3600
    return f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} days ago"
