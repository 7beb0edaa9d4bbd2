"""`make bench-learning`, second part: credit by turn against one number an episode.

A game of up to 32 turns, each asked in a branch of its own, in which the policy decides when to
stop. A turn's one token is right, which pays 1/32 (which half of the vocabulary that is, differs
from turn to turn), wrong, which pays nothing, or ends the game; luck adds to
what each turn pays, whatever the token. The same rewards are trained three
ways: as one number an episode (dr_grpo of the sum), by turn (reward_to_go), and by turn with a
critic (gae over turns); each from three seeds, and by turn once more with the rewards of all turns
of a step less their mean, exchanged at random. Everything but agent, router and servers is the
trainer itself.

A second game has 16 turns, none of which ends it or changes another's reward: what a turn gets from
the others is then all noise. By theory the variance of a turn's estimate is that of 16 rewards for
one number an episode, of 8.5 on average by turn (`reward_to_go` takes away what came before), and
of one with `turn_discount = 0`, which is right here. (64 turns were tried first, for the same
reason: one number an episode had then not learned in 2,000 episodes what took 200 by turn.)

Reported: episodes until the mean return of three steps in a row reaches the threshold, and the mean
return of the last five steps. For the comparison of episodes: the ratio of geometric means, and the
smallest ratio that three seeds would show with a power of 0.8 at 0.05, from the spread seen.
`SEEDS` how many seeds, `STEPS` how many steps, `GAME` which game alone (`may_end`, `fixed`).
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import known, say, tell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.families import make_family

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    import transformers

    from outloop.buffer.records import (
        CheckpointMark,
        DropReason,
        Episode,
        Group,
        Lease,
        Reward,
        Sampling,
        ServerEntry,
        Trajectory,
        Turn,
        VersionSpan,
    )
    from outloop.buffer.run import create_run
    from outloop.buffer.settings import Settings
    from outloop.buffer.telemetry import MetricsWriter, read_metrics
    from outloop.engine.publish.tensor_source import TensorSource
    from outloop.engine.train.loop import RlLoop
    from outloop.engine.train.megatron import model_and_optimizer
    from outloop.engine.train.ranks.controller import RankController
    from outloop.engine.train.ranks.rank_worker import RankWorker
    from outloop.engine.train.ranks.watchdog import Watchdog

NUM_SEEDS = int(os.environ.get("SEEDS", "3"))
NUM_STEPS = int(os.environ.get("STEPS", "500"))
VOCAB = 400


@dataclass(frozen=True)
class Rules:
    """A game."""

    num_turns: int
    stop: int
    """From this token on the game ends; VOCAB: none ends it."""
    luck: float
    """Deviation of what a turn earns beside, whatever the token."""

    def is_right(self, turn: int, token: int) -> bool:
        """The lower half of the tokens that do not end the game at even turns, the upper at odd."""
        return token < self.stop and (token < self.stop // 2) == (turn % 2 == 0)


GAMES = {
    "may_end": Rules(num_turns=32, stop=380, luck=0.04),
    "fixed": Rules(num_turns=16, stop=VOCAB, luck=0.0),
}
GROUP_SIZE, GROUPS_PER_STEP = 8, 1
EPISODES_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
THRESHOLD = 0.75
NUM_LAST = 5
_T_2_SIDED, _T_POWER = 2.776, 0.941
"""Student's t with 4 degrees of freedom, at 0.975 and at 0.8."""
COMMON: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "groups_per_step": GROUPS_PER_STEP,
    "learning_rate": 1.5e-3,
    "checkpoint_every": 0,
    "denominator": "episodes",
    "loss": "ppo_clip",
}
WAYS: dict[str, dict[str, Any]] = {
    "by_own_turn": COMMON | {"advantage": "reward_to_go", "turn_discount": 0.0},
    "one_number": COMMON | {"advantage": "dr_grpo"},
    "by_turn": COMMON | {"advantage": "reward_to_go"},
    "by_critic": COMMON
    | {
        "advantage": "gae",
        "critic": {
            "learning_rate": 3e-3,
            "over": "turns",
            "gae_lambda": 0.7,
            "normalizes_advantages": False,
        },
    },
}


