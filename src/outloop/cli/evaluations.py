"""`outloop evaluations`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outloop.buffer.terminal import echo

if TYPE_CHECKING:
    from outloop.buffer.evaluations.results import Evaluation

_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
_WIDTH = 200
_SHOWN = ("reward", "pass_at_1")


@click.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--name", help="sampled, greedy, test/sampled, or a suite.")
@click.option("--step", type=int, help="The evaluation to compare. Default: the newest.")
@click.option(
    "--against", help="Compare with this step: a number, `first`, `best`, or RUN_DIR[@STEP]."
)
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="With --against: exit code 1 if the 95% interval is below zero.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def evaluations(
    run_dir: Path,
    name: str | None,
    step: int | None,
    against: str | None,
    fail_on_regression: bool,
    as_json: bool,
) -> None:
    """List the evaluations of a run, or compare two of them task by task.

    The difference is that of the tasks that both have; its 95% interval is by task. An evaluation
    that went on beside training names all versions that sampled it, and comparing it is a warning.
    The run need not be up: its folder is all that is read.
    """
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.evaluations import results
    from outloop.buffer.evaluations.estimates import change_between

    if against is None:
        if fail_on_regression or step is not None:
            raise SettingsError("--step and --fail-on-regression need --against: with what?")
        found = [one for one in _read(run_dir) if name in (None, one.name)]
        _list(found, as_json=as_json)
        return
    name = name or "sampled"
    after = _find(run_dir, name, step)
    before = _before(run_dir, name, against, after)
    try:
        change = change_between(before.rewards, after.rewards)
    except ValueError as error:
        raise SettingsError(
            f"{_place(run_dir, after)} and {against!r} cannot be compared: {error}. The second run "
            "needs the same evaluation tasks"
        ) from error
    if as_json:
        row = {"before": before.step, "after": after.step, "name": name} | asdict(change)
        row |= {"mixed_before": before.mixed_share, "mixed_after": after.mixed_share}
        echo(json.dumps(row))
    else:
        echo(
            f"{name}: step {before.step} -> {after.step}, {change.num_tasks} tasks: "
            f"{change.difference:+.4f} +- {change.standard_error:.4f} "
            f"(95%: {change.low:+.4f} to {change.high:+.4f})"
        )
        for task_id, old, new in change.fell:
            echo(f"  fell: {task_id[:60]}  {old:.3f} -> {new:.3f}")
    if mixed := results.mixed_sentence(before, after):
        echo(f"warning: {mixed}", err=True)
    if fail_on_regression and change.is_regression:
        sys.exit(1)


def _read(run_dir: Path) -> list[Evaluation]:
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.evaluations import results

    found = results.read(run_dir)
    if not found:
        raise SettingsError(
            f"{run_dir} has no {results.FILE}: no evaluation was complete; set eval.every or "
            "eval.suites"
        )
    return found


def _find(run_dir: Path, name: str, step: int | None) -> Evaluation:
    """The newest evaluation of a name, or that of a step."""
    from outloop.buffer.errors import SettingsError

    every = _read(run_dir)
    named = [one for one in every if one.name == name]
    if not named:
        names = ", ".join(sorted({one.name for one in every}))
        raise SettingsError(f"--name={name!r}: {run_dir} has {names}")
    chosen = named if step is None else [one for one in named if one.step == step]
    if not chosen:
        steps = ", ".join(str(one.step) for one in named)
        raise SettingsError(f"step={step} of {name!r} was not evaluated; {run_dir} has {steps}")
    return chosen[-1]


def _before(run_dir: Path, name: str, against: str, after: Evaluation) -> Evaluation:
    """What `--against` names."""
    if against in ("first", "best"):
        named = [one for one in _read(run_dir) if one.name == name and one.step != after.step]
        if not named:
            return after
        if against == "first":
            return named[0]
        return max(named, key=lambda one: one.metrics()["reward"])
    if against.isdigit():
        return _find(run_dir, name, int(against))
    folder, _, step = against.rpartition("@")
    if folder and step.isdigit():
        return _find(_existing(folder), name, int(step))
    return _find(_existing(against), name, None)


def _existing(folder: str) -> Path:
    from outloop.buffer.errors import SettingsError

    if not Path(folder).is_dir():
        raise SettingsError(
            f"--against={folder!r} is no folder; a step, first, best, or RUN_DIR[@STEP] is allowed"
        )
    return Path(folder)


def _place(run_dir: Path, evaluation: Evaluation) -> str:
    return f"{evaluation.name!r} of {run_dir} at step {evaluation.step}"


def _list(found: list[Evaluation], *, as_json: bool) -> None:
    from rich.console import Console

    from outloop.buffer.rich_terminal import PlainTable, show_table

    if as_json:
        for one in found:
            row: dict[str, Any] = {
                "step": one.step,
                "policy_version": one.policy_version,
                "oldest_version": one.oldest_version,
                "newest_version": one.newest_version,
                "mixed_share": one.mixed_share,
            }
            figures = {
                key: None if math.isnan(value) else value for key, value in one.metrics().items()
            }
            echo(json.dumps(row | {"name": one.name} | figures))
        return
    table = PlainTable(box=None, pad_edge=False)
    for heading in ("step", "versions", "evaluation", "tasks", "samples", "episodes"):
        is_text = heading == "evaluation"
        table.add_plain_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for heading in (*_SHOWN, "pass@k", "majority", "tokens"):
        table.add_plain_column(heading, justify="right", no_wrap=True)
    for one in found:
        row = one.metrics()
        k = one.num_samples
        cells = (
            *(str(one.step), one.versions, one.name),
            *(f"{row['tasks']:.0f}", str(k), f"{row['episodes']:.0f}"),
            *(_with_error(row, figure) for figure in _SHOWN),
            f"pass@{k} {_with_error(row, f'pass_at_{k}')}" if k > 1 else "-",
            _with_error(row, f"majority_at_{k}"),
            f"{row['generated_tokens_mean']:.1f}",
        )
        table.add_plain_row(cells)
    # Off a terminal nothing is cut.
    show_table(Console(width=None if sys.stdout.isatty() else _WIDTH), table)


def _with_error(row: dict[str, float], name: str) -> str:
    if name not in row:
        return "-"
    error = row[f"{name}_se"]
    return f"{row[name]:.3f}" + ("" if math.isnan(error) else f" +-{error:.3f}")
