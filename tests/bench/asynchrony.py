"""`make bench-async`: levels of asynchrony under agents that wait, beside a bare loop.

Redis, router, torch server, runner and trainer as real processes train the calculator's policy from
one warm start, once for each level and tail (waiting_calculator.py): synchronous, synchronous with
partial rollouts, and depth "auto" under max_staleness 1, 2, 4 and 8. Every level plays the same
tasks with the same waits for the same number of steps. In two more the agents do not wait and the
trainer makes many passes, so that it is the limit; one of them publishes beside training, the other
within it. bare_loop.py gives the time of a step with the same waits and each run's own update time
("bare"). Evaluation is counted apart. Writes runs/bench/async.json, and levels.json and async.png
beside it.

`SEEDS=10` repeats everything with other seeds, `STEPS`, `LEVELS=sync,partial,4` (of the heavy tail;
or whole names as heavy/k4 and trainer/beside) and `SCALE` (of the waits) change what is run;
`KEEP=1` takes the runs that an interrupted call has finished. With `REWARDS=1` only the figures of
held-out reward at equal steps are written, beside those that runs/bench/async.json has already.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bare_loop import seconds_per_step
from figures import OUT, say, tell
from rich.console import Console
from rich.table import Table

from outloop.buffer.tasks.order import task_index
from outloop.buffer.telemetry import read_metrics
from outloop.engine.launch.plan.lengths import Lengths

ROOT = Path(__file__).resolve().parents[2]
FOLDER = OUT / ("async-rewards" if os.environ.get("REWARDS") == "1" else "async")
sys.path.insert(0, str(ROOT / "examples" / "calculator"))

NUM_STEPS = int(os.environ.get("STEPS", "12"))
NUM_SEEDS = int(os.environ.get("SEEDS", "1"))
IS_FOR_REWARDS = os.environ.get("REWARDS") == "1"
SCALE = float(os.environ.get("SCALE", "1.2"))
"""Agents sleep, so long waits and few agents keep two cores from being what limits a level."""
NUM_WARM_STEPS = 300
GROUPS_PER_STEP = 6
GROUP_SIZE = 4
NUM_EPOCHS = 24
"""Passes of an update where the trainer is to be the limit."""
PLACES = 9 * GROUPS_PER_STEP * GROUP_SIZE
"""Enough for every level: nothing but depth and age limits what is in flight."""
OVER_PROVISION = 1.5
NUM_EVAL, NUM_FINAL_EVAL = 64, 1024 if IS_FOR_REWARDS else 128
RUN_TIMEOUT_S = 900
POLL_S, REPORT_S = 0.5, 20.0
DETECTABLE = 1.96 + 0.84
"""Standard errors of a difference that is found in four of five cases at the 5% level, two-sided.
"""

TARGETS = {
    "level1_vs_sync": (1.5, math.inf),
    "best_vs_sync": (2.8, math.inf),
    "partial_vs_plain": (1.25, math.inf),
    "least_vs_bare": (0.9, math.inf),
    "slow_share_ratio": (0.95, 1.05),
    "discarded_time_share": (0.0, 0.05),
    "trainer_wait_share": (0.0, 0.1),
    "reward_gap": (0.0, 0.03),
}
"""From and to what a figure is as wanted."""


@dataclass(frozen=True)
class Level:
    """How a run goes ahead of its trainer."""

    name: str
    tail: str
    max_staleness: int
    pipeline_depth: float | str
    over_provision: float = 1.0
    more: tuple[str, ...] = ()
    """Other settings."""

    @property
    def max_age(self) -> int:
        """Publishes that a trained token may be old."""
        return max(self.max_staleness, int(self.over_provision > 1.0))

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a run."""
        return (
            f"buffer.max_staleness={self.max_staleness}",
            f"buffer.pipeline_depth={json.dumps(self.pipeline_depth)}",
            f"buffer.over_provision={self.over_provision}",
            *self.more,
        )


