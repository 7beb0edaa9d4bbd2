"""The RL loop through Megatron-core, against the twin of Redis and a transformers server."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from fakes.bandit_run import FAST, Setup
from outloop.buffer.errors import UpdateRefused
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.rank_worker import RankWorker

MakeRun = Callable[..., Setup]


@pytest.mark.medium
def test_a_step_keeps_its_order(setup: MakeRun) -> None:
    """Announce, publish, acknowledge, and only then admission credit."""
    made = setup(trainer=FAST | {"num_steps": 2})
    made.train()
    kinds = [(kind, value) for kind, value in made.events if kind != "drop"]
    assert kinds == [
        ("recover", None),
        ("steps_left", 2),
        ("announce", (0, None)),
        ("publish", 0),
        ("acknowledge", 0),
        ("take", 0),
        ("announce", (1, 0)),
        ("publish", 1),
        ("acknowledge", 1),
        ("steps_left", 1),
        ("mark_trained", 1),
        ("take", 1),
        ("announce", (2, 1)),
        ("publish", 2),
        ("acknowledge", 2),
        ("steps_left", 0),
        ("mark_trained", 2),
    ]


@pytest.mark.medium
def test_a_server_that_joins_is_fed_while_groups_are_awaited(setup: MakeRun) -> None:
    """It gets the version in force, not a new one."""
    made = setup(trainer=FAST | {"num_steps": 2})
    made.buffer.joins_at = 2
    made.train()
    versions = [value for kind, value in made.events if kind == "publish"]
    assert versions == [0, 1, 1, 2]
    assert [value for kind, value in made.events if kind == "announce"] == [
        (0, None),
        (1, 0),
        (2, 1),
    ]


@pytest.mark.medium
def test_checkpoints_acknowledge_every_trained_group_once(setup: MakeRun) -> None:
    """Marks are disjoint, cover all groups with signal, and carry cursor and version."""
    made = setup(trainer=FAST | {"num_steps": 5, "checkpoint_every": 2})
    made.train()
    assert [mark.policy_version for mark in made.buffer.marks] == [2, 4, 5]
    assert [mark.next_slot for mark in made.buffer.marks] == [16, 32, 40]
    groups = [group for mark in made.buffer.marks for group in mark.group_ids]
    num_dropped = sum(kind == "drop" for kind, _ in made.events)
    assert len(groups) == len(set(groups)) == 40 - num_dropped


@pytest.mark.medium
def test_a_restart_resumes_and_never_reuses_a_version(setup: MakeRun) -> None:
    """Steps go on from the checkpoint; the next version is above the highest ever issued."""
    setup(trainer=FAST | {"num_steps": 2}).train()
    again = setup(trainer=FAST | {"num_steps": 4})
    for version in range(3, 7):
        again.buffer.announce_version(version, version - 1)
    again.events.clear()
    rows = again.train()
    assert again.events[:3] == [("recover", 2), ("steps_left", 2), ("announce", (7, 2))]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 8, 9]


@pytest.mark.medium
def test_a_restart_at_the_end_keeps_what_the_last_checkpoint_says(setup: MakeRun) -> None:
    """A trainer killed before it acknowledged its last checkpoint writes none that forgets its
    groups; it still ends the run."""
    setup(trainer=FAST | {"num_steps": 2}).train()
    again = setup(trainer=FAST | {"num_steps": 2})
    before = (again.run.dir / "checkpoints" / "step_2" / "state.json").read_bytes()
    again.train()
    assert (again.run.dir / "checkpoints" / "step_2" / "state.json").read_bytes() == before
    assert again.buffer.marks == []
    assert again.buffer.states == ["running", "finished"]


@pytest.mark.medium
@pytest.mark.parametrize("has_signal", [True, False])
def test_a_stop_leaves_a_checkpoint_and_no_end(has_signal: bool, setup: MakeRun) -> None:
    """What was trained is acknowledged, steps that trained nothing are not made again; the run is
    not marked finished."""
    rewards = {} if has_signal else {"reward_of": lambda token: 0.5}
    made = setup(trainer=FAST | {"num_steps": 9, "checkpoint_every": 0}, **rewards)
    made.buffer.stop_after = 3
    rows = made.train()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [mark.policy_version for mark in made.buffer.marks] == [3]
    assert made.buffer.states == ["running"]
    assert not (made.run.dir / "hf").exists()


@pytest.mark.medium
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_one_loop_serves_every_staleness(staleness: int, setup: MakeRun) -> None:
    """Tokens at the limit are trained; beyond it whole groups are dropped as stale."""
    sections = {"trainer": FAST | {"num_steps": 4}, "buffer": {"max_staleness": staleness}}
    rows = setup(lag=staleness, **sections).train()
    assert all(row["train/staleness_max"] == staleness for row in rows)


@pytest.mark.medium
def test_stale_groups_never_reach_the_model(setup: MakeRun) -> None:
    """Others are taken in their place, and the step trains as many as it should."""
    made = setup(
        lag=2,
        trainer=FAST | {"num_steps": 1},
        buffer={"max_staleness": 1},
        env={"max_replaced_share": 1.0},
    )
    made.buffer.lagging_episodes = 64
    (row,) = made.train()
    assert made.buffer.stats()["buffer/replaced/stale"] == 64
    assert (row["train/groups"], row["train/samples"]) == (8, 64)
    assert row["train/staleness_max"] == 0


@pytest.mark.medium
def test_a_step_without_groups_that_can_be_trained_is_refused(setup: MakeRun) -> None:
    """The sentence says what is wrong with them; no weights are published for it."""
    chosen = {"num_steps": 1, "max_microbatch_tokens": 2}
    made = setup(trainer=FAST | chosen, env={"max_replaced_share": 1.0})
    with pytest.raises(UpdateRefused, match=r"8 of 8 groups of step 1 are missing.*overlong"):
        made.train()
    assert made.policy.scheduler.num_steps == 0
    assert made.server.num_publishes == 1


@pytest.mark.medium
def test_what_waited_for_a_resume_is_as_old_as_its_weights(setup: MakeRun) -> None:
    """A resume publishes the checkpoint's weights under a later number: groups that were played by
    the earlier one are no staler for it, and are trained."""
    made = setup(trainer=FAST | {"num_steps": 9})
    made.buffer.stop_after = 2
    made.train()
    made.buffer.play(8)
    again = setup(trainer=FAST | {"num_steps": 3})
    for version in range(3, 7):
        again.buffer.announce_version(version, version - 1)
    *_, row = again.train()
    episodes = [one for lease in again.buffer.taken for one in lease.group.trajectories]
    assert {one.turns[0].version_spans[0].policy_version for one in episodes} == {2}
    assert (row["train/policy_version"], row["train/samples"]) == (8, 64)
    assert row["train/staleness_max"] == 0


@pytest.mark.medium
def test_a_reward_below_that_of_failing_is_warned_about_once(setup: MakeRun) -> None:
    """With a verifier of -1 and 1 an agent that crashes must not get 0; again at twice as much."""
    num_scored = 0

    def score(token: int) -> float:
        nonlocal num_scored
        num_scored += 1
        return -1.0 - 2.0 * (num_scored > 4 * 64) if num_scored % 2 else 1.0

    with structlog.testing.capture_logs() as logs:
        setup(trainer=FAST | {"num_steps": 6}, reward_of=score).train()
    said = [line["sentence"] for line in logs if line["event"] == "failure_reward_too_high"]
    assert [sentence.split(",")[0] for sentence in said] == [
        "an episode was scored -1",
        "an episode was scored -3",
    ]
    assert "Set env.failure_reward" in said[0]


@pytest.mark.medium
def test_trained_episodes_that_are_shorter_than_played_ones_are_a_warning(setup: MakeRun) -> None:
    """Which is how slow episodes go missing without an error; and the row holds the ledger."""
    made = setup(trainer=FAST | {"num_steps": 1})
    made.buffer.numbers = {
        "buffer/ledger/started": 400.0,
        "buffer/ledger/open": 100.0,
        "buffer/ledger/trained": 200.0,
        "buffer/dropped/stale": 3.0,
        "buffer/length/trained_s": 1.5,
        "buffer/length/ended_s": 2.2,
        "buffer/length/trained_tokens": 99.0,
        "buffer/length/ended_tokens": 100.0,
        "buffer/length/slow_lost_share": 0.05,
        "buffer/length/slow_lost_z": 3.5,
    }
    with structlog.testing.capture_logs() as logs:
        (row,) = made.train()
    (warning,) = [entry for entry in logs if entry["event"] == "short_episodes"]
    assert "1.5 seconds against 2.2" in warning["sentence"]
    assert "5.0% of the slow episodes" in warning["sentence"]
    assert "more than of the others by 3.5 standard errors" in warning["sentence"]
    assert row["buffer/ledger/trained"] == 200.0
    assert row["buffer/dropped/stale"] == 3.0
    assert row["buffer/length/ended_tokens"] == 100.0


@pytest.mark.medium
def test_equal_rewards_for_several_steps_are_a_warning(setup: MakeRun) -> None:
    """The sentence says that nothing is learned and what to do."""
    made = setup(
        reward_of=lambda token: 0.5,
        trainer=FAST | {"num_steps": 2},
        telemetry={"no_signal_warning_steps": 2},
    )
    with structlog.testing.capture_logs() as logs:
        made.train()
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "learned in 2 steps: all rewards were equal in every group" in warning["sentence"]
    assert [value for kind, value in made.events if kind == "drop"] == ["no_signal"] * 16


@pytest.mark.medium
def test_a_take_may_serve_several_updates(setup: MakeRun) -> None:
    """Two updates from one take: one publish, and every group is trained."""
    made = setup(trainer=FAST | {"num_steps": 2, "num_updates_per_take": 2})
    rows = made.train()
    assert made.policy.scheduler.num_steps == 4
    assert [row["train/policy_version"] for row in rows] == [1, 2]


@pytest.mark.medium
def test_tokens_are_counted_over_all_updates_of_a_take(setup: MakeRun) -> None:
    """Every sample has two prompt ids and one sampled id, whichever update trains it."""
    chosen = {"num_steps": 1, "num_updates_per_take": 4}
    (row,) = setup(trainer=FAST | chosen, buffer={"drop_zero_signal": False}).train()
    assert row["train/samples"] == 64
    assert row["train/tokens"] == 3 * 64
    assert row["train/trained_tokens"] == 64
    assert row["train/tokens_per_s"] == pytest.approx(3 * 64 / row["train/step_s"])


@pytest.mark.medium
def test_a_refill_asks_and_drops_only_what_is_new(setup: MakeRun, tmp_path: Path) -> None:
    """However often a step is refilled, the filter sees each group once, each is dropped once, and
    the reference scores the batch once."""
    (tmp_path / "twice.py").write_text(
        "from pathlib import Path\n"
        "def keep(group):\n"
        f"    with Path({str(tmp_path / 'asked')!r}).open('a') as file:\n"
        "        print(group.group_id, file=file)\n"
        "    return 'an odd slot' if int(group.group_id[1:].partition('-')[0]) % 2 else ''\n"
    )
    made = setup(
        trainer=FAST | {"num_steps": 1, "kl": "k3"},
        buffer={"filter_path": "twice:keep", "max_refills": 5, "drop_zero_signal": False},
        env={"import_dir": tmp_path},
    )
    (row,) = made.train()
    dropped = made.buffer.dropped
    assert made.buffer.num_takes > 2
    asked = (tmp_path / "asked").read_text().split()
    assert row["train/groups"] == 8
    assert len(asked) == len(set(asked)) == row["train/episodes"] / 8
    assert len(dropped) == len(set(dropped)) == len(asked) - 8


def test_tokens_may_be_as_old_as_the_limit_in_force_allows(setup: MakeRun) -> None:
    """`outloop buffer limits` raises the limit of a run that goes on: what it lets through is
    trained, though it is older than the settings' limit."""
    made = setup(lag=2, trainer=FAST | {"num_steps": 4}, buffer={"max_staleness": 1})
    made.buffer.limits.change(max_staleness=3)
    rows = made.train()
    assert made.buffer.dropped == []
    assert [row["train/staleness_max"] for row in rows[2:]] == [2, 2]


