"""The RL loop against the real buffer on a real Redis server, with episodes played beside it."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio

from fakes.bandit_run import Server
from outloop.buffer.errors import FenceExpired, Gone
from outloop.buffer.reader import BufferReader, init_run
from outloop.buffer.records import Opening, Reward, Sampling, Task, Turn, VersionSpan
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key
from outloop.buffer.run import Run, create_run, load_run
from outloop.buffer.settings import Settings
from outloop.buffer.store.refusal_notes import EpisodeUsage
from outloop.buffer.telemetry import MetricsWriter, read_metrics
from outloop.buffer.writer import BufferWriter
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.train.debug.recorded_groups import NoPublish
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.ranks.controller import RankController

WAIT_S = 30.0


class LateServer(Server):
    """One that takes version 2 only after a while."""

    def __init__(self, folder: Path, *, away_s: float = 0.0, is_hung: bool = False) -> None:
        super().__init__(folder, [])
        self.away_s = away_s
        self.is_hung = is_hung

    def publish(
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> NoPublish:
        """As its base class."""
        until = time.monotonic() + (self.away_s if policy_version == 2 else 0.0)
        while time.monotonic() < until:
            if not self.is_hung:
                on_wait("1 servers (1 registered, 0 answering)")
            time.sleep(0.05)
        return super().publish(source, policy_version, on_wait=on_wait)


class BadServer(LateServer):
    """One that samples an id outside the vocabulary now and then."""

    num_pulls = 0

    def pull(self) -> tuple[int, int, float]:
        """As its base class."""
        self.num_pulls += 1
        version, token, logprob = super().pull()
        return version, 10**6 if self.num_pulls % 23 == 0 else token, logprob


class DamagingWriter(BufferWriter):
    """One that spoils a recorded turn now and then: of another release, or cut short."""

    def __init__(self, run: Run, client: redis.asyncio.Redis, *options: Any, **named: Any) -> None:
        super().__init__(run, client, *options, **named)
        self._run_id, self._redis, self._num_turns = run.run_id, client, 0

    async def append_turn(self, turn: Turn) -> EpisodeUsage:
        """As its base class."""
        usage = await super().append_turn(turn)
        self._num_turns += 1
        turns = key(self._run_id, f"episode:{turn.episode_id}:turns")
        if self._num_turns % 29 == 0:
            data = await self._redis.lindex(turns, 0)
            await self._redis.lset(turns, 0, b"\x09\x00" + data[2:])
        elif self._num_turns % 31 == 0:
            data = await self._redis.lindex(turns, 0)
            await self._redis.lset(turns, 0, data[:-1])
        return usage


async def play(run: Run, server: LateServer, stop: threading.Event) -> None:
    """Claim, sample one turn, score by the arm, close; until stopped."""
    writer = await (DamagingWriter if isinstance(server, BadServer) else BufferWriter).connect(run)
    tasks = [Task(task_id=f"t{index}", payload={"index": index}) for index in range(12)]
    names = itertools.count(time.time_ns())
    try:
        await writer.register_tasks(tasks[:8], tasks[8:])
        while not stop.is_set():
            answer = await writer.claim(key=f"k{next(names)}", count=16)
            for claim in answer.claims:
                with suppress(Gone):
                    await play_one(writer, claim, server, f"e{next(names)}")
            if not answer.claims:
                await asyncio.sleep(0.005)
    finally:
        await writer.close()


async def play_one(writer: BufferWriter, claim: Any, server: LateServer, episode_id: str) -> None:
    """One episode of one turn."""
    now = time.time()
    await writer.open_episode(
        Opening(
            episode_id=episode_id,
            task_id=claim.task.task_id,
            group_id=claim.group_id,
            attempt=claim.attempt,
            purpose=claim.purpose,
            deadline_at=now + 60,
            sampling=claim.sampling,
            eval_name=claim.eval_name,
            opened_at=now,
        )
    )
    version, token, logprob = server.pull()
    await writer.append_turn(
        Turn(
            turn_id=f"{episode_id}-0",
            episode_id=episode_id,
            parent_turn_id=None,
            prompt_ids=np.array([1, 2], np.int32),
            output_ids=np.array([token], np.int32),
            behavior_logprobs=np.array([logprob], np.float32),
            version_spans=(VersionSpan(policy_version=version, start=0, end=1),),
            loss_spans=((0, 1),),
            sampling=Sampling(temperature=1.0),
            finish_reason="stop",
            started_at=now,
            finished_at=now,
        )
    )
    await writer.close_episode(
        episode_id,
        outcome="completed",
        failure_kind=None,
        reward=Reward(value=1.0 if token < 200 else 0.0),
        error="",
        key="close",
    )


@contextmanager
def playing(run: Run, server: LateServer) -> Iterator[None]:
    """Episodes are played in a thread of their own."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(play(run, server, stop)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


