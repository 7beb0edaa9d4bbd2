"""Episodes as OpenTelemetry spans with the names of OpenInference, to any OTLP collector.

An episode is a trace: a span AGENT, below it a span LLM for each turn (as the agent saw it: the
router's), in that a span of the server's sampling, and a span EVALUATOR of the verifier. Ids derive
from those of the episode and the turn, so sending one again makes no second one. The address is
OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, headers and the rest as
OpenTelemetry's specification says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from outloop.buffer.errors import TrackerFailed
from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode, SeenTurn

_BATCH = 512
_MAX_CHARS = 32_000
_SCOPE = InstrumentationScope("outloop")


class OtlpSpans:
    """Sends spans by OTLP over HTTP."""

    needs_turns = True

    def __init__(self, run: RunFacts) -> None:
        self._exporter = OTLPSpanExporter()
        self._resource = Resource.create(
            {
                "service.name": "outloop",
                "service.instance.id": run.run_id,
                "openinference.project.name": run.project,
                "outloop.run": run.name,
            }
        )

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Numbers go by `GET /metrics` of the monitor."""

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """Send their spans.

        Raises:
            TrackerFailed: the collector did not take them.
        """
        spans = [span for one in episodes for span in spans_of(one, self._resource)]
        for first in range(0, len(spans), _BATCH):
            if self._exporter.export(spans[first : first + _BATCH]) is not SpanExportResult.SUCCESS:
                raise TrackerFailed(
                    "the OTLP collector did not take spans; check OTEL_EXPORTER_OTLP_ENDPOINT and "
                    "that it listens"
                )

    def close(self) -> None:
        """Nothing waits: each call sends."""
        self._exporter.shutdown()


def spans_of(episode: SeenEpisode, resource: Resource) -> list[ReadableSpan]:
    """The spans of an episode, the root first."""
    closed = episode.closed_at or episode.ended_at
    last = max((turn.finished_at for turn in episode.turns), default=episode.opened_at)
    root = _context(episode.episode_id, "agent")
    attributes: dict[str, AttributeValue] = {
        "openinference.span.kind": "AGENT",
        "session.id": episode.group_id or episode.task_id,
        "agent.name": "agent",
        "outloop.episode_id": episode.episode_id,
        "outloop.task_id": episode.task_id,
        "outloop.attempt": episode.attempt,
        "outloop.purpose": episode.purpose,
        "outloop.fate": episode.fate,
        "outloop.outcome": episode.outcome or "",
        "output.value": _cut(episode.text),
    }
    if episode.policy_version is not None:
        attributes["outloop.policy_version"] = episode.policy_version
    if episode.reward is not None:
        attributes["outloop.reward"] = episode.reward
    status = Status(StatusCode.OK)
    if episode.outcome == "failed" or episode.error:
        status = Status(StatusCode.ERROR, _cut(episode.error) or episode.reason)

    def span(
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        values: Mapping[str, AttributeValue],
        status: Status = status,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=resource,
            attributes=values,
            kind=SpanKind.INTERNAL,
            status=status,
            start_time=int(start * 1e9),
            end_time=int(max(start, end) * 1e9),
            instrumentation_scope=_SCOPE,
        )

    spans = [span("episode", root, None, episode.opened_at, max(closed, last), attributes)]
    fine = Status(StatusCode.OK)
    for turn in episode.turns:
        context = _context(episode.episode_id, f"turn {turn.turn_id}")
        begin, end = turn.started_at, turn.finished_at
        spans.append(span("turn", context, root, begin, end, _turn_values(turn), fine))
        served = _context(episode.episode_id, f"server {turn.turn_id}")
        values: dict[str, AttributeValue] = {
            "openinference.span.kind": "CHAIN",
            "outloop.part": "server",
            "outloop.policy_version": -1 if turn.policy_version is None else turn.policy_version,
        }
        spans.append(span("sampling", served, context, begin, end, values, fine))
    if episode.reward is not None:
        judged: dict[str, AttributeValue] = {
            "openinference.span.kind": "EVALUATOR",
            "outloop.part": "verifier",
            "outloop.reward": episode.reward,
            **{f"outloop.reward.{name}": value for name, value in episode.components.items()},
        }
        context = _context(episode.episode_id, "verifier")
        spans.append(span("verifier", context, root, last, closed, judged, fine))
    return spans


def _turn_values(turn: SeenTurn) -> dict[str, AttributeValue]:
    return {
        "openinference.span.kind": "LLM",
        "outloop.part": "router",
        "llm.model_name": f"policy@{turn.policy_version}",
        "llm.provider": "outloop",
        "llm.invocation_parameters": f'{{"temperature": {turn.temperature:g}}}',
        "llm.token_count.prompt": turn.num_prompt_tokens,
        "llm.token_count.completion": turn.num_output_tokens,
        "llm.token_count.total": turn.num_prompt_tokens + turn.num_output_tokens,
        "llm.finish_reason": turn.finish_reason,
        "input.value": _cut(turn.prompt_text),
        "output.value": _cut(turn.output_text),
        "outloop.turn_id": turn.turn_id,
        "outloop.branch_cause": turn.branch_cause,
    }


def _context(episode_id: str, name: str) -> SpanContext:
    """Ids of a span that derive from what it is of."""
    trace_id = hashlib.sha256(episode_id.encode()).digest()[:16]
    span_id = hashlib.sha256(f"{episode_id} {name}".encode()).digest()[:8]
    return trace.SpanContext(
        trace_id=int.from_bytes(trace_id, "big"),
        span_id=int.from_bytes(span_id, "big"),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " ..."
