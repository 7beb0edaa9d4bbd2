"""Draws the credit of one group of games: the advantage of every sampled token.

python examples/guess_number/draw_credit.py runs/guess         # writes runs/guess/credit.png

Each row is an attempt at one game, each cell a token that the policy sampled; thick lines part
guesses. Above as GRPO sees it: one number a game. Below by turn (reward_to_go): a guess is
compared with the other attempts that came as far.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from tokenizers import Tokenizer

from outloop.buffer.records import Group, Turn
from outloop.engine.train.algorithms.credit import take_credits
from outloop.engine.train.data.scored_groups import scored, scored_group
from outloop.engine.train.debug.recorded_groups import read_groups

WAYS = {"grpo": "GRPO: one number a game", "reward_to_go": "reward_to_go: by guess"}


def advantages(group: Group, advantage: str) -> list[list[float]]:
    """For each scored attempt one number for each of its guesses."""
    seen = scored_group(group)
    (values,) = take_credits([seen], advantage, signal=[True])
    return [
        [value] * len(episode.turns)
        if isinstance(value, float)
        else [float(own[0]) for own in value]
        for value, episode in zip(values, seen.episodes, strict=True)
    ]


def interest(group: Group) -> tuple[int, int]:
    """Of a group that is worth drawing: won and lost games, of many lengths."""
    rewards = {trajectory.episode.reward.value for trajectory in scored(group)}
    return len(rewards), len({len(trajectory.turns) for trajectory in scored(group)})


def texts(turn: Turn, tokenizer: Tokenizer) -> list[str]:
    """What each sampled token of a guess says; the one that ends it says "end"."""
    ids = turn.output_ids.tolist()
    words = [tokenizer.decode([token], skip_special_tokens=True).strip() or "?" for token in ids]
    if words[-1] == "?" and turn.finish_reason == "stop":
        words[-1] = "end"
    return words


def draw(group: Group, tokenizer: Tokenizer, path: Path) -> None:
    """Write the picture."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    games = scored(group)
    found = {way: advantages(group, way) for way in WAYS}
    largest = max(abs(value) for by in found.values() for own in by for value in own) or 1.0
    width = max(sum(len(turn.output_ids) for turn in game.turns) for game in games)
    figure, panels = plt.subplots(
        2, 1, figsize=(max(8.0, 0.72 * width + 3.4), 0.42 * len(games) * 2 + 2.4), dpi=120
    )
    order = sorted(range(len(games)), key=lambda i: (-games[i].episode.reward.value, i))
    for axes, (way, title) in zip(panels, WAYS.items(), strict=True):
        for row, place in enumerate(order):
            start = 0
            for turn, value in zip(games[place].turns, found[way][place], strict=True):
                color = plt.get_cmap("RdBu")(0.5 + 0.45 * value / largest)
                ink = "white" if sum(color[:3]) < 1.5 else "0.1"
                words = texts(turn, tokenizer)
                for offset, word in enumerate(words):
                    cell = plt.Rectangle((start + offset, row), 1, 0.9, color=color, linewidth=0)
                    axes.add_patch(cell)
                    axes.text(
                        start + offset + 0.5,
                        row + 0.28,
                        word,
                        ha="center",
                        va="center",
                        size=8,
                        color=ink,
                    )
                axes.text(
                    start + len(words) / 2,
                    row + 0.68,
                    f"{value:+.2f}",
                    ha="center",
                    va="center",
                    size=7,
                    color=ink,
                )
                start += len(words)
                axes.plot([start, start], [row, row + 0.9], color="white", linewidth=4)
        axes.set_xlim(0, width)
        axes.set_ylim(len(games), 0)
        axes.set_yticks(np.arange(len(games)) + 0.45)
        axes.set_yticklabels([f"reward {games[place].episode.reward.value:g}" for place in order])
        axes.set_xticks([])
        axes.set_title(title, loc="left", size=10)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[1].set_xlabel(
        "tokens sampled in a game; blue: made more likely, red: less; below a guess its advantage",
        size=9,
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Choose a group of the run, draw it, say where."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="Default: credit.png in the run's folder.")
    options = parser.parse_args()
    settings = json.loads((options.run / "settings.json").read_text())
    tokenizer = Tokenizer.from_file(str(Path(settings["model"]["path"]) / "tokenizer.json"))
    group = max(read_groups(options.run), key=interest)
    path = options.out or options.run / "credit.png"
    draw(group, tokenizer, path)
    print(f"group {group.group_id}, {len(scored(group))} games: {path}")


if __name__ == "__main__":
    main()
