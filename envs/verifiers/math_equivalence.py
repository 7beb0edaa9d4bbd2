"""Compares mathematical answers with math-verify, in worker processes with a deadline."""

from __future__ import annotations

from outloop.buffer.records import Task
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import end_of, text_of


class Math:
    """Scores an answer that must be mathematically equal to the task's.

    It reads fractions, decimals, sets, intervals, expressions and \\boxed. An answer that cannot be
    judged within `timeout_s` of CPU time is wrong.

    The answer must be a result. It may leave no operation to do that the task's answer does not
    leave too: 123*456 is wrong where 56088 is expected (see `math_operations`).
    `allows_unevaluated`: whatever is equal is right.
    """

    def __init__(
        self,
        *,
        field: str = "answer",
        allows_unevaluated: bool = False,
        timeout_s: float = 5.0,
        num_workers: int | None = None,
    ) -> None:
        self._field = field
        self._allows_unevaluated = "yes" if allows_unevaluated else ""
        self._timeout_s = timeout_s
        self.workers = JudgementPool(num_workers, preload=("math_verify",))

    @lowest_if_it_raises
    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0.

        Raises:
            EnvironmentFailure: the task's answer is no mathematics, or math-verify is missing.
        """
        expected = text_of(task, self._field)
        question = " ".join(
            value
            for name, value in task.payload.items()
            if isinstance(value, str) and name != self._field
        )
        job = ("math", expected, end_of(result.answer), end_of(question), self._allows_unevaluated)
        return float(await self.workers.call(job, timeout_s=self._timeout_s) == "right")

    async def tear_down(self) -> None:
        """Stop the workers."""
        await self.workers.close()
