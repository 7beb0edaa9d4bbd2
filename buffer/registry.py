"""The run's registry of processes: servers, the versions they hold, parts, statuses."""

from __future__ import annotations

from typing import Any

import msgspec
import redis

from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.client import translated

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def encode_facts(facts: dict[str, str]) -> bytes:
    """Bytes of a part's facts or status."""
    return msgspec.json.encode(facts)


def decode_facts(entries: dict[bytes, bytes]) -> dict[str, dict[str, str]]:
    """Every part's facts or status."""
    return {
        name.decode(): msgspec.json.decode(data, type=dict[str, str])
        for name, data in entries.items()
    }


def advertised_url(host: str, port: int, advertise: str | None) -> str:
    """The URL to register for a part that listens on `host`.

    `advertise` is the name or address at which other machines reach it. Without it, a part that
    listens on every interface is registered with the loopback address, which is right on one
    machine.
    """
    name = advertise or _LOOPBACK.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def encode_address(entry: ServerEntry) -> bytes:
    """Bytes of a server's address and kind."""
    return msgspec.json.encode([entry.url, entry.kind])


def encode_version(policy_version: int | None, quarantined: bool) -> bytes:
    """Bytes of the version that a server holds now."""
    return msgspec.json.encode([policy_version, quarantined])


def decode_servers(
    addresses: dict[bytes, bytes], versions: dict[bytes, bytes]
) -> tuple[ServerEntry, ...]:
    """Every registered server, by id."""
    entries = []
    for server_id, data in sorted(addresses.items()):
        url, kind = msgspec.json.decode(data, type=tuple[str, str])
        version, quarantined = msgspec.json.decode(
            versions.get(server_id, b"[null,false]"), type=tuple[int | None, bool]
        )
        entries.append(
            ServerEntry(
                server_id=server_id.decode(),
                url=url,
                kind=kind,
                policy_version=version,
                is_quarantined=quarantined,
            )
        )
    return tuple(entries)


class Registry:
    """The processes of one run, through a blocking client."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def _key(self, name: str) -> str:
        return self._prefix + name

    def register_server(self, entry: ServerEntry) -> None:
        """Enter a server and the version that it holds."""
        with (
            translated(f"registering server_id={entry.server_id}"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hset(self._key("servers"), entry.server_id, encode_address(entry))
            version = encode_version(entry.policy_version, entry.is_quarantined)
            pipeline.hset(self._key("server_versions"), entry.server_id, version)
            pipeline.execute()

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter the version that a server holds now."""
        version = encode_version(policy_version, quarantined)
        with translated(f"entering the version of server_id={server_id}"):
            self._client.hset(self._key("server_versions"), server_id, version)

    def servers(self) -> tuple[ServerEntry, ...]:
        """Every registered server, by id."""
        with (
            translated("reading the servers"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hgetall(self._key("servers"))
            pipeline.hgetall(self._key("server_versions"))
            addresses, versions = pipeline.execute()
        return decode_servers(addresses, versions)

    def register_part(self, name: str, facts: dict[str, str]) -> None:
        """Enter a part's address and other facts."""
        with translated(f"registering part={name}"):
            self._client.hset(self._key("parts"), name, encode_facts(facts))

    def parts(self) -> dict[str, dict[str, str]]:
        """Every registered part's facts."""
        with translated("reading the parts"):
            entries: Any = self._client.hgetall(self._key("parts"))
        return decode_facts(entries)

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        """Report what a part is doing; replaces its last report."""
        with translated(f"reporting status of part={part}"):
            self._client.hset(self._key("statuses"), part, encode_facts(fields))

    def statuses(self) -> dict[str, dict[str, str]]:
        """The last report of every part."""
        with translated("reading the statuses"):
            entries: Any = self._client.hgetall(self._key("statuses"))
        return decode_facts(entries)
