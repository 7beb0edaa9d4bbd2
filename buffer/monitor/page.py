"""One page for Prometheus with the metrics of every part of a run.

Numbers of the run's steps and of the buffer are gauges `outloop_...`, named after those of
docs/metrics.md. What routers and servers show at their own `/metrics` is repeated with a label
`part`, so that nothing else needs to be found or scraped.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the page shows now."""

    run_name: str
    values: Mapping[str, float] = field(default_factory=dict)
    """By their names in docs/metrics.md; the newest of each."""
    step: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    """Server -> policy_version that it holds; -1: none."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """Router or server -> address."""
    statuses: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(part, name) -> number that the part reports of itself."""
    alarms: Mapping[str, bool] = field(default_factory=dict)
    """Rule -> whether it is on."""


def prometheus_name(name: str) -> str:
    """The name of a metric of docs/metrics.md on the page."""
    return "outloop_" + re.sub(r"[^A-Za-z0-9_]", "_", name)


class RunCollector:
    """A collector of prometheus_client over a run."""

    def __init__(self, shown: Callable[[], Shown]) -> None:
        self._shown = shown

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is asked for."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now."""
        shown = self._shown()
        run = shown.run_name

        def gauge(name: str, text: str, rows: Mapping[str, float], label: str = "") -> Metric:
            labels = ["run", label] if label else ["run"]
            family = GaugeMetricFamily(name, text, labels=labels)
            for key, value in sorted(rows.items()):
                family.add_metric([run, key] if label else [run], value)
            return family

        yield gauge("outloop_step", "optimizer updates made", {"": float(shown.step)})
        for name, value in sorted(shown.values.items()):
            yield gauge(prometheus_name(name), name, {"": value})
        versions = {name: float(version) for name, version in shown.versions.items()}
        yield gauge("outloop_server_policy_version", "held by a server", versions, "part")
        alarms = {name: float(is_on) for name, is_on in shown.alarms.items()}
        yield gauge("outloop_alarm", "1: the alarm is on", alarms, "alarm")
        family = GaugeMetricFamily(
            "outloop_status", "what a part reports of itself", labels=["run", "part", "name"]
        )
        for (part, name), value in sorted(shown.statuses.items()):
            family.add_metric([run, part, name], value)
        yield family
        answers = _fetch_all(shown.urls)
        up = {name: float(text is not None) for name, text in answers.items()}
        yield gauge("outloop_part_up", "1: the part answers", up, "part")
        yield from _labelled(answers, run)


def _labelled(answers: Mapping[str, str | None], run: str) -> Iterable[Metric]:
    """The parts' own metrics, those of one name together."""
    families: dict[str, Metric] = {}
    for part, text in sorted(answers.items()):
        for family in text_string_to_metric_families(text or ""):
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "part": part, "run": run}
                kept.add_sample(sample.name, labels, sample.value)
    return families.values()


def _fetch_all(urls: Mapping[str, str]) -> dict[str, str | None]:
    """Part -> its page; empty where it has none, None where it does not answer."""
    answers: dict[str, str | None] = dict.fromkeys(urls)

    def fetch(part: str, url: str) -> None:
        answers[part] = _fetch(url)

    threads = [
        threading.Thread(target=fetch, args=pair, daemon=True) for pair in sorted(urls.items())
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * _TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _fetch(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError:
        # It answers, and has no such page.
        return ""
    except (OSError, ValueError, http.client.HTTPException):
        return None
