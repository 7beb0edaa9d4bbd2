"""A server that holds an earlier version of the policy while the run goes on.

It takes no publishes: it loads what the trainer keeps in the run's folder, and moves to a newer
version when one is kept for it and no evaluation of its own goes on. Before it moves it takes no
new turns and lets the running ones end. Under the version that it names, only weights of that
version are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog
import torch

from outloop.buffer.errors import DeadlineExceeded, PublishFailed, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import Run
from outloop.engine.models.kept_versions import due_version, version_folder
from outloop.engine.models.safetensors_folder import HuggingFaceFolder
from outloop.engine.publish.server_client import ServerClient, flush_paused
from outloop.engine.publish.verification.accounts import compare_checksums
from outloop.engine.publish.verification.checksum import tensor_checksum
from outloop.engine.serve.logprob_convention import check_logprobs

_POLL_S = 0.5
_NOTICE_S = 1.0
"""Within this time every router has seen that the server takes no more turns."""
_MAX_DRAIN_S = 20.0
"""Turns that run longer are aborted when the server moves to another version."""
_DRAIN_POLL_S = 0.1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_log = structlog.get_logger()


class FrozenServer:
    """Server `frozen-{index}` of a run, once it answers at `url`."""

    def __init__(self, run: Run, index: int, url: str) -> None:
        self._run = run
        self._index = index
        self._url = url
        self._server_id = f"frozen-{index}"
        self._client = ServerClient(self._server_id, url, key=run.server_key)

    async def follow(self, stop: asyncio.Event) -> None:
        """Hold what is kept for this server, until `stop`.

        Raises:
            SettingsError: its logprobs are not those that training needs.
            ServerUnavailable, DeadlineExceeded, PublishFailed: it does not load a version that is
                there.
        """
        server = self._run.settings.server
        held: int | None = None
        try:
            await asyncio.to_thread(
                check_logprobs,
                self._server_id,
                self._url,
                dtype=server.dtype,
                timeout_s=server.start_timeout_s,
                key=self._run.server_key,
            )
            await asyncio.to_thread(self._enter, None)
            while not stop.is_set():
                due = due_version(server, self._run.dir, self._index)
                if (
                    due is not None
                    and due != held
                    and not await asyncio.to_thread(self._is_evaluated, held)
                ):
                    if held is not None:
                        await self._leave(stop)
                    held = due if await asyncio.to_thread(self._load, due) else None
                    await asyncio.to_thread(self._enter, held)
                await _wait(stop, _POLL_S)
        finally:
            await asyncio.to_thread(self._enter, None)
            self._client.close()

    def _is_evaluated(self, policy_version: int | None) -> bool:
        """Whether an evaluation of this version goes on, whose episodes are sampled here."""
        if policy_version is None:
            return False
        reader = BufferReader.connect(self._run)
        try:
            return reader.is_evaluated(policy_version)
        finally:
            reader.close()

    def _enter(self, policy_version: int | None) -> None:
        """Tell routers which version is here; None: none, so that no turns come."""
        entry = ServerEntry(
            server_id=self._server_id,
            url=self._url,
            kind=self._run.settings.server.kind,
            policy_version=policy_version,
            is_quarantined=False,
            is_frozen=True,
        )
        reader = BufferReader.connect(self._run)
        try:
            reader.registry.register_frozen(entry)
        finally:
            reader.close()

    async def _leave(self, stop: asyncio.Event) -> None:
        """Take no more turns, and let those that run end."""
        await asyncio.to_thread(self._enter, None)
        await _wait(stop, _NOTICE_S)
        deadline = time.monotonic() + _MAX_DRAIN_S
        while time.monotonic() < deadline and not stop.is_set():
            if await asyncio.to_thread(self._is_idle, deadline):
                return
            await _wait(stop, _DRAIN_POLL_S)

    def _is_idle(self, deadline: float) -> bool:
        try:
            self._client.flush_cache(deadline)
        except (PublishFailed, DeadlineExceeded):
            return False
        return True

    def _load(self, policy_version: int) -> bool:
        """Load a version and compare what is held with its folder; False if a newer one has
        replaced it meanwhile."""
        folder = version_folder(self._run.dir, policy_version)
        deadline = time.monotonic() + self._run.settings.publish.phase_timeout_s
        try:
            self._client.pause("abort", deadline)
            flush_paused(self._client, "abort", deadline)
            self._client.update_from_disk(str(folder), deadline)
            self._verify(policy_version, deadline)
            self._client.set_version(str(policy_version), deadline)
            self._client.resume(deadline)
        except (PublishFailed, SettingsError, OSError):
            if due_version(self._run.settings.server, self._run.dir, self._index) == policy_version:
                raise
            _log.info("version_replaced", server_id=self._server_id, policy_version=policy_version)
            return False
        _log.info("version_loaded", server_id=self._server_id, policy_version=policy_version)
        return True

    def _verify(self, policy_version: int, deadline: float) -> None:
        dtype = _DTYPES[self._run.settings.server.dtype]
        with HuggingFaceFolder(version_folder(self._run.dir, policy_version)) as folder:
            kept = {name: tensor_checksum(folder.read(name).to(dtype)) for name in folder.shapes}
        (held,) = self._client.checksums("xxh3_128", deadline)
        compare_checksums(self._server_id, kept, held)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
