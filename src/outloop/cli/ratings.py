"""`outloop ratings`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from outloop.buffer.terminal import echo

if TYPE_CHECKING:
    from outloop.buffer.evaluations.ratings import Rating

_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


@click.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--win", default=1.0, show_default=True, help="The reward of a won game.")
@click.option("--loss", default=0.0, show_default=True, help="The reward of a lost game.")
@click.option("--evaluations", is_flag=True, help="Games of evaluations, not of training.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def ratings(run_dir: Path, win: float, loss: float, evaluations: bool, as_json: bool) -> None:
    """Rate the versions of a run by their games against earlier ones, and draw ratings.png.

    A game is an episode with turns of the policy and of `policy@frozen` or `policy@VERSION`. The
    rating is Elo above the first version, with its 95% interval. The run need not be up.
    """
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.evaluations.ratings import rate
    from outloop.buffer.trajectories.folder import FOLDER
    from outloop.buffer.trajectories.games import read_games

    folder = run_dir / FOLDER
    if not folder.is_dir():
        raise SettingsError(f"{run_dir} has no trajectories: it keeps them with outloop[view]")
    purpose: Literal["train", "eval"] = "eval" if evaluations else "train"
    games, num_mixed = read_games(folder, win=win, loss=loss, purpose=purpose)
    try:
        found = rate(games)
    except ValueError as error:
        raise SettingsError(
            f"{run_dir} gives no ratings: {error} ({len(games)} games, {num_mixed} more with "
            "several versions on a side). Games need an opponent of another version "
            "(policy@frozen); server.num_frozen = 2 links each version to the one before"
        ) from error
    if as_json:
        for one in found:
            low, high = (None if math.isnan(end) else end for end in one.interval)
            row = {"version": one.player, "elo": one.elo, "low": low, "high": high}
            echo(json.dumps(row | {"games": one.num_games}))
        return
    for one in found:
        low, high = one.interval
        echo(
            f"version {one.player:>5}  Elo {one.elo:+7.0f}  "
            f"(95%: {low:+.0f} to {high:+.0f})  {one.num_games} games"
        )
    if num_mixed:
        echo(f"left out: {num_mixed} games with several versions on a side")
    if (path := _draw(found, run_dir)) is not None:
        echo(f"curve {path}")


def _draw(found: list[Rating], run_dir: Path) -> Path | None:
    """Write the picture; None without matplotlib."""
    from outloop.engine.launch.run_summary import ratings_figure

    try:
        figure = ratings_figure(found)
    except ImportError:
        return None
    path = run_dir / "ratings.png"
    figure.savefig(path)
    return path
