"""Which groups the weights contain, acknowledged to the buffer once they are on disk.

A group is acknowledged only after a checkpoint that contains its update is complete. At most one
save is under way, and the groups of a save that failed are in the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from outloop.buffer.errors import CheckpointFailed, DeadlineExceeded
from outloop.buffer.records import CheckpointMark
from outloop.engine.train.checkpoint.async_writer import Saving
from outloop.engine.train.interfaces import Reader
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.rank_worker import RankWorker

_POLL_S = 0.2
_MAX_FAILURES = 2
"""Saves in a row that fail before the run ends."""
_log = structlog.get_logger()


class Acknowledgements:
    """The trained groups of one run on their way to being acknowledged."""

    def __init__(
        self,
        ranks: RankController,
        reader: Reader,
        *,
        timeout_s: float,
        on_wait: Callable[[str], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """Start with no trained groups.

        Args:
            timeout_s: after which a save that does not end ends the run.
            on_wait: called with a sentence while a save is awaited.
            on_failure: gets the sentence of a save that failed.
        """
        self._ranks = ranks
        self._reader = reader
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._on_failure = on_failure
        self._unsaved: list[str] = []
        self._saving: tuple[Saving, CheckpointMark] | None = None
        self._began_at = 0.0
        self._num_failures = 0

    def add(self, group_ids: Sequence[str]) -> None:
        """Add groups that were just trained."""
        self._unsaved += group_ids

    def begin(
        self,
        *,
        step: int,
        fence: int,
        next_slot: int,
        policy_version: int,
        reference_hash: str,
    ) -> None:
        """Save what the weights contain; first waits for a save that is still under way."""
        self.wait()
        mark = CheckpointMark(
            fence=fence,
            group_ids=tuple(self._unsaved),
            next_slot=next_slot,
            policy_version=policy_version,
        )
        self._began_at = time.monotonic()
        saving = self._ranks.run(
            RankWorker.save, step=step, mark=mark, reference_hash=reference_hash
        )
        self._saving = saving, mark
        self._unsaved.clear()

    def collect(self) -> None:
        """Acknowledge the save that is under way, if it is complete by now.

        Raises:
            CheckpointFailed: it failed, and so did the one before it.
        """
        if self._saving is None or not self._saving[0].wait():
            return
        (saving, mark), self._saving = self._saving, None
        try:
            path = saving.result()
        except CheckpointFailed as error:
            self._unsaved[:0] = mark.group_ids
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise
            _log.warning("checkpoint_failed", sentence=str(error))
            self._on_failure(str(error))
            return
        self._num_failures = 0
        self._reader.acknowledge(mark)
        written_s = round(time.monotonic() - self._began_at, 3)
        _log.info("checkpoint_written", path=str(path), within_s=written_s)

    def wait(self, *, is_last: bool = False) -> None:
        """Acknowledge the save that is under way when it is complete.

        Args:
            is_last: no other save follows that could contain the groups of one that fails.

        Raises:
            CheckpointFailed: it failed, and so did the one before it, or it is the last.
            DeadlineExceeded: it did not end.
        """
        if is_last:
            self._num_failures = _MAX_FAILURES
        while self._saving is not None:
            saving, _ = self._saving
            if not saving.wait(_POLL_S):
                waited_s = time.monotonic() - self._began_at
                if waited_s > self._timeout_s:
                    raise DeadlineExceeded(
                        who="trainer",
                        phase=f"write the checkpoint of step {saving.step}",
                        peer="its disk",
                        after_s=waited_s,
                    )
                self._on_wait(f"the checkpoint of step {saving.step} to be written")
            self.collect()
