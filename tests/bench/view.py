"""How long the page of `outloop view` takes with 100,000 episodes: its server, and in Chromium.

python tests/bench/view.py     (see `make bench-view`)

One of them has 128,000 sampled tokens, the others 60. The first call of each kind, and the fastest
of three further ones. In headless Chromium: from the address to what it shows, by the page's own
clock; the first paint is that of a browser without a cache. Nothing is asserted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outloop.buffer.records import OpenEpisode, Opening, Reward, Sampling, Turn, VersionSpan
from outloop.buffer.trajectories.ended import EndedEpisode, Entry
from outloop.buffer.trajectories.folder import FOLDER, Part, writing
from outloop.buffer.trajectories.tables import Decoder, tables_of, write_tables
from outloop.buffer.trajectories.vocabulary import write_vocabulary
from outloop.view.archive import EpisodeFilter, RunFolder

NUM_EPISODES, PER_PART = 100_000, 5_000
LONG, LONG_TOKENS, TOKENS = 77_777, 128_000, 60
VOCABULARY = 5_000


def episode(index: int, random: np.random.Generator) -> EndedEpisode:
    """A trained episode of one turn of random words."""
    n = LONG_TOKENS if index == LONG else TOKENS
    turn = Turn(
        turn_id=f"e{index}.0",
        episode_id=f"e{index}",
        parent_turn_id=None,
        prompt_ids=random.integers(0, VOCABULARY, 40, np.int32),
        output_ids=random.integers(0, VOCABULARY, n, np.int32),
        behavior_logprobs=-random.random(n, np.float32),
        version_spans=(VersionSpan(policy_version=index // 1000, start=0, end=n),),
        loss_spans=((0, n),),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        started_at=1.0,
        finished_at=2.0,
    )
    opening = Opening(
        episode_id=f"e{index}",
        task_id=f"t{index // 64}",
        group_id=f"g{index // 8}",
        attempt=index % 8,
        purpose="train",
        deadline_at=9.0,
        opened_at=1.0,
    )
    found = OpenEpisode(
        opening=opening,
        turns=(turn,),
        is_closed=True,
        outcome="completed",
        reward=Reward(value=float(random.random() < 0.5), components={"exact": 1.0}),
    )
    entry = Entry(f"e{index}", "trained", "", index, n + 40, index // 8, 8, index // 1000 + 1)
    return EndedEpisode(entry=entry, episode=found, closed_at=3.0)


def write_archive(folder: Path) -> None:
    """The archive of NUM_EPISODES."""
    words = {f"word{index} ": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0 "))
    random = np.random.default_rng(0)
    parts: list[Part] = []
    with writing(folder) as opened:
        write_vocabulary(opened.folder, tokenizer)
        for first in range(0, NUM_EPISODES, PER_PART):
            indices = range(first, first + PER_PART)
            tables = tables_of((episode(i, random) for i in indices), Decoder(tokenizer))
            name = opened.new_name(first)
            num_bytes = opened.write_files(
                name, lambda e, t, both=tables: write_tables(*both, e, t)
            )
            parts.append(
                Part(
                    name=name,
                    first=first,
                    last=first + PER_PART - 1,
                    num_episodes=PER_PART,
                    num_tokens=PER_PART * (TOKENS + 40),
                    num_bytes=num_bytes,
                    first_ended_at=1.0,
                    last_ended_at=2.0,
                )
            )
        opened.commit(parts)


def measure(name: str, call: Callable[[], object]) -> None:
    """Print how long `call` takes."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1000)
    print(f"{name:24s} first {times[0]:6.0f} ms, then {min(times[1:]):6.0f} ms", flush=True)


def main() -> None:
    """Write the archive, then ask it what the page asks."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write_archive(path / FOLDER)
        run = RunFolder(path, "bench")
        measure("fates", run.fates)
        measure("components", run.components)
        measure("newest episodes", lambda: run.episodes(EpisodeFilter()))
        longest = EpisodeFilter(max_reward=0.0, sort="tokens")
        measure("longest without reward", lambda: run.episodes(longest))
        measure("search, rare text", lambda: run.episodes(EpisodeFilter(text="word4999 word1")))
        measure("search, common text", lambda: run.episodes(EpisodeFilter(text="word42 ")))
        measure("group", lambda: run.group("g3"))
        measure("task by version", lambda: run.task("t7"))
        for title, episode_id in (("short", "e5"), ("128,000 tokens", f"e{LONG}")):
            measure(f"episode, {title}", lambda one=episode_id: run.episode(one))
            measure(f"tokens, {title}", lambda one=episode_id: run.tokens(one))
        write_metrics(path)
        measure_page(path)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def write_metrics(path: Path) -> None:
    """Curves of 1,000 steps."""
    names = ("loss", "reward_mean", "reward_std", "entropy", "step_s", "wait_s", "update_s")
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, 1001):
            values = {f"train/{name}": 1.0 / step for name in names}
            file.write(json.dumps({"step": step, "time": float(step), **values}) + "\n")


def measure_page(path: Path) -> None:
    """Print what a reader waits for in Chromium."""
    command = [sys.executable, "-m", "outloop.cli", "view", str(path)]
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for time_ in ("first", "second"):
            page = browser.new_context().new_page()
            page.goto(url)
            page.wait_for_selector(".tiles")
            paint = page.evaluate(
                "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            )
            whole = page.evaluate("performance.now()")
            print(f"page, {time_} visit: first paint {paint:.0f} ms, overview {whole:.0f} ms")
        run = path.name
        for title, where in (
            ("newest episodes", "episodes"),
            ("search, rare text", "episodes?text=word4999+word1"),
            ("search, common text", "episodes?text=word42"),
            ("episode, short", "episode/e5"),
            ("tokens, short", "tokens/e5"),
            ("episode, 128,000 tokens", f"episode/e{LONG}"),
            ("tokens, 128,000 tokens", f"tokens/e{LONG}"),
            ("group", "group/g3"),
            ("task by version", "task/t7"),
        ):
            times = [shown_after(page, f"#/{run}/{where}") for _ in range(4)]
            print(f"page, {title:24s} first {times[0]:6.0f} ms, then {min(times[1:]):6.0f} ms")
        browser.close()
        server.terminate()


def shown_after(page: Page, address: str) -> float:
    """Milliseconds from a change of the address to the frame after the view is there."""
    page.evaluate("location.hash = '#/none/none'")
    page.wait_for_selector("main[data-shown='#/none/none']")
    elapsed: float = page.evaluate(
        """async (address) => {
            const main = document.getElementById("main"), began = performance.now();
            const shown = new Promise((resolve) => new MutationObserver((_, one) => {
                if (main.dataset.shown === address) { one.disconnect(); resolve(); }
            }).observe(main, { attributes: true }));
            location.hash = address;
            await shown;
            await new Promise((resolve) => requestAnimationFrame(resolve));
            return performance.now() - began;
        }""",
        address,
    )
    return elapsed


if __name__ == "__main__":
    main()
