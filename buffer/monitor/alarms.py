"""Alarms that are on, and where they go: events.jsonl, the terminal, a webhook.

An alarm is said when it begins and when it is over. What was on when a monitor ended is known from
events.jsonl, so that the next one does not say it again.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from outloop.buffer.events import read_events, record_event
from outloop.buffer.monitor.rules import RULES, Seen

_POST_TIMEOUT_S = 10.0
_TRIES = 3
_MAX_WAITING = 100
_log = structlog.get_logger()


class Alarms:
    """Compares what is seen with the rules."""

    def __init__(self, run_dir: Path, on_change: Callable[[dict[str, Any]], None]) -> None:
        """`on_change` gets each event that is recorded."""
        self._run_dir = run_dir
        self._on_change = on_change
        self.sentences: dict[str, str] = {}
        """Alarms that are on, with their sentences."""
        for event in read_events(run_dir):
            if event["kind"] == "alarm":
                self.sentences[event["name"]] = event["sentence"]
            elif event["kind"] == "alarm_over":
                self.sentences.pop(event["name"], None)

    def look(self, seen: Seen) -> None:
        """Record which alarms began and which are over."""
        seen.on = frozenset(self.sentences)
        for name, rule in RULES.items():
            sentence = rule(seen)
            if sentence is not None and name not in self.sentences:
                self.sentences[name] = sentence
                self._record("alarm", name, sentence)
            elif sentence is None and name in self.sentences:
                self._record("alarm_over", name, self.sentences.pop(name))

    def _record(self, kind: Any, name: str, sentence: str) -> None:
        record_event(self._run_dir, kind, name=name, sentence=sentence)
        _log.warning(kind, name=name, sentence=sentence)
        self._on_change({"kind": kind, "name": name, "sentence": sentence, "time": time.time()})


class Webhook:
    """Posts events to an address, in a thread of its own."""

    def __init__(self, url: str, run_name: str, on_failure: Callable[[str], None]) -> None:
        """`on_failure` gets a sentence when an event was not delivered."""
        self._url = url
        self._run_name = run_name
        self._on_failure = on_failure
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._post_all, daemon=True)
        self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        """Post an event soon; with a hundred waiting, this one is given up."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._on_failure("the webhook is too slow: an alarm was not posted")

    def close(self) -> None:
        """Wait a little for what is under way."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_POST_TIMEOUT_S)

    def _post_all(self) -> None:
        while (event := self._waiting.get()) is not None:
            over = "over: " if event["kind"] == "alarm_over" else ""
            text = f"{self._run_name}: {over}{event['name']}: {event['sentence']}"
            body = json.dumps({"run": self._run_name, "text": text, **event}).encode()
            for attempt in range(1, _TRIES + 1):
                try:
                    self._post(body)
                    break
                except (OSError, ValueError) as error:
                    if attempt == _TRIES:
                        _log.warning("webhook_failed", reason=str(error))
                        self._on_failure(f"an alarm was not posted to the webhook: {error}")

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(
            self._url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=_POST_TIMEOUT_S) as answer:
            answer.read()
