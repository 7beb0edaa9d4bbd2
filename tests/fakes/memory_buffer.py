"""A run in memory: lists for the buffer, a transformers model for the servers, and a bandit."""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers

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
from outloop.buffer.run import Run
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.ranks.controller import RankController

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
RewardOf = Callable[[int], float]
Answer = tuple[list[int], list[int], list[float]]
"""Of a turn: new prompt ids, sampled ids, their logprobs."""
FAST = {"learning_rate": 1e-2, "groups_per_step": 8}


def arm(token_id: int) -> float:
    """The two arms of the bandit: the lower half of the vocabulary pays."""
    return 1.0 if token_id < 200 else 0.0


@dataclass
class Report:
    """What publishing in memory costs."""

    duration_s: float = 0.0
    num_bytes: int = 0
    pause_s: float = 0.0
    peak_extra_buckets: float = 0.0


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
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> Report:
        """Take the weights in place of the old ones; every name must be known."""
        known = dict(self._model.named_parameters())
        with torch.no_grad():
            for spec, tensor in zip(source.specs, source.read(source.specs), strict=True):
                known[spec.name].copy_(tensor)
            logits = self._model(torch.tensor([[1, 2]])).logits[0, -1].double()
        self._logprobs = torch.log_softmax(logits, -1).numpy()
        self.version = policy_version
        self.num_publishes += 1
        self._events.append(("publish", policy_version))
        return Report()

    def share_of_the_paying_arm(self) -> float:
        """Its probability under the published weights."""
        return float(np.exp(self._logprobs)[:200].sum())

    def draw(self, ids: Sequence[int] = (1, 2)) -> tuple[int, float]:
        """A token at temperature 1 after `ids`, and its logprob."""
        logprobs = self.logprobs_after(tuple(ids))
        probabilities = np.exp(logprobs)
        token = int(self._generator.choice(400, p=probabilities / probabilities.sum()))
        return token, float(logprobs[token])

    def logprobs_after(self, ids: tuple[int, ...]) -> np.ndarray:
        """[400], under the published weights."""
        if ids == (1, 2):
            return self._logprobs
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -1].double()
        return torch.log_softmax(logits, -1).numpy()


@dataclass
class MemoryBuffer:
    """The reader's calls on plain lists; groups are played when they are taken."""

    server: Server
    make_turn: MakeTurn
    make_trajectory: MakeTrajectory
    reward_of: RewardOf
    events: list[tuple[str, Any]]
    lag: int = 0
    """Versions by which the sampled tokens say they are older."""
    lagging_takes: int | None = None
    """How many takes get such tokens; none: all of them."""
    depths: dict[int, int] = field(default_factory=dict)
    """Publishes that led to a version, where that is not its number."""
    group_size: int = 8
    stop_after: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    highest: int = -1
    next_slot: int = 0
    num_takes: int = 0
    marks: list[CheckpointMark] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    evals_answer: bool = True
    num_in_flight: int = 0
    """Attempts, as evaluations see them."""
    eval_rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By the evaluation's name; those left out get the same."""
    episode: Callable[[Server], tuple[list[Answer], float]] | None = None
    """Plays an episode and scores it; none: one token, by `reward_of`."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Further entries of stats()."""
    joins_at: int | None = None
    """The take during which a server without weights registers, until it has been fed."""

    @property
    def registry(self) -> Self:
        """The same object stands for the run's processes."""
        return self

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

    def _one_token(self, server: Server) -> tuple[list[Answer], float]:
        token, logprob = server.draw()
        return [([1, 2], [token], [logprob])], self.reward_of(token)

    def _play(self) -> Group:
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        trajectories = []
        for index in range(self.group_size):
            answers, reward = (self.episode or self._one_token)(self.server)
            version = self.server.version - (self.lag if self._lags() else 0)
            turns = [
                self.make_turn(
                    "abcd"[number],
                    parent="abcd"[number - 1] if number else None,
                    prompt=prompt,
                    output=output,
                    logprobs=logprobs,
                    version=version,
                )
                for number, (prompt, output, logprobs) in enumerate(answers)
            ]
            trajectories.append(
                self.make_trajectory(
                    turns,
                    reward=reward,
                    episode_id=f"{slot}-{index}",
                    group_id=f"g{slot}",
                )
            )
        return Group(
            group_id=f"g{slot}",
            slot=slot,
            task_id="t",
            group_size=self.group_size,
            trajectories=tuple(trajectories),
        )

    def _lags(self) -> bool:
        return self.lagging_takes is None or self.num_takes <= self.lagging_takes

    def renew(self, fence: int) -> None:
        pass

    def mark_trained(self, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        self.events.append(("mark_trained", policy_version))

    def drop(self, group_id: str, reason: DropReason, *, fence: int, error: str = "") -> None:
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

    def version_depths(self, versions: Collection[int]) -> dict[int, int]:
        return {version: self.depths[version] for version in versions if version in self.depths}

    def request_eval(
        self,
        name: str,
        *,
        policy_version: int,
        num_episodes: int,
        sampling: dict[str, float],
        split: str = "validation",
    ) -> None:
        self.events.append(("eval", (name, num_episodes, sampling["temperature"])))

    def eval_progress(self, name: str) -> EvalProgress:
        self.events.append(("eval_progress", name))
        rewards = self.eval_rewards.get(name, (0.0, 1.0, 1.0, 1.0)) if self.evals_answer else ()
        return EvalProgress(
            num_done=len(rewards),
            num_total=len(rewards) or 4,
            rewards=rewards,
            num_in_flight=self.num_in_flight,
        )

    def sft_progress(self) -> tuple[int, bool]:
        raise NotImplementedError

    def sft_trajectories(self) -> Iterator[Trajectory]:
        raise NotImplementedError

    def set_steps_left(self, num_steps: int) -> None:
        self.events.append(("steps_left", num_steps))

    def set_run_state(self, state: str) -> None:
        self.states.append(state)

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        assert "waiting_for" in fields

    def stats(self) -> dict[str, float]:
        return {"buffer/dropped_groups": 3.0, "buffer/turns": 5.0} | self.numbers


@dataclass
class Setup:
    """One run: folder, buffer, server and what happened in order."""

    run: Run
    buffer: MemoryBuffer
    server: Server
    events: list[tuple[str, Any]]
    ranks: RankController

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        return self.ranks.worker.policy

    def train(self) -> list[dict[str, Any]]:
        """Run the loop; the rows of metrics.jsonl."""
        with MetricsWriter(self.run.dir) as metrics:
            RlLoop(
                self.run,
                self.ranks,
                reader=self.buffer,
                leases=self.buffer,
                publisher=self.server,
                metrics=metrics,
                stop=self.buffer.stop,
            ).run()
        return [json.loads(x) for x in (self.run.dir / "metrics.jsonl").read_text().splitlines()]
