"""The process that watches a run, from Redis and the run's folder; the run goes on without it."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.monitor.alarms import Alarms, Webhook
from outloop.buffer.monitor.page import RunCollector, Shown
from outloop.buffer.monitor.rules import RULES, Seen
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import wait_for_redis
from outloop.buffer.run import Run, read_secret
from outloop.buffer.trackers.following import Following

_INTERVAL_S = 2.0
_STATS_INTERVAL_S = 10.0
_STATS_AGE_S = 300.0
"""How long ago the buffer's older numbers are taken that newer ones are compared with."""
_NAME = "monitor"
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_log = structlog.get_logger()


def monitor_run(run: Run, *, stop: threading.Event) -> None:
    """Watch `run` until `stop`, then once more.

    Raises:
        SettingsError: the webhook's file cannot be read, or the page's port or package is missing.
    """
    wait_for_redis(run.redis_url, run.settings.buffer.outage_s, who="monitor")
    reader = BufferReader.connect(run)
    try:
        monitor = Monitor(run, reader)
        close_page = monitor.show_page()
        try:
            is_last = False
            while not is_last:
                is_last = stop.wait(_INTERVAL_S)
                monitor.look()
        finally:
            close_page()
            monitor.close()
    finally:
        reader.close()


class Monitor:
    """What is known of a run, its alarms, and its page."""

    def __init__(self, run: Run, reader: BufferReader) -> None:
        settings = run.settings
        self._run = run
        self._reader = reader
        # No place is kept: every monitor reads the run from its beginning.
        self._following = Following(run.dir, run.dir / "monitor.json")
        self._seen = Seen(
            settings=settings.alarms,
            is_rl=settings.trainer.mode == "rl",
            max_replaced_share=settings.env.max_replaced_share,
            dtype="bfloat16"
            if "bfloat16" in (settings.server.dtype, settings.trainer.dtype)
            else "float32",
        )
        self._values: dict[str, float] = {}
        self._old: deque[tuple[float, Mapping[str, float]]] = deque()
        self._asked_at = -_STATS_INTERVAL_S
        self._last_step_at = time.time()
        self._warning = ""
        self._sentences: dict[str, str] = {}
        self._shown = Shown(run_name=settings.run.name)
        self._webhook: Webhook | None = None
        file = settings.alarms.webhook_file
        if settings.alarms.enabled and file is not None:
            url = read_secret(file, "alarms.webhook_file")
            self._webhook = Webhook(url, settings.run.name, self._webhook_failed)
        self._alarms = Alarms(run.dir, self._changed) if settings.alarms.enabled else None

    def look(self) -> None:
        """Read what is new and compare it with the rules."""
        self._read_rows()
        try:
            self._ask()
        except BufferUnavailable as error:
            self._seen.stats = {}
            _log.info("redis_is_away", reason=str(error))
        self._seen.free_bytes = _free_bytes(self._run.dir)
        if self._alarms is not None:
            self._alarms.look(self._seen)
        self._report()

    def show_page(self) -> Any:
        """Serve the page of metrics if the settings want it; a function that ends it.

        Raises:
            SettingsError: its port is taken, or prometheus_client is not installed.
        """
        telemetry = self._run.settings.telemetry
        if telemetry.prometheus_port is None:
            return lambda: None
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(lambda: self._shown))
        try:
            server, thread = start_http_server(
                telemetry.prometheus_port, telemetry.prometheus_host, registry
            )
        except OSError as error:
            raise SettingsError(
                f"telemetry.prometheus_host={telemetry.prometheus_host!r} "
                f"telemetry.prometheus_port={telemetry.prometheus_port}: cannot listen there "
                f"({error}); choose another, or port 0 for any free one"
            ) from error
        url = f"http://{telemetry.prometheus_host}:{server.server_port}/metrics"
        self._reader.registry.register_part(_NAME, {"url": url})
        _log.info("page", url=url)

        def end() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        return end

    def close(self) -> None:
        """Post what waits."""
        if self._webhook is not None:
            self._webhook.close()

    def _read_rows(self) -> None:
        while rows := self._following.new_rows():
            for row in rows:
                self._seen.add({"step": row.step, **row.values})
                self._values |= row.values
                if any(name.startswith("train/") for name in row.values):
                    # A run that is resumed may be silent since long ago.
                    self._last_step_at = max(self._last_step_at, row.time)

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at < _STATS_INTERVAL_S:
            return
        self._asked_at = now
        stats = self._reader.stats()
        self._old.append((now, stats))
        while len(self._old) > 1 and now - self._old[1][0] >= _STATS_AGE_S:
            self._old.popleft()
        self._seen.stats, self._seen.old_stats = stats, self._old[0][1]
        is_running = self._reader.run_state() == "running"
        self._seen.silent_s = time.time() - self._last_step_at if is_running else 0.0
        registry = self._reader.registry
        servers = registry.servers()
        parts = registry.parts()
        self._shown = Shown(
            run_name=self._run.settings.run.name,
            values=self._values | dict(stats),
            step=int(self._seen.rows[-1]["step"]) if self._seen.rows else 0,
            versions={
                one.server_id: -1 if one.policy_version is None else one.policy_version
                for one in servers
            },
            urls={
                name: facts["url"]
                for name, facts in parts.items()
                if name.startswith("router") and facts.get("url")
            }
            | {one.server_id: one.url for one in servers},
            statuses=_numbers_of(registry.statuses()),
            alarms={name: name in self._alarm_sentences for name in RULES},
        )

    @property
    def _alarm_sentences(self) -> Mapping[str, str]:
        return {} if self._alarms is None else self._alarms.sentences

    def _changed(self, event: dict[str, Any]) -> None:
        if self._webhook is not None:
            self._webhook.send(event)

    def _webhook_failed(self, sentence: str) -> None:
        self._sentences["webhook"] = sentence

    def _report(self) -> None:
        """Say on the terminal what is wrong, if it changed."""
        found = {**self._alarm_sentences, **self._sentences}
        warning = "; ".join(f"{name}: {text}" for name, text in found.items())
        if warning == self._warning:
            return
        try:
            self._reader.registry.report_status(_NAME, {"warning": warning} if warning else {})
        except BufferUnavailable:
            return
        self._warning = warning


def _numbers_of(statuses: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, str], float]:
    """(part, name) -> what parts report that is a number."""
    return {
        (part, name): float(text)
        for part, fields in statuses.items()
        for name, text in fields.items()
        if _NUMBER.fullmatch(text)
    }


def _free_bytes(folder: Path) -> float:
    return float(shutil.disk_usage(folder).free)
