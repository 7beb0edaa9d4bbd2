"""Write the dashboard of docker/grafana/dashboards: panels by title, unit and PromQL.

python docker/grafana/dashboard.py     (see `make docs`; tests/docker holds the file to it)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "dashboards/outloop.json"
RUN = '{run=~"$run"}'
SLOWEST = f"histogram_quantile(0.95, sum(rate(router_turn_seconds_bucket{RUN}[1m])) by (le))"
ROWS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Learning": [
        ("Reward", "short", {"training": f"outloop_train_reward_mean{RUN}",
                             "held out, sampled": f"outloop_eval_sampled_reward{RUN}",
                             "held out, greedy": f"outloop_eval_greedy_reward{RUN}"}),
        ("Reward by component", "short",
         {"{{__name__}}": '{__name__=~"outloop_reward_.*", run=~"$run"}'}),
        ("Groups with signal, failed episodes", "percentunit",
         {"signal": f"outloop_train_groups_with_signal_share{RUN}",
          "failed": f"outloop_train_failed_share{RUN}",
          "truncated": f"outloop_train_truncated_share{RUN}"}),
        ("Entropy", "short", {"nats": f"outloop_train_entropy{RUN}"}),
        ("Logprob gap", "short", {"mean": f"outloop_train_logprob_gap_mean{RUN}",
                                  "max": f"outloop_train_logprob_gap_max{RUN}"}),
        ("Gradient norm, loss", "short", {"gradient": f"outloop_train_grad_norm{RUN}",
                                          "loss": f"outloop_train_loss{RUN}"}),
    ],
    "Speed": [
        ("Tokens per second", "short", {"trained": f"outloop_train_tokens_per_s{RUN}",
                                        "sampled": f"rate(router_tokens_total{RUN}[1m])"}),
        ("Where a step's time goes", "s", {"step": f"outloop_train_step_s{RUN}",
                                           "waiting": f"outloop_train_wait_s{RUN}",
                                           "update": f"outloop_train_update_s{RUN}",
                                           "publish": f"outloop_publish_duration_s{RUN}"}),
        ("Turns: seconds, 95th percentile", "s",
         {"turn": SLOWEST}),
        ("Turns in flight", "short", {"{{part}}": f"router_turns_in_flight{RUN}"}),
    ],
    "Buffer": [
        ("Groups", "short", {"ready": f"outloop_buffer_ready_groups{RUN}",
                             "open": f"outloop_buffer_open_groups{RUN}",
                             "leased": f"outloop_buffer_leased_groups{RUN}"}),
        ("Staleness", "short", {"mean": f"outloop_train_staleness_mean{RUN}",
                                "max": f"outloop_train_staleness_max{RUN}",
                                "depth": f"outloop_buffer_pipeline_depth{RUN}"}),
        ("Dropped groups", "short", {
            why: f"outloop_buffer_dropped_{why}{RUN}"
            for why in ("stale", "no_signal", "failed", "overlong", "malformed", "filtered")}),
        ("Attempts without a result", "percentunit",
         {"share": f"outloop_buffer_replaced_share{RUN}"}),
    ],
    "Parts": [
        ("Alarms", "short", {"{{alarm}}": f"outloop_alarm{RUN}"}),
        ("Answers", "short", {"{{part}}": f"outloop_part_up{RUN}"}),
        ("Version that each server holds", "short",
         {"{{part}}": f"outloop_server_policy_version{RUN}"}),
        ("Refusals", "short", {"{{code}}": f"rate(router_refusals_total{RUN}[1m])"}),
    ],
}  # fmt: skip
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, charts in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"type": "row", "title": row, "gridPos": place, "panels": []})
        top += 1
        for index, (title, unit, queries) in enumerate(charts):
            panels.append(
                {
                    "type": "timeseries",
                    "title": title,
                    "datasource": {"type": "prometheus", "uid": "prometheus"},
                    "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                    "gridPos": {
                        "h": _HEIGHT,
                        "w": _WIDTH,
                        "x": index % _COLUMNS * _WIDTH,
                        "y": top + index // _COLUMNS * _HEIGHT,
                    },
                    "targets": [
                        {"refId": chr(65 + number), "expr": query, "legendFormat": legend}
                        for number, (legend, query) in enumerate(queries.items())
                    ],
                }
            )
        top += -(-len(charts) // _COLUMNS) * _HEIGHT
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "uid": "outloop",
        "title": "outloop",
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "run",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "prometheus"},
                    "query": "label_values(outloop_step, run)",
                    "refresh": 2,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