TRAINER = (f"trainer.num_epochs_per_take={NUM_EPOCHS}", "buffer.drop_zero_signal=false")
"""Groups without signal are trained too: a step without an update would not be limited by it."""
LEVELS = (
    Level("heavy/sync", "heavy", 0, 0.0),
    Level("heavy/partial", "heavy", 0, 0.0, OVER_PROVISION),
    Level("heavy/k1", "heavy", 1, "auto"),
    Level("heavy/k2", "heavy", 2, "auto"),
    Level("heavy/k4", "heavy", 4, "auto"),
    Level("heavy/k8", "heavy", 8, "auto"),
    Level("light/sync", "light", 0, 0.0),
    Level("light/partial", "light", 0, 0.0, OVER_PROVISION),
    Level("light/k1", "light", 1, "auto"),
    Level("trainer/beside", "none", 2, "auto", more=TRAINER),
    Level("trainer/within", "none", 2, "auto", more=(*TRAINER, "publish.overlaps_training=false")),
)


def chosen_levels() -> list[Level]:
    """Those that LEVELS names; of the heavy tail where a name has no tail.

    Raises:
        SystemExit: there is no such level.
    """
    known = {level.name: level for level in LEVELS}
    names = os.environ.get("LEVELS", "").replace(",", " ").split() or list(known)
    found = []
    for name in names:
        whole = name if "/" in name else f"heavy/{'k' if name.isdigit() else ''}{name}"
        if whole not in known:
            sys.exit(f"LEVELS names {name!r}; allowed: {', '.join(known)}, or sync, partial, 1 ...")
        found.append(known[whole])
    return found


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one run without its first step, and of the bare loop."""

    level: str
    seed: int
    step_s: float
    """Mean time of a step, less what it waited for an evaluation."""
    wait_share: float
    evaluation_share: float
    """Of the whole time, evaluation included."""
    update_s: float
    """Median."""
    publish_s: float
    """Mean of what is neither wait, update nor evaluation."""
    transfer_s: float
    """Median of the publish itself."""
    pause_s: float
    """Of that, median of the time in which servers stood still."""
    publish_wait_share: float
    """Of the time, what the trainer waited for publishes, copying the weights included."""
    overhead_s: float
    """Mean of what an attempt took beyond its wait, from its claim to its score."""
    staleness_mean: float
    staleness_max: float
    slow_share_ratio: float
    discarded_time_share: float
    gap_by_age: dict[str, float]
    eval_steps: list[int]
    eval_seconds: list[float]
    """Since the end of the first step, evaluation waits left out."""
    eval_rewards: list[float]
    eval_errors: list[float]
    bare_step_s: float


def outloop(
    *arguments: str, env: dict[str, str] | None = None, log: Path
) -> subprocess.Popen[bytes]:
    """Start one command; its output goes to a file."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path} | (env or {}),
            stdout=output,
            stderr=output,
        )


def flags(*settings: str) -> list[str]:
    """As the command line takes them."""
    return [part for setting in settings for part in ("--set", setting)]


def warm_start() -> Path:
    """The policy that every run begins with; made once."""
    folder = FOLDER / "warm-start" / "hf"
    if (folder / "model.safetensors").is_file():
        return folder
    model, log = FOLDER / "policy", FOLDER / "output.log"
    new = ("new-policy", "--out", str(model), "--conversations", "tasks:conversations")
    place = (f"run.dir={FOLDER}", "run.name=warm-start", f"model.path={model}")
    place += (f"trainer.num_steps={NUM_WARM_STEPS}",)
    for command in (
        (*new, "--import-dir", "examples/calculator"),
        ("train", "examples/calculator/warm_start.toml", *flags(*place)),
    ):
        if outloop(*command, log=log).wait(timeout=RUN_TIMEOUT_S) != 0:
            sys.exit(f"the warm start failed; see {log}")
    return folder


