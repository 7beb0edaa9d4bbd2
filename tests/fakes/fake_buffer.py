"""The buffer in memory, with the calls of `BufferWriter`."""

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from outloop.buffer.errors import BufferUnavailable, Conflict, Gone, NotFound
from outloop.buffer.records import (
    Claim,
    ClaimResult,
    CloseResult,
    OpenEpisode,
    Opening,
    PolicyState,
    ServerEntry,
    Turn,
)
from outloop.buffer.store.budget_notes import EpisodeUsage


class FakeBuffer:
    """Keeps everything in dictionaries; `is_away` makes every call fail like a lost Redis."""

    def __init__(self) -> None:
        self.openings: dict[str, Opening] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.closed: dict[str, tuple] = {}
        self.rewards: dict[str, object] = {}
        self.tasks: tuple | None = None
        self.claims: deque[Claim] = deque()
        self.claimed: dict[str, ClaimResult] = {}
        self.heartbeats: list[str] = []
        self.claimed_by: list[str] = []
        self.trajectories: list = []
        self.is_final = False
        self.parts: dict[str, dict[str, str]] = {}
        self.statuses: dict[str, dict[str, str]] = {}
        self.announced: int | None = 0
        self.acknowledged: int | None = 0
        self.servers: list[ServerEntry] = []
        self.run_state = "running"
        self.is_away = False
        self.num_refused = 0
        self.num_policy_reads = 0
        self._acknowledged = asyncio.Event()
        self._acknowledged.set()
        self.num_loads = 0
        self.is_paused = False
        self.sealed: set[str] = set()
        self.budget_notes = FakeNotes(self)
        self.channel = FakeChannel(self)
        self.resumes: dict[str, str] = {}
        """Episode -> the lost one that it resumes."""

    def serve(self, url: str, *, server_id: str = "server-0", version: int | None = 0) -> None:
        """Register a server."""
        self.servers = [s for s in self.servers if s.server_id != server_id]
        self.servers.append(
            ServerEntry(
                server_id=server_id,
                url=url,
                kind="torch",
                policy_version=version,
                is_quarantined=False,
            )
        )

    def hold_acknowledgements(self) -> asyncio.Event:
        """Turns are recorded, and nobody is told until the event is set."""
        self._acknowledged.clear()
        return self._acknowledged

    async def close(self) -> None:
        await self._work()

    async def register_tasks(self, tasks, eval_tasks, sources=(), *, num_test_tasks=0) -> None:
        await self._work()
        content = (tuple(tasks), tuple(eval_tasks))
        if self.tasks not in (None, content):
            raise Conflict("other tasks are registered")
        self.tasks = content

    async def heartbeat(self, runner_id: str) -> float:
        await self._work()
        self.heartbeats.append(runner_id)
        return 20.0

    async def claim(self, *, key: str, count: int, runner_id: str = "") -> ClaimResult:
        await self._work()
        self.claimed_by.append(runner_id)
        if self.is_paused:
            return ClaimResult(claims=(), reason="paused", retry_after_s=1.0)
        if key not in self.claimed:
            claims = tuple(self.claims.popleft() for _ in range(min(count, len(self.claims))))
            reason = "" if claims else "admission"
            if self.run_state != "running":
                claims, reason = (), "finished"
            self.claimed[key] = ClaimResult(claims=claims, reason=reason, retry_after_s=0.1)
        return self.claimed[key]

    async def open_episode(self, opening: Opening) -> None:
        (error,) = await self.open_episodes([opening])
        if error is not None:
            raise error

    async def open_episodes(self, openings) -> tuple:
        await self._work()
        errors = []
        for opening in openings:
            timeless = replace(opening, opened_at=0.0, deadline_at=0.0)
            known = self.openings.setdefault(opening.episode_id, opening)
            self.turns.setdefault(opening.episode_id, [])
            same = replace(known, opened_at=0.0, deadline_at=0.0) == timeless
            error = None if same else Conflict("open with other content")
            if opening.group_id in self.sealed:
                error = Gone(f"group {opening.group_id} is sealed")
            errors.append(error)
        return tuple(errors)

    async def load_episode(self, episode_id: str) -> OpenEpisode | None:
        await self._work()
        self.num_loads += 1
        if episode_id not in self.openings:
            return None
        closed = self.closed.get(episode_id)
        return OpenEpisode(
            opening=self.openings[episode_id],
            turns=tuple(self.turns[episode_id]),
            is_closed=closed is not None,
            outcome=closed[0] if closed else None,
            reward=self.rewards.get(episode_id),
            failure_kind=closed[1] if closed else None,
            error=closed[2] if closed else "",
            output=closed[4] if closed else "",
            resumes=self.resumes.get(episode_id),
            recorded=self._recorded(episode_id),
        )

    def _recorded(self, episode_id: str) -> tuple[Turn, ...]:
        known = {turn.turn_id for turn in self.turns[episode_id]}
        found: list[Turn] = []
        while episode_id in self.resumes:
            episode_id = self.resumes[episode_id]
            found += [turn for turn in self.turns[episode_id] if turn.turn_id not in known]
            known |= {turn.turn_id for turn in found}
        return tuple(found)

    async def count_turns(self, episode_id: str) -> int:
        await self._work()
        return len(self.turns.get(episode_id, ()))

    async def append_turn(self, turn: Turn) -> EpisodeUsage:
        await self._work()
        if turn.episode_id not in self.openings:
            raise NotFound(turn.episode_id)
        if turn.episode_id in self.closed:
            raise Gone(turn.episode_id)
        turns = self.turns[turn.episode_id]
        if turn.turn_id not in {t.turn_id for t in turns}:
            turns.append(turn)
        await self._acknowledged.wait()
        num_tokens = sum(len(t.prompt_ids) + len(t.output_ids) for t in turns)
        return EpisodeUsage(num_turns=len(turns), num_tokens=num_tokens)

    async def put_reward(self, episode_id, reward, *, key) -> None:
        await self._work()
        if episode_id not in self.openings:
            raise NotFound(f"no episode {episode_id}")
        self.rewards[episode_id] = reward

    async def close_episode(
        self, episode_id, *, outcome, failure_kind, reward, error, key, output=""
    ) -> CloseResult:
        await self._work()
        if episode_id not in self.openings:
            raise NotFound(f"no episode {episode_id}")
        known = self.closed.setdefault(episode_id, (outcome, failure_kind, error, key, output))
        if known[3] != key:
            raise Gone(f"episode {episode_id} is closed")
        if reward is not None:
            self.rewards[episode_id] = reward
        return CloseResult(counted=True, sealed_group=None)

    async def put_trajectories(self, trajectories, *, key, final) -> None:
        await self._work()
        self.trajectories += trajectories
        self.is_final = final

    async def policy_state(self) -> PolicyState:
        self.num_policy_reads += 1
        await self._work()
        return PolicyState(
            announced_version=self.announced,
            acknowledged_version=self.acknowledged,
            servers=tuple(self.servers),
            run_state=self.run_state,
        )

    async def set_paused(self, paused: bool) -> None:
        await self._work()
        self.is_paused = paused

    async def register_part(self, name, facts) -> None:
        await self._work()
        self.parts[name] = facts

    async def report_status(self, part, fields) -> None:
        await self._work()
        self.statuses[part] = fields

    async def _work(self) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            self.num_refused += 1
            raise BufferUnavailable("redis is away")


class FakeNotes:
    """Budgets that were noted."""

    def __init__(self, buffer: FakeBuffer) -> None:
        self._buffer = buffer
        self._notes: dict[str, str] = {}

    async def put(self, episode_id: str, budget: str) -> None:
        await self._buffer._work()
        self._notes.setdefault(episode_id, budget)

    async def read(self, episode_id: str) -> str:
        await self._buffer._work()
        return self._notes.get(episode_id, "")


class FakeChannel:
    """Messages to whoever listens, in one order for all."""

    def __init__(self, buffer: FakeBuffer) -> None:
        self._buffer = buffer
        self.listeners: list[dict[str, Callable[[bytes], None]]] = []
        self.said: list[tuple[str, bytes]] = []

    async def publish(self, name: str, message: bytes) -> int:
        await self._buffer._work()
        self.said.append((name, message))
        hearing = [hear[name] for hear in self.listeners if name in hear]
        for hear in hearing:
            asyncio.get_running_loop().call_soon(hear, message)
        return len(hearing)

    async def is_listening(self, timeout_s: float) -> bool:
        return True

    async def listen(self, hear) -> None:
        self.listeners.append(hear)
        try:
            await asyncio.Event().wait()
        finally:
            self.listeners.remove(hear)
