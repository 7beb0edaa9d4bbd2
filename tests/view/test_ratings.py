"""Games of a policy against earlier versions of itself, read from an archive and rated."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from view.conftest import ended, turn

from outloop.buffer.errors import SettingsError
from outloop.buffer.trajectories.ended import EndedEpisode
from outloop.buffer.trajectories.folder import FOLDER, Part, writing
from outloop.buffer.trajectories.games import read_games
from outloop.buffer.trajectories.tables import Decoder, tables_of, write_tables
from outloop.cli.ratings import ratings


def game(
    name: str, version: int, opponent: int | None, reward: float | None, later: int | None = None
) -> EndedEpisode:
    """An episode in which the policy and, unless None, an earlier version took a turn each; `later`
    sampled the end of the policy's, unless None."""
    own = turn(name, 0, [1], [2, 3], versions=(version, later or version))
    turns = [own]
    if opponent is not None:
        other = turn(name, 1, [1], [2, 3], versions=(opponent, opponent))
        turns.append(msgspec.structs.replace(other, loss_spans=(), mask_reason="frozen"))
    return ended(name, turns, group=f"g-{name}", reward=reward)


@pytest.fixture
def write_run(tmp_path: Path):
    """The folder of a run with these episodes in its archive."""

    def write(*episodes: EndedEpisode) -> Path:
        tables = tables_of(episodes, Decoder(None))
        with writing(tmp_path / FOLDER) as opened:
            name = opened.new_name(0)
            num_bytes = opened.write_files(name, lambda e, t: write_tables(*tables, e, t))
            part = Part(
                name=name, first=0, last=len(episodes) - 1, num_episodes=len(episodes),
                num_tokens=50, num_bytes=num_bytes, first_ended_at=110.0, last_ended_at=110.0,
            )  # fmt: skip
            opened.commit([part])
        return tmp_path

    return write


def test_games_are_read_from_the_archive(write_run) -> None:
    """Both sides by the versions of their turns; episodes of one side, of several versions on a
    side and without a reward are none."""
    folder = write_run(
        game("a", 3, 0, 1.0),
        game("b", 3, 2, -1.0),
        game("c", 4, 2, 0.0),
        game("alone", 4, None, 1.0),
        game("unscored", 4, 2, None),
        game("mixed", 4, 0, 1.0, later=5),
    )
    games, num_mixed = read_games(folder / FOLDER, win=1.0, loss=-1.0)
    found = [(one.player, one.opponent, one.score, one.cluster) for one in games]
    assert found == [(3, 0, 1.0, "g-a"), (3, 2, 0.0, "g-b"), (4, 2, 0.5, "g-c")]
    assert num_mixed == 1


def test_a_reward_beyond_a_game_is_refused(write_run) -> None:
    """A reward that is no result would move ratings by who knows what."""
    folder = write_run(game("a", 3, 0, -1.0)) / FOLDER
    with pytest.raises(SettingsError, match=r"episode a has reward=-1; between loss=0 and win=1"):
        read_games(folder, win=1.0, loss=0.0)
    with pytest.raises(SettingsError, match="win=0, loss=1"):
        read_games(folder, win=0.0, loss=1.0)


@pytest.mark.medium
def test_the_command_prints_and_draws(write_run) -> None:
    """A line for each version, JSON on request, and a picture; without a chain of games it says
    what would link versions."""
    folder = write_run(
        *(game(f"a{i}", 3, 0, float(i % 4 > 0)) for i in range(40)),
        *(game(f"b{i}", 5, 3, float(i % 2)) for i in range(40)),
    )
    shown = CliRunner().invoke(ratings, [str(folder)])
    assert shown.exit_code == 0, shown.output
    assert [line.split()[1] for line in shown.output.splitlines()[:3]] == ["0", "3", "5"]
    assert (folder / "ratings.png").stat().st_size > 1000
    lines = CliRunner().invoke(ratings, [str(folder), "--json"]).output.splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[1]["elo"] == pytest.approx(rows[2]["elo"])
    assert 100 < rows[1]["elo"] < 250
    assert rows[1]["low"] < rows[1]["elo"] < rows[1]["high"]
    nothing = CliRunner().invoke(ratings, [str(folder), "--evaluations"])
    assert isinstance(nothing.exception, SettingsError)
    assert "server.num_frozen = 2" in str(nothing.exception)