def run_level(level: Level, seed: int, model: Path) -> Result:
    """Train one level, or read the run that is there."""
    name = f"{level.name.replace('/', '-')}-{seed}"
    run_dir, log = FOLDER / name, FOLDER / f"{name}.log"
    settings = (
        f"run.dir={FOLDER}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"model.path={model}",
        f"trainer.num_steps={NUM_STEPS}",
        f"trainer.groups_per_step={GROUPS_PER_STEP}",
        "trainer.checkpoint_every=0",
        f"buffer.group_size={GROUP_SIZE}",
        *level.settings,
        'env.rollout_function_path="waiting_calculator:play"',
        f"env.max_concurrent_episodes={PLACES}",
        "env.episode_deadline_s=300",
        f"eval.every={max(1, NUM_STEPS // 2)}",
        f"eval.num_episodes={NUM_EVAL}",
        f"eval.final_num_episodes={NUM_FINAL_EVAL}",
        "eval.greedy=false",
        # Of one version each, and out of the way of what is timed.
        "eval.blocks_publish=true",
    )
    key, done = json.dumps([*settings, SCALE]), run_dir / "bench-settings.json"
    if os.environ.get("KEEP") == "1" and done.is_file() and done.read_text() == key:
        say(f"{name}: done before")
        return measure(level, seed, run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    log.unlink(missing_ok=True)
    env = {
        "OUTLOOP_BENCH_TAIL": level.tail,
        "OUTLOOP_BENCH_SCALE": str(SCALE),
        "OUTLOOP_BENCH_LOG": str(episode_log(run_dir)),
    }
    episode_log(run_dir).unlink(missing_ok=True)
    process = outloop("train", "examples/calculator/run.toml", *flags(*settings), env=env, log=log)
    try:
        watch(process, name, run_dir)
    except BaseException:
        process.terminate()
        process.wait(timeout=90)
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}; see {log}")
    done.write_text(key)
    return measure(level, seed, run_dir)


def watch(process: subprocess.Popen[bytes], name: str, run_dir: Path) -> None:
    """Wait for the end of a run, and say how far it is."""
    started = last = time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        if now - started > RUN_TIMEOUT_S:
            raise RuntimeError(f"{name} did not end within RUN_TIMEOUT_S={RUN_TIMEOUT_S}")
        if now - last >= REPORT_S:
            last = now
            step = max((row["step"] for row in step_rows(run_dir)), default=0)
            say(f"{name}: step {step} of {NUM_STEPS} after {now - started:.0f} s")


def episode_log(run_dir: Path) -> Path:
    """Duration and wait of each episode of a run."""
    return run_dir.with_name(f"{run_dir.name}.episodes")


