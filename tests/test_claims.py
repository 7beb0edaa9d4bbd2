"""Names and numbers that pages say of the code are the code's."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.settings import Settings
from outloop.engine.launch.restarts import DEFAULT_BACKOFF

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    # Inputs of `outloop plan` have names like those of settings.
    if path.name != "scaling.md"
)
SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Settings.model_fields.items()}
NAMED = re.compile(r"`([a-z]+)((?:\.[a-z_0-9]+)+)(?: = [^`]*)?`")
FILES = {"json", "md", "mjs", "py", "toml"}
GAP = "\x00"
OF_THE_SYSTEM = {"No space left on device"}
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]


def has_setting(model: Any, names: list[str]) -> bool:
    """Whether a setting of that name is in this section, as deep as settings have names."""
    for name in names:
        fields = getattr(model, "model_fields", None)
        if fields is None:
            return True
        if name not in fields:
            return False
        found = fields[name].annotation
        sections = [
            kind for kind in getattr(found, "__args__", ()) if hasattr(kind, "model_fields")
        ]
        model = sections[0] if sections else found
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_setting_that_a_page_names_is_one(page: Path) -> None:
    """`section.name`, with or without a value."""
    named = [
        (match[1], match[2][1:].split("."))
        for match in NAMED.finditer(page.read_text())
        if match[1] in SECTIONS
    ]
    wrong = [
        ".".join((section, *names))
        for section, names in named
        if names[-1] not in FILES and not has_setting(SECTIONS[section], names)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_metric_that_a_page_names_is_one(page: Path) -> None:
    """As docs/metrics.md, which is made from the code, has it."""
    known = set(re.findall(r"`([a-z_]+/[^`]+)`", (ROOT / "docs/metrics.md").read_text()))
    prefixes = "|".join(sorted({name.partition("/")[0] for name in known} - {"envs", "reward"}))
    found = re.findall(rf"`((?:{prefixes})/[a-z0-9_]+)`", page.read_text())
    folders = {name for name in found if (ROOT / name).exists()}
    assert set(found) - known - folders == set()


def refusals() -> Iterator[tuple[int, str]]:
    """Status and code of every refusal of the router that is written out."""
    for path in (ROOT / "router").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusal":
                status, code, *_ = [*node.args, None, None]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    yield status.value, code.value


def test_the_table_of_refusals_has_every_code_with_its_status() -> None:
    """docs/router.md; one that no client can get is in no row."""
    rows = re.findall(
        r"^\| (`[a-z_`, ]+`) \| (\d+) \|", (ROOT / "docs/router.md").read_text(), re.M
    )
    told = {code: int(status) for codes, status in rows for code in re.findall(r"[a-z_]+", codes)}
    found = set(refusals())
    assert len(found) > 25
    assert {(status, code) for status, code in found if told.get(code) != status} == set()
    text = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    assert [code for code in told if f'"{code}"' not in text] == []


def test_the_codes_of_settings_are_those_of_the_table() -> None:
    """A setting that says with which code something is answered."""
    rows = (ROOT / "docs/settings.md").read_text()
    table = (ROOT / "docs/router.md").read_text()
    answered = re.findall(r"answered (\d{3}), `([a-z_]+)`", rows)
    assert answered
    for status, code in answered:
        assert re.search(rf"^\| [^|]*`{code}`[^|]* \| {status} \|", table, re.M), (status, code)


@pytest.mark.parametrize(
    "page",
    ["troubleshooting.md", "servers.md", "operating.md", "limitations.md", "reliability.md"],
)
def test_pages_say_how_many_short_lives_end_a_run(page: str) -> None:
    """None says another number of restarts."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"(\w+) short (?:lives|ones) in a\s+row", text)
    assert found
    assert {WORDS.index(word) for word in found} == {DEFAULT_BACKOFF.max_short_lives}
    assert re.findall(r"(?:up to )?(\w+) times(?: each)?; after that", text) == []


def test_readme_has_the_families_of_the_limitations() -> None:
    """What the trainer refuses beyond is what README offers."""
    readme = re.search(r"Families: ([^|]+?) \|", (ROOT / "README.md").read_text())
    limits = re.search(
        r"model families beyond ([^|]+?) \|", (ROOT / "docs/limitations.md").read_text()
    )
    assert readme is not None
    assert limits is not None
    assert readme[1] == limits[1]


def messages() -> str:
    """Every text of the sources, with a gap where a value goes."""
    found = []
    for part in ("buffer", "router", "engine", "envs", "src"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    pieces = [
                        one.value if isinstance(one, ast.Constant) else GAP for one in node.values
                    ]
                    found.append("".join(map(str, pieces)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("page", ["troubleshooting.md", "your-own-agent.md"])
def test_a_message_that_a_page_quotes_is_in_the_sources(page: str) -> None:
    """A reader searches for what the terminal says: at least its longest run of fixed words."""
    text = messages()
    quotes = [
        quote
        for row in re.findall(r"^\| .*\|$", (ROOT / "docs" / page).read_text(), re.M)
        for quote in re.findall(r"`([^`]+)`", row)
        if quote.count(" ") > 3 and not quote.startswith(("outloop ", "async ", "make ", "--"))
    ]
    assert len(quotes) > 5
    missing = []
    for quote in quotes:
        runs = re.split(r"\.\.\.|'[^']*'|\([^)]*\)|=\S+|\w+Error\b|\b\d+\b|[;:,] ", quote)
        longest = max((run.strip(" .,;:") for run in runs), key=len)
        if longest not in text and quote not in OF_THE_SYSTEM:
            missing.append((quote, longest))
    assert missing == []
