"""What operators meet is in the documentation."""

import ast
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from outloop.router.metrics import RouterMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/router.md").read_text()
CODE_AT = {"Refusal": 1, "refuse": 2, "_spent": 1}
"""Which argument of a call is the code of a refusal."""


def codes() -> set[str]:
    """Every code that the router's source refuses with."""
    found = {"invalid_value"}
    for path in (ROOT / "router").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            place = CODE_AT.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
            if place is not None and len(node.args) > place:
                code = node.args[place]
                if isinstance(code, ast.Constant):
                    found.add(code.value)
    return found


@pytest.mark.medium
def test_every_refusal_is_documented() -> None:
    """By its code, and none that there is not."""
    rows = [line for line in PAGE.partition("## Metrics")[0].splitlines() if line.startswith("| `")]
    documented = {name.strip(" `") for row in rows for name in row.split("|")[1].split(",")}
    assert len(documented) > 20
    assert documented == codes()


def test_every_metric_is_documented() -> None:
    """By the name that a scrape shows, with its labels, and none that there is not."""
    rows = [line for line in PAGE.partition("## Metrics")[2].splitlines() if line.startswith("| `")]
    documented = {}
    for row in rows:
        name, label = (cell.strip(" `") for cell in row.split("|")[1:3])
        documented[name] = label
    metrics = RouterMetrics()
    declared = {}
    for metric in (one for one in vars(metrics).values() if isinstance(one, MetricWrapperBase)):
        (family,) = metric.describe()
        if label := documented.get(f"{family.name}_total", documented.get(family.name)):
            # One with labels that has counted nothing shows none; another label is refused.
            metric.labels(**{label: "x"})
    for family in metrics.registry.collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        declared[name] = ", ".join(sorted(labels))
    assert documented == declared
