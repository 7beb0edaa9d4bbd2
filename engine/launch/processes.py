"""What the launcher needs of the processes that it leads, and those that are its own children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.settings import Settings
from outloop.engine.launch.child_process import PartProcess

Fsync = Literal["always", "everysec", "no"]


class Process(Protocol):
    """A process of the run that was started."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""


class Part(Process, Protocol):
    """One of its parts."""

    @property
    def log_path(self) -> Path:
        """Where its output goes."""

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then kill its whole group when `timeout_s` has passed."""

    def last_words(self, num_lines: int = 12) -> str:
        """The end of what it said."""


class OwnRedis(Process, Protocol):
    """The run's own Redis."""

    @property
    def url(self) -> str:
        """unix:// URL of the running server."""

    @property
    def data_dir(self) -> Path:
        """Of its append-only file."""

    def start_again(self) -> None:
        """After it ended by itself: a new server on the same folder and URL."""

    def last_words(self) -> str:
        """The end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LivingPart:
    """A part that an earlier launcher started and that runs."""

    part: Part
    age_s: float
    """How long ago it was started."""


class Processes(Protocol):
    """Starts the processes of one run."""

    @property
    def has_living(self) -> bool:
        """Whether an earlier launcher's processes go on."""

    def take_living(self, name: str) -> LivingPart | None:
        """The part of that name, once, if an earlier launcher started it and it runs."""

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        stop_order: int,
        stop_timeout_s: float,
    ) -> Part:
        """Start a part; where nobody leads them any more, lower `stop_order` is stopped first."""

    def redis(
        self, data_dir: Path, *, fsync: Fsync, max_memory_mb: int
    ) -> AbstractContextManager[OwnRedis]:
        """The run's own Redis, which is stopped at the end."""


class ChildProcesses:
    """Children of this process, which end with it."""

    has_living = False

    def take_living(self, name: str) -> None:
        """None: what an earlier launcher started has ended with it."""

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        stop_order: int,
        stop_timeout_s: float,
    ) -> PartProcess:
        """Start a part."""
        return PartProcess(name, command, log_path, environment)

    def redis(
        self, data_dir: Path, *, fsync: Fsync, max_memory_mb: int
    ) -> AbstractContextManager[EmbeddedRedis]:
        """The run's own Redis, as a child too."""
        return EmbeddedRedis(data_dir, fsync=fsync, max_memory_mb=max_memory_mb)


CHILDREN = ChildProcesses()


def refuse_grace(settings: Settings, where: str) -> None:
    """Refuse parts that outlive their launcher where they cannot.

    Raises:
        SettingsError: the settings ask for it.
    """
    if settings.run.launcher_grace_s:
        raise SettingsError(
            f"run.launcher_grace_s={settings.run.launcher_grace_s:g}: {where} ends the parts with "
            "their launcher, or has none; `outloop train` and `outloop serve` on one machine take "
            "it. Leave it out"
        )
