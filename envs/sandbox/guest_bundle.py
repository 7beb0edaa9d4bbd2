"""The supervisor's code as files that a sandbox can mount.

All users can read the folder, and only this user can write it. `close` removes it.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import sys
from pathlib import Path

from outloop.buffer.owned_folder import OwnedFolder
from outloop.envs.sandbox import guest
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.guest import framing

GUEST_FOLDER = "/outloop"
_PASSWD = "agent:x:1000:1000:agent:/work:/bin/sh\n"


class Bundle:
    """A folder with a copy of the package `guest`, as source and compiled."""

    def __init__(self) -> None:
        self._folder = OwnedFolder("outloop-supervisor")
        self.path = self._folder.path
        self.path.chmod(0o755)
        package = self.path
        for name in guest.__name__.split("."):
            package = package / name
            package.mkdir()
            package.chmod(0o755)
            (package / "__init__.py").touch()
        for source in Path(guest.__file__).parent.glob("*.py"):
            copy = package / source.name
            shutil.copyfile(source, copy)
            copy.chmod(0o644)
            # Valid for any time stamps: a session may see other ones.
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(copy), invalidation_mode=mode, doraise=True)
        (package / "__pycache__").chmod(0o755)
        for compiled in (package / "__pycache__").iterdir():
            compiled.chmod(0o644)
        for name in ("given", "kept"):
            (self.path / name).mkdir()
            (self.path / name).chmod(0o755)
        passwd = self.path / "passwd"
        passwd.write_text(_PASSWD)
        passwd.chmod(0o644)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()


def system_python() -> str:
    """A Python that every user can run; the runner's may be in a private folder."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    return os.path.realpath(found or sys.executable)


def boot_argv(
    python: str,
    folder: str,
    walls: str,
    limits: Limits,
    *,
    extra: tuple[str, ...] = (),
    events: int = -1,
    base: str = "",
) -> list[str]:
    """The command that starts the supervisor, with as little of Python as possible.

    `events`: an inherited descriptor of the file in which the kernel counts the processes that it
    killed in the session's control group; -1 without a group. `base`: the folder, as the supervisor
    sees it, that calls begin with; empty: an empty one. The supervisor reports that it is
    ready before it imports its modules, so that the host can prepare the first call meanwhile.
    """
    code = (
        f"import os; os.write(1, {framing.pack([b'ready'])!r})\n"
        f"import sys; sys.path[:0] = [{folder!r}]; sys.path += {list(extra)!r}\n"
        "from outloop.envs.sandbox.guest.supervisor import main\n"
        f"main({walls!r}, {limits.disk_bytes}, {limits.max_files}, {events}, {base!r})()"
    )
    return [python, "-I", "-S", "-X", "utf8", "-c", code]
