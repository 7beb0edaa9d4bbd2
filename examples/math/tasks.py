"""reasoning-gym problems, their split, and the scripted players to compare the policy with.

    python tasks.py     # rewards of the scripted player and of the oracle on held-out problems

The generator is `chain_sum` with two one-digit terms; other generators of reasoning-gym whose
answers are mathematics go through the same verifier. Its own score gives part of the reward to
wrong answers, which groups of GRPO would learn from as if they were right ones.
"""

import random

import reasoning_gym
from agent import SYSTEM_PROMPT

from outloop.envs.tasks.splits import split_of

TITLE = "An arithmetic agent learns to say what it half knows"

GENERATOR = "chain_sum"
SIZES = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NUM_ENTRIES = 4_000
"""All 200 different problems are among them."""
SHARES = {"train": 8, "validation": 1, "test": 1}

NUM_CONVERSATIONS = 8_000
RIGHT_SHARE = 0.3
"""How often the scripted player computes; otherwise it is off by some."""


def problems(split: str) -> list[dict[str, str]]:
    """Every problem of a split, each once; a hash of the problem decides its split."""
    entries = reasoning_gym.create_dataset(GENERATOR, size=NUM_ENTRIES, seed=0, **SIZES)
    every = {entry["question"]: str(entry["answer"]) for entry in entries}
    rows = [{"question": question, "answer": answer} for question, answer in every.items()]
    return [row for row in rows if split_of(row, SHARES) == split]


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return problems("train")


def eval_tasks() -> list[dict[str, str]]:
    """What the curve is measured on; no choice is made by it, so it may be the test split."""
    return problems("test")


def scripted_player(row: dict[str, str], rng: random.Random) -> str:
    """A player that is mostly off by a few."""
    off = 0 if rng.random() < RIGHT_SHARE else rng.choice([-4, -3, -2, -1, 1, 2, 3, 4])
    return f"\\boxed{{{int(row['answer']) + off}}}"


def oracle_player(row: dict[str, str], rng: random.Random) -> str:
    """The best player there is; no policy ever learns from it."""
    return f"\\boxed{{{row['answer']}}}"


def conversations() -> list[dict]:
    """What the warm start learns from: the scripted player on training problems."""
    rng = random.Random(1)
    chosen = problems("train")
    rows = [chosen[index % len(chosen)] for index in range(NUM_CONVERSATIONS)]
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": scripted_player(row, rng)},
            ]
        }
        for row in rows
    ]


def reward_of(player, num_problems: int = 6000) -> float:
    """Mean reward of a scripted player on held-out problems; no model takes part."""
    rng = random.Random(2)
    held_out = problems("test")
    rows = [held_out[index % len(held_out)] for index in range(num_problems)]
    return sum(player(row, rng) == oracle_player(row, rng) for row in rows) / num_problems


if __name__ == "__main__":
    print(f"scripted player {reward_of(scripted_player):.3f}")
    print(f"oracle {reward_of(oracle_player):.3f}")
    print({split: len(problems(split)) for split in ("train", "validation", "test")})
