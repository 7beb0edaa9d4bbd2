"""The run's registry of processes: servers, the versions they hold, parts, statuses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import redis

from outloop.buffer.records import Libraries, ServerEntry
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import Argument, SyncScripts

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_TRAINER = "trainer"
"""The trainer's field among the claims of devices; the others are servers."""


def encode_facts(facts: dict[str, str]) -> bytes:
    """Bytes of a part's facts or status."""
    return msgspec.json.encode(facts)


def decode_facts(entries: dict[bytes, bytes]) -> dict[str, dict[str, str]]:
    """Every part's facts or status."""
    return {
        name.decode(): msgspec.json.decode(data, type=dict[str, str])
        for name, data in entries.items()
    }


def advertised_url(host: str, port: int, advertise: str | None, *, is_tls: bool = False) -> str:
    """The URL to register for a part that listens on `host`.

    `advertise` is the name or address at which other machines reach it. Without it, a part that
    listens on every interface is registered with the loopback address, which is right on one
    machine.
    """
    name = advertise or _LOOPBACK.get(host, host)
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


class _Address(msgspec.Struct, array_like=True, frozen=True):
    """What does not change while a server runs; runs of earlier releases have no libraries."""

    url: str
    kind: str
    gpus: tuple[str, ...]
    libraries: Libraries = Libraries()


def encode_address(entry: ServerEntry) -> bytes:
    """Bytes of a server's address, kind, GPUs and libraries."""
    return msgspec.json.encode(_Address(entry.url, entry.kind, entry.gpus, entry.libraries))


def encode_version(policy_version: int | None, quarantined: bool) -> bytes:
    """Bytes of the version that a server holds now."""
    return msgspec.json.encode([policy_version, quarantined])


def decode_servers(
    addresses: dict[bytes, bytes],
    versions: dict[bytes, bytes],
    released: Mapping[bytes, bytes] = MappingProxyType({}),
) -> tuple[ServerEntry, ...]:
    """Every registered server, by id."""
    entries = []
    for server_id, data in sorted(addresses.items()):
        address = msgspec.json.decode(data, type=_Address)
        version, quarantined = msgspec.json.decode(
            versions.get(server_id, b"[null,false]"), type=tuple[int | None, bool]
        )
        entries.append(
            ServerEntry(
                server_id=server_id.decode(),
                url=address.url,
                kind=address.kind,
                policy_version=version,
                is_quarantined=quarantined,
                gpus=address.gpus,
                libraries=address.libraries,
                released=msgspec.json.decode(released.get(server_id, b"[]"), type=tuple[str, ...]),
            )
        )
    return tuple(entries)


def decode_frozen(entries: dict[bytes, bytes]) -> tuple[ServerEntry, ...]:
    """Every registered server of an earlier version, by id."""
    found = []
    for server_id, data in sorted(entries.items()):
        url, kind, version = msgspec.json.decode(data, type=tuple[str, str, int | None])
        found.append(
            ServerEntry(
                server_id=server_id.decode(),
                url=url,
                kind=kind,
                policy_version=version,
                is_quarantined=False,
                is_frozen=True,
            )
        )
    return tuple(found)


