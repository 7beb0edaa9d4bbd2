"""Write requirements.lock from what .venv holds: exact versions and their hashes, no index named.

.venv/bin/python .ci/lock.py     (see `make lock`)

PyTorch and what only its CUDA build brings are left out: which build it is depends on the index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
LEFT_OUT = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*|outloop|pip|setuptools)$", re.IGNORECASE)
HEAD = """\
# Written by `make lock`: what `make demo` and `make test` install beside PyTorch, for Python 3.11
# on Linux x86-64. For other systems: make LOCKED=no, which resolves pyproject.toml.
"""


def pip(*arguments: str) -> str:
    """What pip prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def format_lock(installs: list[dict[str, object]]) -> str:
    """The lock file for the `install` rows of pip's report."""
    lines = []
    for row in installs:
        metadata, download = row["metadata"], row["download_info"]
        digest = download["archive_info"]["hashes"]["sha256"]
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        lines.append(f"{name}=={metadata['version']} --hash=sha256:{digest}\n")
    return HEAD + "".join(sorted(lines))


def main() -> None:
    """Freeze, look the hashes up, write."""
    frozen = [
        line
        for line in pip("freeze", "--exclude-editable").splitlines()
        if "==" in line and not LEFT_OUT.match(line.partition("==")[0])
    ]
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("\n".join(frozen))
        options = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed")
        pip("install", *options, "--report", str(report), "-r", str(wanted))
        LOCK.write_text(format_lock(json.loads(report.read_text())["install"]))


if __name__ == "__main__":
    main()
