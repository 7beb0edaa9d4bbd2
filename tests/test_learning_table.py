"""The table of `make bench-learning`: what is run, what is kept, and what it concludes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.settings import Settings

BENCH = Path(__file__).parent / "bench"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tests/bench/learning_table.py with three seeds; what it imports from its folder is
    forgotten."""
    for name in ("SEEDS", "CONTROLS", "JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(BENCH))
    names = {path.stem for path in BENCH.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    import learning_table

    yield learning_table
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def found(last: float, *, first: float = 0.2) -> dict[str, Any]:
    """What a cell came to."""
    rewards = [first] * 4 + [0.5] * 4 + [last] * 4
    return {"rewards": rewards, "num_episodes": 64, "seconds": 9.0, "cpu_seconds": 8.0}


def fill(program: ModuleType, folder: Path, *, control: float = 0.25) -> None:
    """Every cell of two recipes on one task."""
    for cell in program.cells_of(["calculator"], ["grpo", "ppo"]):
        last = control if cell.is_exchanged else 0.7 + 0.02 * cell.seed
        cell.keep(found(last), folder)


def test_a_finished_cell_is_not_run_again_unless_its_settings_changed(
    program: ModuleType, tmp_path: Path
) -> None:
    """Three seeds and a control for each recipe; a half-written file counts for nothing."""
    cells = program.cells_of(["calculator"], ["grpo", "ppo"])
    assert len({cell.name for cell in cells}) == len(cells) == 8
    fill(program, tmp_path)
    assert all(cell.known(tmp_path) for cell in cells)
    path = tmp_path / f"{cells[0].name}.json"
    changed = json.loads(path.read_text())
    changed["plan"]["trainer"]["learning_rate"] = 0.5
    path.write_text(json.dumps(changed))
    assert cells[0].known(tmp_path) is None
    assert not list(tmp_path.glob("*.partial"))


def test_every_recipe_with_rewards_has_settings_that_hold(
    program: ModuleType, tmp_path: Path
) -> None:
    """On every task, so that no cell ends at its first line."""
    names = [*(r for r in program.RECIPES if r not in program.NO_REWARDS), *program.VARIANTS]
    for task in program.TASKS:
        for name in names:
            chosen = program.trainer_settings(task, name)
            made = Settings(model={"path": tmp_path}, trainer=chosen)
            assert made.trainer.num_steps == program.TASKS[task].num_steps


def test_what_the_table_says(program: ModuleType, tmp_path: Path) -> None:
    """Complete rows, rows with cells missing, and none for what has not been run."""
    fill(program, tmp_path)
    recipes = ["grpo", "ppo", "rloo"]
    rows = program.rows_of("calculator", recipes, tmp_path)
    assert [row.recipe for row in rows] == ["grpo", "ppo"]
    assert program.sentences(rows) == []
    text = program.table({"calculator": rows, "bandit": []})
    assert "complete (3 seeds, 1 with exchanged rewards): 2 of 2 recipes" in text
    assert "| `grpo` | 0.200 | 0.720 | 0.520 +- 0.012 | 0.050 | 3 |" in text
    assert "difference of" in text
    (tmp_path / "calculator-ppo-2.json").unlink()
    text = program.table({"calculator": program.rows_of("calculator", recipes, tmp_path)})
    assert ": 1 of 2 recipes" in text
    assert "| 2, incomplete |" in text


def test_what_is_not_learned_or_learned_from_nothing_is_named(
    program: ModuleType, tmp_path: Path
) -> None:
    """By the spread of all recipes of the task, controls by that of the others' controls."""
    fill(program, tmp_path)
    for seed, last in enumerate((0.2, 0.22, 0.19)):
        program.Cell("calculator", "ppo", seed, False).keep(found(last), tmp_path)
    recipes = ["grpo", "ppo", "rloo", "dapo", "gspo", "cispo"]
    for recipe, last in zip(recipes, (0.8, 0.15, 0.22, 0.25, 0.1, 0.2), strict=True):
        program.Cell("calculator", recipe, 0, True).keep(found(last), tmp_path)
    assert program.sentences(program.rows_of("calculator", recipes, tmp_path)) == [
        "calculator, grpo: something is learned from exchanged ones",
        "calculator, ppo: nothing is learned from true rewards",
    ]
    # Too few controls say nothing; together they can say what none of them does.
    few = program.rows_of("calculator", recipes[:3], tmp_path)
    assert [one for one in program.sentences(few) if "exchanged" in one] == []
    for recipe, last in zip(recipes, (0.30, 0.28, 0.32, 0.3, 0.27, 0.31), strict=True):
        program.Cell("calculator", recipe, 0, True).keep(found(last), tmp_path)
    assert "calculator: exchanged rewards teach the recipes together" in program.sentences(
        program.rows_of("calculator", recipes, tmp_path)
    )
