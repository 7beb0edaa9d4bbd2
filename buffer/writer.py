"""The asynchronous side of the buffer, for the router.

It registers tasks, gives out claims, opens, records and closes episodes. When a call returns, its
effect is in Redis. Every call may be repeated with the same arguments; the second one changes
nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, get_args

import msgspec
import redis.asyncio
import structlog
from msgspec.structs import replace

from outloop.buffer import run_status
from outloop.buffer.codec import records_codec
from outloop.buffer.errors import (
    BufferLost,
    NotFound,
    OutloopError,
    RecordError,
)
from outloop.buffer.records import (
    SOURCE,
    Claim,
    ClaimResult,
    CloseResult,
    FailureKind,
    OpenEpisode,
    Opening,
    Outcome,
    PolicyState,
    Reward,
    Task,
    Trajectory,
    Turn,
)
from outloop.buffer.redis.client import connect_async, translated
from outloop.buffer.redis.keys import key, prefix
from outloop.buffer.redis.pipelining import PipelinedScripts
from outloop.buffer.redis.pubsub import Channel
from outloop.buffer.redis.refused_writes import UNKNOWN_FOLDER, probe, write_obstacle
from outloop.buffer.redis.run_meta import CLOSE_GRACE_S, check_joinable
from outloop.buffer.redis.scripts import Abandoned, Argument, AsyncScripts, Clock, refusal
from outloop.buffer.registry import decode_frozen, decode_servers, encode_facts
from outloop.buffer.run import Run
from outloop.buffer.runner_keys import KnownKeys, decode_keys
from outloop.buffer.store.episodes import load_async, named
from outloop.buffer.store.refusal_notes import EpisodeUsage, RefusalNotes
from outloop.buffer.store.sft import put_async
from outloop.buffer.tasks.mixture import Mixture, TaskSource
from outloop.buffer.tasks.source_weights import encode_sources, encode_weights, load_mixture
from outloop.buffer.tasks.validation import check_id, check_tasks, deadline_of

_CLAIM_MEMORY_MS = 600_000
_MAX_CLAIM_COUNT, _TASKS_PER_COMMAND, _CACHED_TASKS = 4096, 512, 8192
_WAITS_S = {"admission": 0.1, "not_ready": 0.25, "no_tasks": 0.5, "paused": 1.0, "finished": 5.0}
_log = structlog.get_logger()
_ClaimRow = tuple[str, str, int, int, str, str]


class BufferWriter:
    """One run, through an asyncio client; belongs to the event loop in which it was connected."""

    def __init__(
        self,
        run: Run,
        client: redis.asyncio.Redis,
        clock: Clock | None,
    ) -> None:
        self._run = run
        self._client = client
        self._prefix = prefix(run.run_id)
        scripts = (client, key(run.run_id, "meta"), clock)
        copies = run.settings.buffer.min_replicas
        self._scripts = AsyncScripts(*scripts, min_replicas=copies)
        self._turn_scripts = PipelinedScripts(*scripts, min_replicas=copies)
        self.refusal_notes = RefusalNotes(client, self._scripts, self._prefix)
        self.channel = Channel(client, self._prefix)
        self._tasks: OrderedDict[bytes, Task] = OrderedDict()
        self._mixture: tuple[int, Mixture] | None = None

    @classmethod
    async def connect(
        cls,
        run: Run,
        *,
        clock: Clock | None = None,
        connect_client: Callable[[str], redis.asyncio.Redis] = connect_async,
    ) -> BufferWriter:
        """Join `run`, by the client that `connect_client` makes for its URL.

        Raises:
            BufferUnavailable: Redis is unreachable or does not hold the run.
            SettingsError, SchemaMismatch: it was started with other settings, by another release.
        """
        writer = cls(run, connect_client(run.redis_url), clock)
        try:
            with translated(f"run_id={run.run_id}: joining"):
                meta: Any = await writer._client.hgetall(writer._key("meta"))
            check_joinable(run, meta)
        except BaseException:
            await writer.close()
            raise
        return writer

    async def close(self) -> None:
        """Close the connections."""
        await self._turn_scripts.close()
        await self._client.aclose()

    async def register_tasks(
        self,
        tasks: Sequence[Task],
        eval_tasks: Sequence[Task],
        sources: Sequence[TaskSource] = (),
        *,
        suites: Mapping[str, int] | None = None,
    ) -> None:
        """Fix the run's tasks; the same tasks again change nothing.

        Args:
            tasks: read several times; those of a list that makes them when asked need no memory.
            sources: the sources of `tasks`, one after the other; left out: there is one.
            suites: of which `eval_tasks` consist, in order: name and number of tasks; left out:
                all are "validation".

        Raises:
            Conflict: the run has other tasks.
            RecordError: an id is used twice, a payload is not JSON-able, suites are not made of
                `eval_tasks`, a priority is no whole number, a training task has the content of an
                evaluation task, or its deadline is later than its group's.
        """
        suites = {"validation": len(eval_tasks)} if suites is None else suites
        what = "registering tasks"
        sources = sources or (TaskSource("tasks", len(tasks)),)
        # Millions of tasks take seconds, in which the loop goes on.
        settings = self._run.settings
        checked = await asyncio.to_thread(check_tasks, tasks, eval_tasks, sources, suites, settings)
        arguments = (checked.digest, len(tasks), len(eval_tasks))
        tail = (
            encode_sources(sources),
            encode_weights([source.weight for source in sources]),
            " ".join(f"{name} {number}" for name, number in suites.items()),
            checked.priorities,
            settings.buffer.priority_window,
        )
        (complete,) = await self._scripts.call(
            "register_tasks", *arguments, "begin", *tail, what=what
        )
        if complete:
            return
        for name, records in (
            ("tasks", map(records_codec.encode_task, tasks)),
            ("eval_tasks", checked.held_out),
        ):
            numbered = enumerate(records)
            while fields := list(chain.from_iterable(islice(numbered, _TASKS_PER_COMMAND))):
                with translated(what):
                    await self._client.execute_command("HSET", self._key(name), *fields)
        await self._scripts.call("register_tasks", *arguments, "commit", *tail, what=what)

    async def claim(
        self, *, key: str, count: int, runner_id: str = "", servers_are_busy: bool = False
    ) -> ClaimResult:
        """Claim up to `count` attempts; the same key gets the same claims for ten minutes.

        Args:
            runner_id: of a runner that sends heartbeats; empty: only deadlines end its attempts.
            servers_are_busy: turns wait for room on the servers, so that more episodes would not be
                played faster: buffer.pipeline_depth = "auto" then does not grow.
        """
        check_id(key, "key")
        if runner_id:
            check_id(runner_id, "runner_id")
        if not 1 <= count <= _MAX_CLAIM_COUNT:
            raise RecordError(f"count={count}; 1 to {_MAX_CLAIM_COUNT} are allowed")
        arguments = (key, count, _CLAIM_MEMORY_MS, runner_id, int(servers_are_busy))
        packed, reason, revision = await self._scripts.call(
            "claim", *arguments, what="claiming tasks"
        )
        rows: list[_ClaimRow] = list(msgspec.msgpack.decode(packed))
        if not rows:
            why = reason.decode()
            return ClaimResult(claims=(), reason=why, retry_after_s=_WAITS_S[why])
        mixture = await self._load_mixture(revision)
        places = [
            slot if purpose == "eval" else mixture.task_index(slot)
            for purpose, _, _, slot, *_ in rows
        ]
        fields = [
            f"{'eval_tasks' if row[0] == 'eval' else 'tasks'} {place}".encode()
            for row, place in zip(rows, places, strict=True)
        ]
        tasks = await self._load_tasks(fields)
        claims = tuple(
            self._claim_from(row, task, "" if row[0] == "eval" else mixture.source_of(place))
            for row, task, place in zip(rows, tasks, places, strict=True)
        )
        return ClaimResult(claims=claims, reason="", retry_after_s=0.0)

    async def heartbeat(self, runner_id: str) -> float:
        """Note that a runner is alive; returns for how many seconds it may be silent, 0: for ever.

        What it claimed is lost, to resumption or replacement, when it was silent for longer.

        Raises:
            RecordError: `runner_id` is no id.
        """
        (limit_ms,) = await self._scripts.call(
            "heartbeat",
            check_id(runner_id, "runner_id"),
            what=f"heartbeat of runner_id={runner_id}",
        )
        return int(limit_ms) / 1000

    async def open_episode(self, opening: Opening) -> None:
        """Open an episode for a claimed attempt; the same again changes nothing.

        A second episode for the same attempt takes it over; the first one is discarded.

        Raises:
            Gone: the attempt was replaced, or its group is sealed.
            NotFound: no such group or evaluation.
            Conflict: the episode_id is open with another content.
        """
        (error,) = await self.open_episodes([opening])
        if error is not None:
            raise error

    async def open_episodes(self, openings: Sequence[Opening]) -> tuple[OutloopError | None, ...]:
        """Open many in one round trip; for each None, or the error that open_episode raises."""
        arguments: list[bytes | str | int] = [len(openings)]
        for opening in openings:
            identity = records_codec.encode_opening(
                replace(opening, opened_at=0.0, deadline_at=0.0)
            )
            arguments += [
                opening.episode_id,
                _member(opening),
                opening.task_id,
                opening.metadata.get(SOURCE, ""),
                identity,
                records_codec.encode_opening(opening),
                int((max(opening.deadline_at - opening.opened_at, 0.0) + CLOSE_GRACE_S) * 1000),
            ]
        if not openings:
            return ()
        answers = await self._scripts.call("open", *arguments, what="opening episodes")
        return tuple(
            refusal(code.decode(), sentence.decode(), f"opening episode_id={opening.episode_id}")
            for opening, code, sentence in zip(openings, answers[::2], answers[1::2], strict=True)
        )

    async def load_episode(self, episode_id: str) -> OpenEpisode | None:
        """Load the episode as it is now, for an hour after its end too; None if unknown."""
        return await load_async(self._client, self._prefix, episode_id)

    async def count_turns(self, episode_id: str) -> int:
        """How many turns of an episode are recorded; 0 also if it is unknown."""
        with translated(f"counting the turns of episode_id={episode_id}"):
            found: Any = await self._client.llen(f"{self._prefix}episode:{episode_id}:turns")
        return int(found)

    async def append_turn(self, turn: Turn) -> EpisodeUsage:
        """Record a turn, once; returns what its episode has used.

        Raises:
            NotFound: no such episode or parent turn.
            Gone: the episode is closed or replaced, its group sealed, or the turn holds tokens of a
                version that a rollback abandoned.
            Conflict: the turn_id has another content.
            RecordError: the turn is too large.
        """
        what = f"recording turn_id={turn.turn_id}"
        arguments = (
            check_id(turn.episode_id, "episode_id"),
            check_id(turn.turn_id, "turn_id"),
            turn.parent_turn_id or "",
            records_codec.encode_turn(turn),
            *("" if version is None else version for version in turn.trained_version_bounds),
            int(turn.branch_cause != "extension"),
            *(len(turn.output_ids), len(turn.prompt_ids)),
            min((s.policy_version for s in turn.version_spans if s.end > s.start), default=""),
        )
        try:
            used = await self._turn_scripts.call("append_turn", *arguments, what=what)
        except Abandoned:
            await self._scripts.call("give_up", turn.episode_id, what=what)
            raise
        return EpisodeUsage(*used)

    async def put_reward(self, episode_id: str, reward: Reward, *, key: str) -> None:
        """Score an episode, before or after it is closed.

        Raises:
            NotFound, Conflict (the key was used with another reward), Gone (its group is sealed).
        """
        await self._scripts.call(
            "put_reward",
            episode_id,
            check_id(key, "key"),
            records_codec.encode_reward(reward),
            repr(float(reward.value)),
            what=f"scoring episode_id={episode_id}",
        )

    async def close_episode(
        self,
        episode_id: str,
        *,
        outcome: Outcome,
        failure_kind: FailureKind | None,
        reward: Reward | None,
        error: str,
        key: str,
        output: str = "",
    ) -> CloseResult:
        """Close an episode and settle its attempt; the same key again gets the same answer.

        With a reward the attempt counts, except after a failure of the infrastructure. Without a
        reward, a failure of the agent scores env.failure_reward; after a failure of environment or
        infrastructure, or if the episode was aborted, another attempt takes its place; anything
        else waits for put_reward until the attempt's deadline.

        Raises:
            NotFound, Conflict (same key, other content), Gone (closed under another key).
        """
        for name, value, allowed in (
            ("outcome", outcome, get_args(Outcome)),
            ("failure_kind", failure_kind, (None, *get_args(FailureKind))),
        ):
            if value not in allowed:
                raise RecordError(f"{name}={value!r}; one of {allowed} is allowed")
        if failure_kind == "agent" and reward is None:
            reward = Reward(value=self._run.settings.env.failure_reward)
        is_lost = failure_kind in ("environment", "infrastructure") or outcome == "aborted"
        counted, sealed = await self._scripts.call(
            "close",
            episode_id,
            check_id(key, "key"),
            records_codec.encode_closure(outcome, failure_kind, reward, error, output),
            b"" if reward is None else records_codec.encode_reward(reward),
            "" if reward is None else repr(float(reward.value)),
            (failure_kind or "infrastructure") if is_lost and failure_kind != "agent" else "",
            int(failure_kind == "infrastructure"),
            int(failure_kind in ("agent", "environment")),
            what=f"closing episode_id={episode_id}",
        )
        return CloseResult(counted=bool(counted), sealed_group=sealed.decode() or None)

    async def put_trajectories(
        self, trajectories: Sequence[Trajectory], *, key: str, final: bool
    ) -> None:
        """Store trajectories for supervised training, in order, once per key.

        `final`: no more will come.

        Raises:
            RecordError: one has another purpose than sft, or is too large.
        """
        for trajectory in trajectories:
            if trajectory.episode.purpose != "sft":
                raise RecordError(
                    f"trajectory {trajectory.episode.episode_id}: "
                    f"purpose={trajectory.episode.purpose!r}; only 'sft' is allowed here"
                )
        records = map(records_codec.encode_trajectory, trajectories)
        client, scripts, key = self._client, self._scripts, check_id(key, "key")
        await put_async(client, self._prefix, scripts, records, key=key, final=final)

    async def policy_state(self) -> PolicyState:
        """Versions, servers and run state, read together."""
        with translated("reading the policy state"):
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(self._key("state"), ["announced", "acknowledged", "run_state"])
                pipeline.hgetall(self._key("servers"))
                pipeline.hgetall(self._key("server_versions"))
                pipeline.hgetall(self._key("server_memory"))
                pipeline.hgetall(self._key("frozen_servers"))
                (
                    (announced, acknowledged, run_state),
                    servers,
                    versions,
                    released,
                    frozen,
                ) = await pipeline.execute()
        if run_state is None:
            raise BufferLost(
                f"run_id={self._run.run_id}: Redis lost the run's state; it was emptied"
            )
        return PolicyState(
            announced_version=None if announced is None else int(announced),
            acknowledged_version=None if acknowledged is None else int(acknowledged),
            servers=decode_servers(servers, versions, released) + decode_frozen(frozen),
            run_state=run_state.decode(),
        )

    async def run_status(self) -> dict[str, Any]:
        """How the run stands, as `outloop.buffer.run_status`."""
        obstacle = await self._write_obstacle()
        with translated("reading how the run stands"):
            async with self._client.pipeline(transaction=True) as pipeline:
                run_status.ask(pipeline, self._prefix)
                return run_status.read(await pipeline.execute(), obstacle)

    async def _write_obstacle(self) -> str | None:
        settings = self._run.settings.buffer
        with translated("asking Redis whether it can write"):
            try:
                await self._client.execute_command(*probe(self._key("nothing")))
            except redis.RedisError as error:
                return write_obstacle(
                    error, UNKNOWN_FOLDER if settings.redis_url else self._run.dir / "redis"
                )
        return None

    async def runner_keys(self) -> KnownKeys:
        """Runner keys that were added or revoked while the run is up."""
        with translated("reading the runner keys"):
            found: Any = await self._client.hgetall(self._key("runner_keys"))
        return decode_keys(found)

    async def set_paused(self, paused: bool) -> None:
        """Stop claims, or allow them again, for every router of the run."""
        await self._put("pausing claims", "state", "paused", str(int(paused)))

    async def register_part(self, name: str, facts: dict[str, str]) -> None:
        """Enter a part's address and other facts."""
        await self._put(f"registering part={name}", "parts", name, encode_facts(facts))

    async def report_status(self, part: str, fields: dict[str, str]) -> None:
        """Report what a part is doing; replaces its last report."""
        await self._put(f"reporting status of part={part}", "statuses", part, encode_facts(fields))

    async def _put(self, what: str, *fields: Argument) -> None:
        """Key, field and value, over and over: written together, also into a full Redis."""
        await self._scripts.call("put_fields", *fields, what=what)

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _load_mixture(self, revision: int) -> Mixture:
        """The task order under the weights of `revision`."""
        if self._mixture is None or self._mixture[0] < revision:
            seed = self._run.settings.run.seed
            self._mixture = await load_mixture(self._client, self._prefix, seed)
        return self._mixture[1]

    async def _load_tasks(self, names: Sequence[bytes]) -> list[Task]:
        missing = [name for name in dict.fromkeys(names) if name not in self._tasks]
        if missing:
            with translated("loading tasks"):
                async with self._client.pipeline(transaction=False) as pipeline:
                    for name in missing:
                        hash_name, field = name.decode().split()
                        pipeline.hget(self._key(hash_name), field)
                    found = await pipeline.execute()
            for name, record in zip(missing, found, strict=True):
                if record is None:
                    raise NotFound(f"{name.decode()} is missing in Redis; it was written in part")
                with named(name.decode()):
                    self._tasks[name] = records_codec.decode_task(record)
        tasks = [self._tasks[name] for name in names]
        while len(self._tasks) > _CACHED_TASKS:
            self._tasks.popitem(last=False)
        return tasks

    def _claim_from(self, row: _ClaimRow, task: Task, source: str) -> Claim:
        purpose, owner, attempt, _, sampling, resumes = row
        is_eval = purpose == "eval"
        return Claim(
            task=task,
            purpose="eval" if is_eval else "train",
            group_id=None if is_eval else owner,
            attempt=attempt,
            deadline_s=deadline_of(task, self._run.settings.env.episode_deadline_s),
            sampling=json.loads(sampling) if is_eval else None,
            eval_name=owner if is_eval else "",
            resumes=resumes or None,
            source=source,
        )


def _member(opening: Opening) -> str:
    check_id(opening.episode_id, "episode_id")
    if opening.purpose == "eval":
        name = opening.eval_name and check_id(opening.eval_name, "eval_name")
        return f"e:{name}:{opening.attempt}" if name else f"o:{opening.episode_id}:0"
    if opening.purpose != "train":
        raise RecordError(
            f"episode_id={opening.episode_id}: purpose={opening.purpose!r}; 'train' or 'eval' is "
            "allowed. Conversations for SFT enter as trajectories"
        )
    return f"t:{check_id(opening.group_id or '', 'group_id')}:{opening.attempt}"
