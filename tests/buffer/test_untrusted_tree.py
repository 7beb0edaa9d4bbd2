"""Folders that nobody trusts: whatever is in them, they are counted and removed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outloop.buffer import untrusted_tree
from outloop.buffer.owned_folder import OwnedFolder


def deep(root: Path) -> None:
    """Deeper than Python recurses, and than a path may be long."""
    folder = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("nested", dir_fd=folder)
        below = os.open("nested", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)


def locked(root: Path) -> None:
    """Folders and files without rights, one in the other."""
    (root / "a/b").mkdir(parents=True)
    for path in (root / "a/b/file", root / "a/file"):
        path.write_text("x")
        path.chmod(0)
    for path in (root / "a/b", root / "a", root):
        path.chmod(0)


def names(root: Path) -> None:
    """Names that are no text, begin with a dash or hold line ends."""
    for name in (b"\xff\xfe", b"-rf", b"a\nb", b" ", b"\x1b[2J", b"*", b"x" * 255):
        Path(os.path.join(root, os.fsdecode(name))).touch()


def links(root: Path) -> None:
    """Links to everything, to nothing and in circles."""
    for name, target in {"root": "/", "up": "..", "self": "self", "gone": "gone/x"}.items():
        (root / name).symlink_to(target)


def odd(root: Path) -> None:
    """A FIFO, which blocks who opens it, and hard links."""
    os.mkfifo(root / "fifo")
    (root / "one").write_text("x")
    os.link(root / "one", root / "two")


def many(root: Path) -> None:
    """A hundred folders of a hundred files."""
    for folder in range(100):
        (root / str(folder)).mkdir()
        for file in range(100):
            (root / str(folder) / str(file)).touch()


TREES = (deep, locked, names, links, odd, many)


@pytest.mark.medium
@pytest.mark.parametrize("build", TREES, ids=lambda build: build.__name__)
def test_every_tree_is_removed_with_its_folder(
    build: Callable[[Path], None], tmp_path: Path
) -> None:
    """Nothing is left, nothing beside it is touched, and nothing raises."""
    beside = tmp_path / "beside"
    beside.write_text("kept")
    folder = OwnedFolder("outloop-test-tree", str(tmp_path))
    build(folder.path)
    folder.close()
    assert [*tmp_path.iterdir()] == [beside]


@pytest.mark.medium
@pytest.mark.parametrize("build", TREES, ids=lambda build: build.__name__)
def test_every_tree_of_a_dead_process_is_removed_by_the_next(
    build: Callable[[Path], None], tmp_path: Path
) -> None:
    """A folder without a lock is an abandoned one."""
    abandoned = tmp_path / "outloop-test-tree-abandoned"
    abandoned.mkdir()
    build(abandoned)
    OwnedFolder("outloop-test-tree", str(tmp_path)).close()
    assert [*tmp_path.iterdir()] == []


def test_what_a_tree_uses_counts_its_smallest_files_too(tmp_path: Path) -> None:
    """An empty file is a block; a link's target does not count."""
    many(tmp_path)
    links(tmp_path)
    files = 100 * 100 + 100 + 4
    assert 4096 * files <= untrusted_tree.used_bytes(tmp_path) <= 2 * 4096 * files


def test_a_removal_that_fails_says_why(tmp_path: Path) -> None:
    """The rest is removed, and the cause returned."""
    path = tmp_path / "file"
    path.touch()
    assert isinstance(untrusted_tree.remove(path), NotADirectoryError)
    assert untrusted_tree.remove(tmp_path / "missing") is None
