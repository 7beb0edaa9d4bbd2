"""Sessions that begin with a folder of this machine: each changes its own layer of it."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.api import Limits, Sandbox
from outloop.envs.sandbox.backends import open_sandbox
from outloop.envs.sandbox.host_users import base_owner

LIMITS = Limits(wall_s=20, memory_bytes=256 * 2**20, max_processes=16, disk_bytes=2**20)
BIG = 3 * 2**20


@pytest.fixture(params=["session's", "somebody else's"])
def base(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tree of the session's user, which OverlayFS takes, and one of another, which is copied."""
    with tempfile.TemporaryDirectory(prefix="outloop-base-") as name:
        folder = Path(name)
        (folder / "src").mkdir()
        (folder / "src/words.py").write_text("word = 'old'\n")
        (folder / "old.txt").write_text("here")
        (folder / "run.sh").write_text("echo it runs")
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("src/words.py")
        if request.param == "session's" and (user := base_owner()) is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
        elif request.param != "session's" and base_owner() is None:
            pytest.skip("only root can make files of somebody else")
        folder.chmod(0o755)
        yield folder


CHANGE = "echo \"word = 'new'\" > src/words.py; rm old.txt; echo a > src/added; ./run.sh; cat link"
LOOK = "cat src/words.py; ls src; ls old.txt"


@pytest.mark.medium
async def test_a_session_changes_its_own_layer_alone(sandbox: Sandbox, base: Path) -> None:
    """Kept changes are there for later calls of the session, and nowhere else."""
    shell = ("sh", "-c")
    async with sandbox.session(LIMITS, base=base) as one, sandbox.session(base=base) as other:
        changed = await one.run({}, (*shell, CHANGE), keep_files=True)
        assert changed.stdout == b"it runs\nword = 'new'\n", changed
        kept = await one.run({}, (*shell, LOOK), keep_files=True)
        assert kept.stdout == b"word = 'new'\nadded\nwords.py\n"
        for session, is_kept in ((one, False), (other, True)):
            seen = await session.run({}, (*shell, LOOK), keep_files=is_kept)
            assert seen.stdout == b"word = 'old'\nwords.py\nold.txt\n"
        written = await other.run(
            {"src/words.py": "word = 'ours'"},
            ("python", "look.py"),
            collect=["src/words.py", "old.txt", "link"],
        )
        assert written.files == {"src/words.py": b"word = 'ours'", "old.txt": b"here"}
    assert (base / "src/words.py").read_text() == "word = 'old'\n"
    assert sorted(path.name for path in base.iterdir()) == ["link", "old.txt", "run.sh", "src"]


async def test_a_base_cannot_be_written_by_another_path(sandbox: Sandbox, base: Path) -> None:
    """Where it is mounted, it is read-only; only the session's own layer takes changes."""
    paths = "/base /proc/1/root/base"
    attempt = f"for at in {paths}; do echo x > $at/src/words.py; rm -rf $at/src; done"
    async with sandbox.session(LIMITS, base=base) as session:
        await session.run({}, ("sh", "-c", attempt))
    assert (base / "src/words.py").read_text() == "word = 'old'\n"


async def test_a_layer_counts_as_the_sessions_disk(sandbox: Sandbox, base: Path) -> None:
    """Changes beyond the limit fail; a base that has to be copied must fit itself."""
    (base / "large").write_bytes(b"x" * BIG)
    is_copied = base_owner() is not None and (base / "src").stat().st_uid != base_owner()
    if not is_copied and (user := base_owner()) is not None:
        os.chown(base / "large", user, user)
    async with sandbox.session(LIMITS, base=base) as session:
        if is_copied:
            with pytest.raises(EnvironmentFailure, match="could not be copied"):
                await session.run({}, ("true",))
            return
        read = await session.run({}, ("wc", "-c", "large"))
        assert int(read.stdout.split()[0]) == BIG
        filled = await session.run({}, ("sh", "-c", f"head -c {BIG} /dev/zero > more"))
        assert filled.exit_code != 0


async def test_the_plain_sandbox_copies_the_base(base: Path) -> None:
    """Without isolation too, what a program changes is its own copy."""
    sandbox = open_sandbox("subprocess", LIMITS)
    async with sandbox.session(base=base) as session:
        await session.run({}, ("sh", "-c", CHANGE), keep_files=True)
        kept = await session.run({}, ("sh", "-c", LOOK), keep_files=True)
    await sandbox.close()
    assert kept.stdout == b"word = 'new'\nadded\nwords.py\n"
    assert (base / "src/words.py").read_text() == "word = 'old'\n"
