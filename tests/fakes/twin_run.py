"""A run whose Redis is a twin: what a launcher, a trainer and servers do to it, by calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fakes.twin import Twin
from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Claim, OpenEpisode, ServerEntry, Task, Turn
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run
from outloop.buffer.store.refusal_notes import EpisodeUsage
from outloop.buffer.writer import BufferWriter


class WatchedWriter(BufferWriter):
    """A BufferWriter that notes what it is asked for, and can hold back or refuse turns."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.num_loads = 0
        self.num_policy_reads = 0
        self.may_answer = asyncio.Event()
        """Cleared: a turn is recorded, and append_turn does not return until this is set."""
        self.may_answer.set()
        self.appended: list[Turn] = []
        """Every turn that append_turn was called with."""
        self.load_error: Exception | None = None
        """What load_episode raises."""
        self.refuses: Callable[[Turn], bool] = lambda turn: False
        """Turns for which append_turn fails as without Redis."""

    async def load_episode(self, episode_id: str) -> OpenEpisode | None:
        """As its base class."""
        self.num_loads += 1
        if self.load_error is not None:
            raise self.load_error
        return await super().load_episode(episode_id)

    async def policy_state(self) -> Any:
        """As its base class."""
        self.num_policy_reads += 1
        return await super().policy_state()

    async def append_turn(self, turn: Turn) -> EpisodeUsage:
        """As its base class."""
        self.appended.append(turn)
        if self.refuses(turn):
            raise BufferUnavailable("a refused turn")
        usage = await super().append_turn(turn)
        await self.may_answer.wait()
        return usage


class TwinRun:
    """A run on a twin of its own; version 0 is published."""

    def __init__(self, run: Run, *, may_listen: bool = True) -> None:
        """`may_listen`: False refuses SUBSCRIBE."""
        self.run = run
        self.twin = Twin()
        self.twin.may_listen = may_listen
        self._init()
        self.reader = BufferReader.connect(run, connect_client=lambda url: self.twin.client())
        self._claims: dict[str, list[Claim]] = {}
        self._num_claims = 0
        self.publish(0)

    async def connect(self) -> WatchedWriter:
        """A writer, as each router process has one."""
        writer = await WatchedWriter.connect(
            self.run, connect_client=lambda url: self.twin.async_client()
        )
        assert isinstance(writer, WatchedWriter)
        return writer

    def announce(self, version: int) -> None:
        """Say which weights come next."""
        self.reader.announce_version(version, None)

    def publish(self, version: int) -> None:
        """Announce weights, and acknowledge them."""
        self.announce(version)
        self.reader.acknowledge_version(version)

    def serve(
        self,
        url: str,
        *,
        server_id: str = "server-0",
        version: int | None = 0,
        is_quarantined: bool = False,
        kind: str = "torch",
    ) -> None:
        """Register a server, or change what it holds."""
        self.reader.registry.register_server(
            ServerEntry(
                server_id=server_id,
                url=url,
                kind=kind,
                policy_version=version,
                is_quarantined=is_quarantined,
            )
        )

    def freeze(self, url: str, *, server_id: str = "frozen-0", version: int | None) -> None:
        """Register a server of an earlier version, or change what it holds."""
        self.reader.registry.register_frozen(
            ServerEntry(
                server_id=server_id,
                url=url,
                kind="torch",
                policy_version=version,
                is_quarantined=False,
                is_frozen=True,
            )
        )

    def remove_servers(self) -> None:
        """Empty the registry of servers, as a launcher that starts again does."""
        with self.twin.changed:
            for key in list(self.twin.data):
                if key.endswith((b":servers", b":server_versions")):
                    del self.twin.data[key]

    async def claim(self, writer: BufferWriter, task_id: str) -> Claim:
        """An attempt of a group that plays `task_id`; for runs without tasks of their own."""
        waiting = self._claims.setdefault(task_id, [])
        if not waiting:
            await writer.register_tasks([Task(task_id="t", payload={})], [])
            self._num_claims += 1
            count = self.run.settings.buffer.group_size
            result = await writer.claim(key=f"claim-{self._num_claims}", count=count)
            waiting += result.claims
            assert waiting, result.reason
        return waiting.pop(0)

    def load_episode(self, episode_id: str) -> OpenEpisode:
        """The episode as it stands."""
        episode = self.reader.load_episode(episode_id)
        assert episode is not None, episode_id
        return episode

    def _init(self) -> None:
        init_run(self.run, connect_client=lambda url: self.twin.client())
