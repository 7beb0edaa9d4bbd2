"""A runner that falls silent loses what it claimed, long before its attempts' deadlines."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, Gone, RecordError
from outloop.buffer.records import Claim, Reward, Turn

SILENCE_S = 20.0
EPISODE_S = 1800.0
LONG = {"env__episode_deadline_s": EPISODE_S, "buffer__group_deadline_s": 7200}
REINFORCE = {"trainer__advantage": "reinforce_pp"}


class Runner:
    """A runner with heartbeats, reduced to its calls."""

    def __init__(self, loop: Any, clock: Any, runner_id: str) -> None:
        self._loop = loop
        self._clock = clock
        self.runner_id = runner_id
        self.num_claims = 0

    async def claim(self, count: int = 100) -> tuple[Claim, ...]:
        """Claim under a fresh key and this runner's id."""
        self.num_claims += 1
        result = await self._loop.writer.claim(
            key=f"{self.runner_id}-{self.num_claims}", count=count, runner_id=self.runner_id
        )
        return tuple(result.claims)

    async def beat_for(self, seconds: float) -> None:
        """Heartbeats as a runner sends them, while time passes."""
        for _ in range(round(seconds / (SILENCE_S / 4))):
            self._clock.advance(SILENCE_S / 4)
            assert await self._loop.writer.heartbeat(self.runner_id) == SILENCE_S


async def start_two(start: Callable[..., Any], clock: Any, **changes: Any) -> tuple[Any, ...]:
    """A loop, and two runners of which the second has been heard."""
    loop = await start(env__max_runner_silence_s=SILENCE_S, **(LONG | changes))
    first, second = (Runner(loop, clock, name) for name in ("first", "second"))
    await first.beat_for(SILENCE_S / 4)
    await second.beat_for(SILENCE_S / 4)
    return loop, first, second


