"""`make bench-hosts`: a second host is added to a run, and `outloop plan` had said what that gives.

Hosts are network namespaces. Redis, router, trainer, a server and a runner are on the first; after
some steps a host with another server and another runner joins. Episodes sleep for seconds that are
known, so that places at runners are the limit and not two cores. Prints the steps an hour on one
host, what `outloop plan --run --runners 2` makes of that run, the steps an hour on two hosts, and
measured over planned. Exit code 0 if that is within 15 % of 1, and the run's audit clean. Needs
root.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from hosts import hosts, why_not
from several_hosts import ROUTER_PORT, Fleet
from stack import audit_of, steps_of
from tiny import make_model

FIRST = ("redis", "router", "server0", "trainer", "runner0")
SECOND = ("server1", "runner1")
PLACES = 8
CHANGES = {
    "router": {"host": "0.0.0.0", "port": ROUTER_PORT},
    "server": {"host": "0.0.0.0"},
    "env": {"max_concurrent_episodes": PLACES, "max_runner_silence_s": 60},
    "buffer": {"max_staleness": 2, "group_size": 4, "group_deadline_s": 600},
    "trainer": {"groups_per_step": 6, "checkpoint_every": 100, "take_timeout_s": 600},
    "eval": {"every": 1_000_000},
}
ROLLOUTS = '''
import asyncio
import hashlib


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


def eval_tasks():
    return [{"question": f"hold {i}"} for i in range(8)]


async def play(task, episode):
    """Sleeps for LOW to HIGH seconds, which question and attempt decide; length scores."""
    question = task.payload["question"]
    if episode.purpose == "train":
        words = f"{question} {episode.metadata['attempt']}".encode()
        share = int.from_bytes(hashlib.sha256(words).digest()[:7], "big") / 2**56
        await asyncio.sleep(LOW + share * (HIGH - LOW))
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return float(len(answer.choices[0].message.content or ""))
'''
SLEEP_S = (6.0, 14.0)
SETTLING_STEPS = 2
"""After a change, steps that are not counted."""
NEAR = 0.15


def steps_per_hour(fleet: Fleet, num_steps: int, patience_s: float) -> float:
    """Over so many steps, once the last change has settled."""
    before = len(steps_of(fleet.run_dir))
    wanted = SETTLING_STEPS + num_steps
    if not fleet.wait(patience_s, wanted):
        raise AssertionError(f"no {wanted} steps within {patience_s:.0f} s")
    times = [at for _, at in steps_of(fleet.run_dir)][before + SETTLING_STEPS - 1 :]
    return 3600.0 * (len(times) - 1) / (times[-1] - times[0])


def planned(fleet: Fleet) -> dict[int, float]:
    """What `outloop plan` says of the run as it is, and with two runners."""
    words = ("-m", "outloop.cli", "plan", "--run", str(fleet.run_dir), "--runners", "2")
    said = subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, text=True, cwd=fleet.folder
    ).stdout
    found = re.search(r"simulated over as many: ([\d.]+)\s+with 2 runners: ([\d.]+)", said)
    assert found is not None, said
    return {1: float(found[1]), 2: float(found[2])}


def main() -> int:
    """Measure, plan, add, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="counted on each side")
    parser.add_argument("--patience-s", type=float, default=900.0)
    words = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    with ExitStack() as context:
        model = Path(context.enter_context(tempfile.TemporaryDirectory()))
        make_model(model)
        folder = Path(context.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        made = context.enter_context(hosts(("first", "second")))
        places = dict.fromkeys(FIRST, made["first"]) | dict.fromkeys(SECOND, made["second"])
        fleet = Fleet(folder, model, places, CHANGES)
        context.callback(fleet.stop)
        low, high = (f"{seconds:g}" for seconds in SLEEP_S)
        text = ROLLOUTS.replace("LOW", low).replace("HIGH", high)
        (folder / "rollouts.py").write_text(text)
        fleet.down.update(SECOND)
        loads = [os.getloadavg()[0]]
        try:
            one = steps_per_hour(fleet, words.steps, words.patience_s)
            plan = planned(fleet)
            print(f"one host: {one:.1f} steps/h, simulated {plan[1]:.1f}", flush=True)
            fleet.down.clear()
            joined_at = time.time()
            two = steps_per_hour(fleet, words.steps, words.patience_s)
            loads.append(os.getloadavg()[0])
            print(f"added {time.time() - joined_at:.0f} s ago", flush=True)
            fleet.processes["trainer"].terminate()
            fleet.processes["trainer"].wait(120)
            audit = audit_of(fleet.run_dir)
        except (AssertionError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error}\n{fleet.logs()}")
            return 1
    ratio = two / plan[2]
    print(
        f"two hosts: {two:.1f} steps/h, planned {plan[2]:.1f}: measured over planned {ratio:.3f}; "
        f"{two / one:.2f} times one host, planned {plan[2] / plan[1]:.2f} times; load average "
        f"{loads[0]:.0f} to {loads[1]:.0f}; {audit}"
    )
    return 0 if abs(ratio - 1) <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
