"""A real server, its in-process twin, a run on either, and both faces of the buffer.

Tests that use `url`, `join`, `faces` or `start` are the contract of the buffer: each runs on
Redis and on the twin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import redis.asyncio

from fakes.records import trajectory_of
from fakes.twin import Twin
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
    CheckpointMark,
    Claim,
    ClaimResult,
    CloseResult,
    Lease,
    Opening,
    Purpose,
    Reward,
    Sampling,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.redis.client import connect_async, connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import prefix
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.redis.scripts import Clock
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter

"""Those about turns; to the others it makes no difference where turns are."""


class OpenReader(BufferReader):
    """A BufferReader whose run and client a test may use, to look at Redis or to damage it."""

    def __init__(self, run: Run, client: redis.Redis, clock: Clock | None, **named: Any) -> None:
        super().__init__(run, client, clock, **named)
        self.run, self.client, self.prefix = run, client, prefix(run.run_id)

    def key(self, name: str) -> str:
        """The key of this name in the run."""
        return self.prefix + name


class FakeClock:
    """Time that moves only when a test says so; 1000 s steps are as cheap as 1 s."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One real server for all tests that do not stop it; each test has a run of its own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), max_memory_mb=256) as redis:
        yield redis


@pytest.fixture
def clock() -> FakeClock:
    """The test's time."""
    return FakeClock()


