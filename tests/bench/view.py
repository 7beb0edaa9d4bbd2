"""How long the page of `outloop view` waits for its server, with 100,000 episodes.

python tests/bench/view.py     (see `make bench-view`)

One of them has 128,000 sampled tokens, the others 60. The first call of each kind, and the fastest
of three further ones. Nothing is asserted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
        for title, episode_id in (("short", "e5"), ("128,000 tokens", f"e{LONG}")):
            measure(f"episode, {title}", lambda one=episode_id: run.episode(one))
            measure(f"tokens, {title}", lambda one=episode_id: run.tokens(one))


if __name__ == "__main__":
    main()
