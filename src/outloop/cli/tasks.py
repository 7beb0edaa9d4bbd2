"""`outloop tasks`: change the tasks of a run while it goes on.

If one argument is wrong, nothing changes.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def tasks() -> None:
    """Look at a run's task sources and change how often each is played."""


@tasks.command()
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run, up or not.",
)
@click.argument("changes", nargs=-1, metavar="[NAME=WEIGHT]...")
def weights(run_dir: Path, changes: tuple[str, ...]) -> None:
    """Show the weights of the task sources, or change them from the next group on."""
    from rich.console import Console

    from outloop.buffer.open_run import joined
    from outloop.buffer.rich_terminal import PlainTable, show_table

    wanted = dict(_parse(change) for change in changes)
    with joined(run_dir) as reader:
        if wanted:
            reader.task_weights.change(wanted)
        sources, schedule = reader.task_weights.read()
    now = schedule[-1]
    table = PlainTable(title=f"task weights from slot {now.from_slot} on", title_justify="left")
    for name in ("source", "tasks", "weight", "share"):
        table.add_plain_column(name)
    for source, weight in zip(sources, now.weights, strict=True):
        share = weight / sum(now.weights)
        table.add_plain_row([source.name, str(source.num_tasks), f"{weight:g}", f"{share:.3f}"])
    show_table(Console(), table)


def _parse(change: str) -> tuple[str, float]:
    name, _, text = change.partition("=")
    try:
        return name, float(text)
    except ValueError:
        raise click.BadParameter(
            f"{change!r} is not NAME=WEIGHT; for example easy=0.5", param_hint="changes"
        ) from None