@pytest.fixture
def make_run(tmp_path: Path, clients: Clients) -> Callable[..., Run]:
    """A run created in Redis at `url`, with settings changed by `section__key=value`."""

    def make(url: str, **changes: Any) -> Run:
        tree: dict[str, dict[str, Any]] = {
            "run": {"name": "t", "dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "buffer": {"group_size": 2, "max_staleness": 0},
            "trainer": {"groups_per_step": 2},
        }
        for name, value in changes.items():
            section, _, field = name.partition("__")
            tree.setdefault(section, {})[field] = value
        run = create_run(build_settings(tree, source="test"), tmp_path / tree["run"]["name"], url)
        init_run(run, connect_client=clients.sync)
        return run

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The contract on every backend."""
    chosen = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    if "where" in metafunc.fixturenames and "where" not in chosen:
        metafunc.parametrize("where", ["redis", "twin"], indirect=True)


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    """What the buffer runs on."""
    return str(request.param)


class Clients:
    """Makes the clients of both faces: of a real server, or of a twin by its URL."""

    def __init__(self) -> None:
        self._twins: dict[str, Twin] = {}

    def add(self, twin: Twin) -> str:
        """The URL of a twin."""
        url = f"unix:///twin-{len(self._twins)}"
        self._twins[url] = twin
        return url

    def sync(self, url: str) -> redis.Redis:
        """A blocking client."""
        return self._twins[url].client() if url in self._twins else connect_sync(url)

    def asynchronous(self, url: str) -> redis.asyncio.Redis:
        """One for asyncio."""
        return self._twins[url].async_client() if url in self._twins else connect_async(url)


@pytest.fixture
def clients() -> Clients:
    """Makes clients."""
    return Clients()


@pytest.fixture
def url(where: str, clients: Clients, request: pytest.FixtureRequest) -> str:
    """Of the real server, or of a twin."""
    return str(request.getfixturevalue("server").url) if where != "twin" else clients.add(Twin())


@pytest.fixture
def connect_faces(
    clients: Clients, clock: FakeClock
) -> Iterator[Callable[[Run], Awaitable[tuple[BufferWriter, BufferReader]]]]:
    """Joins a run with both faces, on the test's clock."""
    readers: list[BufferReader] = []

    async def connect(run: Run) -> tuple[BufferWriter, BufferReader]:
        writer = await BufferWriter.connect(run, clock=clock, connect_client=clients.asynchronous)
        readers.append(OpenReader.connect(run, clock=clock, connect_client=clients.sync))
        return writer, readers[-1]

    yield connect
    for reader in readers:
        reader.close()


@pytest.fixture
def join(
    url: str, make_run: Callable[..., Run], connect_faces: Callable[..., Any]
) -> Callable[..., Any]:
    """Both faces of a new run with `section__key=value` settings, on the test's clock."""

    async def connect(**changes: Any) -> tuple[BufferWriter, BufferReader]:
        return await connect_faces(make_run(url, **changes))

    return connect


@pytest.fixture
async def faces(join: Callable[..., Any]) -> AsyncIterator[tuple[BufferWriter, BufferReader]]:
    """Both faces with group_size 2, groups_per_step 2, max_staleness 0."""
    writer, reader = await join()
    yield writer, reader
    await writer.close()


def build_turn(
    episode_id: str,
    index: int = 0,
    *,
    parent: int | None = None,
    version: int = 0,
    num_output: int = 4,
    trained: bool = True,
) -> Turn:
    """A small turn sampled by one version; `parent` is the index of an earlier turn."""
    return Turn(
        turn_id=f"{episode_id}.{index}",
        episode_id=episode_id,
        parent_turn_id=None if parent is None else f"{episode_id}.{parent}",
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(num_output, dtype=np.int32),
        behavior_logprobs=np.full(num_output, -0.5, np.float32),
        version_spans=(VersionSpan(policy_version=version, start=0, end=num_output),),
        loss_spans=((0, num_output),) if trained else (),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        branch_cause="root" if parent is None else "extension",
        started_at=1.0,
        finished_at=2.0,
    )


def build_trajectory(
    episode_id: str, *, purpose: Purpose = "sft", num_output: int = 4
) -> Trajectory:
    """One of one turn that was recorded elsewhere."""
    return trajectory_of(
        [build_turn(episode_id, num_output=num_output)],
        episode_id=episode_id,
        task_id="conversation",
        group_id=None,
        purpose=purpose,
        reward=None,
    )


class Loop:
    """A runner and a trainer reduced to their calls."""

    def __init__(self, writer: BufferWriter, reader: BufferReader) -> None:
        self.writer = writer
        self.reader = reader
        self.fence = 0
        self.num_claims = 0

    async def start(self, num_tasks: int = 10, *, num_eval_tasks: int = 2) -> None:
        """Register tasks, become the trainer, publish version 0."""
        await self.writer.register_tasks(
            [Task(task_id=f"t{i}", payload={"n": i}) for i in range(num_tasks)],
            [Task(task_id=f"e{i}", payload={"n": -1 - i}) for i in range(num_eval_tasks)],
        )
        self.fence = self.reader.acquire_fence()
        self.reader.recover(None, fence=self.fence)
        self.publish(0, None)

    def publish(self, version: int, parent: int | None) -> None:
        """Announce a version and have it acknowledged."""
        self.reader.announce_version(version, parent)
        self.reader.acknowledge_version(version)

    async def claim(self, count: int = 100, runner_id: str = "") -> ClaimResult:
        """Claim under a fresh key."""
        self.num_claims += 1
        key = f"k{self.num_claims}"
        return await self.writer.claim(key=key, count=count, runner_id=runner_id)

    @staticmethod
    def opening(claim: Claim, episode_id: str | None = None) -> Opening:
        """The opening of a claim, under an id made from its attempt unless given."""
        owner = claim.group_id or claim.eval_name
        return Opening(
            episode_id=episode_id or f"{owner}-{claim.attempt}",
            task_id=claim.task.task_id,
            group_id=claim.group_id,
            attempt=claim.attempt,
            purpose=claim.purpose,
            deadline_at=100.0 + claim.deadline_s,
            sampling=claim.sampling,
            eval_name=claim.eval_name,
            opened_at=100.0,
        )

    async def open(self, claim: Claim, episode_id: str | None = None) -> str:
        """Open a claim's episode and return its id."""
        opening = self.opening(claim, episode_id)
        await self.writer.open_episode(opening)
        return opening.episode_id

    async def close(
        self, episode_id: str, value: float | None = 1.0, **changes: Any
    ) -> CloseResult:
        """Close with a reward (None: without), outcome completed unless changed."""
        words: dict[str, Any] = {
            "outcome": "completed",
            "failure_kind": None,
            "reward": None if value is None else Reward(value=value),
            "error": "",
            "key": "close",
        }
        return await self.writer.close_episode(episode_id, **(words | changes))

    async def play(self, claim: Claim, *, version: int = 0, value: float = 1.0) -> CloseResult:
        """A whole episode of one turn."""
        episode_id = await self.open(claim)
        await self.writer.append_turn(build_turn(episode_id, version=version))
        return await self.close(episode_id, value)

    async def play_all(self, *, version: int = 0) -> list[Claim]:
        """Claim and play until nothing may be claimed."""
        played: list[Claim] = []
        while claims := (await self.claim()).claims:
            for claim in claims:
                await self.play(claim, version=version)
            played += claims
        return played

    def take(self, num_groups: int = 2, *, version: int = 0, timeout_s: float = 0.0) -> list[Lease]:
        """Take without waiting."""
        return self.reader.take(
            num_groups,
            fence=self.fence,
            policy_version=version,
            timeout_s=timeout_s,
            on_wait=lambda sentence: None,
            should_stop=lambda: False,
        )

    def mark(self, leases: Sequence[Lease], version: int) -> CheckpointMark:
        """The mark of a checkpoint that contains `leases`."""
        return CheckpointMark(
            fence=self.fence,
            group_ids=tuple(lease.group.group_id for lease in leases),
            next_slot=max((lease.group.slot for lease in leases), default=-1) + 1,
            policy_version=version,
        )

    def train(self, leases: Sequence[Lease], version: int) -> CheckpointMark:
        """Publish `version`, trained on `leases`; return the mark of a checkpoint of it."""
        self.publish(version, version - 1)
        group_ids = [lease.group.group_id for lease in leases]
        self.reader.mark_trained(group_ids, fence=self.fence, policy_version=version)
        return self.mark(leases, version)


@pytest.fixture
def loop_of() -> type[Loop]:
    """Makes a Loop of both faces."""
    return Loop


@pytest.fixture
def make_turn() -> Callable[..., Turn]:
    """Builds small turns."""
    return build_turn


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """Builds small trajectories."""
    return build_trajectory


@pytest.fixture
async def start(join: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Starts a Loop with `section__key=value` settings."""
    writers: list[BufferWriter] = []

    async def begin(num_tasks: int = 10, *, num_eval_tasks: int = 2, **changes: Any) -> Loop:
        writer, reader = await join(**changes)
        writers.append(writer)
        loop = Loop(writer, reader)
        await loop.start(num_tasks, num_eval_tasks=num_eval_tasks)
        return loop

    yield begin
    for writer in writers:
        await writer.close()


@pytest.fixture
async def loop_on(
    make_run: Callable[..., Run], connect_faces: Callable[..., Any]
) -> AsyncIterator[Callable[..., Any]]:
    """Starts a Loop on the server at a URL; `again` joins the run of an earlier call."""
    opened: list[Loop] = []

    async def begin(url: str, *, again: bool = False, **changes: Any) -> Loop:
        run = make_run(url, **changes)
        loop = Loop(*await connect_faces(run))
        opened.append(loop)
        if not again:
            await loop.start()
        return loop

    yield begin
    for loop in opened:
        await loop.writer.close()
