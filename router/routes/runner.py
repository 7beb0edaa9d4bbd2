"""The runner's routes: tasks, claims, episodes, rewards, trajectories.

Owns: their bodies and answers. Does not own: admission, groups, state (buffer). Invariant: every
route may be called again with the same key and does its work once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import structlog

from outloop.buffer.errors import (
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    OutloopError,
    RecordError,
)
from outloop.buffer.records import (
    SOURCE,
    TEACHER_CONTEXT,
    Claim,
    ClaimResult,
    CloseResult,
    OpenEpisode,
    Opening,
    Reward,
    Task,
    Turn,
    facts_of,
)
from outloop.buffer.tasks.mixture import TaskSource
from outloop.buffer.tasks.validation import check_id
from outloop.buffer.writer import BufferWriter
from outloop.router.audit import AuditLog
from outloop.router.auth import KeyRing, check_episode_id
from outloop.router.episodes.episode import Episodes
from outloop.router.episodes.sft import ConversationRenderer
from outloop.router.errors import Refusal, stopping
from outloop.router.http.endpoint import Exchange
from outloop.router.metrics import RouterMetrics
from outloop.router.routes.posted import PostedTrajectories
from outloop.router.routes.rewards import Scores
from outloop.router.routes.schemas import (
    ClaimBody,
    CloseBody,
    EpisodeBody,
    HeartbeatBody,
    RewardBody,
    TasksBody,
    TrajectoriesBody,
    TrajectoryBody,
)
from outloop.router.servers.pool import ServerPool
from outloop.router.timings import DEFAULT_TIMINGS, Timings
from outloop.router.turns.sampling import check_episode_sampling
from outloop.router.turns.service import TurnService

_MAX_ERROR_CHARS = 2000
_MAX_OUTPUT_CHARS = 8192
_MAX_DEADLINE_S = 365 * 24 * 3600.0
_log = structlog.get_logger()


_tasks = msgspec.json.Decoder(TasksBody)
_claim = msgspec.json.Decoder(ClaimBody)
_heartbeat = msgspec.json.Decoder(HeartbeatBody)
_episode = msgspec.json.Decoder(EpisodeBody)
_reward = msgspec.json.Decoder(RewardBody)
_close = msgspec.json.Decoder(CloseBody)
_trajectories = msgspec.json.Decoder(TrajectoriesBody)


class RunnerRoutes:
    """Handlers of the runner's routes."""

    def __init__(
        self,
        *,
        buffer: BufferWriter,
        keys: KeyRing,
        pool: ServerPool,
        episodes: Episodes,
        service: TurnService,
        conversations: ConversationRenderer,
        posted: PostedTrajectories,
        metrics: RouterMetrics,
        scores: Scores,
        audit: AuditLog,
        public_url: str | None = None,
        timings: Timings = DEFAULT_TIMINGS,
        teacher_context_key: str | None = None,
    ) -> None:
        """`public_url`: where agents reach the router; None: where the runner does.
        `teacher_context_key`: trainer.teacher.context_key; the text is kept with the episode."""
        self._teacher_context_key = teacher_context_key
        self._buffer = buffer
        self._public_url = public_url
        self._keys = keys
        self._pool = pool
        self._episodes = episodes
        self._service = service
        self._conversations = conversations
        self._posted = posted
        self._metrics = metrics
        self._scores = scores
        self._audit = audit
        self._claim_wait_s = timings.claim_wait_s

    async def tasks(self, exchange: Exchange) -> None:
        """`POST /tasks`: register the run's tasks; the same content again is nothing new."""
        by = self._keys.require_runner(exchange.key)
        body = await exchange.decode(_tasks)
        tasks, eval_tasks = (
            [
                Task(task_id=x.task_id, payload=x.payload, priority=x.priority, source=x.source)
                for x in group
            ]
            for group in (body.tasks, body.eval_tasks)
        )
        sources = [
            TaskSource(one.name, one.num_tasks, one.weight, one.priority) for one in body.sources
        ]
        await self._buffer.register_tasks(tasks, eval_tasks, sources, suites=body.suites)
        self._audit.note("tasks", by, num_tasks=len(tasks), num_eval_tasks=len(eval_tasks))
        await _answer(exchange, {"num_tasks": len(tasks), "num_eval_tasks": len(eval_tasks)})

    async def claim(self, exchange: Exchange) -> None:
        """`POST /tasks/claim`: what to play now; 503 until servers hold weights to play by."""
        self._keys.require_runner(exchange.key)
        if self._service.is_draining:
            raise stopping()
        body = await exchange.decode(_claim)
        if body.count < 1:
            raise Refusal(
                400, "invalid_value", f"count={body.count}; 1 or more is allowed", param="count"
            )
        result = await self._claim(body)
        opened: list[Opening | None] = [None] * len(result.claims)
        if body.open:
            opened = await self._open_claims(body.key, result.claims)
        claims = [
            {
                "task": {"task_id": claim.task.task_id, "payload": claim.task.payload},
                "purpose": claim.purpose,
                "group_id": claim.group_id,
                "attempt": claim.attempt,
                "deadline_s": claim.deadline_s,
                "sampling": claim.sampling,
                "eval_name": claim.eval_name,
                "resumes": claim.resumes,
                "episode": self._handle(exchange, opening) if opening is not None else None,
            }
            for claim, opening in zip(result.claims, opened, strict=True)
            if opening is not None or not body.open
        ]
        await _answer(
            exchange,
            {"claims": claims, "reason": result.reason, "retry_after_s": result.retry_after_s},
        )

    async def heartbeat(self, exchange: Exchange) -> None:
        """`POST /runners/heartbeat`: a runner is there; for how long it may be silent."""
        self._keys.require_runner(exchange.key)
        body = await exchange.decode(_heartbeat)
        max_silence_s = await self._buffer.heartbeat(body.runner_id)
        if body.warning:
            name = f"runner {body.runner_id[:6]}"
            await self._buffer.report_status(name, {"warning": body.warning})
        await _answer(exchange, {"max_silence_s": max_silence_s})

    async def open(self, exchange: Exchange) -> None:
        """`POST /episodes`: open one episode; idempotent when the caller names it."""
        self._keys.require_runner(exchange.key)
        body = await exchange.decode(_episode)
        if not 0 < body.deadline_s <= _MAX_DEADLINE_S:
            raise Refusal(
                400,
                "invalid_value",
                f"deadline_s={body.deadline_s}; more than 0, and at most {_MAX_DEADLINE_S:.0f} "
                "(a year), is allowed",
                param="deadline_s",
            )
        _check_purpose(body)
        check_episode_sampling(body.sampling, body.purpose)
        if body.episode_id is None:
            episode_id = f"ep-{secrets.token_hex(10)}"
        else:
            episode_id = check_episode_id(body.episode_id)
        now = time.time()
        opening = Opening(
            episode_id=episode_id,
            task_id=body.task_id,
            group_id=body.group_id,
            attempt=body.attempt,
            purpose=body.purpose,
            deadline_at=now + body.deadline_s,
            sampling=body.sampling,
            eval_name=body.eval_name,
            metadata=body.metadata,
            opened_at=now,
        )
        # Whether its attempt was lost before is known to the buffer alone.
        (error,) = await self._open([opening], {episode_id})
        if error is not None:
            raise error
        await _answer(exchange, self._handle(exchange, opening))

    async def read(self, exchange: Exchange) -> None:
        """`GET /episodes/{id}`: opening, turns, outcome and reward."""
        self._keys.require_runner(exchange.key)
        episode_id = exchange.path("episode_id")
        loaded = await self._buffer.load_episode(episode_id)
        if loaded is None:
            raise _no_episode(episode_id)
        await _answer(
            exchange,
            {
                "opening": msgspec.to_builtins(loaded.opening),
                "turns": [_turn(turn) for turn in loaded.turns],
                "num_calls": self._num_calls(episode_id, loaded),
                "is_closed": loaded.is_closed,
                "outcome": loaded.outcome,
                "failure_kind": loaded.failure_kind,
                "reward": msgspec.to_builtins(loaded.reward),
                "error": loaded.error,
                "output": loaded.output,
                "refusals": msgspec.to_builtins(loaded.refusals),
                "resumes": loaded.resumes,
            },
        )

    def _num_calls(self, episode_id: str, loaded: OpenEpisode) -> int:
        """Count the model calls, with refused ones and ones without an answer yet."""
        live = self._episodes.known(episode_id)
        num_asked = 0 if live is None else live.num_asked
        return max(len(loaded.turns) + sum(loaded.refusals.counts.values()), num_asked)

    async def reward(self, exchange: Exchange) -> None:
        """`POST /episodes/{id}/reward`: score an episode; 410 when its group has sealed."""
        by = self._keys.require_runner(exchange.key)
        body = await exchange.decode(_reward)
        episode_id = exchange.path("episode_id")
        reward = await self._scores.reward(episode_id, body)
        await self._buffer.put_reward(episode_id, reward, key=body.key)
        self._audit.note("reward", by, episode_id=episode_id, reward=reward.value)
        await _answer(exchange, {})

    async def close(self, exchange: Exchange) -> None:
        """`POST /episodes/{id}/close`: end an episode; the same key twice is one close."""
        by = self._keys.require_runner(exchange.key)
        body = await exchange.decode(_close)
        episode_id = exchange.path("episode_id")
        check_id(body.key, "key")
        reward = None if body.reward is None else await self._scores.reward(episode_id, body.reward)
        result = await self._close(episode_id, body, reward)
        self._audit.note(
            "close",
            by,
            episode_id=episode_id,
            outcome=body.outcome,
            reward=None if body.reward is None else body.reward.value,
            counted=result.counted,
        )
        await _answer(exchange, {"counted": result.counted, "sealed_group": result.sealed_group})

    async def trajectories(self, exchange: Exchange) -> None:
        """`POST /trajectories`: episodes that were played elsewhere, or conversations for SFT."""
        by = self._keys.require_runner(exchange.key)
        body = await exchange.decode(_trajectories)
        self._audit.note("trajectories", by, num_trajectories=len(body.trajectories))
        played = [one.is_played for one in body.trajectories]
        if not any(played):
            await self._take_conversations(exchange, body)
            return
        if not all(played):
            raise Refusal(
                400,
                "invalid_value",
                f"trajectories[{played.index(False)}] has neither turns nor samples, others have; "
                "post conversations for SFT by themselves",
                param="trajectories",
            )
        ready = [
            await self._check_played(one, index) for index, one in enumerate(body.trajectories)
        ]
        results = [
            await self._record_played(one, turns, reward)
            for one, (turns, reward) in zip(body.trajectories, ready, strict=True)
        ]
        num_accepted = sum(result["counted"] for result in results)
        await _answer(exchange, {"num_accepted": num_accepted, "results": results})

    async def _take_conversations(self, exchange: Exchange, body: TrajectoriesBody) -> None:
        check_id(body.key, "key")
        # Rendering a batch takes long; other requests go on meanwhile.
        trajectories = await asyncio.to_thread(
            self._conversations.render_all,
            [(bytes(one.messages), bytes(one.tools), one.metadata) for one in body.trajectories],
            body.key,
        )
        await self._buffer.put_trajectories(trajectories, key=body.key, final=body.final)
        await _answer(exchange, {"num_accepted": len(trajectories), "results": []})

    async def _check_played(
        self, body: TrajectoryBody, index: int
    ) -> tuple[tuple[Turn, ...], Reward | None]:
        """The turns and the reward of one posted trajectory, none of which is recorded yet.

        Raises:
            Refusal: 400, 404 or 422, naming the trajectory and what is wrong with it.
        """
        where = f"trajectories[{index}]"
        if body.turns is not None and body.samples is not None:
            raise Refusal(400, "invalid_value", f"{where} has turns and samples; give one of them")
        loaded = await self._buffer.load_episode(check_episode_id(body.episode_id))
        if loaded is None:
            raise _no_episode(body.episode_id)
        newest = await self._newest_version()
        try:
            turns = self._posted.turns(
                loaded.opening, body.turns, body.samples, newest_version=newest
            )
            reward = (
                None
                if body.reward is None
                else self._scores.reward_of(body.episode_id, body.reward, turns)
            )
        except Refusal as error:
            raise Refusal(error.status, error.code, f"{where}: {error}", param=where) from error
        except RecordError as error:
            raise Refusal(400, "invalid_value", f"{where}: {error}", param=where) from error
        if strangers := {turn.turn_id for turn in loaded.turns} - {turn.turn_id for turn in turns}:
            raise Refusal(
                400,
                "invalid_value",
                f"{where}: episode_id={body.episode_id} has {len(strangers)} turns that were "
                "recorded here; an episode is played through this router or posted whole",
                param=where,
            )
        return turns, reward

    async def _record_played(
        self, body: TrajectoryBody, turns: Sequence[Turn], reward: Reward | None
    ) -> dict[str, Any]:
        """Record and close an episode; what the buffer refuses of it is part of the answer."""
        result: dict[str, Any] = {"episode_id": body.episode_id, "counted": False, "error": ""}
        try:
            for turn in turns:
                await self._buffer.append_turn(turn)
            # The key is the same each time, so the same trajectory again is one close.
            closing = CloseBody(
                outcome=body.outcome,
                key="posted",
                failure_kind=body.failure_kind,
                error=body.error,
                output=body.output,
            )
            closed = await self._close(body.episode_id, closing, reward)
        except (Conflict, Gone, NotFound) as error:
            return result | {"error": str(error)}
        if not closed.counted and reward is not None:
            result["error"] = "it is too old to be trained, or failed; its attempt is played again"
        self._metrics.posted.inc()
        return result | {"counted": closed.counted}

    async def _newest_version(self) -> int:
        state = await self._buffer.policy_state()
        return -1 if state.announced_version is None else state.announced_version

    async def _close(self, episode_id: str, body: CloseBody, reward: Reward | None) -> CloseResult:
        """Close the episode with a reward that was checked."""
        episode = self._episodes.known(episode_id)
        if episode is not None and not episode.is_closed:
            episode.is_closed = True
            await self._service.end(episode)
        outcome, error = await self._service.budgets.settle(episode_id, body.outcome, body.error)
        result = await self._buffer.close_episode(
            episode_id,
            outcome=outcome,
            failure_kind=body.failure_kind,
            reward=reward,
            error=error[:_MAX_ERROR_CHARS],
            key=body.key,
            output=body.output[-_MAX_OUTPUT_CHARS:],
        )
        if episode is not None:
            if episode.tree.nodes:
                self._metrics.branches_per_episode.observe(episode.tree.num_branches)
            self._episodes.forget(episode)
        return result

    async def _claim(self, body: ClaimBody) -> ClaimResult:
        state = self._pool.state
        if state is None or state.run_state == "running":
            try:
                await self._pool.wait_until(
                    self._may_claim, timeout_s=self._claim_wait_s, who="router", phase="claim"
                )
            except DeadlineExceeded as error:
                raise Refusal(503, "not_ready", str(error), retry_after_s=0.5) from error
        return await self._buffer.claim(
            key=body.key,
            count=body.count,
            runner_id=body.runner_id,
            servers_are_busy=self._pool.is_busy,
        )

    def _may_claim(self) -> bool:
        state = self._pool.state
        return self._pool.is_ready or (state is not None and state.run_state != "running")

    async def _open_claims(self, key: str, claims: Sequence[Claim]) -> list[Opening | None]:
        """Open an episode per claim; None for an attempt that was replaced meanwhile."""
        now = time.time()
        openings = [
            Opening(
                episode_id=_claimed_episode_id(key, index),
                task_id=claim.task.task_id,
                group_id=claim.group_id,
                attempt=claim.attempt,
                purpose=claim.purpose,
                deadline_at=now + claim.deadline_s,
                sampling=claim.sampling,
                eval_name=claim.eval_name,
                metadata=self._metadata_of(claim),
                opened_at=now,
            )
            for index, claim in enumerate(claims)
        ]
        resumed = {o.episode_id for o, c in zip(openings, claims, strict=True) if c.resumes}
        errors = await self._open(openings, resumed)
        opened: list[Opening | None] = []
        for opening, error in zip(openings, errors, strict=True):
            if error is not None and not isinstance(error, Gone):
                raise error
            if error is not None:
                _log.info("claim_not_opened", group_id=opening.group_id, reason=str(error))
            opened.append(opening if error is None else None)
        return opened

    def _metadata_of(self, claim: Claim) -> dict[str, str]:
        metadata = {SOURCE: claim.source} if claim.source else {}
        if self._teacher_context_key is not None:
            text = claim.task.payload.get(self._teacher_context_key)
            if text is not None:
                metadata[TEACHER_CONTEXT] = str(text)
        return metadata

    async def _open(
        self, openings: Sequence[Opening], to_load: AbstractSet[str]
    ) -> tuple[OutloopError | None, ...]:
        """Open episodes; those of `to_load` are read from the buffer when they first speak."""
        errors = await self._buffer.open_episodes(openings)
        for opening, error in zip(openings, errors, strict=True):
            if error is None and self._episodes.known(opening.episode_id) is None:
                self._metrics.episodes.inc()
                if opening.episode_id not in to_load:
                    self._episodes.add(opening)
        return errors

    def _handle(self, exchange: Exchange, opening: Opening) -> dict[str, str]:
        """What an agent needs to speak."""
        return {
            "episode_id": opening.episode_id,
            "base_url": f"{self._public_url or exchange.base_url}/v1",
            "api_key": self._keys.episode_key(opening.episode_id),
        }


