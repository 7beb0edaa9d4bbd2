"""`make bench-envs`: what sandboxes and verifiers cost. PARTS=sandbox,math picks parts.

Each part is a function that returns its figures; the table shows those of the parts that were run,
and runs/bench/envs.json keeps the others' from an earlier run.

sandbox: `sandboxed_runs_per_s`, calls through one session for each core, each a fork of the
session's Python with its own files; `fresh_sessions_per_s`, one session for each call;
`session_start_vs_bwrap`, a session until it is ready beside a bare `bwrap python -I -S -c pass`
with the same mounts, by turns, medians;
`fresh_run_vs_bwrap`, the same program in a fresh session and by bare bwrap, from start to end;
`unit_tests_per_s`, tests in one process and the code in another, eight calls each.
environments: NUM_ENVIRONMENTS sessions over one revision of a repository of 300 files, all open at
once, each with its own layer and a first command that changes a file: `environments_open`,
`environment_starts_per_s`, `environment_start_cpu_ms`, `environment_starts_per_s_per_core` (by that
CPU time), `environment_mb` (memory that only its processes hold, files apart).
math: `math_per_s`, answers of six forms, every expected one another; `math_worst_s`, how long a
right answer waited that came behind one that never ends in every worker (its deadline is 1 s).
Figures `*_cpu_ms` are CPU time of all processes for one of those: they hold on a busy machine too,
and `*_per_s_by_cpu` is what two cores make of them when nobody else wants any.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
from figures import say
from rich.console import Console
from rich.table import Table

from outloop.buffer.records import Task
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.repositories import Repository
from outloop.envs.verifiers.code import UnitTests
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.result import Result

Figures = dict[str, float]
OUT = Path(__file__).resolve().parents[2] / "runs" / "bench" / "envs.json"
NUM_CORES = 2
NUM_ENVIRONMENTS = int(os.environ.get("NUM_ENVIRONMENTS", 500))
FILES = {"main.py": "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"}
COMMAND = ("python", "main.py")
TARGETS = {
    "episodes_lost": "0",
    "cpu_ms_per_turn": "< 5",
    "sandboxed_runs_per_s": ">= 100",
    "fresh_sessions_per_s": ">= 15",
    "session_start_vs_bwrap": "<= 1.3",
    "math_per_s": ">= 200",
}
ADD = Task(
    task_id="add",
    payload={
        "prompt": "def add(a, b):\n",
        "entry_point": "add",
        "test": "for i in range(8):\n    assert candidate(i, 1) == i + 1\n",
    },
)


def cpu_s(pids: Iterable[int] = ()) -> float:
    """CPU time of this process, of `pids` and of the ended children of both."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(one.ru_utime + one.ru_stime for one in usage)
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended, and its parent's figures have it
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def by_cpu(name: str, each_s: float) -> Figures:
    """CPU time of one, and how many NUM_CORES cores make of it in a second."""
    return {f"{name}_cpu_ms": 1000 * each_s, f"{name}s_per_s_by_cpu": NUM_CORES / each_s}


def processes() -> set[int]:
    """Everything that this process started and that goes on."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def timed(name: str, num: int, once: Callable[[int], Awaitable[object]]) -> Figures:
    """Run `once` num times, NUM_CORES at a time: how many in a second."""
    left = iter(range(num))

    async def work() -> None:
        for index in left:
            await once(index)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(NUM_CORES)))
    return {name: num / (time.perf_counter() - started)}


async def bench_sandbox() -> Figures:
    """The sandbox's figures."""
    figures: Figures = {}
    sandbox = BubblewrapSandbox(Limits(wall_s=60, max_processes=8))
    sessions = [sandbox.session() for _ in range(NUM_CORES)]
    others = processes()
    opened = [await session.__aenter__() for session in sessions]

    async def call(index: int) -> None:
        result = await opened[index % NUM_CORES].run(FILES, COMMAND, stdin=b"1 2")
        assert result.stdout == b"3\n", result

    await timed("warm", 20, call)
    # Of each session bwrap twice and the supervisor.
    pids = processes() - others
    before = cpu_s(pids)
    figures |= await timed("sandboxed_runs_per_s", 400, call)
    figures |= by_cpu("sandboxed_run", (cpu_s(pids) - before) / 400)
    for session in sessions:
        await session.__aexit__(None, None, None)

    async def fresh(index: int) -> None:
        result = await sandbox.run(FILES, COMMAND, stdin=b"1 2")
        assert result.stdout == b"3\n", result

    figures |= await timed("fresh_sessions_per_s", 60, fresh)
    figures |= await compare_starts(sandbox)
    await sandbox.close()

    verifier = UnitTests(limits=Limits(wall_s=60))

    async def verify(index: int) -> None:
        assert await verifier(ADD, Result(answer="    return a + b")) == 1.0

    await timed("warm", 4, verify)
    figures |= await timed("unit_tests_per_s", 80, verify)
    await verifier.tear_down()
    return figures


