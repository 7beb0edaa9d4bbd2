"""The dashboard of Grafana and what provisions it: it asks for metrics that exist."""

import importlib.util
import json
import re
from pathlib import Path

import yaml

from outloop.buffer.monitor.page import prometheus_name
from outloop.buffer.stats import STATS
from outloop.buffer.telemetry import METRICS
from outloop.router.metrics import RouterMetrics

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "docker/grafana"
EVALUATIONS = {prometheus_name(f"eval/{kind}/reward") for kind in ("sampled", "greedy")}
"""Names of evaluations are open: METRIC_PREFIXES."""
OWN = {"outloop_step", "outloop_alarm", "outloop_part_up", "outloop_server_policy_version"}
FUNCTIONS = {"rate", "sum", "by", "le", "histogram_quantile", "label_values", "run", "m"}


def shown() -> set[str]:
    """Names of all metrics on the page of the monitor."""
    samples = {s for family in RouterMetrics().registry.collect() for s in _names(family)}
    return {prometheus_name(name) for name in (*METRICS, *STATS)} | OWN | EVALUATIONS | samples


def _names(family: object) -> set[str]:
    name, kind = family.name, family.type  # type: ignore[attr-defined]
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
    return {name + end for end in ends}


def test_every_query_asks_for_a_metric_that_exists() -> None:
    """A name that was changed in the code is found here."""
    dashboard = json.loads((GRAFANA / "dashboards/outloop.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    queries += [one["query"] for one in dashboard["templating"]["list"]]
    assert len(queries) > 30
    known = shown()
    for query in queries:
        plain = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", query)
        names = set(re.findall(r"[a-z_][a-z0-9_]*", plain)) - FUNCTIONS
        patterns = re.findall(r'__name__=~"([^"]+)"', query)
        assert names or patterns, query
        assert names <= known, query
        # Open names: a verifier's components.
        assert all(p == f"{prometheus_name('reward/')}.*" for p in patterns), query


def test_the_file_is_what_its_program_writes() -> None:
    """`make docs` writes it."""
    path = GRAFANA / "dashboard.py"
    spec = importlib.util.spec_from_file_location("dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text() == module.text()


def test_provisioning_agrees_with_the_stack() -> None:
    """Addresses, paths and ids of the files are those of the services."""
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert f"telemetry.prometheus_port={port}" in (ROOT / "docker/prepare.sh").read_text()
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert set(services["prometheus"]["networks"]) <= set(services["grafana"]["networks"])
    assert set(services["prometheus"]["networks"]) <= set(services["monitor"]["networks"])
    dashboard = json.loads((GRAFANA / "dashboards/outloop.json").read_text())
    uids = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "targets" in panel}
    assert uids == {source["uid"]}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/outloop.yaml").read_text())[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    for name in ("viewer", "prometheus", "grafana"):
        assert services[name]["profiles"] == ["watch"]
