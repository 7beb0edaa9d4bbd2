"""Where alarms go: the run's events, the terminal, a webhook; each once."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fakes.receiver import receiver
from outloop.buffer.events import read_events
from outloop.buffer.monitor.alarms import Alarms, Webhook
from outloop.buffer.monitor.rules import Seen
from outloop.buffer.settings.telemetry import AlarmSettings


def low_disk(gigabytes: float) -> Seen:
    """A run whose disk is nearly full, or not."""
    return Seen(settings=AlarmSettings(), free_bytes=gigabytes * 1e9)


def test_an_alarm_is_reported_when_it_begins_and_when_it_is_over(tmp_path: Path) -> None:
    """Once each, also when the monitor is started again in between."""
    changes: list[dict[str, Any]] = []
    alarms = Alarms(tmp_path, changes.append)
    for free in (10.0, 1.0, 0.5):
        alarms.look(low_disk(free))
    again = Alarms(tmp_path, changes.append)
    again.look(low_disk(0.4))
    assert again.sentences.keys() == {"disk_low"}
    again.look(low_disk(10.0))
    again.look(low_disk(10.0))
    events = read_events(tmp_path)
    assert [(event["kind"], event["name"]) for event in events] == [
        ("alarm", "disk_low"),
        ("alarm_over", "disk_low"),
    ]
    assert "1.00 GB are free" in events[0]["sentence"]
    assert [change["kind"] for change in changes] == ["alarm", "alarm_over"]


@pytest.mark.medium
def test_a_webhook_gets_each_event_once_it_answers() -> None:
    """A refusal is tried again; the body is JSON with a text that chat programs show."""
    failures: list[str] = []
    with receiver(refuses=2) as (url, received):
        hook = Webhook(f"{url}/hook?key=1", "calculator", failures.append)
        hook.send({"kind": "alarm", "name": "disk_low", "sentence": "1 GB free", "time": 5.0})
        hook.send({"kind": "alarm_over", "name": "disk_low", "sentence": "1 GB free", "time": 6.0})
        hook.close()
    posted = [json.loads(body) for _, body in received]
    assert [one["text"] for one in posted] == [
        "calculator: disk_low: 1 GB free",
        "calculator: over: disk_low: 1 GB free",
    ]
    assert posted[0]["run"] == "calculator"
    assert failures == []


def test_a_webhook_that_is_away_is_reported_and_holds_nobody() -> None:
    """The sentence reaches the monitor, which shows it on the terminal."""
    failures: list[str] = []
    hook = Webhook("http://127.0.0.1:1/hook", "calculator", failures.append)
    began = time.monotonic()
    hook.send({"kind": "alarm", "name": "disk_low", "sentence": "1 GB free", "time": 5.0})
    assert time.monotonic() - began < 0.5
    hook.close()
    assert len(failures) == 1
    assert "was not posted to the webhook" in failures[0]
