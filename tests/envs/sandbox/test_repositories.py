"""Revisions of a git repository as folders."""

import asyncio
import contextlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.repositories import Repository
from outloop.envs.verifiers.repository_tests import RepositoryTests


def git(folder: Path, *arguments: str) -> str:
    """git as somebody without settings."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    answer = subprocess.run(
        ["git", "-C", folder, *who, *arguments], capture_output=True, check=True, text=True
    )
    return answer.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two revisions, tagged `first` and `second`: a file changed, one gone, one added."""
    folder = tmp_path / "project"
    (folder / "src/deep").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "src/deep/code.py").write_text("x = 1\n")
    (folder / "src/same").write_bytes(bytes(range(256)))
    (folder / "run ü.sh").write_text("echo runs\n")
    (folder / "run ü.sh").chmod(0o755)
    (folder / "link").symlink_to("src/same")
    (folder / "gone").touch()
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "one")
    git(folder, "tag", "first")
    (folder / "src/deep/code.py").write_text("x = 2\n")
    (folder / "gone").unlink()
    (folder / "new").touch()
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "two")
    git(folder, "tag", "second")
    return folder


def names(folder: Path) -> list[str]:
    """Every file below `folder`."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def test_revisions_share_what_is_equal_in_them(project: Path) -> None:
    """Each has its files, modes and links; equal files are one on disk."""
    repository = Repository(project)
    first, second = repository.folder("first"), repository.folder("second")
    assert names(first) == ["gone", "link", "run ü.sh", "src/deep/code.py", "src/same"]
    assert names(second) == ["link", "new", "run ü.sh", "src/deep/code.py", "src/same"]
    assert (first / "src/deep/code.py").read_text() == "x = 1\n"
    assert (second / "src/deep/code.py").read_text() == "x = 2\n"
    assert os.access(first / "run ü.sh", os.X_OK)
    assert os.readlink(first / "link") == "src/same"
    assert (first / "src/same").samefile(second / "src/same")
    assert (first / "src/same").read_bytes() == bytes(range(256))
    assert repository.folder("main") == second
    repository.close()
    assert not first.exists()


def test_a_named_store_stays_and_is_shared(project: Path, tmp_path: Path) -> None:
    """Another process finds what one has made."""
    one = Repository(project, tmp_path / "store")
    made = one.folder("first")
    one.close()
    assert Repository(project, tmp_path / "store").folder("first") == made
    assert made.is_dir()


@pytest.mark.medium
async def test_a_session_over_a_revision_changes_a_layer(project: Path) -> None:
    """And the revision that the next session gets is whole."""
    repository, sandbox = Repository(project), BubblewrapSandbox()
    script = "./run*.sh; echo x = 3 > src/deep/code.py; rm gone"
    for _ in range(2):
        async with sandbox.session(base=repository.folder("first")) as session:
            ran = await session.run({}, ("sh", "-c", f"cat src/deep/code.py; {script}"))
            assert ran.stdout == b"x = 1\nruns\n", ran
    await sandbox.close()
    repository.close()


async def test_attempts_at_once_share_the_folder_of_a_revision(project: Path) -> None:
    """One is made, and it goes with the verifier that made it."""
    verifier = RepositoryTests()
    task = Task(task_id="t", payload={"repository": str(project), "revision": "first"})
    folders = await asyncio.gather(*(verifier.base(task) for _ in range(8)))
    assert len(set(folders)) == 1
    await verifier.tear_down()
    assert not folders[0].exists()


def test_revisions_made_at_once_share_what_is_equal_in_them(tmp_path: Path) -> None:
    """No one replaces a file that another's folder is being linked from."""
    git(tmp_path, "init", "--quiet", "project")
    project = tmp_path / "project"
    for i in range(20):
        (project / str(i)).write_text(str(i))
    revisions = [f"v{i}" for i in range(4)]
    for revision in revisions:
        (project / "version").write_text(revision)
        git(project, "add", "--all")
        git(project, "commit", "--quiet", "--message", revision)
        git(project, "tag", revision)
    with ThreadPoolExecutor(len(revisions)) as at_once:
        for _ in range(10):
            repository = Repository(project)
            folders = list(at_once.map(repository.folder, revisions))
            for name in map(str, range(20)):
                assert len({(folder / name).stat().st_ino for folder in folders}) == 1, name
            repository.close()


def test_a_file_with_all_the_links_that_a_disk_allows_is_copied(project: Path) -> None:
    """An empty file may be in more revisions than ext4 has links for one, which is 65,000."""
    repository = Repository(project)
    first, links = repository.folder("first"), project / "links"
    links.mkdir()
    with contextlib.suppress(OSError):  # where the limit is higher there is nothing to see
        for i in range(65_001):
            (links / str(i)).hardlink_to(first / "src/same")
    second = repository.folder("second")
    assert (second / "src/same").read_bytes() == (first / "src/same").read_bytes()
    assert (second / "src/same").stat().st_mode == (first / "src/same").stat().st_mode
    repository.close()


def test_what_git_does_not_know_is_refused(project: Path, tmp_path: Path) -> None:
    """With git's own words."""
    with pytest.raises(SettingsError, match="git rev-parse: .*not a git repository"):
        Repository(tmp_path)
    repository = Repository(project)
    with pytest.raises(SettingsError, match="git rev-parse: .*Needed a single revision"):
        repository.folder("third")
    repository.close()
