"""Buckets broadcast to all servers at once, over a group that publisher and servers join.

Owns: who is a member, rebuilding without those that fail. Does not own: the group itself (group),
the pipeline (transports). Invariant: every wait has a deadline; a member that is dead, hangs or
never joins costs the others one, then is left out. Over gloo a bucket counts as taken only by
servers that answered for it. Over NCCL SGLang answers before a byte came, so an answer says nothing
(verification does), and a broadcast that breaks costs every member.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Protocol

import structlog

from outloop.buffer.errors import (
    DeadlineExceeded,
    OutloopError,
    PublishFailed,
    ServerUnavailable,
)
from outloop.engine.publish.buckets.pipeline import Filled
from outloop.engine.publish.buckets.plan import PACKED
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Action, error_of
from outloop.engine.publish.transports.process_group import (
    Backend,
    Group,
    Rendezvous,
    in_thread,
    join_group,
)

_GONE = (DeadlineExceeded, ServerUnavailable)
_LEAVE_TIMEOUT_S = 2.0
_log = structlog.get_logger()


class Servers(Protocol):
    """What a sender needs of a fanout."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def left(self) -> tuple[str, ...]: ...
    def url_of(self, server_id: str) -> str: ...
    def start(
        self, action: Action, only: Sequence[str] | None = None
    ) -> dict[str, Future[None]]: ...
    def fail(self, server_id: str, phase: str, error: str) -> None: ...
    def require_some(self) -> None: ...


