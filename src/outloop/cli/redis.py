"""`outloop redis`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--dir",
    "data_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of its append-only file.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=6379, show_default=True)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File that holds the password which clients need.",
)
@click.option(
    "--fsync",
    type=click.Choice(["always", "everysec", "no"]),
    default="everysec",
    show_default=True,
)
@click.option("--max-memory-mb", default=1024, show_default=True)
def redis(
    data_dir: Path, host: str, port: int, password_file: Path, fsync: str, max_memory_mb: int
) -> None:
    """Run a Redis for parts on several machines; `outloop train` starts one of its own."""
    from typing import Literal, cast

    from outloop.buffer.redis.standalone import become_redis
    from outloop.buffer.run import read_secret

    become_redis(
        data_dir,
        host=host,
        port=port,
        password=read_secret(password_file, "--password-file"),
        fsync=cast(Literal["always", "everysec", "no"], fsync),
        max_memory_mb=max_memory_mb,
    )
