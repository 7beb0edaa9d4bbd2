"""Compares mathematical answers with math-verify, in worker processes with a deadline."""

from __future__ import annotations

from outloop.buffer.records import Task
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import end_of, text_of


class Math:
    """Scores an answer that must be mathematically equal to the task's.

    It reads fractions, decimals, sets, intervals, expressions and \\boxed. An answer that cannot be
    judged within `timeout_s` is wrong.
    """

    def __init__(
        self, *, field: str = "answer", timeout_s: float = 5.0, num_workers: int | None = None
    ) -> None:
        self._field = field
        self._timeout_s = timeout_s
        self.workers = JudgementPool(num_workers, preload=("math_verify",))

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0.

        Raises:
            EnvironmentFailure: the task's answer is no mathematics, or math-verify is missing.
        """
        job = ("math", text_of(task, self._field), end_of(result.answer))
        return float(await self.workers.call(job, timeout_s=self._timeout_s) == "right")

    async def tear_down(self) -> None:
        """Stop the workers."""
        await self.workers.close()