class GroupSender:
    """A sender over a group; the group lives from publish to publish."""

    alignment = PACKED
    is_joint = True

    def __init__(
        self, *, host: str, backend: Backend, num_ranks: int = 1, key: str | None = None
    ) -> None:
        """`host` is where servers reach this process; each server joins with `num_ranks` ranks.

        `key`: of the servers, see `Run.server_key`.
        """
        self._key = key
        self._num_ranks = num_ranks
        self._host = host
        self._backend: Backend = backend
        self._group: Group | None = None
        self._rendezvous: Rendezvous | None = None
        self._members: tuple[tuple[str, str], ...] = ()
        """(server_id, url) in the order of their ranks, which begin with 1."""
        self._name = ""
        self._numbers = itertools.count()
        self._bucket: Filled | None = None
        self._posts: dict[str, Future[None]] = {}
        self._cast: Future[None] | None = None
        self._cast_until = 0.0

    def connect(self, fanout: Servers) -> None:
        """Have a group of exactly the servers that are left.

        Raises:
            PublishFailed: no server is left.
        """
        wanted = tuple((server_id, fanout.url_of(server_id)) for server_id in fanout.left)
        if self._group is None or wanted != self._members:
            self._rebuild(fanout)

    def start(self, fanout: Servers, bucket: Filled) -> None:
        """Announce the bucket to every server and begin to broadcast."""
        self._bucket = bucket
        names = [place.spec.name for place in bucket.places]
        dtypes = [str(place.spec.dtype).removeprefix("torch.") for place in bucket.places]
        shapes = [list(place.spec.shape) for place in bucket.places]
        group, name = self._group, self._name
        assert group is not None

        def post(client: ServerClient, deadline: float) -> None:
            client.update_from_group(names, dtypes, shapes, name, deadline)

        self._posts = fanout.start(post, [server_id for server_id, _ in self._members])
        # Sooner than the servers' answers are given up, so that those that wait for others answer.
        half_s = fanout.timeout_s / 2
        self._cast = in_thread(lambda: group.broadcast(bucket.content, timeout_s=half_s))
        self._cast_until = time.monotonic() + fanout.timeout_s

    def finish(self, fanout: Servers) -> None:
        """Wait until every server has answered; broadcast again without those that cannot.

        Raises:
            PublishFailed: no server is left.
        """
        while True:
            assert self._bucket is not None
            is_broken, errors = self._settle(fanout)
            gone = [s for s, e in errors.items() if isinstance(e, _GONE)]
            for server_id in gone if is_broken else errors:
                fanout.fail(server_id, "bucket", str(errors[server_id]))
            fanout.require_some()
            if not is_broken:
                if errors:
                    self._rebuild(fanout)
                return
            if self._backend == "nccl":
                self._fail_all(fanout)
            if not gone:
                self._send_one_by_one(fanout, self._bucket)
                self._rebuild(fanout)
                return
            self._rebuild(fanout)
            self.start(fanout, self._bucket)

    def _fail_all(self, fanout: Servers) -> None:
        """After a break over NCCL no answer counts, and no server can join the next group.

        A server of SGLang answers when its kernel is queued, before a byte came; a kernel that
        waits for what will not come holds its stream until a timeout of its own.

        Raises:
            PublishFailed: always.
        """
        for server_id in fanout.left:
            fanout.fail(
                server_id,
                "bucket",
                "the NCCL broadcast broke; it may wait in it until its own timeout, and is to be "
                "started again",
            )
        fanout.require_some()

    def close(self) -> None:
        """Leave the group, and have its members leave."""
        for server_id, url in self._members:
            self._tell_to_leave(server_id, url)
        self._leave()

    def forget(self) -> None:
        """Leave the group without notifying its members."""
        self._members = ()
        self._leave()

    def _settle(self, fanout: Servers) -> tuple[bool, dict[str, OutloopError]]:
        """Whether the broadcast broke, and how it failed on servers."""
        assert self._cast is not None
        cast, posts = self._cast, self._posts
        left_s = max(0.0, self._cast_until - time.monotonic())
        wait([cast, *posts.values()], timeout=left_s, return_when=FIRST_EXCEPTION)
        # One that failed takes no part any more; its leaving frees those that wait for it.
        failed = [server_id for server_id, f in posts.items() if f.done() and error_of(f)]
        for server_id in failed:
            self._tell_to_leave(server_id, fanout.url_of(server_id))
        error = self._error_of_cast(cast)
        is_broken = error is not None
        if is_broken:
            _log.warning("broadcast_broke", error=str(error))
            self._leave()
        found = {server_id: error_of(future) for server_id, future in posts.items()}
        return is_broken, {server_id: error for server_id, error in found.items() if error}

    def _error_of_cast(self, cast: Future[None]) -> OutloopError | None:
        """How the broadcast failed; one that does not end by its deadline is left to its thread."""
        left_s = max(0.0, self._cast_until - time.monotonic())
        if not wait([cast], timeout=left_s).done:
            return PublishFailed("the broadcast did not end by its deadline; it is given up")
        return error_of(cast)

    def _send_one_by_one(self, fanout: Servers, bucket: Filled) -> None:
        """Find out who breaks a group in which all answer: each alone gets the bucket, or fails."""
        for server_id in fanout.left:
            self._disband(fanout)
            self._try_to_join(fanout, (server_id,))
            if self._group is None:
                continue
            self.start(fanout, bucket)
            is_broken, errors = self._settle(fanout)
            if is_broken or errors:
                reason = errors.get(server_id, "it answered for a bucket that it did not receive")
                fanout.fail(server_id, "bucket", str(reason))

    def _rebuild(self, fanout: Servers) -> None:
        """A group of the servers that are left.

        Raises:
            PublishFailed: no server is left.
        """
        self._disband(fanout)
        while self._group is None:
            fanout.require_some()
            self._try_to_join(fanout, fanout.left)

    def _try_to_join(self, fanout: Servers, chosen: tuple[str, ...]) -> None:
        """Join with the servers chosen, or fail at least one of them."""
        num_ranks = self._num_ranks
        rank_of = {server_id: 1 + num_ranks * index for index, server_id in enumerate(chosen)}
        world_size = 1 + num_ranks * len(chosen)
        # Servers get the name under their key: who does not know it cannot join.
        name = f"outloop-{next(self._numbers)}-{secrets.token_hex(16)}"
        rendezvous = Rendezvous(self._host)
        host, port = rendezvous.host, rendezvous.port

        def post(client: ServerClient, deadline: float) -> None:
            client.join_group(
                host,
                port,
                rank=rank_of[client.server_id],
                world_size=world_size,
                name=name,
                backend=self._backend,
                deadline=deadline,
            )

        began_at, half_s = time.monotonic(), fanout.timeout_s / 2
        posts = fanout.start(post, chosen)
        own = in_thread(
            partial(
                join_group,
                host,
                port,
                rank=0,
                world_size=world_size,
                name=name,
                backend=self._backend,
                timeout_s=half_s,
            )
        )
        pending: list[Future[Any]] = [own, *posts.values()]
        wait(pending, return_when=FIRST_EXCEPTION)
        is_complete = own.done() and error_of(own) is None
        early = {server_id: error_of(f) for server_id, f in posts.items() if f.done()}
        if not is_complete:
            coming = [rank for server_id, rank in rank_of.items() if server_id not in early]
            rendezvous.wait_for(name, coming, self._backend, began_at + half_s - time.monotonic())
            # Frees all who wait for one that does not come, this process included.
            rendezvous.close()
        late = {server_id: error_of(f) for server_id, f in posts.items() if server_id not in early}
        if is_complete and not any([*early.values(), *late.values()]):
            self._group, self._name, self._rendezvous = own.result(), name, rendezvous
            self._members = tuple((server_id, fanout.url_of(server_id)) for server_id in chosen)
            return
        rendezvous.close()
        self._blame(fanout, early, late, "" if is_complete else str(error_of(own)))

    def _blame(
        self,
        fanout: Servers,
        early: dict[str, OutloopError | None],
        late: dict[str, OutloopError | None],
        reason: str,
    ) -> None:
        """Leave out the servers that kept the group from being complete; all, if it is not known.

        `early` answered while the group could still become complete, `late` after it was given up.
        """
        gone = {server_id: error for server_id, error in late.items() if isinstance(error, _GONE)}
        blamed = gone | {server_id: error for server_id, error in early.items() if error}
        for server_id, error in blamed.items():
            fanout.fail(server_id, "join", str(error))
        if not blamed:
            for server_id in early or late:
                fanout.fail(
                    server_id, "join", f"it answered, but the group is incomplete: {reason}"
                )

    def _tell_to_leave(self, server_id: str, url: str) -> None:
        client = ServerClient(server_id, url, key=self._key)
        try:
            client.leave_group(self._name, time.monotonic() + _LEAVE_TIMEOUT_S)
        except OutloopError as error:
            _log.info("group_not_left", server_id=server_id, error=str(error))
        finally:
            client.close()

    def _disband(self, fanout: Servers) -> None:
        """Have every member that can be reached leave."""
        members, self._members = self._members, ()
        for server_id, url in members:
            if server_id in fanout.left:
                self._tell_to_leave(server_id, url)
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        if group is not None:
            # Leaving a broken group blocks until what is under way in it has run out.
            in_thread(group.close)
