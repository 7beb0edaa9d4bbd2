"""The programs of `make bench-fleet`: Redis, one router, and many servers in two processes.

Owns: starting and ending them, which servers are registered. Does not own: load, figures.
Invariant: everything started here is ended here, by its id.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import redis
from router_stage import MOCK, Program, start

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.ports import free_ports

NUM_PROCESSES = 2
"""That the fake servers share."""


class FleetStage:
    """A router, and as many servers as are asked for; `close` ends them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        num_servers: int,
        num_episodes: int,
        latency_s: float,
        max_in_flight: int,
    ) -> None:
        with ExitStack() as started:
            self._redis = EmbeddedRedis(folder / "redis", fsync="everysec", max_memory_mb=4096)
            url = self._redis.start()
            started.callback(self._redis.stop)
            settings = build_settings(
                {
                    "run": {"name": "fleet", "dir": str(folder)},
                    "model": {
                        "path": str(model),
                        "renderer": "qwen3",
                        "renderer_options": {"enable_thinking": False},
                        "max_context_tokens": 100_000,
                    },
                    "env": {"episode_deadline_s": 7200},
                    "server": {"num_servers": num_servers, "max_running_requests": max_in_flight},
                    "buffer": {"group_size": 8, "max_staleness": 0, "group_deadline_s": 7200},
                    "trainer": {"groups_per_step": -(-num_episodes // 8)},
                },
                source="bench",
            )
            self.run = create_run(settings, folder / "run", url)
            init_run(self.run)
            self._client = redis.Redis.from_url(url)
            started.callback(self._client.close)
            self._reader = BufferReader.connect(self.run)
            started.callback(self._reader.close)
            self._reader.announce_version(0, None)
            port, *self._ports = free_ports(1 + num_servers)
            for first in range(min(NUM_PROCESSES, num_servers)):
                ports = self._ports[first::NUM_PROCESSES]
                words = [",".join(map(str, ports)), latency_s]
                command = [sys.executable, MOCK, "serve", *words]
                mock = start(command, ports[0], folder / f"servers-{first}.log")
                started.callback(mock.stop)
            self._keys: list[bytes] = []
            self.register(num_servers)
            # Before there are episodes: later to look for them takes minutes.
            for name in ("servers", "server_versions"):
                self._keys += self._client.scan_iter(f"*:{name}")
            self._reader.acknowledge_version(0)
            command = [sys.executable, "-m", "outloop.cli", "router", "--run", self.run.dir]
            self.router: Program = start([*command, "--port", port], port, folder / "router.log")
            started.callback(self.router.stop)
            # Programs that have started are ended if a later one does not start.
            self._started = started.pop_all()

    def close(self) -> None:
        """End everything."""
        self._started.close()

    def register(self, number: int) -> None:
        """Have exactly the first `number` servers in the registry."""
        for index, port in enumerate(self._ports):
            server_id = f"server-{index:02}"
            if index < number:
                entry = ServerEntry(
                    server_id=server_id,
                    url=f"http://127.0.0.1:{port}",
                    kind="torch",
                    policy_version=0,
                    is_quarantined=False,
                )
                self._reader.registry.register_server(entry)
                self._reader.registry.set_server_version(server_id, 0, quarantined=False)
                continue
            # Nothing of ours takes a server out of a run that goes on.
            for key in self._keys:
                self._client.hdel(key, server_id)
