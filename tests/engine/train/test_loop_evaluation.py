"""Evaluations of the RL loop."""

from collections.abc import Callable

import pytest
from memory_buffer import FAST, Setup

from outloop.buffer.errors import DeadlineExceeded

MakeRun = Callable[..., Setup]


def test_evaluations_follow_their_schedule(setup: MakeRun) -> None:
    """Ends and every second version; greedy at the ends; each done before the next publish."""
    made = setup(
        trainer=FAST | {"num_steps": 5},
        eval={"every": 2, "num_episodes": 16, "final_num_episodes": 32},
    )
    rows = made.train()
    assert [value for kind, value in made.events if kind == "eval"] == [
        ("0:sampled", 32, 1.0),
        ("0:greedy", 32, 0.0),
        ("2:sampled", 16, 1.0),
        ("4:sampled", 16, 1.0),
        ("5:sampled", 32, 1.0),
        ("5:greedy", 32, 0.0),
    ]
    kinds = [kind for kind, _ in made.events]
    for index, kind in enumerate(kinds):
        if kind == "eval" and "announce" in kinds[index:]:
            assert "eval_progress" in kinds[index : kinds.index("announce", index)]
    answers = {row["step"]: row for row in rows if "eval/sampled_reward" in row}
    assert sorted(answers) == [0, 2, 4, 5]
    assert answers[5]["eval/greedy_reward"] == 0.75
    assert answers[5]["eval/sampled_se"] == pytest.approx(0.25)


def test_an_evaluation_that_never_ends_names_who_is_awaited(setup: MakeRun) -> None:
    """The deadline passes with the number of episodes done."""
    made = setup(trainer=FAST | {"num_steps": 1}, eval={"every": 1, "timeout_s": 0.2})
    made.buffer.evals_answer = False
    with pytest.raises(DeadlineExceeded, match=r"runner.*0 of 8|0 of 8.*runner"):
        made.train()