def _claimed_episode_id(key: str, index: int) -> str:
    """The same for every router and every repetition of a claim."""
    return f"ep-{hashlib.blake2b(f'{key}{chr(0)}{index}'.encode(), digest_size=12).hexdigest()}"


def _check_purpose(body: EpisodeBody) -> None:
    if body.purpose == "sft" or (body.purpose == "eval" and body.group_id is not None):
        raise Refusal(
            400,
            "invalid_value",
            f"purpose={body.purpose!r} with group_id={body.group_id!r}; train episodes are opened "
            "with a group, eval episodes without one, SFT conversations go to /trajectories",
            param="purpose",
        )


def _turn(turn: Turn) -> dict[str, Any]:
    logprobs = turn.behavior_logprobs
    facts = facts_of(turn)
    del facts["episode_id"], facts["retry_key"]
    return facts | {
        "prompt_ids": turn.prompt_ids.tolist(),
        "output_ids": turn.output_ids.tolist(),
        "behavior_logprobs": logprobs.tolist() if logprobs is not None else None,
    }


def _no_episode(episode_id: str) -> Refusal:
    return Refusal(404, "episode_not_found", f"there is no episode episode_id={episode_id!r}")


async def _answer(exchange: Exchange, body: dict[str, Any]) -> None:
    await exchange.answer(200, msgspec.json.encode(body))
