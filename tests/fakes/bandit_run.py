"""A run on the twin of Redis whose episodes pull one of two arms, with a transformers model as the
only server."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from msgspec import structs

from fakes.twin import Twin
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
    CheckpointMark,
    Claim,
    DropReason,
    EvalProgress,
    Lease,
    Opening,
    Reward,
    ServerEntry,
    Task,
    Turn,
)
from outloop.buffer.redis.keys import prefix
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.registry import Registry
from outloop.buffer.run import Run
from outloop.buffer.telemetry import MetricsWriter
from outloop.buffer.writer import BufferWriter
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.train.debug.recorded_groups import NoPublish
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.ranks.controller import RankController

MakeTurn = Callable[..., Turn]
RewardOf = Callable[[int], float]
Answer = tuple[list[int], list[int], list[float]]
"""Of a turn: new prompt ids, sampled ids, their logprobs."""
FAST = {"learning_rate": 1e-2, "groups_per_step": 8}


def arm(token_id: int) -> float:
    """The two arms of the bandit: the lower half of the vocabulary pays."""
    return 1.0 if token_id < 200 else 0.0


class Server:
    """A transformers model that loads what is published, by name, and samples tokens."""

    def __init__(self, folder: Path, events: list[tuple[str, Any]], *, seed: int = 0) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._events = events
        self._generator = np.random.default_rng(seed)
        self.num_publishes = 0
        self.is_asleep = False
        """It gave its memory to the trainer, and must not be asked for a token."""
        self.on_publish: Callable[[int], None] = lambda policy_version: None
        """Called with the version when its weights are loaded."""
        self._state: tuple[int, np.ndarray] = (-1, np.zeros(0))

    @property
    def version(self) -> int:
        """Of its weights; -1 before the first publish."""
        return self._state[0]

    def wait_for_servers(self, on_wait: Callable[[str], None]) -> None:
        """It is there."""

    def take_devices(self, *, keeps_weights: bool = False, on_wait: Callable[[str], None]) -> None:
        """Sleep."""
        self.is_asleep = True

    def give_devices(self, source: TensorSource) -> None:
        """Go on."""
        source.leave()
        self.is_asleep = False

    def publish(
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> NoPublish:
        """Take the weights in place of the old ones; every name must be known."""
        known = dict(self._model.named_parameters())
        with torch.no_grad():
            for spec, tensor in zip(source.specs, source.read(source.specs), strict=True):
                known[spec.name].copy_(tensor)
            logits = self._model(torch.tensor([[1, 2]])).logits[0, -1].double()
        self._state = (policy_version, torch.log_softmax(logits, -1).numpy())
        source.leave()
        self.is_asleep = False
        self.num_publishes += 1
        self._events.append(("publish", policy_version))
        self.on_publish(policy_version)
        return NoPublish()

    def share_of_the_paying_arm(self) -> float:
        """Its probability under the published weights."""
        return float(np.exp(self._state[1])[:200].sum())

    def sample(self, ids: Sequence[int] = (1, 2)) -> tuple[int, float]:
        """A token at temperature 1 after `ids`, and its logprob."""
        assert not self.is_asleep
        logprobs = self.logprobs_after(tuple(ids))
        probabilities = np.exp(logprobs)
        token = int(self._generator.choice(400, p=probabilities / probabilities.sum()))
        return token, float(logprobs[token])

    def pull(self) -> tuple[int, int, float]:
        """(version, token, logprob) after [1, 2], by the same weights; for another thread."""
        assert not self.is_asleep
        version, logprobs = self._state
        probabilities = np.exp(logprobs)
        token = int(self._generator.choice(400, p=probabilities / probabilities.sum()))
        return version, token, float(logprobs[token])

    def logprobs_after(self, ids: tuple[int, ...]) -> np.ndarray:
        """[400], under the published weights."""
        if ids == (1, 2):
            return self._state[1]
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -1].double()
        return torch.log_softmax(logits, -1).numpy()


class _NotingRegistry(Registry):
    """A Registry that hands the trainer's sentence about what it waits for to `on_wait`."""

    on_wait: Callable[[str], None]

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        """As its base class."""
        super().report_status(part, fields)
        self.on_wait(fields["waiting_for"])


