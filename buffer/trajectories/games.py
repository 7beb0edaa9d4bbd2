"""Games of the policy against earlier versions of itself, out of a run's archive.

A game is an episode in which both the policy and a version that it asked for by name took turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outloop.buffer.errors import SettingsError
from outloop.buffer.evaluations.ratings import Game
from outloop.buffer.trajectories.query import query

_TURNS = """
    SELECT e.episode_id, coalesce(e.group_id, e.task_id) AS cluster, e.reward,
           t.mask_reason = 'frozen' AS is_opponent, t.version_spans
    FROM episodes e JOIN turns t ON e.episode_id = t.episode_id
    WHERE e.purpose = ? AND e.reward IS NOT NULL AND isfinite(e.reward)
    ORDER BY e.episode_id
"""


@dataclass(slots=True)
class _Sides:
    cluster: str
    reward: float
    own: set[int]
    opponents: set[int]


def read_games(
    folder: Path, *, win: float, loss: float, purpose: Literal["train", "eval"] = "train"
) -> tuple[list[Game], int]:
    """(games, how many more were left out because a side was of several versions).

    Args:
        folder: the archive, runs/NAME/trajectories.
        win, loss: the rewards of a won and of a lost game; a draw is halfway.

    Raises:
        SettingsError: a reward is not between those of a lost and a won game.
    """
    if not win > loss:
        raise SettingsError(f"win={win:g}, loss={loss:g}: a won game is worth more than a lost one")
    found: dict[str, _Sides] = {}
    for row in query(folder, _TURNS, [purpose]):
        game = found.setdefault(
            row["episode_id"], _Sides(row["cluster"], row["reward"], set(), set())
        )
        versions = game.opponents if row["is_opponent"] else game.own
        versions.update(row["version_spans"][::3])
    games, num_mixed = [], 0
    for episode_id, game in found.items():
        if not game.own or not game.opponents:
            continue
        score = (game.reward - loss) / (win - loss)
        if not -1e-9 <= score <= 1 + 1e-9 or math.isnan(score):
            raise SettingsError(
                f"episode {episode_id} has reward={game.reward:g}; between loss={loss:g} and "
                f"win={win:g} is allowed: give the rewards of a lost and of a won game"
            )
        if len(game.own) > 1 or len(game.opponents) > 1:
            num_mixed += 1
            continue
        games.append(
            Game(
                player=min(game.own),
                opponent=min(game.opponents),
                score=min(1.0, max(0.0, score)),
                cluster=game.cluster,
            )
        )
    return games, num_mixed