async def compare_starts(sandbox: BubblewrapSandbox) -> Figures:
    """A session's start beside bwrap's with the same mounts, by turns."""
    others = processes()
    async with sandbox.session():
        outermost = psutil.Process(min(processes() - others))
        argv, owner = outermost.cmdline(), outermost.uids().real
    bare = [*argv[: argv.index("-c")], "-c", "pass"]
    script = [*bare[:-1], FILES["main.py"]]
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "our_run": [], "their_run": []}

    def take(name: str) -> None:
        nonlocal started
        times[name].append(time.perf_counter() - started)
        started = time.perf_counter()

    for _ in range(60):
        started = time.perf_counter()
        subprocess.run(bare, check=True, user=owner, group=owner, cwd="/")
        take("theirs")
        async with sandbox.session():
            take("ours")
        started = time.perf_counter()
        subprocess.run(
            script, check=True, user=owner, group=owner, cwd="/",
            input=b"1 2", stdout=subprocess.PIPE,
        )  # fmt: skip
        take("their_run")
        await sandbox.run(FILES, COMMAND, stdin=b"1 2")
        take("our_run")
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "bwrap_start_ms": 1000 * medians["theirs"],
        "session_start_ms": 1000 * medians["ours"],
        "session_start_vs_bwrap": medians["ours"] / medians["theirs"],
        "fresh_run_vs_bwrap": medians["our_run"] / medians["their_run"],
    }


def make_repository(folder: Path) -> None:
    """A git repository of 300 files of 2 KB in 30 folders."""
    for number in range(300):
        path = folder / f"package{number % 30}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 256)
    who = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "all")):
        subprocess.run(["git", "-C", folder, *who, *words], check=True)


async def bench_environments() -> Figures:
    """Repositories ready for a policy, all at once."""
    sandbox = BubblewrapSandbox(Limits(wall_s=120, max_processes=8, memory_bytes=2**27))
    command = ("sh", "-c", "echo y = 1 >> package0/module0.py && wc -l < package0/module0.py")
    async with AsyncExitStack() as stack:
        project = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_repository(project)
        repository = Repository(project)
        stack.callback(repository.close)
        base = repository.folder("HEAD")
        pool = await stack.enter_async_context(AsyncExitStack())

        async def start(_: int) -> None:
            session = await pool.enter_async_context(sandbox.session(base=base))
            ran = await session.run({}, command, keep_files=True)
            assert ran.stdout == b"257\n", ran

        others = processes()
        before = cpu_s()
        figures = await timed("environment_starts_per_s", NUM_ENVIRONMENTS, start)
        started = processes() - others
        each_s = (cpu_s(started) - before) / NUM_ENVIRONMENTS
        used_bytes = sum(psutil.Process(pid).memory_full_info().uss for pid in started)
        figures |= {
            "environments_open": NUM_ENVIRONMENTS,
            "environment_start_cpu_ms": 1000 * each_s,
            "environment_starts_per_s_per_core": 1 / each_s,
            "environment_mb": used_bytes / 2**20 / NUM_ENVIRONMENTS,
        }
    await sandbox.close()
    return figures


async def bench_math() -> Figures:
    """The math verifier's figures."""
    verifier = Math(timeout_s=60.0, num_workers=NUM_CORES)
    forms = (
        ("{0}", "the answer is \\boxed{{{0}}}"),
        ("{0}/7", "so we get $\\frac{{{0}}}{{7}}$"),
        ("{0}", "#### {0}"),
        ("0.5", "\\boxed{{\\frac{{{0}}}{{{1}}}}}"),
        ("{0}", "it is \\boxed{{{1}}}"),
        ("\\sqrt{{{0}}}", "$\\sqrt{{{0}}}$"),
    )

    async def verify(index: int) -> None:
        expected, given = forms[index % len(forms)]
        numbers = (index + 3, 2 * (index + 3))
        task = Task(task_id="t", payload={"answer": expected.format(*numbers)})
        await verifier(task, Result(answer=given.format(*numbers)))

    others = processes()
    await timed("warm", 24, verify)
    pids = processes() - others
    before = cpu_s(pids)
    figures = await timed("math_per_s", 1200, verify)
    figures |= by_cpu("math_run", (cpu_s(pids) - before) / 1200)
    hasty = Math(timeout_s=1.0)
    hasty.workers = verifier.workers
    task = Task(task_id="t", payload={"answer": "7"})
    endless = [
        asyncio.ensure_future(hasty(task, Result(answer="9**9**9**9**9"))) for _ in range(NUM_CORES)
    ]
    await asyncio.sleep(0)
    started = time.perf_counter()
    assert await hasty(task, Result(answer="7")) == 1.0
    figures["math_worst_s"] = time.perf_counter() - started
    assert await asyncio.gather(*endless) == [0.0] * NUM_CORES
    await verifier.tear_down()
    return figures


PARTS: dict[str, Callable[[], Awaitable[Figures]]] = {
    "sandbox": bench_sandbox,
    "environments": bench_environments,
    "math": bench_math,
}


def show(report: dict[str, object], figures: Figures) -> None:
    """Print the table."""
    table = Table(title=f"envs, {report['date']}, load {report['load']}", title_justify="left")
    for column in ("figure", "value", "target"):
        table.add_column(column)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}", TARGETS.get(name, ""))
    Console().print(table)


def main() -> None:
    """Run the parts, write the file, print the table."""
    names = [name for name in os.environ.get("PARTS", "").split(",") if name] or [*PARTS]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        sys.exit(f"PARTS={','.join(unknown)}; {', '.join(PARTS)} are allowed")
    earlier = json.loads(OUT.read_text())["figures"] if OUT.exists() else {}
    figures: Figures = {}
    load = os.getloadavg()[0]
    for name in names:
        say(f"{name}, part {names.index(name) + 1} of {len(names)}")
        figures |= asyncio.run(PARTS[name]())
    report: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "load": round(load, 1),
        "figures": earlier | figures,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    show(report, figures)


if __name__ == "__main__":
    main()
