"""Write the pages that repeat what the code says: settings, metrics, python and scaling.

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
from types import ModuleType
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import outloop
from outloop.buffer.settings import Settings, UpstreamSettings, load_settings
from outloop.buffer.settings.deploy import PartResources
from outloop.buffer.settings.env import EvalSuiteSettings, TaskSourceSettings
from outloop.buffer.settings.trainer import (
    CriticSettings,
    CurriculumSettings,
    SourceSettings,
    TeacherSettings,
)
from outloop.buffer.stats import STATS
from outloop.buffer.telemetry import METRIC_PREFIXES, METRICS
from outloop.buffer.transcripts import Transcript, TurnText
from outloop.engine.launch.known_models import KNOWN_CONFIGS
from outloop.engine.launch.plan import bounds, cost, memory, network
from outloop.engine.launch.plan.fit import Gpus, fit, gib
from outloop.engine.launch.plan.inputs import Inputs, load_plan
from outloop.engine.launch.plan.report import Table as PlanTable
from outloop.engine.launch.plan.report import level_table, memory_table, size_table, transfer_table
from outloop.router.metrics import RouterMetrics

DOCS = Path(__file__).resolve().parent
NAMED_TABLES: dict[str, type[BaseModel]] = {
    "env.tasks.NAME": TaskSourceSettings,
    "eval.suites.NAME": EvalSuiteSettings,
    "trainer.critic": CriticSettings,
    "trainer.teacher": TeacherSettings,
    "trainer.sources.NAME": SourceSettings,
    "trainer.curriculum": CurriculumSettings,
    "router.upstreams.NAME": UpstreamSettings,
    "deploy.parts.PART": PartResources,
}
SETTINGS_HEAD = """\
# Settings

Every setting of a run. They come from a TOML file, then from the environment
(`OUTLOOP_TRAINER__NUM_STEPS=10`), then from flags (`--set trainer.num_steps=10`); later ones win.
A name that does not exist is refused with the nearest one that does, and so is a combination that
contradicts itself: nothing is corrected in silence. `runs/NAME/settings.json` holds what a run
resolved to, and `outloop settings run.toml` prints it before a run, with where each value came from.

A file may change others: `extends = "base.toml"`, or a list of them, at its top, relative to the file. Later ones win.
`eval "$(outloop completion bash)"` completes commands, options and names of settings (`zsh` and `fish` too).

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
PYTHON_HEAD = """\
# Python

The command line calls these functions; notebooks and scripts may too. `import outloop` is light: parts are
imported when a function needs them.

```python
import outloop

run = outloop.train("run.toml", settings={"trainer.num_steps": 20})
print(run.metrics()[-1]["train/reward_mean"], run.weights)

run = outloop.train("run.toml", wait=False)  # goes on in the background
run.stop()  # with a checkpoint; the same call goes on from there

for episode in outloop.Run("runs/your-agent").episodes(failed=True):
    print(episode.error, episode.turns[-1].output)

with outloop.serve("run.toml") as served:
    print(served.base_url, served.runner_key)
```

A rollout function is named, `settings={"env.rollout_function_path": "my_module:play"}`, because processes of
their own import it: in a notebook, write it to a file first. Errors are `outloop.buffer.errors.OutloopError`
and say what to change. This page is written by `make docs` from the docstrings.

"""
METRICS_HEAD = """\
# Metrics

A run writes one JSON object for each step and each evaluation to `runs/NAME/metrics.jsonl`, with
`step`, `time` (Unix seconds) and the names below that apply. `outloop.Run("runs/NAME").metrics()` reads
them, `telemetry.trackers` sends them elsewhere ([trackers.md](trackers.md)), and Prometheus gets them from one page:
`train/reward_mean` is `outloop_train_reward_mean` there.

The line that `outloop train` prints for each step has these:

| in the line | metric | look twice when |
|---|---|---|
| reward | `train/reward_mean` | it does not move |
| signal | `train/groups_with_signal_share` | it is near 0: all attempts at a task get the same reward, so nothing is learned |
| failed | `train/failed_share` | it is there at all: `outloop episodes --run DIR --failed` |
| staleness | `train/staleness_mean` | it sits at `buffer.max_staleness` |
| tokens/s | `train/tokens_per_s` | 0: nothing was trained in this step |
| logprob gap | `train/logprob_gap_mean` | above 1e-5 in float32 or 0.1 in bfloat16: server and trainer disagree, and the alarm `gap_high` is on ([operating.md](operating.md)) |
| loss | `train/loss` | |
| step s | `train/step_s` | most of it is `train/wait_s`: episodes are slower than training |

This page is written by `make docs`.
"""


