"""Temporary folders, and what becomes of those whose process was killed."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outloop.buffer.owned_folder import OwnedFolder

HOLDER = """
import sys
from outloop.buffer.owned_folder import OwnedFolder
made = OwnedFolder(sys.argv[1])
(made.path / "large").touch()
print(made.path, flush=True)
sys.stdin.read()
"""
FORKED = """
import os
import sys
from outloop.buffer.owned_folder import OwnedFolder
made = OwnedFolder(sys.argv[1])
if os.fork() == 0:
    sys.exit()
os.wait()
print(made.path.is_dir())
"""


@pytest.fixture
def kind() -> str:
    """That of no other test."""
    return f"outloop-test-{uuid.uuid4().hex}"


@contextmanager
def another_process(kind: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """That has made a folder, and ends when its input does."""
    words = [sys.executable, "-c", HOLDER, kind]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_killed_process_has_its_folder_removed_by_the_next(kind: str) -> None:
    """Of the same kind, and not while the process lives."""
    with another_process(kind) as (process, left):
        first = OwnedFolder(kind)
        assert (left / "large").exists()
        process.kill()
        process.wait()
        other = OwnedFolder(f"other-{kind}")
        assert (left / "large").exists()
        second = OwnedFolder(kind)
        assert not left.exists()
    assert first.path != second.path
    assert first.path.is_dir()
    for folder in (first, second, other):
        folder.close()
        assert not folder.path.exists()


def test_a_process_that_ends_leaves_no_folder(kind: str) -> None:
    """Although it does not close it."""
    with another_process(kind) as (process, made):
        assert made.is_dir()
        process.communicate()
        assert process.returncode == 0
        assert not made.exists()


def test_a_forked_child_that_ends_leaves_the_folder_of_its_parent(kind: str) -> None:
    """Who made it removes it."""
    words = [sys.executable, "-c", FORKED, kind]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n", answer


def test_a_folder_of_a_parent(kind: str, tmp_path: Path) -> None:
    """There, what was left there is removed too."""
    left = tmp_path / f"{kind}-left"
    left.mkdir()
    made = OwnedFolder(kind, str(tmp_path))
    assert list(tmp_path.iterdir()) == [made.path]
    made.close()


def test_a_link_with_such_a_name_is_left_alone(kind: str, tmp_path: Path) -> None:
    """Another user may have put it there."""
    probe = OwnedFolder(kind)
    link = probe.path.with_name(f"{kind}-link")
    link.symlink_to(tmp_path)
    try:
        OwnedFolder(kind).close()
        assert tmp_path.is_dir()
    finally:
        link.unlink()
        probe.close()