@pytest.fixture
def train(
    tmp_path: Path, tiny_folder: Callable[..., Path], make_ranks: Callable[..., RankController]
) -> Iterator[Callable[..., tuple[list[dict[str, Any]], dict[str, float]]]]:
    """Run the loop on Redis: (rows of metrics.jsonl, the buffer's stats)."""
    with EmbeddedRedis(tmp_path / "redis", fsync="no") as redis:

        def run_it(
            *,
            num_steps: int,
            staleness: int,
            group_size: int = 4,
            buffer: Any = None,
            away_s: float = 0.0,
            is_hung: bool = False,
            server_class: type[LateServer] = LateServer,
            **trainer: Any,
        ) -> Any:
            sizes = {"group_size": group_size, "max_staleness": staleness}
            settings = Settings(
                model={"path": tiny_folder()},
                env={"import_dir": tmp_path},
                buffer=sizes | (buffer or {}),
                trainer={
                    "num_steps": num_steps,
                    "groups_per_step": 4,
                    "learning_rate": 4e-3,
                    "checkpoint_every": 2,
                    "take_timeout_s": WAIT_S,
                }
                | trainer,
                eval={"every": 3, "num_episodes": 4, "final_num_episodes": 8, "timeout_s": WAIT_S},
            )
            run = create_run(settings, tmp_path / "run", redis.url)
            init_run(run)
            server = server_class(tiny_folder(), away_s=away_s, is_hung=is_hung)
            reader, leases = BufferReader.connect(run), BufferReader.connect(run)
            ranks = make_ranks(run, num_updates=num_steps)
            with playing(run, server), MetricsWriter(run.dir) as metrics:
                RlLoop(
                    run,
                    ranks,
                    reader=reader,
                    leases=leases,
                    publisher=server,
                    metrics=metrics,
                    stop=threading.Event(),
                ).run()
            stats = reader.stats()
            reader.close()
            leases.close()
            return read_metrics(run.dir), stats

        yield run_it


@pytest.mark.medium
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_loop_trains_on_redis_at_every_staleness(staleness: int, train: Any) -> None:
    """Versions advance, tokens keep their bound, logprobs agree, every group is accounted for."""
    rows, stats = train(num_steps=6, staleness=staleness)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/policy_version"] for row in steps] == [1, 2, 3, 4, 5, 6]
    worst = [row["train/staleness_max"] for row in steps if row["train/staleness_max"] is not None]
    assert worst
    assert max(worst) <= staleness
    gaps = [row["train/logprob_gap_max"] for row in steps]
    assert all(gap is None or gap < 1e-4 for gap in gaps)
    assert {row["step"] for row in rows if "eval/sampled_reward" in row} == {0, 3, 6}
    assert stats["buffer/leased_groups"] == 0
    taken = sum(row["train/episodes"] for row in steps) / 4
    assert stats["buffer/acknowledged_groups"] + stats["buffer/dropped_groups"] == taken == 24


@pytest.mark.medium
def test_partial_rollouts_train_at_level_0(train: Any) -> None:
    """Groups that a step does not need go on into the next, where their tokens are one publish old;
    none is left over at the end, none is played for nothing, and a restart changes none of it."""
    chosen = {"over_provision": 1.5}
    train(num_steps=2, staleness=0, buffer=chosen)
    rows, stats = train(num_steps=6, staleness=0, buffer=chosen)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    worst = [row["train/staleness_max"] for row in steps if row["train/staleness_max"] is not None]
    assert max(worst) == 1
    assert [row["buffer/pipeline_depth"] for row in steps] == [0] * 6
    assert stats["buffer/groups"] == stats["buffer/leased_groups_total"] == 24
    assert stats["buffer/replaced_attempts"] == stats["buffer/dropped/stale"] == 0
    assert stats["buffer/discarded_time_share"] == 0


