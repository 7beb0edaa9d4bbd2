"""Starting the page."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import uvicorn

from outloop.buffer.errors import SettingsError
from outloop.view.app import create_app
from outloop.view.archive import RunFolder


def demo_folder() -> Path:
    """The recorded run of this package."""
    with as_file(files("outloop.view").joinpath("demo")) as folder:
        return folder


def find_runs(paths: Sequence[Path]) -> dict[str, RunFolder]:
    """The runs in `paths` by name; a folder of runs stands for those in it.

    Raises:
        SettingsError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(one.parent for one in path.glob("*/metrics.jsonl"))
        if (path / "metrics.jsonl").exists() or (path / "run.json").exists():
            found.append(path)
        elif inside:
            found += inside
        else:
            raise SettingsError(
                f"path={str(path)!r} holds no run: neither run.json nor metrics.jsonl is there; "
                "give the folder of a run, runs/NAME, or one of several"
            )
    runs: dict[str, RunFolder] = {}
    for path in found:
        name = path.absolute().name
        if name in runs:
            name = f"{path.absolute().parent.name}-{name}"
        while name in runs:
            name += "-again"
        runs[name] = RunFolder(path.absolute(), name)
    return runs


def serve_page(
    runs: dict[str, RunFolder],
    *,
    host: str,
    port: int,
    key: str,
    on_ready: Callable[[str], None],
) -> None:
    """Serve the page until the process is interrupted; `on_ready` gets its URL, without `key`.

    Raises:
        SettingsError: `host` and `port` cannot be had.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise SettingsError(
            f"--host={host!r} --port={port}: cannot listen there ({error}); choose another port, "
            "or 0 for any free one"
        ) from error
    with listener:
        on_ready(f"http://{host}:{listener.getsockname()[1]}/")
        config = uvicorn.Config(
            create_app(runs, key),
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        uvicorn.Server(config).run(sockets=[listener])
