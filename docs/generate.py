"""Write the pages that repeat what the code says: settings.md and metrics.md.

python docs/generate.py     (see `make docs`; tests/test_docs.py holds the pages to it)
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outloop.buffer.settings import Settings, UpstreamSettings
from outloop.buffer.settings.env import TaskSourceSettings
from outloop.buffer.stats import STATS
from outloop.buffer.telemetry import METRICS
from outloop.router.metrics import RouterMetrics

DOCS = Path(__file__).resolve().parent
NAMED_TABLES: dict[str, type[BaseModel]] = {
    "env.tasks.NAME": TaskSourceSettings,
    "router.upstreams.NAME": UpstreamSettings,
}
SETTINGS_HEAD = """\
# Settings

Every setting of a run. They come from a TOML file, then from the environment
(`OUTLOOP_TRAINER__NUM_STEPS=10`), then from flags (`--set trainer.num_steps=10`); later ones win.
A name that does not exist is refused with the nearest one that does, and so is a combination that
contradicts itself: nothing is corrected in silence. `runs/NAME/settings.json` holds what a run
resolved to.

The shortest file that trains:

```toml
[model]
path = "policy"

[env]
tasks = "tasks.jsonl"
rollout_function_path = "rollout:play"
```

This page is written by `make docs` from `buffer/settings/`.
"""
METRICS_HEAD = """\
# Metrics

A run writes one JSON object for each step and each evaluation to `runs/NAME/metrics.jsonl`, with
`step`, `time` (Unix seconds) and the names below that apply. `outloop.Run("runs/NAME").metrics()` reads
them. With `telemetry.tensorboard = true` (and `pip install 'outloop[tensorboard]'`) the same numbers
go to `runs/NAME/tensorboard`.

The line that `outloop train` prints for each step has seven of them:

| in the line | metric | look twice when |
|---|---|---|
| reward | `train/reward_mean` | it does not move |
| signal | `train/groups_with_signal_share` | it is near 0: all attempts at a task get the same reward, so nothing is learned |
| failed | `train/failed_share` | it is there at all: `outloop episodes --run DIR --failed` |
| staleness | `train/staleness_mean` | it sits at `buffer.max_staleness` |
| tokens/s | `train/tokens_per_s` | 0: nothing was trained in this step |
| logprob gap | `train/logprob_gap_mean` | above 1e-3 in float32 or 0.1 in bfloat16: server and trainer disagree |
| loss | `train/loss` | |
| step s | `train/step_s` | most of it is `train/wait_s`: episodes are slower than training |

This page is written by `make docs`.
"""


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = " ".join(after.value.value.split())
    return found


def type_text(annotation: Any) -> str:
    """A type as a user writes values of it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin is typing.Union or type(annotation).__name__ == "UnionType":
        return " or ".join(type_text(one) for one in arguments if one is not type(None))
    if origin in (tuple, list, frozenset, set):
        return f"list of {type_text(arguments[0])}" if arguments else "list"
    if origin is dict:
        return f"table of {type_text(arguments[1])}"
    if annotation is Any:
        return "any"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def bounds_text(field: FieldInfo) -> str:
    """What is allowed beside the type."""
    words = []
    for constraint in field.metadata:
        for kind, sign in (
            (annotated_types.Gt, ">"),
            (annotated_types.Ge, "at least"),
            (annotated_types.Lt, "<"),
            (annotated_types.Le, "at most"),
        ):
            if isinstance(constraint, kind):
                limit = getattr(constraint, kind.__name__.lower())
                words.append(f"{sign} {limit:g}")
    return ", ".join(words)


def default_text(field: FieldInfo) -> str:
    """The default as TOML has it."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "none"
    if isinstance(value, tuple | list | dict | frozenset):
        return "empty" if not value else f"`{json.dumps(list(value))}`"
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


def cell(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "\\|")


def settings_page() -> str:
    """The whole of settings.md."""
    parts = [SETTINGS_HEAD]
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"\n## `[{section}]`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n")
        parts.append(settings_table(model))
    for title, model in NAMED_TABLES.items():
        parts.append(f"\n## `[{title}]`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n")
        parts.append(settings_table(model))
    return "".join(parts)


def settings_table(model: type[BaseModel]) -> str:
    """One row a field."""
    meanings = attribute_docstrings(model)
    lines = ["| setting | type | default | meaning |\n|---|---|---|---|\n"]
    for name, field in model.model_fields.items():
        allowed = ", ".join(filter(None, (type_text(field.annotation), bounds_text(field))))
        row = (f"`{name}`", allowed, default_text(field), meanings.get(name, ""))
        lines.append("| " + " | ".join(map(cell, row)) + " |\n")
    return "".join(lines)


def table(rows: dict[str, str]) -> str:
    """Names with meanings."""
    lines = [f"| `{name}` | {cell(meaning)} |\n" for name, meaning in rows.items()]
    return "| name | meaning |\n|---|---|\n" + "".join(lines)


def router_metrics() -> dict[str, str]:
    """Of `/metrics`, by Prometheus's name."""
    return {
        family.name: family.documentation
        for family in sorted(RouterMetrics().registry.collect(), key=lambda family: family.name)
    }


def metrics_page() -> str:
    """The whole of metrics.md."""
    parts = [METRICS_HEAD]
    groups = {
        "train": "Of a training step",
        "publish": "Of a publish",
        "eval": "Of an evaluation",
        "test": "Of the test split, once",
        "buffer": "Of the buffer, at each step",
    }
    known = {name.partition("/")[0] for name in METRICS}
    for prefix in [*groups, *sorted(known - set(groups))]:
        rows = {name: text for name, text in METRICS.items() if name.startswith(f"{prefix}/")}
        if rows:
            parts.append(f"\n## {groups.get(prefix, f'`{prefix}/`')}\n\n{table(rows)}")
    parts.append(
        "\n## Of the whole run: `outloop buffer stats --run DIR`\n\n"
        f"Counters since the run began, and sizes now.\n\n{table(STATS)}"
        "\n## Of a router: `GET /metrics`, for Prometheus\n\n"
        "A counter's name ends in `_total` there. On a port that several processes share, a request "
        f"reaches one of them.\n\n{table(router_metrics())}"
    )
    return "".join(parts)


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        sys.stdout.write(f"wrote docs/{name}\n")
