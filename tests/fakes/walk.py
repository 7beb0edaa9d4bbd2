"""A random walk through the buffer: a runner, a trainer, its disk, and damage.

The walk keeps its own account of what the surviving weights contain and compares it with what the
buffer believes after every step.
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs

from outloop.buffer.errors import DeadlineExceeded, FenceExpired, Gone
from outloop.buffer.records import CheckpointMark, Claim, Lease, Reward, Turn


@dataclass
class Weights:
    """A trainer's weights: their version and the slots they were trained on."""

    version: int = 0
    slots: tuple[int, ...] = ()
    groups_since_mark: tuple[str, ...] = ()
    turn_ids: tuple[str, ...] = ()
    lineage: tuple[int, ...] = (0,)
    """Versions that led here."""


@dataclass
class Walk:
    """One random run: a runner, a trainer, checkpoints on disk, and a clock."""

    loop: Any
    clock: Any
    make_turn: Callable[..., Turn]
    choices: random.Random
    weights: Weights = field(default_factory=Weights)
    disk: list[tuple[Weights, CheckpointMark]] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    closed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    unscored: list[str] = field(default_factory=list)
    group_ids: set[str] = field(default_factory=set)
    num_ids: int = 0
    has_damage: bool = False
    max_age: int = 0
    """Publishes: the highest that was ever allowed."""

    async def claim(self, count: int = 0) -> None:
        runner_id = self.choices.choice(["", "heard", "silent"])
        result = await self.loop.claim(count or self.choices.randint(1, 5), runner_id)
        self.claims += result.claims
        self.group_ids |= {claim.group_id or "" for claim in result.claims}

    async def silence(self) -> None:
        """One of two runners is not heard for longer than the 10 s that it may be silent."""
        for _ in range(4):
            self.clock.advance(4.0)
            await self.loop.writer.heartbeat("heard")
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        assert b"silent" not in client.hgetall(f"{prefix}attempt_runners").values()

    async def open_one(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self.choices.randrange(len(self.claims)))
        self.num_ids += 1
        try:
            episode_id = await self.loop.open(claim, f"ep{self.num_ids}")
        except Gone:
            return
        self.open[episode_id] = 0
        if claim.resumes:
            await self._replay(episode_id)
        if self.choices.random() < 0.1:
            self.claims.append(claim)

    async def _replay(self, episode_id: str) -> None:
        """The agent asks for some of what was recorded again, and then goes another way."""
        recorded = (await self.loop.writer.load_episode(episode_id)).recorded
        assert recorded or self.has_damage
        here: set[str] = set()
        for turn in recorded:
            if turn.parent_turn_id in (None, *here) and self.choices.random() < 0.8:
                try:
                    await self.loop.writer.append_turn(structs.replace(turn, episode_id=episode_id))
                except Gone:
                    del self.open[episode_id]
                    return
                here.add(turn.turn_id)

    async def turn(self) -> None:
        if not self.open:
            return
        episode_id = self.choices.choice(list(self.open))
        index = self.open[episode_id]
        turn = self.make_turn(
            episode_id, index, parent=index - 1 if index else None, version=self.weights.version
        )
        try:
            for _ in range(self.choices.choice([1, 1, 2])):
                await self.loop.writer.append_turn(turn)
        except Gone:
            del self.open[episode_id]
        else:
            self.open[episode_id] += 1

    async def close(self) -> None:
        if not self.open:
            return
        episode_id = self.choices.choice(list(self.open))
        del self.open[episode_id]
        words: dict[str, Any] = {"value": self.choices.random()}
        if self.choices.random() < 0.15:
            kind = self.choices.choice(["infrastructure", "environment"])
            words = {"value": None, "failure_kind": kind, "outcome": "failed"}
        elif self.choices.random() < 0.2:
            words = {"value": None}
            self.unscored.append(episode_id)
        first = await self.loop.close(episode_id, **words)
        assert await self.loop.close(episode_id, **words) == first
        self.closed.append((episode_id, words))

    async def play(self) -> None:
        """Whole episodes, so that short sequences get somewhere."""
        await self.claim(4)
        for _ in range(len(self.claims)):
            await self.open_one()
        for _ in range(len(self.open)):
            await self.turn()
            await self.close()

    async def score(self) -> None:
        """A reward that comes by itself: before or after the close, or too late."""
        known = [*self.unscored, *self.open, *(episode_id for episode_id, _ in self.closed)]
        if not known:
            return
        episode_id = self.choices.choice(known)
        self.num_ids += 1
        reward = Reward(value=self.choices.random())
        with contextlib.suppress(Gone):
            for _ in range(self.choices.choice([1, 2])):
                await self.loop.writer.put_reward(episode_id, reward, key=f"r{self.num_ids}")

    async def close_again(self) -> None:
        if self.closed:
            episode_id, words = self.choices.choice(self.closed)
            await self.loop.close(episode_id, **words)

    async def take(self) -> None:
        if self.leases:
            return
        try:
            self.leases = self.loop.take(2, version=self.weights.version)
        except FenceExpired:
            return
        except DeadlineExceeded:
            # A trainer ends of it. When a damaged group was to be replaced it held others.
            if self._holds_leases():
                await self.crash()
            return
        depths = self.loop.reader.version_depths(self.weights.lineage)
        for lease in self.leases:
            assert lease.max_age <= self.max_age
            for trajectory in lease.group.trajectories:
                for turn in trajectory.turns:
                    version = turn.version_spans[0].policy_version
                    assert version in self.weights.lineage
                    age = depths[self.weights.version] - depths[version]
                    assert 0 <= age <= lease.max_age

    async def change_limits(self) -> None:
        """Somebody changes how far ahead episodes start, or how old tokens may be."""
        if self.choices.random() < 0.5:
            depth = self.choices.choice(["auto", 0, 0.5, 1, 2])
            self.loop.reader.limits.change(pipeline_depth=depth)
        else:
            staleness = self.choices.randint(0, self.max_age)
            self.loop.reader.limits.change(max_staleness=staleness)

    def _holds_leases(self) -> bool:
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        groups = [name.decode() for name in client.zrange(f"{prefix}leases", 0, -1)]
        return any(client.hget(f"{prefix}group:{name}", "state") == b"leased" for name in groups)

    async def train(self) -> None:
        if not self.leases:
            return
        keep = [x for x in self.leases if self.choices.random() < 0.8]
        version = self.loop.reader.highest_version() + 1
        try:
            for lease in self.leases:
                if lease not in keep:
                    self.loop.reader.drop(lease.group.group_id, "no_signal", fence=self.loop.fence)
            ids = tuple(lease.group.group_id for lease in keep)
            self.loop.reader.renew(self.loop.fence)
            self.loop.publish(version, self.weights.version)
            self.loop.reader.mark_trained(ids, fence=self.loop.fence, policy_version=version)
        except FenceExpired:
            await self.crash()
            return
        self.weights = Weights(
            version,
            self.weights.slots + tuple(lease.group.slot for lease in keep),
            self.weights.groups_since_mark + ids,
            self.weights.turn_ids + tuple(turn_ids(keep)),
            (*self.weights.lineage, version),
        )
        self.leases = []

    async def checkpoint(self) -> None:
        if not self.weights.groups_since_mark or self.leases:
            return
        mark = CheckpointMark(
            fence=self.loop.fence,
            group_ids=self.weights.groups_since_mark,
            next_slot=max(self.weights.slots) + 1,
            policy_version=self.weights.version,
        )
        self.weights = replace(self.weights, groups_since_mark=())
        self.disk.append((self.weights, mark))
        if self.choices.random() < 0.3:
            await self.crash()
            return
        try:
            for _ in range(self.choices.choice([1, 2])):
                self.loop.reader.acknowledge(mark)
        except FenceExpired:
            await self.crash()

    async def crash(self) -> None:
        """The trainer dies and resumes from its newest checkpoint, or an older one."""
        while len(self.disk) > 1 and self.choices.random() < 0.2:
            self.disk.pop()
        self.leases = []
        old = self.loop.fence
        self.loop.fence = self.loop.reader.acquire_fence()
        with pytest.raises(FenceExpired):
            self.loop.reader.renew(old)
        weights, mark = self.disk[-1] if self.disk else (Weights(), None)
        version = self.loop.reader.recover(mark, fence=self.loop.fence) + 1
        self.loop.publish(version, None if mark is None else mark.policy_version)
        kept = weights.lineage if mark is not None else ()
        self.weights = replace(weights, version=version, lineage=(*kept, version))

    async def resolve(self) -> None:
        """Somebody looks at the dead letters."""
        letters = self.loop.reader.dead_letters.list_all()
        if not letters:
            return
        letter = self.choices.choice(letters)
        if letter.slot is None or self.choices.random() < 0.3:
            self.loop.reader.dead_letters.discard(letter.group_id)
        else:
            self.loop.reader.dead_letters.requeue(letter.group_id)

    async def damage(self) -> None:
        """Bytes of some recorded turn become others."""
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        number = self.choices.randint(1, max(1, self.num_ids))
        turns = f"{prefix}episode:ep{number}:turns"
        if client.llen(turns):
            self.has_damage = True
            client.lset(turns, -1, self.choices.choice([b"", b"\x09" + bytes(40), b"rubbish"]))

    async def wait(self) -> None:
        self.clock.advance(self.choices.choice([1.0, 5.0, 20.0]))

    def check(self, limit: int) -> None:
        """What must hold after every step."""
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        state = client.hgetall(f"{prefix}state")
        number = {name.decode(): int(state.get(name, 0)) for name in (b"admitted", b"trained")}
        held = int(state.get(b"held", 0))
        assert len(self.weights.slots) == len(set(self.weights.slots))
        assert len(self.weights.turn_ids) == len(set(self.weights.turn_ids))
        live: dict[int, bytes] = {}
        num_untrained = 0
        for group_id, slot in client.zrange(f"{prefix}groups", 0, -1, withscores=True):
            assert int(slot) not in live
            state_of = client.hget(f"{prefix}group:{group_id.decode()}", "state")
            live[int(slot)] = state_of
            if state_of == b"open":
                self._check_places(group_id.decode())
            num_untrained += state_of != b"trained"
        assert number["admitted"] - number["trained"] == num_untrained + held <= limit
        self._check_slots(live, int(state.get(b"cursor", 0)))
        self.loop.reader.ledger().check()
        in_flight = client.hgetall(f"{prefix}attempts")
        assert set(client.hgetall(f"{prefix}attempt_starts")) == set(in_flight)
        assert set(client.hgetall(f"{prefix}attempt_runners")) <= set(in_flight)

    def _check_places(self, group_id: str) -> None:
        """Every place of an open group is scored, given up, to be claimed, or in flight."""
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        names = ("size", "scored", "lost", "pending", "next_attempt")
        size, scored, lost, pending, last = map(
            int, client.hmget(f"{prefix}group:{group_id}", *names)
        )
        members = [f"t:{group_id}:{attempt}" for attempt in range(last)]
        flying = [m for m in members if client.hexists(f"{prefix}attempts", m)]
        assert size == scored + lost + pending + len(flying)

    def _check_slots(self, live: dict[int, bytes], cursor: int) -> None:
        client, prefix = self.loop.reader.client, self.loop.reader.prefix
        replay = {int(slot) for slot in client.zrange(f"{prefix}replay", 0, -1)}
        with client.pipeline(transaction=False) as pipeline:
            for group_id in self.group_ids:
                pipeline.hmget(f"{prefix}group:{group_id}", "slot", "state")
            dropped = {int(slot) for slot, state in pipeline.execute() if state == b"dropped"}
        letters = self.loop.reader.dead_letters.list_all()
        dead = {letter.slot for letter in letters if letter.slot is not None}
        trained = set(self.weights.slots)
        untrained = {slot for slot, state in live.items() if state != b"trained"}
        assert not trained & replay
        assert not trained & untrained
        assert not set(live) & replay
        assert not dead & (trained | set(live) | replay)
        waiting = {int(slot) for slot in client.zrange(f"{prefix}window", 0, -1)}
        assert not waiting & (trained | set(live) | replay)
        lost = set(range(cursor)) - trained - set(live) - replay - dropped - waiting
        assert not lost
        for lease in self.leases:
            assert lease.group.slot not in trained


def turn_ids(leases: list[Lease]) -> list[str]:
    """Every turn of `leases`."""
    episodes = (t for lease in leases for t in lease.group.trajectories)
    return [turn.turn_id for trajectory in episodes for turn in trajectory.turns]
