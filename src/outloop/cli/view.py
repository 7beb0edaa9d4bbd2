"""`outloop view`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--demo", is_flag=True, help="Show a recorded run that comes with outloop.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0: any free one.")
def view(runs: tuple[Path, ...], demo: bool, host: str, port: int) -> None:
    """Show RUNS, live or finished, on a page: curves, episodes, turns and tokens.

    Without RUNS: every run in runs/. Nothing is written; who has the printed link may read.
    """
    import secrets

    from outloop.view import require_packages

    require_packages()
    from outloop.view.server import demo_folder, find_runs, serve_page

    if demo:
        runs = (*runs, demo_folder())
    elif not runs:
        runs = (Path("runs"),)
    found = find_runs(runs)
    key = secrets.token_urlsafe(18)
    echo(f"showing {', '.join(found)}", err=True)
    serve_page(found, host=host, port=port, key=key, on_ready=lambda url: echo(f"{url}?key={key}"))