GPU_EXAMPLES = """\
# Real models on GPUs

**None of these settings has ever run.** No machine with so many GPUs was at hand: they load, they are consistent by
the checks that need no GPU, and by the formulas of `outloop check` they fit. What did run on one GPU is in
[gpu.md](../../docs/gpu.md). Expect the first start to find something, and please report it.

| file | model | GPUs |
|---|---|---|
{files}

`model.path` is a repository of the Hugging Face hub: it is downloaded at the start. The tasks are those of
[examples/math](../math), so that there is something to play; put your own in their place. Start in the root of the
repository, in an environment with the extras `gpu` and `examples` (`pip install '.[gpu,examples]'`): `outloop check FILE`
needs nothing else. SGLang has an environment of its own: make it as [servers](../../docs/servers.md#sglang-on-gpus) says, or
name yours as `server.sglang_python`, which is `/opt/sglang/bin/python` in these files. `outloop doctor --config FILE` says
what is missing on the machine with the GPUs; then `outloop train FILE`.

## What each takes

By `outloop check`, for the GPUs in the table, with 989 TFLOP/s in bfloat16 of which 0.3 are reached, 2 TB/s of
memory and 25 GB/s into a server: **assumed, not measured**. An episode is taken as one turn that fills
`model.max_context_tokens`; shorter ones take less. Memory is for one GPU, "may take" is what a trainer rank has
while servers on its GPU have released theirs, a tenth of the GPU left free. `make docs` writes this table.

{table}

## What to know

* Servers on shared GPUs give their memory back while the trainer works, all but 2 GiB that are assumed for CUDA and
  NCCL. For a checkpoint they keep their weights beside the trainer's weights, gradients and optimizer. With SGLang
  that never ran on a GPU.
* Qwen3-30B-A3B does not fit one node of 80 GB: weights, gradients and optimizer alone are 18 bytes for each of 30.5
  billion parameters, 64 GiB for each of eight ranks before anything is served. On two nodes of 80 GB one serves and
  one trains, with 4 GiB to spare by the formulas, which is little. Experts are computed one after the other
  ([limitations](../../docs/limitations.md)): its update will take far longer than the table says.
* `qwen3-30b-a3b-two-nodes.toml` is for `outloop submit slurm`: `outloop train` starts all parts on one machine. Slurm gives
  each part nodes of its own, so that the job takes four, two of them without GPUs. On just two, start the parts by hand, as
  [operating](../../docs/operating.md#parts-on-several-machines) says. Both nodes need the run's folder on a shared file
  system, the model at the same path (download it with the same `HF_HOME`), and a Redis, here at `node-a`: `outloop init FILE`
  with `--set buffer.redis_url=redis://node-a:6379 --set publish.host=node-b --set router.host=0.0.0.0 --set
  server.host=0.0.0.0`; on node-a `outloop server --index 0` to `3` with `CUDA_VISIBLE_DEVICES` of two GPUs each, `outloop
  router` and `outloop runner`; on node-b `outloop trainer`.
"""


