"""Tokens per second of a server at a given concurrency, by hand:

    python tests/bench/bench_server.py http://127.0.0.1:PORT [--concurrency 128] [--seconds 10]

Plays two-turn episodes: a prompt of about 80 ids whose first part all episodes share, an answer of
about 15, then a second turn that extends the first. Prints one JSON line.
"""

import argparse
import asyncio
import json
import random
import time

import aiohttp

SHARED_IDS = 60
OWN_IDS = 20
TOOL_IDS = 12
NEW_IDS = 15


async def episode(session: aiohttp.ClientSession, url: str, rng: random.Random, vocab: int) -> int:
    """Two turns; returns the number of ids sampled."""
    ids = [2 + i % (vocab - 2) for i in range(SHARED_IDS)]
    ids += [rng.randrange(2, vocab) for _ in range(OWN_IDS)]
    sampled = 0
    for _ in range(2):
        body = {
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": rng.randint(NEW_IDS - 7, NEW_IDS + 7),
                "temperature": 1.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "extra_key": "0",
        }
        async with session.post(f"{url}/generate", json=body) as response:
            answer = json.loads(await response.read())
        new = answer["output_ids"]
        sampled += len(new)
        ids = ids + new + [rng.randrange(2, vocab) for _ in range(TOOL_IDS)]
    return sampled


async def measure(url: str, concurrency: int, seconds: float) -> dict[str, float]:
    """Requests and ids per second, closed loop."""
    rng = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"{url}/server_info") as response:
            vocab = (await response.json())["vocab_size"]
        sampled = num = 0
        end_at = time.monotonic() + seconds

        async def agent() -> None:
            nonlocal sampled, num
            while time.monotonic() < end_at:
                new = await episode(session, url, rng, vocab)
                sampled += new
                num += 2

        began_at = time.monotonic()
        await asyncio.gather(*(agent() for _ in range(concurrency)))
        took = time.monotonic() - began_at
    return {
        "concurrency": concurrency,
        "requests_per_s": round(num / took, 1),
        "new_tokens_per_s": round(sampled / took, 1),
        "mean_latency_ms": round(1000 * took * concurrency / max(1, num), 1),
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.url, arguments.concurrency, arguments.seconds))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
