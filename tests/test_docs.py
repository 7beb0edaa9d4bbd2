"""Pages that repeat what the code says are written from it, and links lead somewhere."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", ["settings.md", "metrics.md", "python.md", "../examples/gpu/README.md"]
)
def test_a_generated_page_is_what_the_code_says(name: str, generate: ModuleType) -> None:
    """`make docs` was run after the last change of a setting or metric."""
    assert generate.PAGES[name]() == (ROOT / "docs" / name).read_text(), "run make docs"


# Half a minute of computing, on a machine that may have more to do.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_scaling_page_is_what_its_plan_says(generate: ModuleType) -> None:
    """`make docs` was run after the last change of a formula, the simulator or its file."""
    assert generate.scaling_page() == (ROOT / "docs/scaling.md").read_text(), "run make docs"


def test_every_setting_says_what_it_means(generate: ModuleType) -> None:
    """No row of settings.md is empty."""
    rows = [line for line in generate.settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To files that are there, and to headings that they have."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if heading and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in {slug(text) for text in headings}, target


def slug(heading: str) -> str:
    """A heading as links name it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_index_lists_every_page() -> None:
    """A page that index.md does not name is one that nobody finds."""
    index = (ROOT / "docs/index.md").read_text()
    assert [
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if page.name != "index.md" and f"({page.name})" not in index
    ] == []


QUOTED = {
    "prompt is too long: 734 tokens > 512 maximum": "prompt is too long: {num_tokens} tokens > ",
    "importing it raised ModuleNotFoundError": "importing it raised {type(error).__name__}",
    "there is no program 'pyton' in PATH or": "there is no program {program!r} in ",
    "model.max_context_tokens=1536 exceeds max_position_embeddings=512": (
        "exceeds max_position_embeddings={known}"
    ),
    "is not served; served:": "is not served",
    "has made all of its 40 steps": "has made all of its {settings.trainer.num_steps} steps",
    "attempts ended without a result": "attempts ended without a result",
    "answers were cut at sampling.max_new_tokens=16": "answers were cut at ",
    "the router refused every call of the first": "the router refused every call of the first ",
}
"""A message that troubleshooting.md quotes -> what the code says it with."""


def test_quoted_messages_are_those_of_the_code() -> None:
    """Who searches the page for a message finds it."""
    root = Path(__file__).parents[1]
    page = (root / "docs/troubleshooting.md").read_text()
    code = "".join(
        path.read_text()
        for folder in ("buffer", "engine", "envs", "router", "src")
        for path in (root / folder).rglob("*.py")
    )
    assert [quoted for quoted in QUOTED if quoted not in page] == []
    assert [said for said in QUOTED.values() if said not in code] == []