def step_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of training steps."""
    return [row for row in read_metrics(run_dir) if row.get("train/step_s") is not None]


def measure(level: Level, seed: int, run_dir: Path) -> Result:
    """Read a finished run, and compute the bare loop beside it."""
    rows = step_rows(run_dir)
    later, last = rows[1:], rows[-1]
    waited = [row.get("train/evaluation_wait_s") or 0.0 for row in later]
    whole_s = sum(row["train/step_s"] for row in later)
    played_s = whole_s - sum(waited)
    wait_s = sum(row["train/wait_s"] for row in later)
    updates = [row["train/update_s"] for row in later]
    step_s = played_s / len(later)
    publish_s = max(0.0, step_s - (wait_s + sum(updates)) / len(later))
    update_s = statistics.median(updates)
    played = np.loadtxt(episode_log(run_dir), ndmin=2)
    beyond = played[:, 0] - played[:, 1]
    attempt_s = last["buffer/length/ended_s"]
    claim_s = max(0.0, attempt_s - float(played[:, 0].mean()))
    evaluations = [
        row for row in read_metrics(run_dir) if row.get("eval/sampled_reward") is not None
    ]
    ends = np.cumsum(
        [0.0, *(row["train/step_s"] - w for row, w in zip(later, waited, strict=True))]
    )
    gaps = {
        name.removeprefix("train/logprob_gap_"): statistics.fmean(found)
        for name in last.keys() | later[0].keys()
        if name.startswith("train/logprob_gap_age_")
        and (found := [row[name] for row in later if row.get(name) is not None])
    }
    # In a step whose groups had no signal no token is of any age.
    trained = [row for row in later if row["train/staleness_mean"] is not None]
    return Result(
        level=level.name,
        seed=seed,
        step_s=step_s,
        wait_share=wait_s / played_s,
        evaluation_share=sum(waited) / whole_s,
        update_s=update_s,
        publish_s=publish_s,
        transfer_s=statistics.median(row["publish/duration_s"] for row in later),
        pause_s=statistics.median(row["publish/pause_s"] for row in later),
        publish_wait_share=sum(row["train/publish_wait_s"] for row in later) / played_s,
        overhead_s=claim_s + float(beyond.mean()),
        staleness_mean=statistics.fmean(row["train/staleness_mean"] for row in trained),
        staleness_max=max(row["train/staleness_max"] for row in trained),
        slow_share_ratio=last.get("buffer/length/slow_share_ratio") or math.nan,
        discarded_time_share=last.get("buffer/discarded_time_share") or 0.0,
        gap_by_age=dict(sorted(gaps.items())),
        eval_steps=[row["step"] for row in evaluations],
        eval_seconds=[float(ends[max(0, row["step"] - 1)]) for row in evaluations],
        eval_rewards=[row["eval/sampled_reward"] for row in evaluations],
        eval_errors=[row["eval/sampled_se"] for row in evaluations],
        bare_step_s=bare_step_s(level, seed, update_s),
    )


@functools.cache
def waits(tail: str) -> Lengths:
    """Of a tail, with SCALE."""
    from waiting_calculator import lengths

    return lengths(tail, SCALE)


@functools.cache
def questions() -> tuple[str, ...]:
    """What is played, in the order of the tasks."""
    from tasks import train_tasks

    return tuple(task["question"] for task in train_tasks())


def ranks(seed: int, slot: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How long the attempts at a slot's task wait, as the rollout function has it."""
    from waiting_calculator import rank

    question = questions()[task_index(slot, len(questions()), seed)]
    return np.array([rank(question, attempt) for attempt in range(GROUP_SIZE)])


def bare_step_s(level: Level, seed: int, update_s: float) -> float:
    """Return the seconds of a step with the same tasks, waits and steps without any process."""
    values = waits(level.tail).values

    def group_s(slot: int) -> float:
        return float(max(values[(ranks(seed, slot) * len(values)).astype(int)]))

    return seconds_per_step(
        group_s,
        update_s=update_s,
        groups_per_step=GROUPS_PER_STEP,
        max_age=level.max_age,
        over_provision=level.over_provision,
        num_steps=NUM_STEPS,
    )


# What all runs say together.


def mean_of(results: Sequence[Result], level: str, name: str) -> float:
    """A number of a level, over seeds; NaN: it was not run."""
    found = [getattr(result, name) for result in results if result.level == level]
    return statistics.fmean(found) if found else math.nan


def speed_ratio(results: Sequence[Result], level: str, base: str) -> float:
    """Steps per hour of `level` over those of `base`: the mean over seeds of both."""
    return mean_of(results, base, "step_s") / mean_of(results, level, "step_s")


def final_rewards(results: Sequence[Result], level: str) -> list[tuple[float, float]]:
    """Held-out reward after the last step and its error, for each seed."""
    return [
        (result.eval_rewards[-1], result.eval_errors[-1])
        for result in results
        if result.level == level and result.eval_rewards
    ]


def reward_error(rewards: Sequence[tuple[float, float]]) -> float:
    """Standard error of their mean: between seeds where there are several."""
    if not rewards:
        return math.nan
    if len(rewards) > 1:
        return statistics.stdev(value for value, _ in rewards) / math.sqrt(len(rewards))
    return rewards[0][1]


