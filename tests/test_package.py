"""What a person who installs outloop gets: metadata, licence, lock file, commands."""

import re
import tomllib
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import outloop
from outloop.cli import GROUPS, cli
from outloop.engine.serve.sglang.cpu_environment import cpu_requirements

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = (ROOT / "requirements.lock").read_text()


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(*extras: str) -> list[Requirement]:
    """Of the package and the extras, other extras of ours resolved."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting = list(extras)
    while waiting:
        for line in EXTRAS[waiting.pop()]:
            requirement = Requirement(line)
            if requirement.name == "outloop":
                waiting += requirement.extras
            else:
                found.append(requirement)
    return found


def test_version_licence_and_changelog_agree() -> None:
    """One version everywhere; the whole text of the licence that the metadata names."""
    assert outloop.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license-files"] == ["LICENSE"]
    assert PROJECT["authors"] == [{"name": "outloop contributors"}]


@pytest.mark.parametrize("name", ["laptop", "train", "router", "gpu", "dev"])
def test_extras_can_be_guessed(name: str) -> None:
    """Every extra resolves, and asks nobody for SGLang, which needs an environment of its own."""
    assert not [r for r in required_by(name) if canonical(r.name) == "sglang"]


def test_the_lock_holds_what_the_two_commands_install() -> None:
    """Every requirement of `make demo` and `make test` in an allowed version, with its hash."""
    locked: dict[str, Version] = {}
    for line in LOCK.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        locked[match[1]] = Version(match[2])
    for requirement in required_by("laptop", "dev"):
        name = canonical(requirement.name)
        if name == "torch":
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        assert requirement.specifier.contains(locked[name], prereleases=True), requirement
    assert "://" not in LOCK


def test_sglang_s_requirements_travel_with_the_package() -> None:
    """PyTorch first and pinned, as the build of the environment needs it."""
    assert cpu_requirements()[0].startswith("torch==")
    assert len(cpu_requirements()) > 30


def commands_of(command: click.Command, path: str) -> list[str]:
    """Every command below `command`, as it is typed."""
    if not isinstance(command, click.Group):
        return [path]
    return [
        word
        for name, below in command.commands.items()
        for word in commands_of(below, f"{path} {name}")
    ]


def test_every_command_is_in_help_and_says_what_it_does() -> None:
    """In one of the groups of `outloop --help`, with a sentence and text for each option."""
    shown = {command.name for commands in GROUPS.values() for command in commands}
    assert shown == set(cli.commands)
    for command in cli.commands.values():
        assert command.get_short_help_str(200)


def test_readme_names_every_command_and_make_target() -> None:
    """Nothing that is typed is missing there, and what it names exists."""
    readme = (ROOT / "README.md").read_text()
    for name in cli.commands:
        assert re.search(rf"\b{re.escape(str(name))}\b", readme), name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", readme, re.MULTILINE)) <= targets
    for target in ("demo", "check", "test", "test-slow", "test-wheel", "test-sglang"):
        assert f"make {target}" in readme
    for line in (ROOT / ".ci/run").read_text().splitlines():
        if line.startswith("make "):
            assert line in readme