@pytest.mark.medium
def test_a_restart_goes_on_from_the_checkpoint(train: Any) -> None:
    """Two steps, then two more: steps in order, versions never twice."""
    train(num_steps=2, staleness=1)
    rows, _ = train(num_steps=4, staleness=1)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    versions = [row["train/policy_version"] for row in steps]
    assert versions == sorted(set(versions))


@pytest.mark.medium
def test_a_server_that_takes_three_leases_time_to_come_back_costs_no_group(train: Any) -> None:
    """The publish waits, the leases are renewed meanwhile, and the step is trained once."""
    lease_s = 1.5
    rows, stats = train(num_steps=3, staleness=1, buffer={"lease_s": lease_s}, away_s=3 * lease_s)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/policy_version"] for row in steps] == [1, 2, 3]
    assert stats["buffer/leased_groups"] == 0
    taken = sum(row["train/episodes"] for row in steps) / 4
    assert stats["buffer/acknowledged_groups"] + stats["buffer/dropped_groups"] == taken == 12


@pytest.mark.medium
def test_a_trainer_that_hangs_loses_its_leases(train: Any) -> None:
    """Without progress for hang_timeout_s others get its groups, and it trains none of them."""
    with pytest.raises(FenceExpired):
        train(
            num_steps=3,
            staleness=1,
            buffer={"lease_s": 1.0},
            hang_timeout_s=1.0,
            away_s=6.0,
            is_hung=True,
        )


@pytest.mark.medium
def test_groups_of_one_are_trained_under_a_baseline_of_the_take(train: Any) -> None:
    """REINFORCE++ compares a take's episodes with each other; no group is dropped for its size."""
    chosen = {"advantage": "reinforce_pp", "groups_per_step": 12}
    rows, stats = train(num_steps=3, staleness=1, group_size=1, **chosen)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12, 12]
    assert [row["train/samples"] for row in steps] == [12, 12, 12]
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert stats["buffer/dropped_groups"] == 0
    assert stats["buffer/acknowledged_groups"] == 36


@pytest.mark.medium
@pytest.mark.parametrize("staleness", [0, 2])
def test_other_groups_are_taken_for_those_a_filter_drops(
    staleness: int, train: Any, tmp_path: Path
) -> None:
    """Every second group is dropped, at level 0 too, and each step still trains a full batch."""
    keep = (
        "def keep(group):\n"
        "    slot = int(group.group_id[1:].partition('-')[0])\n"
        "    return 'an odd slot' if slot % 2 else ''\n"
    )
    (tmp_path / f"filters{staleness}.py").write_text(keep)
    chosen = {"filter_path": f"filters{staleness}:keep", "max_refills": 40}
    rows, stats = train(num_steps=3, staleness=staleness, buffer=chosen)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/policy_version"] for row in steps] == [1, 2, 3]
    assert stats["buffer/acknowledged_groups"] == 3 * 4
    assert stats["buffer/dropped/filtered"] >= 4
    taken = sum(row["train/episodes"] for row in steps) / 4
    assert stats["buffer/acknowledged_groups"] + stats["buffer/dropped_groups"] >= taken


@pytest.mark.medium
@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_that_cannot_be_trained_are_dead_letters(
    staleness: int, train: Any, tmp_path: Path
) -> None:
    """Bytes of another release, damage and ids outside the vocabulary stop neither reader nor
    trainer: each group leaves a letter that says which episode and what is wrong with it."""
    rows, stats = train(num_steps=6, staleness=staleness, server_class=BadServer)
    assert [r["train/policy_version"] for r in rows if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    reader = BufferReader.connect(load_run(tmp_path / "run"))
    letters = reader.dead_letters.list_all()
    reader.close()
    assert len(letters) == stats["buffer/dropped/malformed"] == stats["buffer/dead_letters"]
    for reason in ("schema=9, this release reads schema=4", "turn is damaged", "vocab_size=400"):
        assert any(reason in x.error and x.error.startswith("episode_id=e") for x in letters), (
            reason
        )
