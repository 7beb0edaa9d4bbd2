"""Plays a batch of episodes with a function `async def rollout(tasks, context)`.

When the function returns, every episode of its batch has exactly one result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outloop.buffer.errors import NotFound, RecordError
from outloop.buffer.records import Outcome, Purpose, Task
from outloop.envs.rollout.episode import Episode
from outloop.envs.rollout.episode_result import EpisodeResult, without_reward
from outloop.envs.runner.player import Player, error_of, late
from outloop.envs.runner.worker_protocol import Job
from outloop.envs.user_code import awaited

End = Callable[[int, EpisodeResult], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Task):
    """One attempt at a task; attempts with one group_id are compared with each other."""

    episode_id: str
    group_id: str
    """Empty for evaluation."""
    attempt: int
    purpose: Purpose


class Context:
    """Opens and closes the episodes of one batch."""

    def __init__(self, player: Player, jobs: Sequence[Job], num_calls: int, end: End) -> None:
        self.num_calls = num_calls
        """How many batches this process has played before."""
        self._player = player
        self._end = end
        self.tasks = tuple(_attempt_of(job) for job in jobs)
        self._jobs = {job.opened.episode_id: job for job in jobs}
        self._episodes: dict[int, Episode] = {}
        self._open = {job.number: job for job in jobs}

    @property
    def purpose(self) -> Purpose:
        """`train` or `eval`; the tasks of a batch have one."""
        return self.tasks[0].purpose

    def groups(self) -> list[list[Attempt]]:
        """The batch's attempts, those of one group together."""
        found: dict[str, list[Attempt]] = {}
        for one in self.tasks:
            found.setdefault(one.group_id or one.task_id, []).append(one)
        return list(found.values())

    def open(self, task: Attempt) -> Episode:
        """The episode of an attempt: its address, key and clients; the same one every time."""
        job = self._job(task)
        if job.number not in self._episodes:
            self._episodes[job.number] = self._player.open(job)
        return self._episodes[job.number]

    def close(self, task: Attempt, reward: Any = None) -> None:
        """End an attempt with a reward, or with the scores of its episode.

        Raises:
            RecordError: there is no reward, or it is no finite number.
        """
        job = self._job(task)
        self._ended(job, EpisodeResult(outcome="completed", reward=self._reward(task, reward)))

    def fail(self, task: Attempt, error: BaseException) -> None:
        """End an attempt that failed with `error`, which decides the kind of the failure."""
        self._ended(self._job(task), self._player.ending_of(error, self.open(task)))

    async def play_all(
        self,
        play: Callable[..., Any],
        tasks: Sequence[Attempt] | None = None,
        *,
        max_concurrent: int | None = None,
    ) -> None:
        """Play attempts with `async def play(task, episode)`, each to its deadline, and close them.

        Args:
            tasks: left out: all attempts of the batch that have not ended.
        """
        places = asyncio.Semaphore(max_concurrent or len(self.tasks))

        async def play_one(task: Attempt) -> None:
            async with places:
                job = self._job(task)
                ending = await self._player.play_by(play, self.open(task), job.number)
                self._ended(job, ending)

        chosen = [one for one in self.tasks if self._job(one).number in self._open]
        await asyncio.gather(*map(play_one, chosen if tasks is None else tasks))

    def finish(self, error: BaseException | None, outcome: Outcome = "failed") -> None:
        """End the attempts that the function left open."""
        for job in list(self._open.values()):
            if error is not None:
                episode = self.open(_attempt_of(job))
                self._ended(job, self._player.ending_of(error, episode, outcome))
                continue
            nothing = RecordError(
                "no reward: rollout returned without closing this episode; call "
                "context.close(task, reward) for every task, or context.play_all(play)"
            )
            self._ended(job, without_reward(nothing))

    def _reward(self, task: Attempt, reward: Any) -> Any:
        return self.open(task).scores.reward(reward, "context.close(task, reward)")

    def _ended(self, job: Job, ending: EpisodeResult) -> None:
        if self._open.pop(job.number, None) is not None:
            self._end(job.number, ending)

    def _job(self, task: Attempt) -> Job:
        try:
            return self._jobs[task.episode_id]
        except (KeyError, AttributeError):
            raise NotFound(f"{task!r} is no attempt of this batch; use those in `tasks`") from None


async def play_batch(player: Player, jobs: Sequence[Job], num_calls: int, end: End) -> None:
    """Call the user's function with one batch; `end` gets each episode's result once.

    The function is cancelled when the last deadline of the batch has passed.
    """
    context = Context(player, jobs, num_calls, end)
    limit_s = max(0.0, max(job.deadline for job in jobs) - time.time())
    calling = asyncio.ensure_future(awaited(player.rollout.call(context.tasks, context)))
    if await player.ends_within(limit_s, calling, "rollout"):
        context.finish(error_of(calling, "rollout"))
    else:
        context.finish(late("rollout", limit_s), outcome="truncated")


def _attempt_of(job: Job) -> Attempt:
    claim = job.opened.claim
    return Attempt(
        task_id=claim.task.task_id,
        payload=claim.task.payload,
        episode_id=job.opened.episode_id,
        group_id=claim.group_id or "",
        attempt=claim.attempt,
        purpose=claim.purpose,
    )
