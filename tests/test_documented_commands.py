"""Commands of README.md and docs/*.md do what pages say: each is run, or has a reason not to be."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from outloop.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests/documented_commands.toml").read_text())
FENCE = re.compile(r"^ *```(\S*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TINY = """
[run]
name = "calculator"
[model]
path = "policy"
renderer = "qwen3"
renderer_options = { enable_thinking = false }
max_context_tokens = 512
[env]
rollout_function_path = "rollout:play"
tasks = "tasks.jsonl"
split = { train = 0.6, validation = 0.4 }
[sampling]
max_new_tokens = 8
[buffer]
group_size = 2
[trainer]
num_steps = 12
groups_per_step = 1
learning_rate = 2e-3
checkpoint_every = 6
[deploy]
image = "registry.example/mine:1"
[eval]
every = 6
num_episodes = 4
final_num_episodes = 4
"""


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block of a page."""
    return FENCE.findall(page.read_text())


def commands(page: Path) -> Iterator[str]:
    """The commands of a page's shell blocks, each in one line and without its comment."""
    for language, text in fences(page):
        if language != "sh" or text.startswith("set -eu"):
            # A script of its own, with a title; tests/e2e/test_newcomer.py runs it.
            continue
        command = ""
        for line in text.replace("\\\n", " ").splitlines():
            command += "\n" + line
            if command.count('"') % 2 == 0:
                # In a comment no word has a quote, so that this one is none of SQL's.
                stripped = re.sub(r"\s+# [^\"]*$", "", command).strip()
                command = ""
                if stripped and not stripped.startswith("#"):
                    yield re.sub(r" {2,}", " ", stripped) if "\n" not in stripped else stripped


def documented() -> list[tuple[str, str]]:
    """(page, command), in the order of pages."""
    return [(str(page.relative_to(ROOT)), one) for page in PAGES for one in commands(page)]


def not_run() -> dict[tuple[str, str], str]:
    """(page, command) -> why it is not run."""
    return {
        (entry["page"], command): entry["reason"]
        for entry in TABLE["not_run"]
        for command in entry["commands"]
    }


def test_every_block_says_what_it_is() -> None:
    """A block without a language, or with another word for a shell, would hide commands."""
    hidden = {"", "bash", "shell", "console", "zsh"}
    assert [page.name for page in PAGES if hidden & {name for name, _ in fences(page)}] == []
    assert len(documented()) > 60


def test_every_exception_is_still_documented() -> None:
    """An entry whose command is gone, or was changed, is none."""
    known = documented()
    assert [one for one in not_run() if one not in known] == []
    assert all(len(reason) > 15 for reason in not_run().values())
    texts = "\n".join(command for _, command in known)
    assert [one for one in TABLE["placeholders"] if one not in texts] == []
    assert [one for one in TABLE["until"] if one not in texts] == []


def test_commands_and_options_that_pages_name_exist() -> None:
    """In blocks and within sentences, also of commands that no test runs."""
    found = [command for _, command in documented() if command.startswith("outloop ")]
    for page in PAGES:
        found += re.findall(r"`(outloop [a-z][^`|]*)`", page.read_text())
    assert len(found) > 150
    wrong = [text for text in found if not is_known(text)]
    assert wrong == []


def is_known(text: str) -> bool:
    """Whether `outloop ...` names a command, and options that it has."""
    command: click.Command = cli
    words = text.replace("[", "").replace("]", "").replace(",", " ").split()[1:]
    context = click.Context(cli)
    while words and isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        if inner is None:
            return False
        command, words = inner, words[1:]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return given <= options | {"--help"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the examples, a policy, settings, and a run of twelve steps."""
    path = tmp_path_factory.mktemp("reader")
    (path / "home").mkdir()
    shutil.copytree(ROOT / "examples", path / "examples")
    for name in ("agent.py", "rollout.py", "tasks.jsonl", "verifier.py"):
        for where in (path, path / "examples/calculator"):
            shutil.copy(ROOT / "examples/your_agent" / name, where)
    for where in (path, path / "examples/calculator"):
        (where / "run.toml").write_text(TINY)
    for command in ("outloop new-policy --out policy", "outloop train run.toml"):
        answer = run(path, command)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return path


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """What a shell in the folder makes of a command."""
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment(folder), capture_output=True,
        text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """The reader's, with outloop on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "HOME": str(folder / "home"), "PATH": path}


def run_until(folder: Path, command: str, words: str) -> str:
    """Why it did not print `words` and end well when it was interrupted; empty if it did."""
    with subprocess.Popen(
        shlex.split(command), cwd=folder, env=environment(folder), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        shown = ""
        for line in process.stdout:
            shown += line
            if words in line:
                process.send_signal(signal.SIGINT)
                process.wait(60)
                return ""
        return f"ended without {words!r}: {shown}"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_every_documented_command_runs(folder: Path) -> None:
    """As it stands but for placeholders, in the order of pages; all failures are named at once."""
    failures = {}
    for page, documented_command in documented():
        if (page, documented_command) in not_run():
            continue
        command = documented_command
        for placeholder, ours in TABLE["placeholders"].items():
            command = command.replace(placeholder, ours)
        if command in TABLE["until"]:
            problem = run_until(folder, command, TABLE["until"][command])
        else:
            answer = run(folder, command)
            problem = answer.stdout + answer.stderr if answer.returncode else ""
        if problem:
            failures[page, command] = problem
    assert failures == {}