class BanditReader(BufferReader):
    """The reader of a run on a twin: it plays groups when they are taken, evaluations when their
    progress is read, and notes in `events` what it is asked for."""

    twin: Twin
    server: Server
    make_turn: MakeTurn

    def __init__(self, run: Run, *options: Any, **named: Any) -> None:
        super().__init__(run, *options, **named)
        self.registry = _NotingRegistry(options[0], prefix(run.run_id), self._scripts)
        self.registry.on_wait = lambda sentence: self.on_wait(sentence)
        self.on_wait: Callable[[str], None] = lambda sentence: None
        """Called with what the trainer reports to wait for."""
        self.events: list[tuple[str, Any]] = []
        self.reward_of: RewardOf = arm
        self.episode: Callable[[Server], tuple[list[Answer], float]] | None = None
        """Plays an episode and scores it; None: one token, by `reward_of`."""
        self.metadata: dict[str, str] = {}
        """Of every episode."""
        self.lag = 0
        """Versions by which the sampled tokens say they are older."""
        self.lagging_episodes: int | None = None
        """How many of the first episodes have such tokens; None: all of them."""
        self.stop_after: int | None = None
        """The take after which the run is stopped."""
        self.stop = threading.Event()
        self.on_take: Callable[[], None] = lambda: None
        """Called before groups are taken."""
        self.joins_at: int | None = None
        """The take during which a server without weights registers."""
        self.eval_rewards: dict[str, tuple[float, ...]] | None = {}
        """By the evaluation's name; None: no evaluation is ever played."""
        self.num_validation_tasks = 1
        self.may_evaluate = threading.Event()
        """Cleared: evaluation attempts are claimed, and go on until it is set."""
        self.may_evaluate.set()
        self.on_trained: Callable[[int], None] = lambda policy_version: None
        """Called with the version when groups are marked as trained."""
        self.numbers: dict[str, float] = {}
        """Entries of stats() in place of the run's own."""
        self.num_takes = 0
        self.taken: list[Lease] = []
        self.dropped: list[str] = []
        self.marks: list[CheckpointMark] = []
        self.states: list[str] = []
        self._run = run
        self._num_played = self._num_claims = 0
        self._held: list[Claim] = []
        self._runner = asyncio.Runner()
        self._writer: BufferWriter | None = None

    def close(self) -> None:
        """As its base class."""
        if self._writer is not None:
            self._runner.run(self._writer.close())
        self._runner.close()
        super().close()

    def play(self, num_groups: int) -> None:
        """Play so many groups, or fewer where admission ends."""
        self._runner.run(self._play(num_groups * self._run.settings.buffer.group_size))

    async def _play(self, count: int, *, is_for_evaluation: bool = False) -> None:
        writer = self._writer
        if writer is None:
            writer = self._writer = await BufferWriter.connect(
                self._run, connect_client=lambda url: self.twin.async_client()
            )
            count_of = {"validation": self.num_validation_tasks, "test": 1}
            evaluated = [
                Task(task_id=f"e{n}", payload={"eval": n}) for n in range(sum(count_of.values()))
            ]
            await writer.register_tasks([Task(task_id="t", payload={})], evaluated, suites=count_of)
        while count > 0:
            self._num_claims += 1
            key = f"k{self.highest_version()}-{self._num_claims}"
            found = (await writer.claim(key=key, count=count)).claims
            if not found:
                break
            for claim in found:
                if claim.purpose == "eval":
                    self._held.append(claim)
                    count -= is_for_evaluation
                else:
                    await self._play_one(writer, claim)
                    count -= 1
        if self.may_evaluate.is_set():
            for claim in self._held:
                await self._play_one(writer, claim)
            self._held.clear()

    async def _play_one(self, writer: BufferWriter, claim: Claim) -> None:
        episode_id = f"{claim.group_id or claim.eval_name}-{claim.attempt}".replace(":", "-")
        self._num_played += 1
        opening = Opening(
            episode_id=episode_id,
            task_id=claim.task.task_id,
            group_id=claim.group_id,
            attempt=claim.attempt,
            purpose=claim.purpose,
            deadline_at=claim.deadline_s,
            sampling=claim.sampling,
            eval_name=claim.eval_name,
            metadata=self.metadata,
            opened_at=0.0,
        )
        await writer.open_episode(opening)
        if claim.purpose == "eval":
            rewards = (self.eval_rewards or {}).get(claim.eval_name, (0.0, 1.0, 1.0, 1.0))
            reward = rewards[claim.attempt % len(rewards)]
            answers: list[Answer] = [([1, 2], [3], [-1.0])]
        else:
            answers, reward = (self.episode or self._pull)(self.server)
        for turn in self._turns_of(episode_id, answers):
            await writer.append_turn(turn)
        await writer.close_episode(
            episode_id,
            outcome="completed",
            failure_kind=None,
            reward=Reward(value=reward),
            error="",
            key="close",
        )

    def _pull(self, server: Server) -> tuple[list[Answer], float]:
        token, logprob = server.sample()
        return [([1, 2], [token], [logprob])], self.reward_of(token)

    def _turns_of(self, episode_id: str, answers: Sequence[Answer]) -> list[Turn]:
        lags = self.lagging_episodes is None or self._num_played <= self.lagging_episodes
        version = self.server.version - (self.lag if lags else 0)
        names = [f"{episode_id}.{number}" for number in range(len(answers))]
        return [
            structs.replace(
                self.make_turn(
                    name, prompt=prompt, output=output, logprobs=logprobs, version=version
                ),
                episode_id=episode_id,
                parent_turn_id=parent,
                branch_cause="extension" if parent else "root",
            )
            for name, parent, (prompt, output, logprobs) in zip(
                names, [None, *names], answers, strict=False
            )
        ]

    def take(
        self, num_groups: int, *, policy_version: int, on_wait: Callable[[str], None], **named: Any
    ) -> list[Lease]:
        """As its base class."""
        self.num_takes += 1
        if self.stop_after is not None and self.num_takes > self.stop_after:
            self.stop.set()
        self.on_take()
        if self.joins_at == self.num_takes:
            self.registry.register_server(NEW_SERVER)
            on_wait("groups")

        def play_and_wait(sentence: str) -> None:
            on_wait(sentence)
            self.play(num_groups)

        named |= {"policy_version": policy_version, "on_wait": play_and_wait}
        leases = super().take(num_groups, **named)
        self.taken += leases
        self.events.append(("take", policy_version))
        return leases

    def mark_trained(self, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        """As its base class."""
        self.on_trained(policy_version)
        super().mark_trained(group_ids, fence=fence, policy_version=policy_version)
        self.events.append(("mark_trained", policy_version))

    def drop(self, group_id: str, reason: DropReason, *, fence: int, error: str = "") -> None:
        """As its base class."""
        super().drop(group_id, reason, fence=fence, error=error)
        self.dropped.append(group_id)
        self.events.append(("drop", reason))

    def acknowledge(self, mark: CheckpointMark) -> None:
        """As its base class."""
        super().acknowledge(mark)
        self.marks.append(mark)

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        """As its base class."""
        self.events.append(("recover", mark.policy_version if mark else None))
        return super().recover(mark, fence=fence)

    def announce_version(self, policy_version: int, parent: int | None) -> None:
        """As its base class."""
        super().announce_version(policy_version, parent)
        self.events.append(("announce", (policy_version, parent)))

    def acknowledge_version(self, policy_version: int) -> None:
        """As its base class."""
        super().acknowledge_version(policy_version)
        self.events.append(("acknowledge", policy_version))

    def request_eval(
        self,
        name: str,
        *,
        policy_version: int,
        num_episodes: int,
        sampling: dict[str, float],
        suite: str = "validation",
        samples_per_task: int = 0,
        blocks_training: bool = False,
    ) -> None:
        """As its base class."""
        super().request_eval(
            name,
            policy_version=policy_version,
            num_episodes=num_episodes,
            sampling=sampling,
            suite=suite,
            samples_per_task=samples_per_task,
            blocks_training=blocks_training,
        )
        self.events.append(("eval", (name, num_episodes, sampling["temperature"])))

    def eval_progress(self, name: str) -> EvalProgress:
        """As its base class."""
        progress = super().eval_progress(name)
        num_held = sum(claim.eval_name == name for claim in self._held)
        missing = progress.num_total - progress.num_done - num_held
        if self.eval_rewards is not None:
            self._runner.run(self._play(missing, is_for_evaluation=True))
            progress = super().eval_progress(name)
        self.events.append(("eval_progress", name))
        return progress

    def set_steps_left(self, num_steps: int) -> None:
        """As its base class."""
        super().set_steps_left(num_steps)
        self.events.append(("steps_left", num_steps))

    def set_run_state(self, state: Any) -> None:
        """As its base class."""
        super().set_run_state(state)
        self.states.append(state)

    def stats(self) -> dict[str, float]:
        """As its base class."""
        return super().stats() | self.numbers


NEW_SERVER = ServerEntry(
    server_id="server-1", url="http://x", kind="torch", policy_version=None, is_quarantined=False
)


def join(run: Run, twin: Twin, server: Server, make_turn: MakeTurn) -> BanditReader:
    """Start a run on a twin, or start it again."""

    def connect(url: str) -> Any:
        return twin.client()

    init_run(run, connect_client=connect)
    reader = BanditReader.connect(run, connect_client=connect)
    assert isinstance(reader, BanditReader)
    reader.twin, reader.server, reader.make_turn = twin, server, make_turn

    def load(policy_version: int) -> None:
        for entry in reader.registry.servers():
            reader.registry.set_server_version(entry.server_id, policy_version, quarantined=False)

    server.on_publish = load
    return reader


@dataclass
class Setup:
    """One run: folder, buffer, server and ranks."""

    run: Run
    buffer: BanditReader
    server: Server
    ranks: RankController

    @property
    def events(self) -> list[tuple[str, Any]]:
        """What happened, in order."""
        return self.buffer.events

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        return self.ranks.worker.policy

    def train(self, **parts: Any) -> list[dict[str, Any]]:
        """Run the loop, with further parts of it; the rows of metrics.jsonl."""
        with MetricsWriter(self.run.dir) as metrics:
            RlLoop(
                self.run,
                self.ranks,
                reader=self.buffer,
                leases=self.buffer,
                publisher=self.server,
                metrics=metrics,
                stop=self.buffer.stop,
                **parts,
            ).run()
        return [json.loads(x) for x in (self.run.dir / "metrics.jsonl").read_text().splitlines()]