def reward_figures(results: Sequence[Result]) -> dict[str, float]:
    """Held-out reward after the last step, of the level that is farthest from synchronous.

    Seeds are pairs: each plays the same tasks at every level, from the same weights.
    """
    by_seed = {
        (result.level, result.seed): (result.eval_rewards[-1], result.eval_errors[-1])
        for result in results
        if result.eval_rewards and result.level.startswith("heavy/")
    }
    gaps, detectable = [math.nan], [math.nan]
    for name in sorted({level for level, _ in by_seed} - {"heavy/sync"}):
        pairs = [
            (one, by_seed["heavy/sync", seed])
            for (level, seed), one in by_seed.items()
            if level == name and ("heavy/sync", seed) in by_seed
        ]
        differences = [other[0] - sync[0] for other, sync in pairs]
        if not pairs:
            continue
        if len(pairs) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(pairs))
        else:
            error = math.hypot(pairs[0][0][1], pairs[0][1][1])
        gaps.append(abs(statistics.fmean(differences)))
        detectable.append(DETECTABLE * error)
    return {
        "reward_gap": max((g for g in gaps if not math.isnan(g)), default=math.nan),
        "reward_detectable": max((d for d in detectable if not math.isnan(d)), default=math.nan),
        "reward_seeds": float(len({seed for _, seed in by_seed})),
        "reward_steps": float(NUM_STEPS),
    }


def figures_of(results: Sequence[Result]) -> dict[str, float]:
    """What runs/bench/async.json holds: the required names first, then those of each level."""
    names = [level.name for level in LEVELS if any(r.level == level.name for r in results)]
    heavy = [name for name in names if name.startswith("heavy/")]
    waiting = [name for name in names if not name.startswith("trainer/")]
    ahead = [name for name in heavy if name.startswith("heavy/k")]
    speeds = {name: speed_ratio(results, name, "heavy/sync") for name in heavy}
    best = min(ahead or heavy, key=lambda name: mean_of(results, name, "step_s"))
    against_bare = {
        name: mean_of(results, name, "bare_step_s") / mean_of(results, name, "step_s")
        for name in names
    }
    slow = [mean_of(results, name, "slow_share_ratio") for name in waiting]
    slow = [ratio for ratio in slow if not math.isnan(ratio)] or [math.nan]
    found = {
        "level1_vs_sync": speeds.get("heavy/k1", math.nan),
        "best_vs_sync": speeds.get(best, math.nan),
        "best_vs_bare": against_bare[best],
        "least_vs_bare": min(against_bare[name] for name in waiting),
        "partial_vs_plain": speeds.get("heavy/partial", math.nan),
        "slow_share_ratio": max(slow, key=lambda ratio: abs(ratio - 1)),
        "discarded_time_share": max(
            mean_of(results, name, "discarded_time_share") for name in waiting
        ),
        "trainer_wait_share": mean_of(results, "trainer/beside", "wait_share"),
        "best_trainer_wait_share": mean_of(results, best, "wait_share"),
        "publish_wait_share": mean_of(results, "trainer/beside", "publish_wait_share"),
        "publish_wait_share_within": mean_of(results, "trainer/within", "publish_wait_share"),
        "publish_pause_p50_within_s": mean_of(results, "trainer/within", "pause_s"),
        "publish_beside_vs_within": speed_ratio(results, "trainer/beside", "trainer/within"),
        "publish_pause_p50_s": mean_of(results, best, "pause_s"),
        "publish_share": mean_of(results, best, "transfer_s") / mean_of(results, best, "step_s"),
        "light_trainer_wait_share": mean_of(results, "light/k1", "wait_share"),
        "light_level1_vs_sync": speed_ratio(results, "light/k1", "light/sync"),
        "light_partial_vs_plain": speed_ratio(results, "light/partial", "light/sync"),
        "num_seeds": float(len({result.seed for result in results})),
        "num_steps": float(NUM_STEPS),
    }
    found |= reward_figures(results)
    for name in names:
        short = name.replace("/", "_")
        found |= {
            f"{short}_steps_per_hour": 3600 / mean_of(results, name, "step_s"),
            f"{short}_vs_bare": against_bare[name],
        }
    return found


