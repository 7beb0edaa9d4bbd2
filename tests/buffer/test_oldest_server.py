"""What the buffer asks of a server: commands that Redis 6.2 has."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis

SCRIPTS = Path(__file__).resolve().parents[2] / "buffer" / "redis" / "scripts"
OLDEST = (6, 2)


def called_by_scripts() -> set[str]:
    """Every command that a script names; each is named by a literal."""
    text = "\n".join(path.read_text() for path in SCRIPTS.glob("*.lua"))
    names = re.findall(r"redis\.p?call\('([A-Z]+)'", text)
    assert len(names) == len(re.findall(r"redis\.p?call\(", text))
    return {name.lower() for name in names}


@pytest.mark.medium
async def test_no_command_is_newer_than_redis_6_2(
    loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """Of the scripts, and of both faces in a run from claim to acknowledgement, the server's own
    word on since when it has them."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as server:
        loop = await loop_on(server.url)
        await loop.play_all()
        leases = loop.take(2)
        loop.reader.acknowledge(loop.train(leases, 1))
        loop.reader.stats()
        client = connect_sync(server.url)
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        names = called_by_scripts() | {name.partition("|")[0] for name in used}
        assert {"evalsha", "hmget", "lrange", "zadd"} <= names
        version = client.info("server")["redis_version"]
        if tuple(map(int, version.split(".")[:2])) <= OLDEST:
            # It has no word on that, and is the proof itself.
            return
        docs: Any = client.execute_command("COMMAND DOCS", *sorted(names))
        client.close()
    words = docs if isinstance(docs, dict) else dict(zip(docs[::2], docs[1::2], strict=True))
    assert {name.decode() for name in words} == names
    for name, doc in words.items():
        facts = doc if isinstance(doc, dict) else dict(zip(doc[::2], doc[1::2], strict=True))
        major, minor, _ = map(int, facts[b"since"].split(b"."))
        assert (major, minor) <= OLDEST, name
