"""docs/gpu.md names the code that a reading changed, and the tests that hold it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/gpu.md").read_text()
READING = PAGE[PAGE.index("## What a reading of the sources found") : PAGE.index("## Only read")]
NUM_CERTAIN, NUM_LIKELY = 9, 12


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if hasattr(node, "name")}


def test_every_file_and_test_that_the_page_names_is_there() -> None:
    """One that was renamed would hold nothing."""
    path, num_tests = ROOT, 0
    for file, test in re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", READING):
        if file:
            path = ROOT / "tests" / file if (ROOT / "tests" / file).exists() else ROOT / file
            assert path.exists() or "/" not in file, file
        if test:
            num_tests += 1
            assert test in names_in(path), (path, test)
    assert num_tests > NUM_CERTAIN + NUM_LIKELY


def test_every_finding_has_a_test_a_row_or_a_reason() -> None:
    """Of those that were certain or likely to break."""
    certain, likely = (
        READING.split(f"{title} to break:")[1].split("\n\n")[1].splitlines()[2:]
        for title in ("Certain", "Likely")
    )
    assert (len(certain), len(likely)) == (NUM_CERTAIN, NUM_LIKELY)
    for row in (*certain, *likely):
        held_by = row.strip("| ").split(" | ")[2]
        assert re.search(r"test_\w+|rows? \"|no test|make test", held_by), row
