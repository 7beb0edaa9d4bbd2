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
from outloop.engine.launch.plan import bounds, cost, memory, network, serving
from outloop.engine.launch.plan.fit import Gpus, fit, gib
from outloop.engine.launch.plan.inputs import Inputs, load_plan
from outloop.engine.launch.plan.report import Table as PlanTable
from outloop.engine.launch.plan.report import (
    level_table,
    levels,
    memory_table,
    order_table,
    packing_table,
    size_table,
    sizes,
    transfer_table,
)
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
repository, first `outloop check FILE`, then `outloop train FILE`.

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
* `qwen3-30b-a3b-two-nodes.toml` is not for `outloop train`, which starts all parts on one machine. Both nodes need
  the run's folder on a shared file system and a Redis at `node-a`; then, by
  [operating](../../docs/operating.md#parts-on-several-machines): `outloop init FILE`; on node-a `outloop server
  --index 0` to `3` with `CUDA_VISIBLE_DEVICES` of two GPUs each, `outloop router` and `outloop runner`; on node-b
  `outloop trainer`. The model must be at the same path on both: download it with the same `HF_HOME`.
"""


SCALING = """\
# Scaling

`outloop plan FILE` says how fast a run would be, how many GPUs should serve and how many train, what memory
and networks it needs and what a step costs. It simulates the loop, event by event, under exactly the buffer's
admission (a test compares each claim and each batch with the buffer's own scripts), and puts closed-form bounds beside
it. `outloop plan --run runs/NAME` takes settings, step times and
the lengths of episodes from a run's metrics and ledger, and prints what that run reached beside it: start
with a small run, then change one thing.

The tables below are made by `make docs` from [scaling.toml](scaling.toml). **Its numbers are an example**: the
trainer's speed was measured on one H100 ([gpu.md](gpu.md)), a server's speed and all of the network were
not measured but taken from data sheets, and nothing here ran on more than one GPU. What a plan is good for is
which limit comes first, and what would move it.

## Which level

On four servers of one GPU and four trainer GPUs. "of the first" is the speed over that of the synchronous loop; the bound is what no
schedule exceeds, by the name of what sets it ([bounds](#bounds)).

{levels}

* Most of the gain comes by `max_staleness` 1 or 2: beyond that the age of tokens grows and the speed does not.
* Once the trainer hardly waits, more depth would only make tokens older: `pipeline_depth = "auto"` stops there.

## Stragglers on few servers

`router.packed_turns_per_server = N`: when few episodes of training are in flight, their next turns are placed on as few
servers as hold them with at most N turns on each, so that the other servers become empty. What that gives at the end of
a synchronous batch, by the same command; a turn that moves is taken to cost nothing, and the share of servers without an
episode is of the time in which some episode is in flight.

{packing}

* **A batch ends no earlier.** It ends with its longest episode, which is no faster on a server of its own. What packing
  gives is empty servers, early and all at once: evaluation gets them (its turns go to servers without training), one
  that is stopped or taken back by a spot market has no turn to hand over (`GET /servers` of the router: `is_spare`), and
  one that loads weights mixes no versions in a turn. Without any use for them leave the setting out, as it is by default.
* N is a number of turns that a server generates about as fast as one: decoding reads the weights once a step, whatever
  the batch, so that 8 to 16 cost little where caches fit. Servers do not report how much of their KV memory is free: N is
  what bounds it.
* Fewer servers are used only where at most half as many as before are enough with a quarter of their N turns to spare,
  and no episode came within the last second. So a turn moves at most log2(servers) times in a batch, and none goes back
  and forth. Training's turns go on all servers again when the next batch starts.
* An episode moves between two turns, never within one. The move costs one prefill of its context: 16,000 tokens at the
  {prefill} tokens a second of the example are {move_s} s, once or twice in an episode of minutes. Where contexts
  are long and turns are few, `router.packed_max_context_tokens` keeps long ones where their prefix is cached; their
  servers do not become empty then.
* While the trainer is busy and nothing is in flight, all servers are empty anyway. `over_provision` and `max_staleness` 1
  use the servers for training instead, and gain what the table of levels says.
* Where servers and trainer share GPUs, a step needs every GPU and waits for the last server: empty ones do not give their
  memory back early.

## Long tasks first

`buffer.task_order = "longest_first"`: of the groups of a step, those of tasks whose earlier attempts took longest start
first. What it gains where fewer episodes fit than a batch has (here half), each task having been played by one group
before; mean and extremes over two seeds, by the same command.

{order}

* The buffer keeps the mean duration of each task's last 16 attempts or so, in complete groups and with their waits, and of
  each source's last 256, whatever the order. A task that was not played yet counts as its source does; where nothing is
  known, the longer `prompt` of the payload goes first (its whole payload, if it has no `prompt`). A higher `priority`
  goes before.
* The order changes within `trainer.groups_per_step` slots that follow each other, and the next ones start only after all of
  them have: every epoch plays every task once, and none waits for longer than a step's groups. Only at the very end of a
  run whose steps took refills may the last of a window, the shortest, not be played.
* `buffer/length/rank_correlation` ([metrics.md](metrics.md)) says how well earlier attempts predict, under either order. In
  the table it is of runs by slot. At 0.4 nothing is gained, at 0.6 a few percent that chance may take back (0.98 to 1.05
  over four seeds), at 0.9 about 8 %. Where a batch's episodes all fit at once nothing can be gained. So `"slot"` is the
  default.

## How many GPUs, and how to split them

From 64 GPUs on the batch grows with the cluster. `episodes/s per GPU` would be the same in all rows if scaling
were linear; `bound by` says why it is not. Clusters whose batch is larger than is simulated are simulated as
a slice, with the whole's update and publish. `after failures` takes off what failing GPUs cost.

{sizes}

* Where `groups in flight` bind, episodes are too long for the batches that may be in flight, and further GPUs
  wait: raise `trainer.groups_per_step` or `buffer.max_staleness`, or use fewer GPUs.
* Where `trainer` binds, servers are idle, and the other way round.
* Servers may be spot GPUs, since a lost server costs a turn's unrecorded tokens; a trainer GPU costs a restart.

## A host added to a run

`outloop plan --run runs/NAME --runners N` says how fast that run would be with N runners. `make bench-hosts` (as root) checks it over
network namespaces: Redis, router, trainer, a server and a runner with 8 places on one host, then a second host with another server
and another runner joins the run. Episodes sleep for 6 to 14 seconds, so that places are the limit. 2026-11-23, six counted steps of 24
episodes each, beside other work at a load average of 14 to 28 on two cores (the run's processes at a nice of -8):

| | measured, steps/h | simulated | measured over simulated |
|---|---|---|---|
| one host | 121.4 | 115.7 | 1.049 |
| two hosts, planned from the run on one | 245.9 | 244.1 | 1.007 |

## Memory of a trainer rank

Four ranks, tensor-parallel by two, microbatches of 16,384 tokens, recomputation.

{memory}

## Weights

{weights}

## The file

```toml
{inputs}
```

Every input; without [servers] the seconds of episodes contain the model's, and clusters cannot be split.

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
    tables = (
        level_table(levels(plan)),
        packing_table(plan),
        order_table(plan),
        size_table(plan, sizes(plan)),
        memory_table(plan),
        transfer_table(plan),
    )
    shown = {table.title.split(" ")[0]: _markdown(table) for table in tables}
    formulas = "\n".join(
        f"### {title}\n\n{_formulas(module)}\n"
        for title, module in (
            ("Bounds", bounds),
            ("Speed of servers", serving),
            ("Memory", memory),
            ("Networks", network),
            ("Failures and prices", cost),
        )
    )
    return SCALING.format(
        inputs=(DOCS / "scaling.toml").read_text().strip(),
        levels=shown["Levels,"],
        packing=shown["Turns"],
        prefill=f"{plan.inputs.servers.prefill_tokens_per_s:,.0f}",
        move_s=f"{16000 / plan.inputs.servers.prefill_tokens_per_s:.1f}",
        order=shown["Long"],
        sizes=shown["Best"],
        memory=shown["Memory"],
        weights=shown["Seconds"],
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
    """What a module's docstring says after its contract."""
    _, _, rest = inspect.getdoc(module).partition("Invariant:")  # type: ignore[union-attr]
    if not rest:
        _, _, rest = inspect.getdoc(module).partition("Owns:")  # type: ignore[union-attr]
    return rest.partition("\n\n")[2].strip()


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
