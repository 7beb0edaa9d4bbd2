"""`outloop status`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from outloop.buffer.terminal import echo

_NUM_GROUP_SIZES = 3
"""The first so many sizes of the queue are numbers of groups."""
_TIMEOUT_S = 30.0
_REFUSED = "refused/"
"""What names of metrics of refused calls begin with; the code follows."""


@click.command()
@click.argument(
    "run_dir", type=click.Path(path_type=Path, file_okay=False, exists=True), required=False
)
@click.option("--router-url", help="In place of RUN_DIR: ask a router of the run, from anywhere.")
@click.option(
    "--admin-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --router-url: a file that holds the run's admin key.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(
    run_dir: Path | None, router_url: str | None, admin_key_file: Path | None, as_json: bool
) -> None:
    """Say how a run stands: every part, versions, the queue, and what is waited for since when."""
    if run_dir is not None and router_url is None and admin_key_file is None:
        found = _from_folder(run_dir)
    elif run_dir is None and router_url is not None and admin_key_file is not None:
        found = _from_router(router_url, admin_key_file)
    else:
        raise click.UsageError("give RUN_DIR, or --router-url and --admin-key-file")
    if as_json:
        echo(json.dumps(found))
    else:
        _print(found)


def _from_folder(run_dir: Path) -> dict[str, Any]:
    from outloop.engine.launch.launcher_process import find_launcher

    launcher = find_launcher(run_dir)
    num_steps, facts = _from_redis(run_dir)
    return {
        "run": run_dir.absolute().name,
        "launcher_pid": None if launcher is None else launcher.pid,
        "last_step": _last_step(run_dir),
        "num_steps": num_steps,
        **facts,
    }


def _from_router(url: str, admin_key_file: Path) -> dict[str, Any]:
    """What the router answers.

    Raises:
        SettingsError: the key's file cannot be read, or the key is refused.
        PartFailed: no router answers there.
    """
    from outloop.buffer.errors import PartFailed, SettingsError
    from outloop.buffer.run import read_secret

    key = read_secret(admin_key_file, "--admin-key-file")
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--router-url={url!r}; http:// or https:// is allowed")
    request = urllib.request.Request(
        f"{url.rstrip('/')}/status", headers={"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise SettingsError(
                f"--admin-key-file={str(admin_key_file)!r}: --router-url={url!r} refuses the key; "
                "give admin_key of the run's secrets.json"
            ) from error
        raise PartFailed(f"--router-url={url!r} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise PartFailed(
            f"--router-url={url!r}: no router of a run answers there ({error})"
        ) from error
    return found


def _last_step(run_dir: Path) -> dict[str, Any] | None:
    from outloop.buffer.telemetry import read_metrics

    rows = [row for row in read_metrics(run_dir) if "train/loss" in row]
    names = ("step", "time", "train/reward_mean", "train/step_s", "train/policy_version")
    if not rows:
        return None
    refused = {name: value for name, value in rows[-1].items() if name.startswith(_REFUSED)}
    return {name: rows[-1].get(name) for name in names} | refused


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
        return num_steps, reader.run_status()
    finally:
        reader.close()


def _print(found: dict[str, Any]) -> None:
    last = found.get("last_step")
    # Supervised training makes as many steps as its conversations need, 0 here.
    is_over = last is not None and 0 < found["num_steps"] <= last["step"]
    state = found.get("state", "finished" if is_over else "not up")
    words = [state] + ["paused"] * found.get("is_paused", False)
    if "launcher_pid" in found:
        launcher = found["launcher_pid"]
        words.append(f"led by process {launcher}" if launcher else "no launcher on this machine")
    echo(f"{found['run']}: {', '.join(words)}", bold=True)
    if last is not None:
        of_all = f" of {found['num_steps']}" if found["num_steps"] else ""
        words = [f"step {last['step']}{of_all}, {_ago(last['time'])}"]
        if last["train/reward_mean"] is not None:
            words.append(f"reward {last['train/reward_mean']:.3f}")
        if last["train/step_s"] is not None:
            words.append(f"{last['train/step_s']:.1f} s a step")
        echo("; ".join(words))
        refused = [
            f"{number:.0f} {name.removeprefix(_REFUSED)}"
            for name, number in last.items()
            if name.startswith(_REFUSED)
        ]
        if refused:
            echo(f"refused model calls of its episodes: {', '.join(refused)}")
    if "redis" in found:
        echo(found["redis"])
    if "queue" not in found:
        return
    echo(f"newest version {found['highest_version']}")
    statuses: dict[str, dict[str, str]] = found["statuses"]
    for name in sorted({*found["parts"], *statuses}):
        echo(f"  {name:<12} {found['parts'].get(name, '')}")
        _print_status(statuses.get(name, {}))
    for server in found["servers"]:
        holds = "no weights yet" if server["version"] is None else f"version {server['version']}"
        quarantined = ", quarantined" if server["is_quarantined"] else ""
        echo(f"  {server['id']:<12} {server['url']}  {holds}{quarantined}")
    words = [f"{n} {label}" for label, n in found["queue"].items()]
    echo("groups: " + ", ".join(words[:_NUM_GROUP_SIZES]))
    others = [word for word in words[_NUM_GROUP_SIZES:] if not word.startswith("0 ")]
    if others:
        echo("besides: " + ", ".join(others))


def _print_status(fields: dict[str, str]) -> None:
    waits = fields.get("waiting_for") or fields.get("waits_for")
    if waits:
        since = f" since {_ago(float(fields['since']))}" if "since" in fields else ""
        echo(f"{'':<15}waits for {waits}{since}")
    left = {"waiting_for", "waits_for", "since"}
    shown = [f"{name.removeprefix('num_')} {text}" for name, text in fields.items() if text]
    rest = [word for word in shown if word.partition(" ")[0] not in left]
    if rest:
        echo(f"{'':<15}{', '.join(rest)}")


def _ago(unix: float) -> str:
    seconds = max(0.0, time.time() - unix)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    hours = seconds / 3600
    return f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} days ago"