async def test_a_silent_runners_attempts_are_played_by_another(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """One with turns is resumed, one without is replaced, each place once; what was claimed without
    a heartbeat, or by a runner that is heard, stays."""
    loop, first, second = await start_two(start, clock)
    (other,) = await second.claim(1)
    played, bare = await first.claim(2)
    (by_hand,) = (await loop.claim(1)).claims
    episode_id = await loop.open(played)
    await loop.writer.append_turn(make_turn(episode_id))
    await loop.open(bare)
    await second.beat_for(SILENCE_S - SILENCE_S / 4)
    assert not await second.claim()
    await second.beat_for(SILENCE_S / 2)
    again = await second.claim()
    assert sorted(claim.resumes or "" for claim in again) == ["", episode_id]
    stats = loop.reader.stats()
    assert stats["buffer/silent_attempts"] == 2
    assert stats["buffer/resumed_attempts"] == 1
    assert stats["buffer/replaced/infrastructure"] == stats["buffer/resultless_attempts"] == 1
    for claim in (other, by_hand, *again):
        assert (await loop.play(claim)).counted
    assert [len(lease.group.trajectories) for lease in loop.take(2)] == [2, 2]
    assert loop.reader.stats()["buffer/silent_attempts"] == 2


async def test_what_a_silent_runner_posts_later_is_late(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """It was paused or cut off: turns and rewards are Gone, closes count nothing, and what it
    claims from then on is its own."""
    loop, first, second = await start_two(start, clock, buffer__group_size=1, **REINFORCE)
    (claim,) = await first.claim(1)
    (unopened,) = await first.claim(1)
    episode_id = await loop.open(claim)
    await second.beat_for(2 * SILENCE_S)
    (again, _) = await second.claim()
    assert await loop.writer.heartbeat("first") == SILENCE_S
    with pytest.raises(Gone, match="replaced"):
        await loop.writer.append_turn(make_turn(episode_id))
    with pytest.raises(Gone):
        await loop.writer.put_reward(episode_id, Reward(value=1.0), key="late")
    assert not (await loop.close(episode_id)).counted
    with pytest.raises(Gone):
        await loop.open(unopened)
    await loop.play(again)
    (lease,) = loop.take(1)
    assert [t.episode.episode_id for t in lease.group.trajectories] == [
        loop.opening(again).episode_id
    ]
    loop.train([lease], 1)
    (fresh,) = await first.claim()
    for _ in range(4):
        await first.beat_for(SILENCE_S / 4)
        await second.beat_for(SILENCE_S / 4)
    assert (await loop.play(fresh, version=1)).counted


@pytest.mark.parametrize("jump", [10, -20, 3])
async def test_nobody_is_silent_while_nobody_looks(
    start: Callable[..., Any], clock: Any, jump: int
) -> None:
    """After Redis was away, or its clock jumped either way, every runner has its time again; one
    that stays silent then is lost."""
    loop, first, second = await start_two(start, clock)
    await first.claim()
    clock.advance(jump * SILENCE_S)
    assert not await second.claim()
    await second.beat_for(SILENCE_S / 2)
    await first.beat_for(SILENCE_S / 4)
    await second.beat_for(SILENCE_S / 2)
    assert not await second.claim()
    assert loop.reader.stats()["buffer/silent_attempts"] == 0
    clock.advance(jump * SILENCE_S)
    await second.beat_for(5 / 4 * SILENCE_S)
    assert len(await second.claim()) == 4
    assert loop.reader.stats()["buffer/silent_attempts"] == 4


async def test_a_waiting_trainer_notices_the_only_runner(
    start: Callable[..., Any], clock: Any
) -> None:
    """Takes that wait look, too, so that no other runner is needed."""
    loop, first, _ = await start_two(start, clock)
    await first.claim()
    for _ in range(6):
        clock.advance(SILENCE_S / 4)
        with pytest.raises(DeadlineExceeded):
            loop.take(1)
    assert loop.reader.stats()["buffer/silent_attempts"] == 4
    assert len((await loop.claim()).claims) == 4


async def test_evaluation_attempts_are_requeued(start: Callable[..., Any], clock: Any) -> None:
    """A silent runner's evaluation episodes are played by another."""
    loop, first, second = await start_two(start, clock)
    loop.reader.request_eval(
        "0:greedy", policy_version=0, num_episodes=2, sampling={}, blocks_training=True
    )
    lost = await first.claim(2)
    assert {claim.purpose for claim in lost} == {"eval"}
    await second.beat_for(2 * SILENCE_S)
    for claim in await second.claim(2):
        assert (await loop.play(claim)).counted
    assert loop.reader.eval_progress("0:greedy").num_done == 2


async def test_silence_is_for_ever_when_switched_off(start: Callable[..., Any], clock: Any) -> None:
    """With env.max_runner_silence_s = 0 heartbeats mean nothing and deadlines hold alone."""
    loop = await start(env__max_runner_silence_s=0, **LONG)
    runner = Runner(loop, clock, "first")
    assert len(await runner.claim()) == 4
    assert await loop.writer.heartbeat("second") == 0
    clock.advance(EPISODE_S - 1)
    assert not (await loop.claim()).claims
    clock.advance(10)
    assert len((await loop.claim()).claims) == 4
    assert loop.reader.stats()["buffer/silent_attempts"] == 0


async def test_nothing_of_a_runner_stays(start: Callable[..., Any], clock: Any) -> None:
    """Scored and lost attempts leave no entry, and a silent runner none either."""
    loop, first, second = await start_two(start, clock)
    for claim in await first.claim():
        await loop.play(claim)
    client, prefix = loop.reader.client, loop.reader.prefix
    assert client.hgetall(f"{prefix}attempt_runners") == {}
    await second.beat_for(2 * SILENCE_S)
    assert client.zrange(f"{prefix}runners", 0, -1) == [b"second"]


@pytest.mark.parametrize("runner_id", ["", "a\n", "x" * 300])
async def test_a_runner_has_an_id(start: Callable[..., Any], runner_id: str) -> None:
    """A heartbeat of nobody is refused by name."""
    loop = await start()
    with pytest.raises(RecordError, match="runner_id"):
        await loop.writer.heartbeat(runner_id)
