"""Lay the pages out as one tree for mkdocs, with everything that they link to, and a navigation.

python docs/site/build.py FOLDER     (see `make site`; writes FOLDER/pages and FOLDER/mkdocs.yml)

Pages link to other pages, to sources and to folders, relative to where they stand in the checkout.
The tree has the same layout, so the same links hold on the site: sources are copied beside the
pages, and a link to a folder becomes one to its README.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def pages() -> list[Path]:
    """Every page, relative to the repository."""
    found = [ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found += [*(ROOT / "examples").glob("*/*.md"), ROOT / "tests/bench/README.md"]
    return sorted({path.relative_to(ROOT) for path in found})


def lay_out(folder: Path) -> None:
    """Write the tree into `folder`, which is made new.

    Raises:
        SystemExit: a page links to what is not there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / page).read_text()
        target.write_text(_LINK.sub(partial(_linked, page=page, folder=folder), text))


def _linked(match: re.Match[str], *, page: Path, folder: Path) -> str:
    """The link, with what it leads to copied; folders become their README."""
    link = match.group(2)
    if re.match(r"[a-z]+:", link):
        return match.group(0)
    there = (ROOT / page.parent / link).resolve()
    if there.is_dir():
        inside = next(
            (there / name for name in ("README.md", "run.toml") if (there / name).exists()), None
        )
        if inside is None:
            inside = sorted(path for path in there.iterdir() if path.suffix == ".py")[0]
        link, there = f"{link.rstrip('/')}/{inside.name}", inside
    if not there.is_file():
        raise SystemExit(f"{page}: the link {link!r} leads nowhere")
    relative = there.relative_to(ROOT)
    if relative not in pages():
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there, target)
    return match.group(1) + link + match.group(3)


def navigation() -> list[str | dict[str, str | list[str]]]:
    """The sections of docs/index.md with the pages that they link to; what is in none is last."""
    left = [str(page) for page in pages()]
    found: list[str | dict[str, str | list[str]]] = [{"outloop": "README.md"}, "docs/index.md"]
    left = [page for page in left if page not in ("README.md", "docs/index.md")]
    text = (ROOT / "docs/index.md").read_text()
    for title, section in re.findall(r"^\*\*(.+?)\*\*$(.*?)(?=^\*\*|\Z)", text, re.M | re.S):
        inside: list[str] = []
        for link in _LINK.findall(section):
            page = os.path.normpath(f"docs/{link[1]}")
            if page in left:
                left.remove(page)
                inside.append(page)
        found.append({title: inside})
    examples = [page for page in left if page.startswith("examples/")]
    found.append({"Examples": examples})
    return [*found, {"More": [page for page in left if page not in examples]}]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    lay_out(target / "pages")
    settings = (ROOT / "docs/site/mkdocs.yml").read_text()
    # JSON is YAML.
    (target / "mkdocs.yml").write_text(f"{settings}nav: {json.dumps(navigation())}\n")
