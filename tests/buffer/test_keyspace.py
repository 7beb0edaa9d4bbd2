"""Every key that a run writes is declared: its type, how long it lives and who creates it."""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fakes.twin import Twin
from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import Gone
from outloop.buffer.records import Reward, ServerEntry, Task, Trajectory, Turn
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import KEYS, KeySpec, prefix
from outloop.buffer.redis.scripts import load_script

CREATES = (
    "SET",
    "HSET",
    "HSETNX",
    "HINCRBY",
    "RPUSH",
    "LPUSH",
    "SADD",
    "ZADD",
    "ZINCRBY",
    "RENAME",
)
SCRIPTS = sorted(
    file.name.removesuffix(".lua")
    for file in files("outloop.buffer.redis.scripts").iterdir()
    if file.name.endswith(".lua") and file.name not in ("core.lua", "lifecycle.lua")
)
LIVES_SHORT = ("10 minutes", "until its end, plus one hour")


def spec_of(name: str) -> KeySpec:
    """The one declaration that fits a key's name after its prefix."""
    fitting = [
        spec
        for spec in KEYS
        if re.fullmatch(re.sub(r"[A-Z]+", "[^:]+(:[^:]+)?", spec.name), name)
        and spec.name.count(":") <= name.count(":")
    ]
    # `eval:0:main:rewards` fits `eval:NAME` too; the longest literal part decides.
    assert fitting, f"{name} is not declared"
    return max(fitting, key=lambda spec: len(re.sub(r"[A-Z]+", "", spec.name)))


def without_tag(key: str) -> str:
    """The name of a key."""
    return key.partition("}:")[2]


class Witness(Twin):
    """A twin that notes which script touches which key."""

    def __init__(self) -> None:
        super().__init__()
        self.script = ""
        self.touched: dict[str, set[str]] = defaultdict(set)
        """By script."""
        self.creators: dict[str, set[str]] = defaultdict(set)
        """Scripts, or "commands", by key."""

    def _evalsha(self, sha1: bytes, num_keys: bytes, *words: bytes) -> Any:
        return self._as_script(super()._evalsha, sha1, num_keys, *words)

    def _eval(self, text: bytes, num_keys: bytes, *words: bytes) -> Any:
        return self._as_script(super()._eval, text, num_keys, *words)

    def _as_script(self, run: Callable[..., Any], source: bytes, *words: bytes) -> Any:
        known = {load_script(name).sha1.encode(): name for name in SCRIPTS}
        known |= {load_script(name).text.encode(): name for name in SCRIPTS}
        self.script = known[source]
        try:
            return run(source, *words)
        finally:
            self.script = ""

    def run(self, words: list[bytes]) -> Any:
        command = words[0].decode().upper()
        if command in CREATES or self.script:
            for key in self._keys_of(command, words):
                self.touched[self.script].add(key)
            created = words[2 if command == "RENAME" else 1]
            if command in CREATES and created not in self.data:
                self.creators[created.decode()].add(self.script or "commands")
        return super().run(words)

    @staticmethod
    def _keys_of(command: str, words: list[bytes]) -> list[str]:
        if command == "TIME":
            return []
        if command in ("DEL", "EXISTS"):
            return [word.decode() for word in words[1:]]
        return [word.decode() for word in words[1 : 3 if command == "RENAME" else 2]]


async def everything(
    loop: Any,
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
    folder: Path,
    look: Callable[[], object],
) -> None:
    """Every transition once: play, fail, resume, replace, drop, train, checkpoint, recover."""
    reader, writer = loop.reader, loop.writer
    entry = ServerEntry(
        server_id="s", url="http://s", kind="torch", policy_version=None, is_quarantined=False
    )
    reader.registry.register_server(entry)
    reader.registry.register_frozen(entry)
    reader.registry.set_server_version("s", 0, quarantined=False)
    reader.registry.set_released("s", ["kv_cache"])
    reader.registry.claim_devices()
    reader.registry.register_part("router", {"url": "x"})
    reader.registry.report_status("router", {"doing": "x"})
    reader.trajectories.open(10**6)
    reader.request_eval(
        "0:main",
        policy_version=0,
        num_episodes=1,
        sampling={"temperature": 0.0},
        blocks_training=True,
    )
    look()
    (claim,) = (await loop.claim(1)).claims
    await loop.play(claim)
    await writer.heartbeat("r1")
    claims = (await loop.claim(4)).claims
    for index, claim in enumerate(claims):
        episode_id = await loop.open(claim)
        await writer.append_turn(make_turn(episode_id))
        await writer.refusal_notes.put(episode_id, "turns", "spent", is_budget=True)
        kind = ("infrastructure", "environment", None, None)[index]
        if kind:
            await loop.close(episode_id, None, failure_kind=kind, outcome="failed")
    for claim in (await loop.claim(2)).claims:
        await loop.play(claim)
    for claim in claims[2:]:
        episode_id = f"{claim.group_id}-{claim.attempt}"
        await writer.put_reward(episode_id, Reward(value=1.0), key="early")
        await loop.close(episode_id, None)
    look()
    reader.renew(loop.fence)
    reader.ledger()
    first, second = loop.take(2)
    look()
    reader.drop(first.group.group_id, "malformed", fence=loop.fence, error="odd")
    reader.acknowledge(loop.train([second], 1))
    for claim in (await loop.claim(2)).claims:
        await loop.play(claim, version=1)
    look()
    reader.dead_letters.requeue(first.group.group_id)
    reader.task_weights.change({"tasks": 2.0})
    reader.limits.change(pipeline_depth="auto", max_staleness=1)
    sft = make_trajectory("sft-1")
    await writer.put_trajectories([sft], key="k", final=True)
    path = folder / "file.jsonl"
    path.write_bytes(format_line(make_trajectory("sft-2")))
    reader.archive.read(path)
    look()
    reader.runner_keys.add("gpu-7")
    loop.fence = reader.acquire_fence()
    highest = reader.recover(None, fence=loop.fence)
    loop.publish(highest + 1, None)
    reader.trajectories.acknowledge(100)
    (claim, other, *_) = (await loop.claim(3, "r1")).claims
    episode_id = await loop.open(other)
    with pytest.raises(Gone, match="abandoned"):
        await writer.append_turn(make_turn(episode_id, version=0))
    episode_id = await loop.open(claim)
    await writer.append_turn(make_turn(episode_id, version=highest + 1))
    await loop.close(episode_id, None, failure_kind="infrastructure", outcome="failed")
    look()
    await loop.play_all(version=highest + 1)
    look()


