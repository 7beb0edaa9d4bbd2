"""The documentation's site and what GitHub reads: every page is on it, and every command exists."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """docs/site/build.py."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs/site/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.medium
def test_every_page_is_in_the_navigation(tmp_path: Path, build: ModuleType) -> None:
    """Once, and under the sections of docs/index.md where that links to it."""
    build.lay_out(tmp_path)
    sections = {}
    for entry in build.navigation():
        sections |= entry if isinstance(entry, dict) else {entry: entry}
    flat = [
        p for pages in sections.values() for p in ([pages] if isinstance(pages, str) else pages)
    ]
    assert sorted(flat) == sorted(str(page) for page in build.pages())
    assert all((tmp_path / page).is_file() for page in flat)
    assert "docs/quick-start.md" in sections["Start"]
    assert "docs/trackers.md" in sections["Use"]


@pytest.mark.medium
def test_links_hold_where_pages_are_laid_out(tmp_path: Path, build: ModuleType) -> None:
    """Pages, sources that they link to, and folders by their README."""
    folder = tmp_path / "pages"
    build.lay_out(folder)
    number = 0
    for page in folder.rglob("*.md"):
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            if not re.match(r"[a-z]+:", link):
                assert (page.parent / link).resolve().is_file(), f"{page}: {link}"
                number += 1
    assert number > 200


def test_workflows_run_what_exists() -> None:
    """Targets of make and scripts; forms and the template are where GitHub looks."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        runs += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(runs) >= 5
    for command in runs:
        first, *words = command.split()
        if first == "make":
            assert words[0] in targets, command
        elif first.startswith("."):
            assert (ROOT / first).is_file(), command
    for name in ("bug", "feature"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all(part["attributes"]["label"] for part in form["body"])
    assert (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").is_file()
