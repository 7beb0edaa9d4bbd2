"""The process of one tracker: reads a run's folder, hands on what is new, says when that fails.

Calls of a tracker run in a thread, because a call may never return; the main thread says so then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.buffer.trackers.following import Following
from outloop.buffer.trackers.tracker import (
    RunFacts,
    Tracker,
    TrackerFactory,
    factory_of,
    part_name,
)

PROGRESS = "trackers"
"""In the run's folder: how far each tracker is."""
_INTERVAL_S = 1.0
_MAX_WAIT_S = 60.0
"""Between two tries of a tracker that fails."""
_log = structlog.get_logger()

Say = Callable[[str], None]
"""Takes a sentence for the terminal; empty: it is over."""


def run_facts(run_dir: Path, settings: Settings, run_id: str) -> RunFacts:
    """What a tracker is told."""
    return RunFacts(
        run_id=run_id,
        name=settings.run.name,
        dir=run_dir,
        project=settings.telemetry.project,
        settings=settings.model_dump(mode="json"),
    )


def follow_run(run: Run, name: str, *, stop: threading.Event, say: Say) -> None:
    """Hand on what `run` records to the tracker `name` until `stop`, then what is left.

    Args:
        say: gets a sentence when the tracker fails or hangs, and an empty one when it works again.

    Raises:
        SettingsError: the tracker is not installed, or cannot be imported.
    """
    forwarding = Forwarding(
        name,
        factory_of(name, run.settings.env.import_dir),
        run_facts(run.dir, run.settings, run.run_id),
        Following(run.dir, run.dir / PROGRESS / f"{part_name(name)}.json"),
    )
    watch(forwarding, stop=stop, say=say, timeout_s=run.settings.telemetry.tracker_timeout_s)


def send_once(run_dir: Path, settings: Settings, name: str) -> tuple[int, int]:
    """Hand on all that a run that is over has recorded; (rows, episodes) that were new.

    Raises:
        SettingsError: the tracker is not installed, or cannot be imported.
        Exception: what the tracker raised.
    """
    facts = run_facts(run_dir, settings, json.loads((run_dir / "run.json").read_text())["run_id"])
    following = Following(run_dir, run_dir / PROGRESS / f"{part_name(name)}.json")
    forwarding = Forwarding(name, factory_of(name, settings.env.import_dir), facts, following)
    forwarding.hand_on()
    forwarding.close()
    return forwarding.num_rows, forwarding.num_episodes


class Forwarding:
    """A tracker, and how far it is."""

    def __init__(
        self, name: str, factory: TrackerFactory, facts: RunFacts, following: Following
    ) -> None:
        self.name = name
        self.num_rows = 0
        self.num_episodes = 0
        self.under_way: tuple[str, float] | None = None
        """The call that has not returned, and since when by the monotonic clock."""
        self._factory = factory
        self._facts = facts
        self._following = following
        self._tracker: Tracker | None = None

    def hand_on(self) -> None:
        """Give the tracker what is new.

        Raises:
            Exception: what the tracker raised; the same is given to a new one the next time.
        """
        place = self._following.place
        offset = place.offset
        try:
            if self._tracker is None:
                self._begin("start")
                self._tracker = self._factory(self._facts)
            while rows := self._following.new_rows():
                for row in rows:
                    self._begin(f"log_metrics of step {row.step}")
                    self._tracker.log_metrics(row.step, row.time, row.values)
                self.num_rows += len(rows)
                self._following.save()
                offset = place.offset
            for episodes in self._following.new_episodes(with_turns=self._tracker.needs_turns):
                self._begin(f"log_episodes of {len(episodes)} episodes")
                self._tracker.log_episodes(episodes)
                self.num_episodes += len(episodes)
            self._following.save()
        except Exception:
            # The place of episodes is behind a batch only when the next one is asked for.
            place.offset = offset
            self._tracker = None
            raise
        finally:
            self.under_way = None

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._begin("close")
            self._tracker.close()
            self._tracker = None
            self.under_way = None

    def _begin(self, what: str) -> None:
        self.under_way = (what, time.monotonic())


def watch(forwarding: Forwarding, *, stop: threading.Event, say: Say, timeout_s: float) -> None:
    """Forward in a thread until `stop`; returns when all is handed on, or when that takes longer
    than `timeout_s`."""
    reported = _Reported(say)
    thread = threading.Thread(target=_forward, args=(forwarding, stop, reported), daemon=True)
    thread.start()
    stopped_at: float | None = None
    while thread.is_alive():
        thread.join(_INTERVAL_S if stopped_at is None else 0.1)
        call = forwarding.under_way
        if call is not None and time.monotonic() - call[1] > timeout_s:
            reported.say(
                f"{forwarding.name} has not returned from {call[0]} for {timeout_s:g} s; training "
                "goes on, and what it does not take stays in the run's folder"
            )
        elif reported.sentence.startswith(f"{forwarding.name} has not returned"):
            reported.say("")
        if stop.is_set():
            stopped_at = stopped_at or time.monotonic()
            if time.monotonic() - stopped_at > timeout_s:
                return


class _Reported:
    def __init__(self, say: Say) -> None:
        self.sentence = ""
        self._say = say

    def say(self, sentence: str) -> None:
        if sentence != self.sentence:
            self.sentence = sentence
            self._say(sentence)


def _forward(forwarding: Forwarding, stop: threading.Event, reported: _Reported) -> None:
    wait_s = _INTERVAL_S
    while True:
        is_last = stop.is_set()
        try:
            forwarding.hand_on()
            if is_last:
                forwarding.close()
            reported.say("")
            wait_s = _INTERVAL_S
        except Exception as error:  # noqa: BLE001 - another project's code: recorded and reported
            _log.warning("tracker_failed", tracker=forwarding.name, exc_info=True)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            reported.say(
                f"{forwarding.name} failed ({type(error).__name__}: {reason}); training goes on, "
                "and what it did not take is sent again"
            )
        if is_last:
            return
        stop.wait(wait_s)