def tasks_with_priorities(loop_of: Callable[..., Any]) -> Any:
    """A loop whose tasks are not all equal."""

    class Urgent(loop_of):  # type: ignore[misc, valid-type]
        async def start(self, num_tasks: int = 10, **_: Any) -> None:
            await self.writer.register_tasks(
                [Task(task_id=f"t{i}", payload={"n": i}, priority=i % 2) for i in range(num_tasks)],
                [Task(task_id="e0", payload={"n": -1})],
            )
            self.fence = self.reader.acquire_fence()
            self.reader.recover(None, fence=self.fence)
            self.publish(0, None)

    return Urgent


Play = Callable[..., Awaitable[str]]
"""Everything, on the server at a URL; the run's prefix, which `look` gets now and then."""


@pytest.fixture
def play_on(
    make_run: Callable[..., Any],
    connect_faces: Callable[..., Any],
    make_turn: Callable[..., Turn],
    make_trajectory: Callable[..., Trajectory],
    loop_of: Callable[..., Any],
    tmp_path: Path,
) -> Play:
    """Plays."""

    async def play(url: str, look: Callable[[str], object] = lambda tag: None) -> str:
        run = make_run(url, buffer__group_deadline_s=60)
        writer, reader = await connect_faces(run)
        loop = tasks_with_priorities(loop_of)(writer, reader)
        await loop.start()
        tag = prefix(run.run_id)
        await everything(loop, make_turn, make_trajectory, tmp_path, lambda: look(tag))
        await writer.close()
        return tag

    return play


async def test_every_key_carries_the_tag_of_its_run(clients: Any, play_on: Play) -> None:
    """Each script was run; a cluster has all keys of a run on one primary."""
    witness = Witness()
    tag = await play_on(clients.add(witness))
    assert set(SCRIPTS) <= set(witness.touched)
    for script, keys in witness.touched.items():
        assert keys, script
        assert not {key for key in keys if not key.startswith(tag)}, script


async def test_every_key_has_its_declared_creator(clients: Any, play_on: Play) -> None:
    """By the scripts that the table names, by several where it says so, or by a plain call()."""
    witness = Witness()
    await play_on(clients.add(witness))
    by_spec: dict[str, set[str]] = defaultdict(set)
    for key, creators in witness.creators.items():
        by_spec[spec_of(without_tag(key)).name] |= creators
    declared = {
        spec.name: {name.removesuffix("()") for name in spec.written_by.split(", ")}
        for spec in KEYS
        if spec.written_by != "scripts"
    }
    calls = {spec.name for spec in KEYS if spec.written_by.endswith("()")}
    assert {name: by_spec[name] for name in calls} == {name: {"commands"} for name in calls}
    others = {name: (by_spec[name], declared[name]) for name in declared if name not in calls}
    assert {name: pair for name, pair in others.items() if not pair[0] <= pair[1]} == {}
    assert {spec.name for spec in KEYS} == {name for name in by_spec if by_spec[name]}


@pytest.mark.medium
async def test_a_real_run_s_keys_are_the_declared_ones(
    server: EmbeddedRedis, play_on: Play
) -> None:
    """On Redis: names and types are those of the table, and so is whether a key expires."""
    client = connect_sync(server.url)
    seen = set()

    def look(tag: str) -> None:
        for key in client.scan_iter(match=f"{tag.partition(':')[0]}:*"):
            spec = spec_of(without_tag(key.decode()))
            assert key.decode().startswith(tag), key
            seen.add(spec.name)
            assert client.type(key).decode() == spec.type, key
            expires = client.pttl(key) >= 0
            assert not expires or spec.lifetime in LIVES_SHORT, (key, spec.lifetime)
            assert expires or spec.lifetime != "10 minutes", key

    await play_on(server.url, look)
    client.close()
    missing = {spec.name for spec in KEYS} - seen
    assert missing == {"staged:TOKEN:NUMBER"}, "what is staged is taken over in the same call"