class Report:
    """What publishing in memory costs."""

    duration_s, num_bytes, pause_s, peak_extra_buckets = 0.0, 0, 0.0, 0.0


class Game:
    """Servers and buffer of a run in memory; groups are played when they are taken."""

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        *,
        seed: int,
        has_one_number: bool,
        is_shuffled: bool,
    ) -> None:
        self._rules = rules
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._generator = np.random.default_rng(seed)
        self._has_one_number = has_one_number
        self._is_shuffled = is_shuffled
        self._logprobs = np.zeros((rules.num_turns, VOCAB))
        self._version = -1
        self._num_groups = 0
        self._num_right = 0
        self.returns: list[float] = []
        """Of each step, the mean over its episodes, without luck."""

    def publish(
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> Report:
        """Take the weights in place of the old ones."""
        known_names = dict(self._model.named_parameters())
        states = torch.tensor([[1, 2, 3 + turn] for turn in range(self._rules.num_turns)])
        with torch.no_grad():
            for spec, tensor in zip(source.specs, source.read(source.specs), strict=True):
                known_names[spec.name].copy_(tensor)
            logits = self._model(states).logits[:, -1].double()
        self._logprobs = torch.log_softmax(logits, -1).numpy()
        self._version = policy_version
        return Report()

    def take(self, num_groups: int, **_: Any) -> list[Lease]:
        """Play a step's groups."""
        self._num_right = 0
        played = [[self._play() for _ in range(GROUP_SIZE)] for _ in range(num_groups)]
        everyone = [earned for group in played for _, earned in group]
        self.returns.append(self._num_right / self._rules.num_turns / len(everyone))
        if self._is_shuffled:
            rewards = np.concatenate(everyone)
            pool = self._generator.permutation(rewards - rewards.mean()).tolist()
            played = [
                [(tokens, [pool.pop() for _ in earned]) for tokens, earned in group]
                for group in played
            ]
        return [Lease(group=self._group(group), fence=1, deadline=0.0) for group in played]

    def _play(self) -> tuple[list[int], list[float]]:
        """The tokens of a game and what each earned."""
        rules, tokens = self._rules, list[int]()
        while len(tokens) < rules.num_turns and (not tokens or tokens[-1] < rules.stop):
            probabilities = np.exp(self._logprobs[len(tokens)])
            chosen = self._generator.choice(VOCAB, p=probabilities / probabilities.sum())
            tokens.append(int(chosen))
        luck = self._generator.normal(0.0, rules.luck, len(tokens))
        right = [rules.is_right(turn, token) for turn, token in enumerate(tokens)]
        self._num_right += sum(right)
        earned = [own / rules.num_turns + by for own, by in zip(right, luck.tolist(), strict=True)]
        return tokens, earned

    def _group(self, played: Sequence[tuple[list[int], list[float]]]) -> Group:
        slot, self._num_groups = self._num_groups, self._num_groups + 1
        return Group(
            group_id=f"g{slot}",
            slot=slot,
            task_id="game",
            group_size=GROUP_SIZE,
            trajectories=tuple(
                self._trajectory(f"{slot}-{index}", f"g{slot}", tokens, earned)
                for index, (tokens, earned) in enumerate(played)
            ),
        )

    def _trajectory(
        self, name: str, group_id: str, tokens: Sequence[int], earned: Sequence[float]
    ) -> Trajectory:
        reward = Reward(value=0.0, turns={str(t): value for t, value in enumerate(earned)})
        if self._has_one_number:
            reward = Reward(value=float(sum(earned)))
        return Trajectory(
            episode=Episode(
                episode_id=name,
                task_id="game",
                group_id=group_id,
                attempt=0,
                purpose="train",
                outcome="completed",
                failure_kind=None,
                reward=reward,
                metadata={},
                opened_at=0.0,
                closed_at=0.0,
            ),
            turns=tuple(
                Turn(
                    turn_id=str(turn),
                    episode_id=name,
                    parent_turn_id=None,
                    prompt_ids=np.array([1, 2, 3 + turn], np.int32),
                    output_ids=np.array([token], np.int32),
                    behavior_logprobs=np.array([self._logprobs[turn, token]], np.float32),
                    version_spans=(VersionSpan(self._version, 0, 1),),
                    loss_spans=((0, 1),),
                    sampling=Sampling(temperature=1.0),
                    finish_reason="stop",
                    branch_cause="root",
                    started_at=float(turn),
                    finished_at=float(turn),
                )
                for turn, token in enumerate(tokens)
            ),
        )

    @property
    def registry(self) -> Game:
        """The same object stands for the run's processes."""
        return self

    # The rest of what the trainer asks of a buffer; nothing of it matters here.

    def acquire_fence(self) -> int:
        return 1

    def renew(self, fence: int) -> None: ...

    def mark_trained(self, group_ids: Sequence[str], **_: Any) -> None: ...

    def drop(self, group_id: str, reason: DropReason, **_: Any) -> None: ...

    def acknowledge(self, mark: CheckpointMark) -> None: ...

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        return -1

    def announce_version(self, policy_version: int, parent: int | None) -> None: ...

    def acknowledge_version(self, policy_version: int) -> None: ...

    def version_depths(self, versions: Collection[int]) -> dict[int, int]:
        return {}

    def servers(self) -> tuple[ServerEntry, ...]:
        return ()

    def set_run_state(self, state: str) -> None: ...

    def set_steps_left(self, num_steps: int) -> None: ...

    def report_status(self, part: str, fields: dict[str, str]) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


def train(
    folder: Path, rules: Rules, way: str, *, seed: int, is_shuffled: bool = False
) -> list[float]:
    """The mean return of every step of one run."""
    run_dir = Path(tempfile.mkdtemp(prefix="turn-credit-"))
    one_number = way == "one_number"
    settings = Settings(
        model={"path": folder},
        run={"seed": seed},
        # Luck adds to every reward, so any reward may be below zero.
        env={"failure_reward": -100.0} | ({} if one_number else {"turn_scores": "train"}),
        buffer={"group_size": GROUP_SIZE, "drop_zero_signal": False},
        trainer=WAYS[way],
    )
    run = create_run(settings, run_dir / "run", "unix:///nowhere")
    game = Game(folder, rules, seed=seed, has_one_number=one_number, is_shuffled=is_shuffled)
    config = model_and_optimizer.read_config(folder, {}, dtype="float32")
    watchdog = Watchdog(run.dir, rank=0, num_ranks=1, hang_timeout_s=600.0)
    ranks = RankController(
        RankWorker(run, config, watchdog), watchdog, num_ranks=1, timeout_s=600.0
    )
    ranks.run(RankWorker.build, num_updates=NUM_STEPS)
    with MetricsWriter(run.dir) as metrics:
        RlLoop(
            run,
            ranks,
            reader=game,
            leases=game,
            publisher=game,
            metrics=metrics,
            stop=threading.Event(),
        ).run()
    watchdog.close()
    assert len(read_metrics(run.dir)) == NUM_STEPS
    shutil.rmtree(run_dir)
    return game.returns


def episodes_to(returns: Sequence[float]) -> float:
    """Episodes until the mean of three steps reaches the threshold; all, if it never does."""
    for step in range(3, len(returns) + 1):
        if np.mean(returns[step - 3 : step]) >= THRESHOLD:
            return step * EPISODES_PER_STEP
    return len(returns) * EPISODES_PER_STEP


def detectable(*samples: Sequence[float]) -> float:
    """The smallest ratio of two geometric means that so many seeds show with a power of 0.8."""
    spreads = [np.var(np.log(values), ddof=1) for values in samples if len(values) > 1]
    spread = math.sqrt(float(np.mean(spreads))) if spreads else float("nan")
    return math.exp((_T_2_SIDED + _T_POWER) * spread * math.sqrt(2 / NUM_SEEDS))


RUNS: dict[str, tuple[tuple[str, bool], ...]] = {
    "may_end": (
        ("one_number", False),
        ("by_turn", False),
        ("by_critic", False),
        ("by_turn", True),
    ),
    "fixed": (
        ("one_number", False),
        ("by_turn", False),
        ("by_own_turn", False),
        ("by_own_turn", True),
    ),
}
"""By game: how it is trained, and whether from exchanged rewards."""
MIN_SPEED_UP, MAX_APART = 1.5, 0.05
"""Of the fixed game: how many times fewer episodes; by how much final returns may differ."""


def play_all(folder: Path, name: str, chosen: Sequence[str]) -> dict[str, float]:
    """Every way of training one game, from every seed."""
    figures: dict[str, float] = {}
    needed: dict[str, list[float]] = {}
    for way, is_shuffled in RUNS[name]:
        if chosen and (way not in chosen or is_shuffled):
            continue
        run = way + "_shuffled" * is_shuffled
        last = []
        for seed in range(NUM_SEEDS):
            returns = train(folder, GAMES[name], way, seed=seed, is_shuffled=is_shuffled)
            needed.setdefault(run, []).append(episodes_to(returns))
            last.append(float(np.mean(returns[-NUM_LAST:])))
            say(
                f"{name}, {run}, seed {seed}: return {np.mean(returns[:3]):.3f} -> "
                f"{last[-1]:.3f}, {needed[run][-1]:.0f} episodes to {THRESHOLD}"
            )
        figures[f"{name}_{run}_episodes"] = float(np.exp(np.mean(np.log(needed[run]))))
        figures[f"{name}_{run}_last_return"] = float(np.mean(last))
    for run in needed:
        if run != "one_number" and "shuffled" not in run and "one_number" in needed:
            ratio = figures[f"{name}_one_number_episodes"] / figures[f"{name}_{run}_episodes"]
            figures[f"{name}_{run}_speed_up"] = ratio
            figures[f"{name}_{run}_detectable"] = detectable(needed["one_number"], needed[run])
    return figures


def wrong(figures: dict[str, float]) -> list[str]:
    """What the figures do not show, as sentences."""
    found = []
    if "may_end_by_critic_speed_up" in figures and (
        figures["may_end_by_critic_speed_up"] < figures["may_end_by_critic_detectable"]
    ):
        found.append("may_end: credit by turn is not faster, or it cannot be told")
    if "fixed_by_own_turn_speed_up" in figures:
        least = max(MIN_SPEED_UP, figures["fixed_by_own_turn_detectable"])
        if figures["fixed_by_own_turn_speed_up"] < least:
            found.append(f"fixed: credit by turn is not {least:.2f} times as fast")
        apart = figures["fixed_one_number_last_return"] - figures["fixed_by_own_turn_last_return"]
        if abs(apart) > MAX_APART:
            found.append(f"fixed: final returns differ by {apart:.3f}")
    # Half of the turns are right by chance, if none ends the game.
    for run in ("may_end_by_turn_shuffled", "fixed_by_own_turn_shuffled"):
        if figures.get(f"{run}_last_return", 0.0) > 0.6:
            found.append(f"{run}: something is learned from exchanged rewards")
    return found


def main() -> None:
    """Train, print, write; fail when credit by turn is not faster, or noise teaches."""
    torch.set_num_threads(1)
    chosen = os.environ.get("ONLY", "").split()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_family("qwen3", Path(folder), is_tied=True)
        model_and_optimizer.join_process_group(seed=1)
        for name in os.environ.get("GAME", "").split() or list(GAMES):
            figures |= play_all(Path(folder), name, chosen)
            tell("turn-credit", known("turn-credit") | figures)
        model_and_optimizer.leave_process_group()
    if sentences := wrong(figures):
        sys.exit("; ".join(sentences))


if __name__ == "__main__":
    main()