class NotingRanks(RankController):
    """The run's ranks; they note which groups each update of a step trains."""

    def __init__(self, made: Setup) -> None:
        worker, watchdog = made.ranks.worker, made.ranks.watchdog
        super().__init__(worker, watchdog, num_ranks=1, timeout_s=60.0)
        self.noted: list[list[list[int]]] = []

    def run(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """As its base class."""
        if operation is RankWorker.train_step:
            batch, updates = args
            names = list(dict.fromkeys(batch.group_ids))
            order = [
                list(dict.fromkeys(names.index(batch.group_ids[row]) for row in rows))
                for rows in updates
            ]
            self.noted.append(order)
        return super().run(operation, *args, **kwargs)


def test_further_passes_have_another_order_in_every_step(setup: MakeRun) -> None:
    """Within a step and between steps; the same run deals the same."""
    chosen = {"num_steps": 4, "num_epochs_per_take": 3, "num_updates_per_take": 8}
    made = setup(trainer=FAST | chosen, buffer={"drop_zero_signal": False})
    ranks = NotingRanks(made)
    dataclasses.replace(made, ranks=ranks).train()
    passes = [[step[at : at + 8] for at in (0, 8, 16)] for step in ranks.noted]
    assert all(step[0] == [[group] for group in range(8)] for step in passes)
    others = [str(one) for step in passes for one in step[1:]]
    assert len(set(others)) == 8
