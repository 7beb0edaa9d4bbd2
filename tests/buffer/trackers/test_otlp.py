"""Spans of episodes at a real receiver of OTLP over HTTP on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fakes.receiver import receiver
from outloop.buffer.errors import TrackerFailed
from outloop.buffer.run import load_run_settings
from outloop.buffer.trackers.process import send_once
from outloop.buffer.trajectories.folder import FOLDER, part_paths, read_manifest


def requests_of(received: list[tuple[str, bytes]]) -> list[ExportTraceServiceRequest]:
    """What was exported."""
    assert {path for path, _ in received} == {"/v1/traces"}
    return [ExportTraceServiceRequest.FromString(body) for _, body in received]


def attributes(span: Span) -> dict[str, object]:
    """By name."""
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }


@pytest.mark.medium
def test_episodes_arrive_as_traces(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is one trace of an agent, its turns with their servers, and the verifier, with
    the ids and times of the archive; sending it again makes no other ids."""
    with receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        send_once(recorded, load_run_settings(recorded), "otlp")
        first = [span for one in requests_of(received) for span in spans_in(one)]
        (recorded / "trackers/tracker-otlp.json").unlink()
        received.clear()
        send_once(recorded, load_run_settings(recorded), "otlp")
        again = [span for one in requests_of(received) for span in spans_in(one)]
    assert [span.span_id for span in again] == [span.span_id for span in first]

    archive = recorded / FOLDER
    rows = [
        row
        for part in read_manifest(archive).parts
        for row in pq.read_table(part_paths(archive, part)[0]).to_pylist()
    ]
    roots = {
        str(attributes(span)["outloop.episode_id"]): span
        for span in first
        if not span.parent_span_id
    }
    assert roots.keys() == {row["episode_id"] for row in rows}
    for row in rows:
        root = roots[row["episode_id"]]
        below = [span for span in first if span.parent_span_id == root.span_id]
        kinds = [attributes(span)["openinference.span.kind"] for span in below]
        assert attributes(root)["openinference.span.kind"] == "AGENT"
        assert kinds.count("LLM") == row["num_turns"]
        assert kinds.count("EVALUATOR") == (row["reward"] is not None)
        assert root.start_time_unix_nano == int(row["opened_at"] * 1e9)
        sampled = [span for span in first if span.parent_span_id in {s.span_id for s in below}]
        assert len(sampled) == row["num_turns"]
        tokens = [
            attributes(span)["llm.token_count.completion"]
            for span in below
            if attributes(span)["openinference.span.kind"] == "LLM"
        ]
        assert sum(int(str(number)) for number in tokens) == row["num_output_tokens"]
        assert len({span.trace_id for span in (root, *below, *sampled)}) == 1


def spans_in(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """Every span of a request."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            yield from scope.spans


@pytest.mark.medium
def test_a_collector_that_refuses_is_a_failure(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is counted as sent."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with pytest.raises(TrackerFailed, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        send_once(recorded, load_run_settings(recorded), "otlp")
