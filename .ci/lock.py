"""Write the locks from what .venv holds: exact versions and their hashes, no index named.

.venv/bin/python .ci/lock.py     (see `make lock`)

requirements.lock is for a checkout. docker/requirements.lock has what of it the images install,
with hashes for both of their Pythons, and setuptools, which builds outloop there.
PyTorch and what only its CUDA build brings are left out: which build it is depends on the index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
IMAGES = ROOT / "docker" / "requirements.lock"
EXTRAS = ("redis", "router", "envs", "verifiers", "train", "plot", "view", "otlp", "tensorboard")
"""Of outloop, in the images."""
LEFT_OUT = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*|outloop|pip|setuptools)$", re.IGNORECASE)
HEAD = """\
# Written by `make lock`: what `make demo` and `make test` install beside PyTorch, for Python 3.11
# on Linux x86-64. For other systems: make LOCKED=no, which resolves pyproject.toml.
"""
HEAD_OF_IMAGES = """\
# Written by `make lock`: what the images install beside PyTorch, for Python 3.11 and 3.12 on Linux
# x86-64.
"""
GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
OTHER_PYTHON = (
    *("--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:"),
    *(word for old in GLIBC for word in ("--platform", f"manylinux_{old}_x86_64")),
    *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
)


def pip(*arguments: str) -> str:
    """What pip prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(*extras: str) -> set[str]:
    """Names of the packages that outloop needs with these extras, and that these need."""
    found: set[str] = set()
    waiting = [Requirement(f"outloop[{','.join(extras)}]")]
    while waiting:
        asked = waiting.pop()
        for text in metadata.requires(asked.name) or ():
            one = Requirement(text)
            wanted = [{"extra": extra} for extra in (*asked.extras, "")]
            if one.marker is not None and not any(map(one.marker.evaluate, wanted)):
                continue
            name = canonical(one.name)
            if name not in found or one.extras:
                found.add(name)
                waiting.append(one)
    return found


def hashes_of(pinned: list[str], *options: str) -> dict[str, str]:
    """`name==version` -> SHA-256 of the file that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(pinned))
        words = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed", *options)
        if options:
            words += ("--target", str(Path(folder, "target")))
        pip("install", *words, "--report", str(report), "-r", str(wanted))
        rows = json.loads(report.read_text())["install"]
    return {
        f"{canonical(row['metadata']['name'])}=={row['metadata']['version']}": row["download_info"][
            "archive_info"
        ]["hashes"]["sha256"]
        for row in rows
    }


def lines_of(*hashes: dict[str, str]) -> str:
    """Of a lock file, each package with its hashes."""
    lines = []
    for pinned in sorted(hashes[0]):
        known = dict.fromkeys(found[pinned] for found in hashes if pinned in found)
        lines.append(" ".join([pinned, *(f"--hash=sha256:{digest}" for digest in known)]) + "\n")
    return "".join(lines)


def main() -> None:
    """Freeze, look the hashes up, write."""
    frozen = [
        line for line in pip("freeze", "--all", "--exclude-editable").splitlines() if "==" in line
    ]
    locked = [line for line in frozen if not LEFT_OUT.match(line.partition("==")[0])]
    here = hashes_of(locked)
    LOCK.write_text(HEAD + lines_of(here))
    needed = needed_by(*EXTRAS) | {"setuptools"}
    of_images = [
        line
        for line in frozen
        if canonical(line.partition("==")[0]) in needed
        and (line in locked or line.startswith("setuptools=="))
    ]
    IMAGES.write_text(
        HEAD_OF_IMAGES + lines_of(hashes_of(of_images), hashes_of(of_images, *OTHER_PYTHON))
    )


if __name__ == "__main__":
    main()