SCALING = """\
# Scaling

`outloop plan FILE` computes, before anything runs, the most steps per hour that a run can make, the best split of GPUs
between servers and trainer, memory, transfers and the price of a step. Every formula is below with its source. You
could do the same on paper. For the settings of a run, `outloop check CONFIG` says whether it fits its GPUs.

Copy [scaling.toml](scaling.toml) and put your own measurements in. A short run gives them: `train/update_s`,
`publish/duration_s` and the durations of episodes are in its metrics. The tables below come from that file. **Its
numbers are an example**: the trainer's speed was measured on one H100 ([gpu.md](gpu.md)); the speeds of servers and
networks are from data sheets. Nothing here ran on more than one GPU.

## Which level

Four servers of one GPU, four trainer GPUs. A run does not exceed the smallest bound, and comes near it where no
other bound is near ([bounds](#bounds)).

{levels}

* The longest episode bounds a synchronous run. `max_staleness` 1 removes that bound.
* Once the trainer binds, more staleness makes tokens older and nothing faster. `pipeline_depth = "auto"` stops there.

## How many GPUs, and how to split them

From 64 GPUs on the batch grows with the cluster. With linear scaling `episodes/s per GPU` would be equal in all rows.

{sizes}

* Where `groups in flight` bind, episodes are too long for the batches in flight. Raise `trainer.groups_per_step` or
  `buffer.max_staleness`, or use fewer GPUs.
* Where `trainer` binds, servers are idle part of the time, and the reverse.
* Servers may run on spot GPUs: a lost server costs one turn's unrecorded tokens. A lost trainer GPU costs a restart.

## Memory of a trainer rank

Four ranks, tensor-parallel by two, microbatches of 16,384 tokens, recomputation.

{memory}

## Weights

{weights}

## The file

```toml
{inputs}
```

Every input is below. Without [servers] the seconds of episodes contain the model's time, and clusters cannot be split.
[model] takes the names of a Hugging Face `config.json`, or `config`, the path of one.

{names}

## Formulas

Each is in `engine/launch/plan/` with its test in `tests/launch/plan/`.

{formulas}

This page is written by `make docs`.
"""


def attribute_docstrings(model: type) -> dict[str, str]:
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
    lines = [f"| `{cell(name)}` | {cell(meaning)} |\n" for name, meaning in rows.items()]
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
        "\n## Of the verifier and the tasks\n\nNames begin as follows.\n\n"
        f"{table(METRIC_PREFIXES)}"
        "\n## Of the whole run: `outloop buffer stats --run DIR`\n\n"
        f"Counters since the run began, and sizes now.\n\n{table(STATS)}"
        "\n## Of a router: `GET /metrics`, for Prometheus\n\n"
        "A counter's name ends in `_total` there. On a port that several processes share, a request "
        f"reaches one of them.\n\n{table(router_metrics())}"
    )
    return "".join(parts)


def signature_text(name: str, function: Any) -> str:
    """A signature over several lines, as annotations are written."""
    parameters = inspect.signature(function).parameters.values()
    lines, is_keyword = [], False
    for parameter in parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            lines.append("    *,")
            is_keyword = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    returned = inspect.signature(function).return_annotation
    body = "\n".join(lines)
    text = f"{name}(\n{body}\n)" if lines else f"{name}()"
    return text if returned in (inspect.Signature.empty, "None") else f"{text} -> {returned}"


def described(name: str, function: Any) -> str:
    """A function with its docstring."""
    return f"```text\n{signature_text(name, function)}\n```\n\n{doc_text(function)}\n\n"


