"""`outloop trajectories`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from outloop.buffer.foreign_text import one_line
from outloop.buffer.terminal import echo
from outloop.cli.options import check_writable
from outloop.cli.waiting import waiting

_LIST = """
SELECT episode_id AS episode, purpose, fate, reason, task_id AS task, reward, num_turns AS turns,
  num_output_tokens AS tokens, max_version AS version
FROM episodes ORDER BY ended_at DESC LIMIT 20
"""
_MAX_CHARS = 60


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option("--sql", help="A query over the tables `episodes` and `turns`; see docs/viewer.md.")
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write whole episodes as JSONL, as `outloop buffer export` does.",
)
@click.option(
    "--export-atif",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write whole episodes as ATIF documents into this folder, a file each.",
)
@click.option(
    "--import-atif",
    type=click.Path(path_type=Path, dir_okay=False),
    help="RUN_DIR is a folder of ATIF documents: write them as JSONL, as --export does.",
)
@click.option(
    "--conversations",
    is_flag=True,
    help="With --import-atif: write conversations for env.conversations instead, of any documents.",
)
@click.option(
    "--where",
    default="true",
    show_default=True,
    help="With --export...: a condition on `episodes`.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def trajectories(
    run_dir: Path,
    sql: str | None,
    export: Path | None,
    export_atif: Path | None,
    import_atif: Path | None,
    conversations: bool,
    where: str,
    as_json: bool,
) -> None:
    """Ask for the ended episodes of a run: list the newest, query them by SQL, export them.

    The run need not be up: its folder is all that is read.
    """
    from outloop.buffer.trajectories.folder import FOLDER
    from outloop.buffer.trajectories.query import query

    if import_atif is not None:
        from outloop.buffer.trajectories import atif_documents

        check_writable(import_atif, "--import-atif")
        read = (
            atif_documents.import_conversations
            if conversations
            else atif_documents.import_trajectories
        )
        echo(f"wrote {read(run_dir, import_atif)} documents to {import_atif}")
        return
    folder = run_dir / FOLDER
    if not run_dir.is_dir():
        raise click.BadParameter(f"folder {str(run_dir)!r} does not exist", param_hint="RUN_DIR")
    exports = ((export, _export_lines), (export_atif, _export_atif))
    wanted = [(out, write) for out, write in exports if out is not None]
    for out, write in wanted:
        with waiting(f"writing {out}"):
            number = write(folder, out, where)
        echo(f"wrote {number} episodes to {out}")
    if wanted:
        return
    rows = query(folder, sql or _LIST)
    if as_json:
        for row in rows:
            echo(json.dumps(row, default=str))
    else:
        _print(rows)


def _export_lines(folder: Path, out: Path, where: str) -> int:
    from outloop.buffer.trajectories.reading import write_jsonl

    check_writable(out, "--export")
    return write_jsonl(folder, out, _ids(folder, f"outcome IS NOT NULL AND ({where})"))


def _export_atif(folder: Path, out: Path, where: str) -> int:
    from outloop.buffer.trajectories.atif_documents import write_documents

    return write_documents(folder, out, _ids(folder, f"outcome IS NOT NULL AND ({where})"))


def _ids(folder: Path, where: str) -> set[str]:
    from outloop.buffer.trajectories.query import query

    return {
        row["episode_id"] for row in query(folder, f"SELECT episode_id FROM episodes WHERE {where}")
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from outloop.buffer.rich_terminal import PlainTable, show_table

    if not rows:
        echo("no rows")
        return
    table = PlainTable(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_plain_column(name, justify="right" if _is_number(rows, name) else "left")
    for row in rows:
        table.add_plain_row([_cell(value) for value in row.values()])
    console = Console()
    # Off a terminal nothing is cut.
    show_table(console, table, width=None if console.is_terminal else 10_000)


def _is_number(rows: list[dict[str, Any]], name: str) -> bool:
    return all(isinstance(row[name], int | float | None) for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = one_line(str(value))
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
