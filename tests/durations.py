"""Which tests are slow: reads a JUnit report and writes durations.toml, which conftest.py reads.

python tests/durations.py REPORT.xml     (see `make durations`)

A test is `slow` from 8 s on and `medium` from 0.2 s on, as the slowest of its parameters was.
Tests that the report does not hold count as quick until the next one. A test that was marked before
keeps its marker: a set-up that several tests share counts for whichever of them came first. Without
the file all is measured again.
"""

from __future__ import annotations

import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/durations.toml"
FROM_S = {"slow": 8.0, "medium": 0.2}


def read_report(path: Path) -> dict[tuple[str, str], float]:
    """(file, test function) -> seconds of its slowest case, set-up and tear-down included."""
    longest: dict[tuple[str, str], float] = defaultdict(float)
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
        longest[file, name] = max(longest[file, name], float(case.get("time", 0)))
    return longest


def keep_marks(longest: dict[tuple[str, str], float], before: str) -> None:
    """Raise tests to what the file said of them before, where they still exist."""
    for marker, files in tomllib.loads(before).items():
        for file, names in files.items():
            path = ROOT / file
            text = path.read_text() if path.exists() else ""
            for name in names:
                if f"def {name}(" in text:
                    longest[file, name] = max(longest.get((file, name), 0.0), FROM_S[marker])


def format_file(longest: dict[tuple[str, str], float]) -> str:
    """The text of durations.toml."""
    lines = ["# Written by `make durations`; see durations.py.\n"]
    chosen: dict[str, dict[str, list[str]]] = {marker: {} for marker in FROM_S}
    for (file, name), seconds in sorted(longest.items()):
        for marker, from_s in FROM_S.items():
            if seconds >= from_s:
                chosen[marker].setdefault(file, []).append(name)
                break
    for marker, files in chosen.items():
        lines.append(f"\n[{marker}]\n")
        for file, names in files.items():
            lines.append(f'"{file}" = [\n' + "".join(f'    "{name}",\n' for name in names) + "]\n")
    return "".join(lines)


if __name__ == "__main__":
    measured = read_report(Path(sys.argv[1]))
    if FILE.exists():
        keep_marks(measured, FILE.read_text())
    FILE.write_text(format_file(measured))