def doc_text(documented: Any) -> str:
    """A docstring as Markdown: its sections become lists."""
    lines = []
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if line in ("Args:", "Raises:"):
            lines.append(f"*{line}*\n")
        elif line.startswith("        "):
            lines.append(f"  {line.strip()}")
        elif line.startswith("    "):
            lines.append(f"* {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines)


def python_page() -> str:
    """The whole of python.md."""
    parts = [PYTHON_HEAD, "## `outloop.train`\n\n", described("outloop.train", outloop.train)]
    parts += ["## `outloop.serve`\n\n", described("outloop.serve", outloop.serve)]
    for title, documented in (
        ("outloop.Run", outloop.Run),
        ("outloop.Serving", outloop.Serving),
        ("Transcript: an element of `Run.episodes()`", Transcript),
        ("TurnText: an element of `Transcript.turns`", TurnText),
    ):
        shown = title if " " in title else f"`{title}`"
        parts.append(f"## {shown}\n\n{doc_text(documented)}\n\n")
        parts.append(members(documented))
    return "".join(parts).rstrip() + "\n"


def members(documented: type) -> str:
    """Attributes and methods, a row each."""
    texts = attribute_docstrings(documented)
    rows = {
        name: texts.get(name, "") for name in documented.__annotations__ if not name.startswith("_")
    }
    for name, member in vars(documented).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            rows[name] = inspect.cleandoc(member.__doc__ or "").replace("\n", " ")
        elif inspect.isfunction(member):
            parameters = [str(one) for one in inspect.signature(member).parameters.values()]
            shown = ", ".join(one.replace("'", "") for one in parameters if one != "self")
            text = inspect.cleandoc(member.__doc__ or "").partition("\n\nRaises:")[0]
            rows[f"{name}({shown})"] = text.replace("\n\n", " ").replace("\n", " ")
    return table(rows) + "\n"


def scaling_page() -> str:
    """docs/scaling.md: tables of the plan in docs/scaling.toml, formulas and inputs from the code."""
    plan = load_plan(DOCS / "scaling.toml")
    formulas = "\n".join(
        f"### {title}\n\n{_formulas(module)}\n"
        for title, module in (
            ("Bounds", bounds),
            ("Memory", memory),
            ("Networks", network),
            ("Prices", cost),
        )
    )
    return SCALING.format(
        inputs=(DOCS / "scaling.toml").read_text().strip(),
        levels=_markdown(level_table(plan)),
        sizes=_markdown(size_table(plan)),
        memory=_markdown(memory_table(plan)),
        weights=_markdown(transfer_table(plan)),
        names=_plan_inputs(),
        formulas=formulas.strip(),
    )


GPU_FOLDER = DOCS.parent / "examples/gpu"
_ONE_NODE_GIB = {"qwen3-30b-a3b-one-node": 141.0}
"""Memory of a GPU by file, where it is not 80 GiB."""


def gpu_examples_page() -> str:
    """examples/gpu/README.md: what `outloop check` says of each settings file there."""
    files, rows = [], []
    for path in sorted(GPU_FOLDER.glob("*.toml")):
        settings = load_settings(path)
        name = str(settings.model.path)
        gpus = Gpus(memory_gib=_ONE_NODE_GIB.get(path.stem, 80.0))
        found = fit(settings, KNOWN_CONFIGS[name], gpus, source=name)
        assert found.server is not None
        kind = "shared by servers and trainer" if settings.trainer.is_colocated else "split"
        number = f"{found.num_gpus} of {gpus.memory_gib:g} GB, {kind}"
        files.append(f"| [{path.name}]({path.name}) | {name} | {number} |")
        cells = (
            path.stem,
            gib(found.rank.weights),
            gib(found.rank.gradients),
            gib(found.rank.optimizer),
            gib(found.rank.activations),
            f"{gib(found.rank_total)} of {gib(found.rank_limit)}",
            gib(found.server.weights),
            f"{found.server.cache_tokens:,.0f}",
            f"{found.generate_s:.0f} s",
            f"{found.update_s:.0f} s",
            f"{found.publish_s:.2g} s",
            f"{found.step_s:.0f} s",
        )
        rows.append(f"| {' | '.join(cells)} |")
    names = [
        "file",
        "rank's weights",
        "gradients",
        "optimizer",
        "activations",
        "together of what it may take",
        "server's weights",
        "tokens in a server's cache",
        "generate",
        "update",
        "publish",
        "a step at least",
    ]
    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return GPU_EXAMPLES.format(files="\n".join(files), table="\n".join([*head, *rows]))


def _markdown(table: PlanTable) -> str:
    names = table.names if any(table.names) else ("", "")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    return "\n".join(lines)


def _formulas(module: ModuleType) -> str:
    """Return a module's docstring without its first paragraph."""
    text = inspect.getdoc(module) or ""
    _, _, rest = text.partition("Invariant:") if "Owns:" in text else ("", "", text)
    return (rest or text).partition("\n\n")[2].strip()


def _plan_inputs() -> str:
    lines = ["| name | default | meaning |", "|---|---|---|"]
    for section, field in Inputs.model_fields.items():
        model = next((m for m in _models(field.annotation) if issubclass(m, BaseModel)), None)
        if model is None:
            continue
        meanings = attribute_docstrings(model)
        for name, one in model.model_fields.items():
            meaning = meanings.get(name, "")
            lines.append(f"| `{section}.{name}` | {default_text(one)} | {meaning} |")
    return "\n".join(lines)


def _models(annotation: Any) -> list[type]:
    found = [annotation, *typing.get_args(annotation)]
    return [one for one in found if isinstance(one, type)]


PAGES = {
    "python.md": python_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "scaling.md": scaling_page,
    "../examples/gpu/README.md": gpu_examples_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        sys.stdout.write(f"wrote docs/{name}\n")
