"""Control calls to one server.

No call outlasts its deadline, and every answer but an explicit success is an error.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog

from outloop.buffer.errors import DeadlineExceeded, PublishFailed, ServerUnavailable

PauseMode = Literal["in_place", "retract", "abort"]
_MAX_IDLE_S = 2.0
"""Servers close idle connections; an older one than this is not trusted."""
_CHUNK_BYTES = 1 << 16
_FLUSH_PAUSE_S = 0.1
_log = structlog.get_logger()


class KeyRefused(PublishFailed):
    """The server wants a key, or another one."""


class ServerClient:
    """Speaks SGLang's control routes; one thread at a time. `deadline` is in monotonic seconds."""

    def __init__(self, server_id: str, url: str, *, key: str | None = None) -> None:
        """`key`: sent as a bearer token, see `Run.server_key`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerUnavailable(
                f"server {server_id} has url={url!r}; http://HOST:PORT or https://HOST:PORT is "
                "allowed"
            )
        self.server_id = server_id
        self.url = url
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(parts.hostname, parts.port or 443)
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80)
        self._used_at = 0.0
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def model_info(self, deadline: float) -> dict[str, Any]:
        """What is loaded; also shows whether the server answers while paused."""
        return self._call("GET", "/model_info", None, deadline)

    def server_info(self, deadline: float) -> dict[str, Any]:
        """What the server was started with."""
        return self._call("GET", "/server_info", None, deadline)

    def generate(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """One answer, not streamed."""
        return self._call("POST", "/generate", body, deadline)

    def pause(self, mode: PauseMode, deadline: float) -> None:
        """Hold every turn; in-flight ones by `mode`."""
        self._call("POST", "/pause_generation", {"mode": mode}, deadline)

    def resume(self, deadline: float) -> None:
        """Let turns go on."""
        self._call("POST", "/continue_generation", {}, deadline)

    def flush_cache(self, deadline: float) -> None:
        """Drop every cached prefix; shows that nothing runs.

        Raises:
            PublishFailed: requests run, or wait without a pause.
        """
        self._call("POST", "/flush_cache", {}, deadline, is_text=True)

    def release_memory(self, tags: Sequence[str], deadline: float) -> None:
        """Give these parts of the server's device memory back; it must be paused and idle.

        SGLang ends itself if it is not, and when a part is released or resumed twice.
        """
        self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, deadline)

    def resume_memory(self, tags: Sequence[str], deadline: float) -> None:
        """Take these parts again; weights have no values until they are updated."""
        self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, deadline)

    def open_update(self, deadline: float) -> bool:
        """Open a weight update; False if one was left open by a trainer that died."""
        try:
            self._call("POST", "/begin_weight_update", {"selector": "all"}, deadline)
        except PublishFailed:
            return False
        return True

    def begin_update(self, deadline: float) -> None:
        """Open a weight update of a paused server; one that was left open is closed first."""
        if not self.open_update(deadline):
            # What that session holds is never served: all weights are loaded before the server
            # goes on.
            self._call("POST", "/end_weight_update", {}, deadline)
            self._call("POST", "/begin_weight_update", {"selector": "all"}, deadline)

    def end_update(self, deadline: float) -> None:
        """Close the weight update."""
        self._call("POST", "/end_weight_update", {}, deadline)

    def update_from_bucket(self, payloads: Sequence[str], deadline: float) -> None:
        """Send one bucket (flattened_bucket.py), as a payload for each of the server's ranks."""
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
            # A failed flush within an update ends SGLang: `flush_paused` comes before.
            "flush_cache": False,
        }
        self._call("POST", "/update_weights_from_tensor", body, deadline)

    def join_group(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str,
        backend: str,
        deadline: float,
    ) -> None:
        """Join the group `name` as `rank`; answers when all members have joined."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        self._call("POST", "/init_weights_update_group", body, deadline)

    def leave_group(self, name: str, deadline: float) -> None:
        """Leave the group `name`."""
        body = {"group_name": name}
        self._call("POST", "/destroy_weights_update_group", body, deadline)

    def update_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        deadline: float,
    ) -> None:
        """Receive these tensors, packed without gaps, as one broadcast over `group`."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._call("POST", "/update_weights_from_distributed", body, deadline)

    def update_from_disk(self, folder: str, deadline: float) -> None:
        """Load a Hugging Face folder that the server can read; an open update is closed first."""
        try:
            # Left open by a publish that failed; the folder replaces whatever it staged.
            self._call("POST", "/end_weight_update", {}, deadline)
        except PublishFailed:
            _log.debug("no_update_was_open", server_id=self.server_id)
        body = {"model_path": folder, "flush_cache": False}
        self._call("POST", "/update_weights_from_disk", body, deadline)

    def checksums(self, algorithm: str | None, deadline: float) -> list[dict[str, str]]:
        """Per rank, checksums by parameter as the server holds them; None: of its own choice."""
        body = {"action": "checksum"} | ({"algorithm": algorithm} if algorithm else {})
        answer = self._call("POST", "/weights_checker", body, deadline)
        return [rank.get("checksums") or {} for rank in answer.get("ranks") or [{}]]

    def scramble(self, deadline: float) -> None:
        """Fill the weights at random, so that what an update does not bring shows."""
        self._call("POST", "/weights_checker", {"action": "reset_tensors"}, deadline)

    def set_version(self, version: str, deadline: float) -> None:
        """Name the weights that the server holds."""
        body = {"new_version": version, "abort_all_requests": False}
        answer = self._call("POST", "/update_weight_version", body, deadline)
        if answer.get("new_version") != version:
            raise PublishFailed(
                f"{self.server_id} acknowledged weight_version={answer.get('new_version')!r}; "
                f"expected {version!r}"
            )

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        deadline: float,
        *,
        is_text: bool = False,
    ) -> dict[str, Any]:
        """The answer; `is_text`: it is for people, and only its status counts."""
        began_at = time.monotonic()
        try:
            status, content = self._exchange(method, path, body, deadline)
        except TimeoutError as error:
            self._connection.close()
            raise DeadlineExceeded(
                who="publisher",
                phase=path,
                peer=f"{self.server_id} at {self.url}",
                after_s=time.monotonic() - began_at,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerUnavailable(
                f"{self.server_id}: {method} {self.url}{path} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        return self._judge(method, path, status, b"" if is_text and status == 200 else content)

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> tuple[int, bytes]:
        """Send and read everything; each socket operation gets what remains of the time."""
        if time.monotonic() - self._used_at > _MAX_IDLE_S:
            self._connection.close()
        self._connection.timeout = _remaining(deadline)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(_remaining(deadline))
        data = None if body is None else json.dumps(body).encode()
        content_type = {} if body is None else {"Content-Type": "application/json"}
        self._connection.request(method, path, data, self._headers | content_type)
        response = self._connection.getresponse()
        parts: list[bytes] = []
        while True:
            # The response drops the socket once it has been read to its end.
            if self._connection.sock is not None:
                self._connection.sock.settimeout(_remaining(deadline))
            part = response.read1(_CHUNK_BYTES)
            if not part:
                break
            parts.append(part)
        # read1 leaves a response of known length open; the next request would be refused.
        response.close()
        self._used_at = time.monotonic()
        return response.status, b"".join(parts)

    def _judge(self, method: str, path: str, status: int, content: bytes) -> dict[str, Any]:
        where = f"{self.server_id}: {method} {self.url}{path} answered status={status}"
        text = content[:300].decode(errors="replace")
        if status in (401, 403):
            raise KeyRefused(
                f"{where}: it wants another key; servers of this run take the one in secrets.json; "
                "for an attached server set server.api_key_file to the file that holds its key"
            )
        if status >= 500:
            raise ServerUnavailable(f"{where}: {text}")
        if status != 200:
            raise PublishFailed(f"{where}: {text}")
        try:
            # SGLang's memory routes answer null.
            answer = json.loads(content) if content not in (b"", b"null") else {}
        except ValueError as error:
            raise PublishFailed(f"{where} with a body that is not JSON: {text}") from error
        if not isinstance(answer, dict):
            raise PublishFailed(f"{where} with a body that is not an object: {text}")
        if answer.get("success") is False:
            raise PublishFailed(f"{where} with success=false: {text}")
        return answer


def _remaining(deadline: float) -> float:
    """Seconds left; raises TimeoutError when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def flush_paused(client: ServerClient, mode: PauseMode, deadline: float) -> None:
    """Drop the cached prefixes of a server that was paused with `mode`.

    A turn that waits there, or that a router sends before it has heard of the publish, asks for the
    prefixes of the version before. With `in_place`, turns in flight keep their keys and values;
    SGLang then drops nothing. With the other modes this returns once nothing runs; what a pause
    does not end, such as a grammar that is being compiled, is aborted when half of the time has
    passed.

    Raises:
        PublishFailed: something runs at the deadline.
    """
    half = time.monotonic() + (deadline - time.monotonic()) / 2
    is_aborted = mode == "abort"
    while True:
        try:
            client.flush_cache(deadline)
        except PublishFailed:
            if mode == "in_place":
                return
            if time.monotonic() + _FLUSH_PAUSE_S > deadline:
                raise
            if not is_aborted and time.monotonic() > half:
                is_aborted = True
                client.pause("abort", deadline)
            time.sleep(_FLUSH_PAUSE_S)
        else:
            return
