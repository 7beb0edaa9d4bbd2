"""The RL loop through Megatron-core, against an in-memory buffer and a transformers server."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch
import transformers

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.records import (
    CheckpointMark,
    DropReason,
    EvalProgress,
    Group,
    Lease,
    ServerEntry,
    Trajectory,
    Turn,
)
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.mcore import Policy
from outloop.engine.train.reference import content_hash

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
RewardOf = Callable[[int], float]
FAST = {"learning_rate": 1e-2, "groups_per_step": 8}
BANDIT = {"learning_rate": 4e-3, "groups_per_step": 8, "num_steps": 25}


def arm(token_id: int) -> float:
    """The two arms of the bandit: the lower half of the vocabulary pays."""
    return 1.0 if token_id < 200 else 0.0


@dataclass
class Report:
    """What publishing in memory costs."""

    duration_s: float = 0.0
    num_bytes: int = 0
    pause_s: float = 0.0


class Server:
    """A transformers model that loads what is published, by name, and draws one token."""

    def __init__(self, folder: Path, events: list[tuple[str, Any]]) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._events = events
        self._generator = np.random.default_rng(0)
        self.version = -1
        self.num_publishes = 0
        self._logprobs = np.zeros(0)

    def publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> Report:
        """Take the weights in place of the old ones; every name must be known."""
        known = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                known[name].copy_(tensor)
            logits = self._model(torch.tensor([[1, 2]])).logits[0, -1].double()
        self._logprobs = torch.log_softmax(logits, -1).numpy()
        self.version = policy_version
        self.num_publishes += 1
        self._events.append(("publish", policy_version))
        return Report()

    def share_of_the_paying_arm(self) -> float:
        """Its probability under the published weights."""
        return float(np.exp(self._logprobs)[:200].sum())

    def draw(self) -> tuple[int, float]:
        """A token at temperature 1 and its logprob."""
        probabilities = np.exp(self._logprobs)
        token = int(self._generator.choice(400, p=probabilities / probabilities.sum()))
        return token, float(self._logprobs[token])


@dataclass
class MemoryBuffer:
    """The reader's calls on plain lists; groups are played when they are taken."""

    server: Server
    make_turn: MakeTurn
    make_trajectory: MakeTrajectory
    reward_of: RewardOf
    events: list[tuple[str, Any]]
    lag: int = 0
    """Versions by which the drawn tokens say they are older."""
    group_size: int = 8
    stop_after: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    highest: int = -1
    next_slot: int = 0
    num_takes: int = 0
    marks: list[CheckpointMark] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    evals_answer: bool = True
    joins_at: int | None = None
    """The take during which a server without weights registers, until it has been fed."""

    def servers(self) -> tuple[ServerEntry, ...]:
        joined = self.joins_at is not None and self.num_takes >= self.joins_at
        if not joined or self.server.num_publishes > self.num_takes:
            return ()
        entry = ServerEntry(
            server_id="server-1", url="http://x", kind="torch", policy_version=None,
            is_quarantined=False,
        )  # fmt: skip
        return (entry,)

    def acquire_fence(self) -> int:
        return 1

    def take(
        self,
        num_groups: int,
        *,
        fence: int,
        policy_version: int,
        timeout_s: float,
        on_wait: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> list[Lease]:
        self.num_takes += 1
        if self.stop_after is not None and self.num_takes > self.stop_after:
            self.stop.set()
        on_wait("groups")
        if should_stop():
            return []
        groups = [self._play() for _ in range(num_groups)]
        self.events.append(("take", policy_version))
        return [Lease(group=group, fence=fence, deadline=0.0) for group in groups]

    def _play(self) -> Group:
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        trajectories = []
        for index in range(self.group_size):
            token, logprob = self.server.draw()
            turn = self.make_turn(
                "a",
                prompt=[1, 2],
                output=[token],
                logprobs=[logprob],
                version=self.server.version - self.lag,
            )
            trajectories.append(
                self.make_trajectory(
                    [turn], reward=self.reward_of(token), episode_id=f"{slot}-{index}"
                )
            )
        return Group(
            group_id=f"g{slot}",
            slot=slot,
            task_id="t",
            group_size=self.group_size,
            trajectories=tuple(trajectories),
        )

    def renew(self, fence: int) -> None:
        pass

    def mark_trained(self, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        self.events.append(("mark_trained", policy_version))

    def drop(self, group_id: str, reason: DropReason, *, fence: int) -> None:
        self.events.append(("drop", reason))

    def acknowledge(self, mark: CheckpointMark) -> None:
        self.marks.append(mark)

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        self.events.append(("recover", mark.policy_version if mark else None))
        return self.highest

    def announce_version(self, policy_version: int, parent: int | None) -> None:
        assert policy_version > self.highest
        self.highest = policy_version
        self.events.append(("announce", (policy_version, parent)))

    def acknowledge_version(self, policy_version: int) -> None:
        self.events.append(("acknowledge", policy_version))

    def request_eval(
        self, name: str, *, policy_version: int, num_episodes: int, sampling: dict[str, float]
    ) -> None:
        self.events.append(("eval", (name, num_episodes, sampling["temperature"])))

    def eval_progress(self, name: str) -> EvalProgress:
        self.events.append(("eval_progress", name))
        rewards = (0.0, 1.0, 1.0, 1.0) if self.evals_answer else ()
        return EvalProgress(num_done=len(rewards), num_total=4, rewards=rewards)

    def sft_progress(self) -> tuple[int, bool]:
        raise NotImplementedError

    def sft_trajectories(self) -> Iterator[Trajectory]:
        raise NotImplementedError

    def set_run_state(self, state: str) -> None:
        self.states.append(state)

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        assert "waiting_for" in fields

    def stats(self) -> dict[str, float]:
        return {"buffer/dropped_groups": 3.0, "buffer/turns": 5.0}


@dataclass
class Setup:
    """One run: folder, buffer, server and what happened in order."""

    run: Run
    buffer: MemoryBuffer
    server: Server
    events: list[tuple[str, Any]]
    policy: Policy

    def train(self) -> list[dict[str, Any]]:
        """Run the loop; the rows of metrics.jsonl."""
        with MetricsWriter(self.run.dir) as metrics:
            RlLoop(
                self.run,
                self.policy,
                reader=self.buffer,
                publisher=self.server,
                metrics=metrics,
                stop=self.buffer.stop,
            ).run()
        return [json.loads(x) for x in (self.run.dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def setup(
    tmp_path: Path,
    tiny_folder: Callable[..., Path],
    make_policy: Callable[..., Policy],
    make_turn: MakeTurn,
    make_trajectory: MakeTrajectory,
) -> Callable[..., Setup]:
    """Make a run: `setup(trainer={"num_steps": 3}, reward_of=arm)`; again: a restart."""

    def make(reward_of: RewardOf = arm, lag: int = 0, **sections: dict[str, Any]) -> Setup:
        events: list[tuple[str, Any]] = []
        settings = Settings(model={"path": tiny_folder()}, **sections)
        run = create_run(settings, tmp_path / "run", "unix:///nowhere")
        server = Server(tiny_folder(), events)
        buffer = MemoryBuffer(server, make_turn, make_trajectory, reward_of, events, lag=lag)
        trainer = settings.trainer
        policy = make_policy(num_updates=trainer.num_steps, learning_rate=trainer.learning_rate)
        return Setup(run, buffer, server, events, policy)

    return make


def test_a_bandit_is_learned(setup: Callable[..., Setup], tiny_folder: Callable[..., Path]) -> None:
    """The paying arm wins; the trainer's logprobs are the server's at every step."""
    made = setup(trainer=BANDIT)
    rows = made.train()
    assert rows[0]["train/reward_mean"] < 0.65
    assert rows[-1]["train/reward_mean"] > 0.9
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-4 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows[:3])
    assert made.buffer.states == ["running", "finished"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(made.run.dir / "hf")
    with torch.no_grad():
        probabilities = exported(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
    assert probabilities[:200].sum() > 0.9


def test_shuffled_rewards_teach_nothing(setup: Callable[..., Setup]) -> None:
    """With rewards that do not depend on the action the arm's share stays what it was."""
    generator = np.random.default_rng(7)
    made = setup(reward_of=lambda token: float(generator.integers(0, 2)), trainer=BANDIT)
    made.train()
    assert 0.25 < made.server.share_of_the_paying_arm() < 0.75


def test_a_step_keeps_its_order(setup: Callable[..., Setup]) -> None:
    """Announce, publish, acknowledge, and only then admission credit."""
    made = setup(trainer=FAST | {"num_steps": 2})
    made.train()
    kinds = [(kind, value) for kind, value in made.events if kind != "drop"]
    assert kinds == [
        ("recover", None),
        ("announce", (0, None)),
        ("publish", 0),
        ("acknowledge", 0),
        ("take", 0),
        ("announce", (1, 0)),
        ("publish", 1),
        ("acknowledge", 1),
        ("mark_trained", 1),
        ("take", 1),
        ("announce", (2, 1)),
        ("publish", 2),
        ("acknowledge", 2),
        ("mark_trained", 2),
    ]


def test_a_server_that_joins_is_fed_while_groups_are_awaited(setup: Callable[..., Setup]) -> None:
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


def test_checkpoints_acknowledge_every_trained_group_once(setup: Callable[..., Setup]) -> None:
    """Marks are disjoint, cover all groups with signal, and carry cursor and version."""
    made = setup(trainer=FAST | {"num_steps": 5, "checkpoint_every": 2})
    made.train()
    assert [mark.policy_version for mark in made.buffer.marks] == [2, 4, 5]
    assert [mark.next_slot for mark in made.buffer.marks] == [16, 32, 40]
    groups = [group for mark in made.buffer.marks for group in mark.group_ids]
    num_dropped = sum(kind == "drop" for kind, _ in made.events)
    assert len(groups) == len(set(groups)) == 40 - num_dropped


def test_a_restart_resumes_and_never_reuses_a_version(setup: Callable[..., Setup]) -> None:
    """Steps go on from the checkpoint; the next version is above the highest ever issued."""
    setup(trainer=FAST | {"num_steps": 2}).train()
    again = setup(trainer=FAST | {"num_steps": 4})
    again.buffer.highest = 6
    rows = again.train()
    assert again.events[:2] == [("recover", 2), ("announce", (7, 2))]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 8, 9]


def test_a_stop_leaves_a_checkpoint_and_no_end(setup: Callable[..., Setup]) -> None:
    """What was trained is acknowledged; the run is not marked finished."""
    made = setup(trainer=FAST | {"num_steps": 9, "checkpoint_every": 0})
    made.buffer.stop_after = 3
    rows = made.train()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [mark.policy_version for mark in made.buffer.marks] == [3]
    assert made.buffer.states == ["running"]
    assert not (made.run.dir / "hf").exists()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_one_loop_serves_every_staleness(staleness: int, setup: Callable[..., Setup]) -> None:
    """Tokens at the limit are trained; beyond it whole groups are dropped as stale."""
    sections = {"trainer": FAST | {"num_steps": 4}, "buffer": {"max_staleness": staleness}}
    rows = setup(lag=staleness, **sections).train()
    assert all(row["train/staleness_max"] == staleness for row in rows)


def test_stale_groups_never_reach_the_model(setup: Callable[..., Setup]) -> None:
    """A step of nothing but stale groups makes no update and says so."""
    made = setup(lag=2, trainer=FAST | {"num_steps": 1}, buffer={"max_staleness": 1})
    (row,) = made.train()
    assert [value for kind, value in made.events if kind == "drop"] == ["stale"] * 8
    assert row["train/loss"] is None
    assert row["train/samples"] == 0
    assert made.policy.scheduler.num_steps == 0


def test_equal_rewards_for_several_steps_are_a_warning(setup: Callable[..., Setup]) -> None:
    """The sentence says that nothing is learned and what to do."""
    made = setup(
        reward_of=lambda token: 0.5,
        trainer=FAST | {"num_steps": 2},
        telemetry={"no_signal_warning_steps": 2},
    )
    with structlog.testing.capture_logs() as logs:
        made.train()
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "equal in every group for 2 steps" in warning["sentence"]
    assert [value for kind, value in made.events if kind == "drop"] == ["no_signal"] * 16


def test_evaluations_follow_their_schedule(setup: Callable[..., Setup]) -> None:
    """Ends and every second version; greedy at the ends; each done before the next publish."""
    made = setup(
        trainer=FAST | {"num_steps": 5},
        eval={"every": 2, "num_episodes": 16, "final_num_episodes": 32},
    )
    rows = made.train()
    assert [value for kind, value in made.events if kind == "eval"] == [
        ("0:sampled", 32, 1.0),
        ("0:greedy", 32, 0.0),
        ("2:sampled", 16, 1.0),
        ("4:sampled", 16, 1.0),
        ("5:sampled", 32, 1.0),
        ("5:greedy", 32, 0.0),
    ]
    kinds = [kind for kind, _ in made.events]
    for index, kind in enumerate(kinds):
        if kind == "eval" and "announce" in kinds[index:]:
            assert "eval_progress" in kinds[index : kinds.index("announce", index)]
    answers = {row["step"]: row for row in rows if "eval/sampled_reward" in row}
    assert sorted(answers) == [0, 2, 4, 5]
    assert answers[5]["eval/greedy_reward"] == 0.75
    assert answers[5]["eval/sampled_se"] == pytest.approx(0.25)


def test_an_evaluation_that_never_ends_names_who_is_awaited(setup: Callable[..., Setup]) -> None:
    """The deadline passes with the number of episodes done."""
    made = setup(trainer=FAST | {"num_steps": 1}, eval={"every": 1, "timeout_s": 0.2})
    made.buffer.evals_answer = False
    with pytest.raises(DeadlineExceeded, match=r"runner.*0 of 8|0 of 8.*runner"):
        made.train()


def test_a_take_may_serve_several_updates(setup: Callable[..., Setup]) -> None:
    """Two updates from one take: one publish, and every group is trained."""
    made = setup(trainer=FAST | {"num_steps": 2, "num_updates_per_take": 2})
    rows = made.train()
    assert made.policy.scheduler.num_steps == 4
    assert [row["train/policy_version"] for row in rows] == [1, 2]


RECOMPUTE = {"proximal": "recompute"}
ALGORITHMS = {
    "dr_grpo": {"advantage": "dr_grpo", "denominator": "constant", "denominator_constant": 64.0},
    "rloo": {"advantage": "rloo"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "gspo": {"loss": "gspo", "denominator": "episodes"},
    "cispo": {"loss": "cispo", "clip_low": 1.0},
    "decoupled": RECOMPUTE,
    "token_tis": RECOMPUTE | {"correction": "token_tis"},
    "sequence_tis": RECOMPUTE | {"correction": "sequence_tis"},
    "masked_veto": RECOMPUTE
    | {"correction": "token_mis", "correction_floor": 0.5, "correction_veto": 0.01},
    "sequence_mis": RECOMPUTE | {"correction": "sequence_mis"},
    "k1": {"kl": "k1", "kl_coefficient": 0.01},
    "k2": {"kl": "k2", "kl_coefficient": 0.01},
    "k3": {"kl": "k3", "kl_coefficient": 0.01},
    "entropy": {"entropy_coefficient": 0.01},
    "overlong": {"overlong_penalty": 0.5, "overlong_max_tokens": 4, "overlong_buffer_tokens": 2},
}
SHORT = BANDIT | {"num_steps": 12, "learning_rate": 1.2e-2, "checkpoint_every": 0}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_the_bandit(name: str, setup: Callable[..., Setup]) -> None:
    """The paying arm wins, and the first ratio of every step is 1."""
    made = setup(trainer=SHORT | ALGORITHMS[name])
    rows = made.train()
    assert rows[0]["train/reward_mean"] < 0.65
    assert made.server.share_of_the_paying_arm() > 0.75
    trained = [row for row in rows if row["train/samples"]]
    assert all(abs(row["train/ratio_mean"] - 1) < 1e-4 for row in trained)
    for row in trained:
        assert row.get("train/proximal_ratio_max", 1.0) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_learns_from_shuffled_rewards(name: str, setup: Callable[..., Setup]) -> None:
    """Rewards that do not depend on the action leave the arm's share where it was."""
    generator = np.random.default_rng(7)
    made = setup(
        reward_of=lambda token: float(generator.integers(0, 2)),
        trainer=SHORT | ALGORITHMS[name],
    )
    made.train()
    assert 0.2 < made.server.share_of_the_paying_arm() < 0.8


def test_a_strong_kl_term_keeps_the_policy_where_it_was(setup: Callable[..., Setup]) -> None:
    """What is learned without it is not learned with it, in the reward or in the loss."""
    for kind, coefficient in (("k1", 5.0), ("k2", 5.0), ("k3", 5.0)):
        made = setup(trainer=SHORT | {"kl": kind, "kl_coefficient": coefficient, "resume": False})
        rows = made.train()
        assert made.server.share_of_the_paying_arm() < 0.75, kind
        assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-5)
        assert all(row["train/kl"] is None or abs(row["train/kl"]) < 0.5 for row in rows)


def test_the_second_update_of_a_take_is_corrected_for_the_first(
    setup: Callable[..., Setup],
) -> None:
    """Both updates take their ratio to the weights before the first."""
    chosen = RECOMPUTE | {"correction": "token_tis", "num_updates_per_take": 2}
    rows = setup(trainer=FAST | {"num_steps": 2} | chosen).train()
    for row in rows:
        assert row["train/proximal_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["train/correction_ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert row["train/correction_masked_share"] == 0.0


def test_the_reference_is_pinned_across_a_resume(
    setup: Callable[..., Setup], tmp_path: Path, tiny_folder: Callable[..., Path]
) -> None:
    """The checkpoint names its content; another folder's content is refused."""
    chosen = {"kl": "k3", "num_steps": 2}
    first = setup(trainer=FAST | chosen)
    first.train()
    state = json.loads((first.run.dir / "checkpoints/step_2/state.json").read_text())
    assert state["reference_hash"] == content_hash(tiny_folder())
    # A run that leaves the KL term out for a while keeps the pin.
    setup(trainer=FAST | {"num_steps": 3}).train()
    again = setup(trainer=FAST | chosen | {"num_steps": 4})
    state_file = again.run.dir / "checkpoints/step_3/state.json"
    state = json.loads(state_file.read_text())
    assert state["reference_hash"] == content_hash(tiny_folder())
    forged = json.dumps(state | {"reference_hash": "0" * 64}, indent=1)
    state_file.write_text(forged)
    complete = state_file.with_name("COMPLETE")
    sizes = json.loads(complete.read_text()) | {"state.json": len(forged)}
    complete.write_text(json.dumps(sizes))
    with pytest.raises(SettingsError, match="pinned to the reference model 000000000000"):
        again.train()


def test_an_own_loss_takes_the_place_of_the_built_in_one(
    setup: Callable[..., Setup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is zero everywhere leaves the weights as they were."""
    (tmp_path / "own_zero.py").write_text(
        "def zero(policy_logprobs, proximal_logprobs, advantages, *, clip_low, clip_high):\n"
        "    return 0.0 * policy_logprobs\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = setup(trainer=FAST | {"num_steps": 1, "loss_path": "own_zero:zero"}).train()
    assert rows[0]["train/samples"] > 0
    assert rows[0]["train/grad_norm"] == 0.0