class Registry:
    """The processes of one run, through a blocking client."""

    def __init__(self, client: redis.Redis, prefix: str, scripts: SyncScripts) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _put(self, what: str, *fields: Argument) -> None:
        """Key, field and value, over and over: written together, also into a full Redis."""
        self._scripts.call("put_fields", *fields, what=what, is_counted=False)

    def register_server(self, entry: ServerEntry) -> None:
        """Enter a server and the version that it holds."""
        version = encode_version(entry.policy_version, entry.is_quarantined)
        self._put(
            f"registering server_id={entry.server_id}",
            *("servers", entry.server_id, encode_address(entry)),
            *("server_versions", entry.server_id, version),
            # A server that is entered has just started: it holds all of its memory.
            *("server_memory", entry.server_id, b""),
        )

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter the version that a server holds now."""
        version = encode_version(policy_version, quarantined)
        what = f"entering the version of server_id={server_id}"
        self._put(what, "server_versions", server_id, version)

    def register_frozen(self, entry: ServerEntry) -> None:
        """Enter a server of an earlier version, with the version that it holds now. Publishes pass
        it by."""
        held = msgspec.json.encode([entry.url, entry.kind, entry.policy_version])
        what = f"registering server_id={entry.server_id}"
        self._put(what, "frozen_servers", entry.server_id, held)

    def frozen_servers(self) -> tuple[ServerEntry, ...]:
        """Every registered server of an earlier version, by id."""
        with translated("reading the servers of earlier versions"):
            entries: Any = self._client.hgetall(self._key("frozen_servers"))
        return decode_frozen(entries)

    def servers(self) -> tuple[ServerEntry, ...]:
        """Every registered server that publishes go to, by id."""
        with (
            translated("reading the servers"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hgetall(self._key("servers"))
            pipeline.hgetall(self._key("server_versions"))
            pipeline.hgetall(self._key("server_memory"))
            addresses, versions, released = pipeline.execute()
        return decode_servers(addresses, versions, released)

    def set_released(self, server_id: str, tags: Sequence[str]) -> None:
        """Enter what of a server's memory is released; before it is asked, so that whoever comes
        later knows of it."""
        what = f"entering the memory of server_id={server_id}"
        self._put(what, "server_memory", server_id, msgspec.json.encode(tags))

    def claim_devices(self) -> tuple[str, ...]:
        """The trainer takes the GPUs that it shares with servers; no server starts from now on.

        Returns the servers that are starting, which must be waited for.
        """
        with (
            translated("claiming the devices"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hset(self._key("devices"), _TRAINER, "1")
            pipeline.hgetall(self._key("devices"))
            _, claims = pipeline.execute()
        now = time.time()
        return tuple(
            sorted(
                name.decode()
                for name, until in claims.items()
                if name.decode() != _TRAINER and float(until) > now
            )
        )

    def free_devices(self) -> None:
        """The trainer holds nothing on shared GPUs: servers may start there."""
        with translated("freeing the devices"):
            self._client.hdel(self._key("devices"), _TRAINER)

    def claim_start(self, server_id: str, *, timeout_s: float) -> bool:
        """Whether a server may start on GPUs that it shares with the trainer.

        If so, the trainer waits for `end_start` before it takes them, or for `timeout_s`.
        """
        until = f"{time.time() + timeout_s:.0f}"
        with (
            translated(f"claiming devices for server_id={server_id}"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hset(self._key("devices"), server_id, until)
            pipeline.hexists(self._key("devices"), _TRAINER)
            _, is_taken = pipeline.execute()
        if is_taken:
            self.end_start(server_id)
        return not is_taken

    def end_start(self, server_id: str) -> None:
        """A server has started, or has given up."""
        with translated(f"ending the start of server_id={server_id}"):
            self._client.hdel(self._key("devices"), server_id)

    def register_part(self, name: str, facts: dict[str, str]) -> None:
        """Enter a part's address and other facts."""
        self._put(f"registering part={name}", "parts", name, encode_facts(facts))

    def forget_part(self, name: str) -> None:
        """A part has ended: its address is nobody's."""
        with translated(f"forgetting part={name}"):
            self._client.hdel(self._key("parts"), name)

    def parts(self) -> dict[str, dict[str, str]]:
        """Every registered part's facts."""
        with translated("reading the parts"):
            entries: Any = self._client.hgetall(self._key("parts"))
        return decode_facts(entries)

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        """Report what a part is doing; replaces its last report."""
        self._put(f"reporting status of part={part}", "statuses", part, encode_facts(fields))

    def statuses(self) -> dict[str, dict[str, str]]:
        """The last report of every part."""
        with translated("reading the statuses"):
            entries: Any = self._client.hgetall(self._key("statuses"))
        return decode_facts(entries)
