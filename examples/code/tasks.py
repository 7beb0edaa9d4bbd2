"""One-line functions: a family of small problems, their split, and players to compare with.

    python tasks.py     # rewards of the scripted player and of the oracle, in the sandbox

A problem is a function of three arguments whose docstring says in words what it returns of two of
them. There are 11,880; a hash of the problem decides its split: 4/5 for training (warm start and
RL), 1/10 validation, 1/10 test. The last fifth is held out. HumanEval is in human_eval_tasks.py.
"""

import asyncio
import itertools
import random

from agent import SYSTEM_PROMPT

from outloop.buffer.records import Task
from outloop.envs.tasks.splits import split_of
from outloop.envs.verifiers.code import UnitTests
from outloop.envs.verifiers.result import Result

TITLE = "A coding agent learns to write what it was asked for"

NAMES = "abcdeknptwxy"
WORDS = {"plus": "{} + {}", "minus": "{} - {}", "times": "{} * {}"}
SHARES = {"train": 8, "validation": 1, "test": 1}
INPUTS = ((2, 7, 19), (23, 5, 3), (4, 31, 11))

NUM_CONVERSATIONS = 8000
RIGHT_SHARE = 0.3
"""How often the scripted player writes what was asked for; otherwise it slips once."""


def problem(names: tuple[str, ...], word: str, first: int, second: int) -> dict[str, str]:
    """A row of the task list; the agent is shown the prompt alone."""
    text = f"{names[first]} {word} {names[second]}"
    call = WORDS[word].format("values[0]", "values[1]")
    tests = [
        f"assert f{values} == {eval(call, {'values': (values[first], values[second])})}"
        for values in INPUTS
    ]
    return {
        "prompt": f'def f({", ".join(names)}):\n    """{text}"""\n',
        "entry_point": "f",
        "test": "\n".join(tests),
    }


def problems(split: str) -> list[dict[str, str]]:
    """Every problem of a split, shuffled."""
    every = [
        problem(names, word, first, second)
        for names in itertools.permutations(NAMES, 3)
        for word in WORDS
        for first, second in itertools.permutations(range(3), 2)
        if names[0] < names[2]
    ]
    chosen = [row for row in every if split_of(row, SHARES) == split]
    random.Random(0).shuffle(chosen)
    return chosen


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return problems("train")


def eval_tasks() -> list[dict[str, str]]:
    """What the curve is measured on; no choice is made by it, so it may be the test split."""
    return problems("test")


def words_of(row: dict[str, str]) -> tuple[list[str], str, str, str]:
    """The arguments, and what is asked of which two of them."""
    head, text, _ = row["prompt"].split("\n")
    first, word, second = text.strip(' "').split()
    return head[6:-2].split(", "), word, first, second


def oracle_player(row: dict[str, str], rng: random.Random) -> str:
    """The best player there is; no policy ever learns from it."""
    _, word, first, second = words_of(row)
    return f"return {WORDS[word].format(first, second)}"


def scripted_player(row: dict[str, str], rng: random.Random) -> str:
    """A careless player: mostly another operator, or another argument than was asked for."""
    names, word, first, second = words_of(row)
    if rng.random() >= RIGHT_SHARE:
        other = next(name for name in names if name not in (first, second))
        slips = [(w, first, second) for w in WORDS if w != word]
        slips += [(word, other, second), (word, first, other)]
        word, first, second = rng.choice(slips)
    return f"return {WORDS[word].format(first, second)}"


def conversations() -> list[dict]:
    """What the warm start learns from: the scripted player on training problems."""
    rng = random.Random(1)
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": scripted_player(row, rng)},
            ]
        }
        for row in problems("train")[:NUM_CONVERSATIONS]
    ]


def reward_of(player, num_problems: int = 200) -> float:
    """Mean reward of a scripted player on held-out problems, by their tests in the sandbox."""

    async def score() -> float:
        rng = random.Random(2)
        verifier = UnitTests()
        rows = problems("test")[:num_problems]
        try:
            rewards = [
                await verifier(
                    Task(task_id="t", payload=row), Result(answer="    " + player(row, rng))
                )
                for row in rows
            ]
        finally:
            await verifier.tear_down()
        return sum(rewards) / len(rewards)

    return asyncio.run(score())


if __name__ == "__main__":
    for player in (scripted_player, oracle_player):
        print(f"{player.__name__} {reward_of(player):.3f}")
    counts = {split: len(problems(split)) for split in SHARES}
    print(f"problems {counts}, for example:\n{problems('test')[0]['prompt']}")
