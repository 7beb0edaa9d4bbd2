"""`make bench-router`: what the router costs beside sglang-router, LiteLLM and a bare relay.

Every program is a process of its own; the server behind all of them is a mock of fixed latency and
Redis is real. Conversations of 8 turns with bodies of about 4 KiB, alike for all; repetitions
are interleaved and "per core-second" is per second of the process's own CPU time, so other work on
the machine moves the figures little. Prints a table and writes runs/bench/router.json.

    python tests/bench/router.py [--quick] [--parts turns,streams,long,waiting,soak]

All of it takes a few minutes on an idle machine with two cores. `--parts` measures some of it.

Ratios are medians over repetitions.

rps_vs_*: requests for each CPU second of ours over theirs, on turns 2 to 8; stream_*: streamed.
first_turn_*: the same of first turns, which render the whole prompt.
added_p50_ms: a turn at concurrency 1, over calling the server directly; added_p50_relay_ms: the
relay's. episodes_*, bytes_*: 4,096 at once through one process; bytes beyond the
8 bytes of each token. turn128_vs_turn2: CPU for the same new text. stream_32k_vs_1k: CPU per
streamed token. cpu_4096_waiting_vs_64: CPU per turn with 4,096 episodes that ask at once over that
with 64; the server takes as many as it does by default, the others wait in the router.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvloop
from figures import say
from router_latency import seconds_added
from router_load import Conversation, Episodes, play
from router_report import OUT, report, write
from router_stage import Program, Stage

NUM_TURNS = 8
NUM_REPEATS = 7
NUM_CONVERSATIONS = 96
NUM_LITELLM = 8
CONCURRENCY = 32
NUM_LATENCIES = 400
SOAK_EPISODES = 4096
FEW_EPISODES = 64
NUM_WAITING_REPEATS = 3
SOAK_SECONDS_MAX = 900
SETTLE_S = 6.0
"""Longer than the router keeps idle connections to servers."""
LONG_TURNS = 128
NUM_LONG = 32
NUM_LONG_REPEATS = 5
NUM_COMPARED = 4
GROUP_SIZE = 8
TOKEN_BYTES = 8
STREAM_SIZES = (1024, 32768)


async def cpu_per_turn(
    program: Program, conversations: list[Conversation], num_turns: int, *, checked: bool
) -> float:
    """CPU seconds of `program` for each turn."""
    before = program.cpu_s
    await play(program.port, conversations, num_turns, concurrency=CONCURRENCY, checked=checked)
    return (program.cpu_s - before) / (num_turns * len(conversations))


class Bench:
    """All measurements."""

    def __init__(self, stage: Stage, *, is_quick: bool, parts: Sequence[str] = ()) -> None:
        self.stage = stage
        self.parts = parts or tuple(PARTS)
        self.scale = 8 if is_quick else 1
        # No text is said twice: a router that met it before would know its ids.
        self.names = (f"e{number:05d}" for number in itertools.count())
        self.episodes = Episodes(stage.run, stage.router.port, self.names)
        self.seconds: dict[str, list[float]] = {}
        self.figures: dict[str, float] = {}

    async def measure(self) -> dict[str, float]:
        """Every figure by name."""
        await self.episodes.register()
        for name in self.parts:
            started = time.perf_counter()
            say(f"part {name}")
            await PARTS[name](self)
            self.figures[f"{name}_took_s"] = time.perf_counter() - started
            write(self.figures)
        return self.figures

    async def turns(self) -> None:
        """Turns through every router, by turns."""
        await self._warm()
        num_repeats = max(1, NUM_REPEATS // self.scale)
        for number in range(num_repeats):
            say(f"turns, repetition {number + 1} of {num_repeats}")
            await self._throughput(is_streamed=False)
            await self._throughput(is_streamed=True)
            say("turns one at a time")
            await self._latency()
        self._summarise()

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    async def _warm(self) -> None:
        for is_streamed in (False, True):
            ours = await self.episodes.open(CONCURRENCY, is_streamed=is_streamed)
            await cpu_per_turn(self.stage.router, ours, 2, checked=True)
            await self.episodes.close(ours)
            for program in (self.stage.sglang_router, self.stage.relay):
                theirs = self._unkeyed(CONCURRENCY, is_streamed)
                await cpu_per_turn(program, theirs, 2, checked=False)
            litellm = self._unkeyed(4, is_streamed)
            await cpu_per_turn(self.stage.litellm, litellm, 2, checked=False)

    def _unkeyed(self, number: int, is_streamed: bool) -> list[Conversation]:
        key = self.stage.litellm_key
        return [Conversation(next(self.names), key, is_streamed) for _ in range(number)]

    async def _throughput(self, *, is_streamed: bool) -> None:
        """CPU per turn of every router on the same conversations, one after the other."""
        number = max(CONCURRENCY, NUM_CONVERSATIONS // self.scale)
        kind = "stream_" if is_streamed else ""
        say(f"{kind}turns through ours")
        ours = await self.episodes.open(number, is_streamed=is_streamed)
        router = self.stage.router
        self._note(f"{kind}first", await cpu_per_turn(router, ours, 1, checked=True))
        redis = self._redis_cpu_s()
        self._note(f"{kind}ours", await cpu_per_turn(router, ours, NUM_TURNS - 1, checked=True))
        self._note(f"{kind}redis", (self._redis_cpu_s() - redis) / (number * (NUM_TURNS - 1)))
        assert not sum(one.num_mixed for one in ours)
        await self.episodes.close(ours)
        for name in ("sglang_router", "relay", "litellm"):
            say(f"{kind}turns through {name}")
            program: Program = getattr(self.stage, name)
            theirs = self._unkeyed(NUM_LITELLM if name == "litellm" else number, is_streamed)
            first = await cpu_per_turn(program, theirs, 1, checked=False)
            self._note(f"{kind}{name}_first", first)
            rest = await cpu_per_turn(program, theirs, NUM_TURNS - 1, checked=False)
            self._note(f"{kind}{name}", rest)

    def _redis_cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.stage.redis.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9

    async def _latency(self) -> None:
        """Latency at concurrency 1, ours and the bare relay's, by turns."""
        number = max(1, NUM_LATENCIES // NUM_REPEATS // NUM_TURNS // self.scale)
        for chat in await self.episodes.open(number):
            added = await seconds_added(self.stage, chat, NUM_TURNS)
            await self.episodes.close([chat])
            for name, seconds in added.items():
                self._note(f"added_{name}", seconds)

    def _summarise(self) -> None:
        s = {name: statistics.median(values) for name, values in self.seconds.items()}
        figures, ratio = self.figures, self._ratio
        figures["rps_vs_sglang_router"] = ratio("sglang_router", "ours")
        figures["rps_vs_litellm"] = ratio("litellm", "ours")
        figures["stream_rps_vs_sglang_router"] = ratio("stream_sglang_router", "stream_ours")
        figures["stream_rps_vs_litellm"] = ratio("stream_litellm", "stream_ours")
        figures["added_p50_ms"] = 1000 * s["added_ours"]
        figures["added_p50_relay_ms"] = 1000 * s["added_relay"]
        figures["first_turn_vs_sglang_router"] = ratio("sglang_router_first", "first")
        for name in ("ours", "sglang_router", "litellm", "relay"):
            for kind in ("", "stream_"):
                figures[f"{kind}rps_per_core_{name}"] = 1 / s[kind + name]
        for name in ("ours", "relay", "redis"):
            figures[f"cpu_us_{name}"] = 1e6 * s[name]
        figures["cpu_us_first"] = 1e6 * s["first"]
        figures["cpu_us_stream_ours"] = 1e6 * s["stream_ours"]

    def _ratio(self, over: str, under: str) -> float:
        """Median over repetitions, whose parts met the same machine."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        return statistics.median(one / other for one, other in pairs)

    async def streams(self) -> None:
        """CPU for each token of a short and of a long stream."""
        per_token = {}
        for num_tokens in STREAM_SIZES:
            number = max(1, 65_536 // num_tokens // self.scale)
            say(f"{number} streams of {num_tokens} tokens")
            chats = await self.episodes.open(number, is_streamed=True, max_tokens=num_tokens)
            each = await cpu_per_turn(self.stage.router, chats, 1, checked=True)
            assert not sum(chat.num_mixed for chat in chats)
            per_token[num_tokens] = each / num_tokens
            await self.episodes.close(chats)
        small, large = STREAM_SIZES
        self.figures["stream_32k_vs_1k"] = per_token[large] / per_token[small]
        self.figures["cpu_us_streamed_token"] = 1e6 * per_token[large]

    async def long(self) -> None:
        """CPU of turns at the beginning and at the end of long conversations, for the same new
        text, one right after the other."""
        number, router = max(8, NUM_LONG // self.scale), self.stage.router
        for _ in range(max(1, NUM_LONG_REPEATS // self.scale)):
            say(f"{LONG_TURNS} turns of {number} episodes")
            old = await self.episodes.open(number)
            await cpu_per_turn(router, old, LONG_TURNS - NUM_COMPARED, checked=True)
            new = await self.episodes.open(number)
            await cpu_per_turn(router, new, 1, checked=True)
            self._note("early", await cpu_per_turn(router, new, NUM_COMPARED, checked=True))
            self._note("late", await cpu_per_turn(router, old, NUM_COMPARED, checked=True))
            await self.episodes.close([*old, *new])
        self.figures["turn128_vs_turn2"] = self._ratio("late", "early")
        self.figures["cpu_us_turn128"] = 1e6 * statistics.median(self.seconds["late"])

    async def waiting(self) -> None:
        """CPU of a turn where thousands wait for the server, and where none does."""
        router = self.stage.start_router()
        try:
            episodes = Episodes(self.stage.run, router.port, self.names, first_claim=20_000)
            per_turn: dict[int, list[float]] = {}
            for number in (FEW_EPISODES, SOAK_EPISODES // self.scale):
                say(f"{number} episodes ask at once")
                chats = await episodes.open(number)
                await play(router.port, chats, 1, concurrency=number, checked=True)
                for _ in range(NUM_WAITING_REPEATS):
                    before = router.cpu_s
                    await play(router.port, chats, 1, concurrency=number, checked=True)
                    each = (router.cpu_s - before) / number
                    per_turn.setdefault(number, []).append(each)
                assert not sum(chat.num_mixed for chat in chats)
            few, many = (statistics.median(values) for values in per_turn.values())
            self.figures["cpu_4096_waiting_vs_64"] = many / few
            self.figures["cpu_us_4096_waiting"] = 1e6 * many
        finally:
            router.stop()

    async def soak(self) -> None:
        """Thousands of episodes at once through one fresh process; every turn of each is there."""
        router = self.stage.start_router()
        try:
            episodes = Episodes(self.stage.run, router.port, self.names, first_claim=10_000)
            number = SOAK_EPISODES // self.scale
            async with asyncio.timeout(SOAK_SECONDS_MAX):
                warm = await episodes.open(CONCURRENCY)
                await play(router.port, warm, 2, concurrency=CONCURRENCY, checked=True)
                before = router.rss_bytes
                say(f"opening {number} episodes")
                chats = await episodes.open(number)
                say(f"{NUM_TURNS} turns of each, all at once")
                started = time.perf_counter()
                await play(router.port, chats, NUM_TURNS, concurrency=number, checked=True)
                took = time.perf_counter() - started
            # An open episode has no connection between its turns.
            await asyncio.sleep(SETTLE_S)
            held = router.rss_bytes - before
            say("reading what was recorded of each")
            num_tokens = num_lost = 0
            for chat in chats:
                loaded = self.stage.reader.load_episode(chat.episode_id)
                turns = loaded.turns if loaded is not None else ()
                num_lost += len(turns) != NUM_TURNS
                num_tokens += sum(len(t.prompt_ids) + len(t.output_ids) for t in turns)
            self.figures["episodes_played"] = number
            self.figures["episodes_lost"] = num_lost
            self.figures["episodes_mixed"] = sum(chat.num_mixed for chat in chats)
            self.figures["bytes_per_open_episode"] = (
                held / number - TOKEN_BYTES * num_tokens / number
            )
            self.figures["tokens_per_open_episode"] = num_tokens / number
            self.figures["soak_turns_per_s"] = number * NUM_TURNS / took
        finally:
            router.stop()


PARTS: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "turns": Bench.turns,
    "streams": Bench.streams,
    "long": Bench.long,
    "waiting": Bench.waiting,
    "soak": Bench.soak,
}


def main() -> None:
    """Start everything, measure, report."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    asked = argparse.ArgumentParser()
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--parts", type=lambda words: words.split(","), default=list(PARTS))
    options = asked.parse_args()
    # Ended from outside, it ends its programs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before it was through"))
    num_groups = 4 * SOAK_EPISODES // GROUP_SIZE
    with tempfile.TemporaryDirectory() as folder:
        OUT.mkdir(parents=True, exist_ok=True)
        stage = Stage(
            Path(folder) / "bench",
            OUT / "router-model",
            group_size=GROUP_SIZE,
            num_groups=num_groups,
        )
        try:
            figures = uvloop.run(
                Bench(stage, is_quick=options.quick, parts=options.parts).measure()
            )
        finally:
            stage.close()
    report(figures)


if __name__ == "__main__":
    main()