def base_of(level: Level) -> str:
    """The level with which it is compared."""
    return "trainer/within" if level.name.startswith("trainer/") else f"{level.tail}/sync"


def level_table(results: Sequence[Result]) -> Table:
    """The levels beside each other."""
    table = Table(title="Levels", title_justify="left")
    for name in (
        "level",
        "steps/h",
        "of base",
        "of bare",
        "waits",
        "evaluation",
        "staleness",
        "slow ratio",
        "discarded",
        "held out",
        "pause s",
        "overhead s",
    ):
        table.add_column(name, justify="left" if name == "level" else "right")
    for level in LEVELS:
        name = level.name
        if not any(result.level == name for result in results):
            continue

        def mean(field: str, name: str = name) -> float:
            return mean_of(results, name, field)

        rewards = final_rewards(results, name)
        held = statistics.fmean(value for value, _ in rewards) if rewards else math.nan
        table.add_row(
            name,
            f"{3600 / mean('step_s'):.0f}",
            f"{speed_ratio(results, name, base_of(level)):.2f}",
            f"{mean('bare_step_s') / mean('step_s'):.2f}",
            f"{mean('wait_share'):.2f}",
            f"{mean('evaluation_share'):.2f}",
            f"{mean('staleness_mean'):.2f} / {mean('staleness_max'):.0f}",
            f"{mean('slow_share_ratio'):.2f}",
            f"{mean('discarded_time_share'):.3f}",
            f"{held:.3f} +- {reward_error(rewards):.3f}",
            f"{mean('pause_s'):.3f}",
            f"{mean('overhead_s'):.2f}",
        )
    return table


def target_table(figures: Mapping[str, float]) -> Table:
    """What is wanted beside what was reached."""
    table = Table(title="Wanted", title_justify="left")
    for name in ("figure", "value", "wanted", ""):
        table.add_column(name, justify="right" if name == "value" else "left")
    for name, (low, high) in TARGETS.items():
        value = figures.get(name, math.nan)
        wanted = f"at most {high:g}" if low == 0.0 else f"{low:g} to {high:g}"
        wanted = f"at least {low:g}" if high == math.inf else wanted
        verdict = "yes" if low <= value <= high else "NO"
        if name == "reward_gap" and figures["reward_seeds"] < 2:
            verdict = "one seed says little: make bench-async-rewards, after this"
        table.add_row(name, f"{value:.3f}", wanted, "" if math.isnan(value) else verdict)
    return table


def main() -> None:
    """Run every level for every seed, print, write, draw."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    levels = chosen_levels()
    say(f"a warm start, then {len(levels)} levels of {NUM_STEPS} steps, {NUM_SEEDS} seeds")
    model = warm_start()
    results: list[Result] = []
    failed: list[str] = []
    for seed in range(NUM_SEEDS):
        for level in levels:
            started = time.monotonic()
            try:
                result = run_level(level, seed, model)
            except RuntimeError as error:
                say(str(error))
                failed.append(f"{level.name} seed {seed}")
                continue
            results.append(result)
            say(
                f"{level.name} seed {seed}: {result.step_s:.2f} s a step, {result.bare_step_s:.2f} "
                f"bare; {time.monotonic() - started:.0f} s"
            )
            (FOLDER / "levels.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
    if not any(result.level.startswith("heavy/") for result in results):
        sys.exit("no level of the heavy tail was run; see the logs beside levels.json")
    if IS_FOR_REWARDS:
        path = OUT / "async.json"
        before = json.loads(path.read_text())["figures"] if path.is_file() else {}
        tell("async", before | reward_figures(results))
        Console().print(target_table(before | reward_figures(results)))
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    from asynchrony_plots import draw

    figures = figures_of(results)
    tell("async", figures)
    Console(width=200).print(level_table(results))
    Console().print(target_table(figures))
    draw([r for r in results if not r.level.startswith("trainer/")], OUT / "async.png")
    say(f"plots in {OUT / 'async.png'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
