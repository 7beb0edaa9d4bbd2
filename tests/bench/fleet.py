"""`make bench-fleet`: what a router costs in front of many servers, and a publish to many.

    python tests/bench/fleet.py [--quick] [--parts router,publish]

One router process with thousands of open episodes, and 1, 8 and 64 fake servers behind it, by
turns. Then one publisher and 1 to 64 receivers, processes that join a group and answer over HTTP
(fleet_publish.py). Prints a table and writes runs/bench/fleet.json. Under four minutes on two idle
cores.

router_cpu_us_N: CPU time of the router's process for a turn in front of N servers, everything that
it does meanwhile included; router_cpu_8_vs_1, router_cpu_64_vs_1: over that in front of one,
medians over repetitions whose parts met the same machine. As many turns of other episodes go
before, so that connections are open. turns_per_s_N is the machine's limit: client, servers and
Redis share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import uvloop
from figures import OUT, known, say, tell
from fleet_stage import FleetStage
from router_load import Conversation, Episodes, play
from router_stage import make_model

FLEETS = (1, 8, 64)
NUM_EPISODES = 10_000
NUM_REPEATS = 5
NUM_IN_FLIGHT = 1024
NUM_TURNS = 600
"""Of each repetition and fleet; each by an episode of its own."""
LATENCY_S = 0.25
BODY_BYTES = 1024
SEEN_TIMEOUT_S = 60.0
"""For the router to see that servers came or left."""


async def cpu_per_turn(
    stage: FleetStage, chats: list[Conversation], num_in_flight: int
) -> tuple[float, float]:
    """CPU seconds of the router for a turn of each, and turns a second."""
    router = stage.router
    before, began_at = router.cpu_s, time.perf_counter()
    await play(router.port, chats, 1, concurrency=num_in_flight, checked=True)
    took = time.perf_counter() - began_at
    return (router.cpu_s - before) / len(chats), len(chats) / took


async def until_seen(stage: FleetStage, number: int) -> None:
    """Return when the router knows exactly so many servers."""
    headers = {"Authorization": f"Bearer {stage.run.keys.admin_key}"}
    url = f"http://127.0.0.1:{stage.router.port}/servers"
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(SEEN_TIMEOUT_S):
        while True:
            async with session.get(url) as answer:
                if len((await answer.json())["servers"]) == number:
                    return
            await asyncio.sleep(0.05)


async def measure_router(
    stage: FleetStage,
    *,
    fleets: tuple[int, ...] = FLEETS,
    num_episodes: int = NUM_EPISODES,
    num_repeats: int = NUM_REPEATS,
    num_turns: int = NUM_TURNS,
    num_in_flight: int = NUM_IN_FLIGHT,
) -> dict[str, float]:
    """Every figure of the router by name."""
    names = (f"e{number:05d}" for number in itertools.count())
    episodes = Episodes(stage.run, stage.router.port, names)
    await episodes.register()
    say(f"opening {num_episodes} episodes, a turn of each")
    chats = await episodes.open(num_episodes, body_bytes=BODY_BYTES)
    # Every episode that is measured is at its second turn.
    await play(stage.router.port, chats, 1, concurrency=num_in_flight, checked=True)
    num_measured = num_repeats * len(fleets) * num_turns
    assert num_measured + num_turns <= num_episodes, f"{num_measured} of {num_episodes} episodes"
    fresh, spare = iter(chats[:num_measured]), chats[num_measured:]
    seconds: dict[int, list[float]] = {number: [] for number in fleets}
    speeds: dict[int, list[float]] = {number: [] for number in fleets}
    for repeat in range(num_repeats):
        for number in fleets if repeat % 2 else fleets[::-1]:
            say(f"{number} servers, repetition {repeat + 1} of {num_repeats}")
            stage.register(number)
            await until_seen(stage, number)
            # Connections to the servers are open then, as many as are needed at once.
            await cpu_per_turn(stage, spare[:num_turns], num_in_flight)
            asked = list(itertools.islice(fresh, num_turns))
            each, speed = await cpu_per_turn(stage, asked, num_in_flight)
            seconds[number].append(each)
            speeds[number].append(speed)
    figures: dict[str, float] = {
        "open_episodes": len(chats),
        "turns_in_flight": min(num_in_flight, num_turns),
        "episodes_mixed": sum(chat.num_mixed for chat in chats),
        "router_mb": stage.router.rss_bytes / 1e6,
    }
    one = seconds[fleets[0]]
    for number in fleets:
        figures[f"router_cpu_us_{number}"] = 1e6 * statistics.median(seconds[number])
        figures[f"turns_per_s_{number}"] = statistics.median(speeds[number])
        if number != fleets[0]:
            ratios = [more / few for more, few in zip(seconds[number], one, strict=True)]
            figures[f"router_cpu_{number}_vs_{fleets[0]}"] = statistics.median(ratios)
    return figures


def run_router(*, is_quick: bool) -> dict[str, float]:
    """Start the stage and measure."""
    scale = 8 if is_quick else 1
    model = OUT / "router-model"
    make_model(model)
    with tempfile.TemporaryDirectory() as folder:
        stage = FleetStage(
            Path(folder),
            model,
            num_servers=max(FLEETS),
            num_episodes=NUM_EPISODES,
            latency_s=LATENCY_S,
            max_in_flight=4 * NUM_IN_FLIGHT,
        )
        try:
            return uvloop.run(
                measure_router(
                    stage, num_episodes=NUM_EPISODES // scale, num_turns=NUM_TURNS // scale
                )
            )
        finally:
            stage.close()


def run_publish(*, is_quick: bool) -> dict[str, float]:
    """In a process of its own, which is forked into receivers."""
    script = Path(__file__).with_name("fleet_publish.py")
    command = [sys.executable, str(script), *(["--quick"] if is_quick else [])]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


PARTS = {"router": run_router, "publish": run_publish}


def main() -> None:
    """Measure and report."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    asked = argparse.ArgumentParser()
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--parts", type=lambda words: words.split(","), default=list(PARTS))
    options = asked.parse_args()
    # Ended from outside, it ends its programs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before it was through"))
    figures = known("fleet")
    for part in options.parts:
        began_at = time.perf_counter()
        say(f"part {part}")
        figures |= PARTS[part](is_quick=options.quick)
        figures[f"{part}_took_s"] = time.perf_counter() - began_at
    tell("fleet", figures)


if __name__ == "__main__":
    main()
