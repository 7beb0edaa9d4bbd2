"""Buckets broadcast to all servers at once, over a group that publisher and servers join.

Every wait has a deadline. A server that does not join is left out, and the group is made of the
others; a broadcast that breaks costs every member. Over NCCL SGLang answers before a byte came, so
that an answer says nothing there, and verification does.

A group that was just joined carries one byte before it carries weights, with a deadline of its own:
NCCL makes its communicator in the first broadcast. SGLang takes part in one only between
begin_weight_update and end_weight_update, and a server is not let go on between: it may hold what a
trainer that died had sent. So the byte is sent when the update is open, before the first bucket.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

import structlog
import torch

from outloop.buffer.errors import (
    DeadlineExceeded,
    OutloopError,
    PublishFailed,
    ServerUnavailable,
)
from outloop.engine.publish.buckets.pipeline import Filled
from outloop.engine.publish.buckets.plan import PACKED
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Fanout, error_of
from outloop.engine.publish.transports.process_group import (
    Backend,
    Group,
    Rendezvous,
    in_thread,
    join_group,
)

_GONE = (DeadlineExceeded, ServerUnavailable)
_LEAVE_TIMEOUT_S = 2.0
_FIRST_BYTE_SHARE = 1 / 3
"""Of a phase's deadline: for the byte that a new group carries."""
_UNLOADED = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""The name of that byte. Old checkpoints hold a tensor of this name that models compute themselves:
servers receive it and load nothing."""
_REMEDY: dict[Backend, str] = {
    "gloo": "",
    "nccl": "; the server may wait in it until its own timeout, and is to be started again",
}
"""After a broadcast broke: a kernel that waits for what will not come holds its stream."""
_log = structlog.get_logger()


class GroupSender:
    """A sender over a group; the group lives from publish to publish."""

    alignment = PACKED
    is_joint = True

    def __init__(
        self,
        *,
        host: str,
        backend: Backend,
        num_ranks: int = 1,
        key: str | None = None,
        join: Callable[..., Group] = join_group,
    ) -> None:
        """`host` is where servers reach this process; each server joins with `num_ranks` ranks.

        `key`: of the servers, see `Run.server_key`. `join`: as `join_group`.
        """
        self._join = join
        self._key = key
        self._num_ranks = num_ranks
        self._host = host
        self._backend: Backend = backend
        self._group: Group | None = None
        self._rendezvous: Rendezvous | None = None
        self._members: tuple[tuple[str, str], ...] = ()
        """(server_id, url) in the order of their ranks, which begin with 1."""
        self._name = ""
        self._has_carried = False
        """Whether the group has carried its first byte."""
        self._numbers = itertools.count()
        self._posts: dict[str, Future[None]] = {}
        self._broadcast: Future[None] | None = None
        self._ends_at = 0.0
        """Deadline of the broadcast under way, monotonic seconds."""

    def connect(self, fanout: Fanout) -> None:
        """Have a group of exactly the servers that are left.

        Raises:
            PublishFailed: no server is left.
        """
        wanted = tuple((server_id, fanout.url_of(server_id)) for server_id in fanout.left)
        if self._group is not None and wanted == self._members:
            return
        self._disband(fanout)
        while self._group is None:
            fanout.require_some()
            self._try_to_join(fanout)

    def start(self, fanout: Fanout, bucket: Filled) -> None:
        """Announce the bucket to every server and begin to broadcast; a new group is tried first.

        Raises:
            PublishFailed: no server is left.
        """
        # Without those that failed since.
        self.connect(fanout)
        while not self._has_carried:
            self._carry_first_byte(fanout)
            self.connect(fanout)
        names = [place.spec.name for place in bucket.places]
        dtypes = [str(place.spec.dtype).removeprefix("torch.") for place in bucket.places]
        shapes = [list(place.spec.shape) for place in bucket.places]
        group, name = self._group, self._name
        assert group is not None

        def post(client: ServerClient, deadline: float) -> None:
            client.update_from_group(names, dtypes, shapes, name, deadline)

        self._posts = fanout.start(post)
        # Sooner than the servers' answers are given up, so that those that wait for others answer.
        half_s = fanout.timeout_s / 2
        self._broadcast = in_thread(lambda: group.broadcast(bucket.content, timeout_s=half_s))
        self._ends_at = time.monotonic() + fanout.timeout_s

    def finish(self, fanout: Fanout) -> None:
        """Wait until every server has answered; one that refused the bucket fails.

        Raises:
            PublishFailed: no server is left, or the broadcast broke, which costs every member: who
                broke it is not known, and an answer of SGLang over NCCL says nothing.
        """
        assert self._broadcast is not None
        under_way, posts = self._broadcast, self._posts
        wait([under_way, *posts.values()], timeout=self._left_s, return_when=FIRST_EXCEPTION)
        # A server that failed takes no further part; its leaving ends the wait of the others.
        for server_id in [s for s, post in posts.items() if post.done() and error_of(post)]:
            self._ask_to_leave(server_id, fanout.url_of(server_id))
        broken = self._error_of_broadcast(under_way)
        if broken is not None:
            _log.warning("broadcast_broke", error=str(broken))
            self._leave()
        errors = {server_id: error_of(post) for server_id, post in posts.items()}
        for server_id, error in errors.items():
            if error is not None:
                fanout.fail(server_id, "bucket", str(error))
        if broken is not None:
            for server_id in fanout.left:
                fanout.fail(server_id, "bucket", f"{broken}{_REMEDY[self._backend]}")
        fanout.require_some()

    def close(self) -> None:
        """Leave the group, and have its members leave."""
        for server_id, url in self._members:
            self._ask_to_leave(server_id, url)
        self._leave()

    @property
    def _left_s(self) -> float:
        """Until the broadcast under way is given up."""
        return max(0.0, self._ends_at - time.monotonic())

    def _error_of_broadcast(self, under_way: Future[None]) -> OutloopError | None:
        """How it failed; one that does not end by its deadline is left to its thread."""
        if not wait([under_way], timeout=self._left_s).done:
            return PublishFailed("the broadcast did not end by its deadline; it is given up")
        return error_of(under_way)

    def _try_to_join(self, fanout: Fanout) -> None:
        """Join with the servers that are left, or fail at least one of them."""
        num_ranks, chosen = self._num_ranks, fanout.left
        rank_of = {server_id: 1 + num_ranks * index for index, server_id in enumerate(chosen)}
        world_size = 1 + num_ranks * len(chosen)
        # Servers get the name in a call with their key; without the name nothing can join.
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
        posts = fanout.start(post)
        own = in_thread(
            partial(
                self._join,
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
            # Ends the wait of all members for one that does not come, this process included.
            rendezvous.close()
        late = {server_id: error_of(f) for server_id, f in posts.items() if server_id not in early}
        if is_complete and not any([*early.values(), *late.values()]):
            self._group, self._name, self._rendezvous = own.result(), name, rendezvous
            self._members = tuple((server_id, fanout.url_of(server_id)) for server_id in chosen)
            self._has_carried = False
            return
        rendezvous.close()
        self._blame(fanout, early, late, "" if is_complete else str(error_of(own)))

    def _carry_first_byte(self, fanout: Fanout) -> None:
        """Broadcast one byte over the new group, or leave it and fail at least one of its servers.

        Those that took no part fail, and over NCCL all: a communicator that was not made holds who
        waits in it.
        """
        group, name = self._group, self._name
        assert group is not None
        limit_s = _FIRST_BYTE_SHARE * fanout.timeout_s
        ends_at = time.monotonic() + limit_s

        def post(client: ServerClient, deadline: float) -> None:
            # Those that wait for others answer when the group has been left.
            until = min(deadline, ends_at + _LEAVE_TIMEOUT_S)
            client.update_from_group([_UNLOADED], ["uint8"], [[1]], name, until)

        posts = fanout.start(post)
        byte = torch.ones(1, dtype=torch.uint8, device=group.device_type)
        own = in_thread(lambda: group.broadcast(byte, timeout_s=limit_s))
        wait([own, *posts.values()], timeout=limit_s, return_when=FIRST_EXCEPTION)
        early = {server_id: error_of(f) for server_id, f in posts.items() if f.done()}
        broken = error_of(own) if own.done() else PublishFailed("it did not end by its deadline")
        if len(early) == len(posts) and not broken and not any(early.values()):
            self._has_carried = True
            return
        for server_id in [s for s, error in early.items() if error]:
            self._ask_to_leave(server_id, fanout.url_of(server_id))
        self._leave()
        late = {server_id: error_of(f) for server_id, f in posts.items() if server_id not in early}
        reason = (
            f"the first byte over the group was not taken by all within {limit_s:.1f} s"
            f"{f': {broken}' if broken else ''}{_REMEDY[self._backend]}"
        )
        _log.warning("group_does_not_carry", reason=reason)
        if self._backend == "nccl":
            for server_id in posts:
                error = early.get(server_id) or late.get(server_id)
                fanout.fail(server_id, "join", f"{f'{error}; ' if error else ''}{reason}")
        else:
            self._blame(fanout, early, late, reason)

    def _blame(
        self,
        fanout: Fanout,
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

    def _ask_to_leave(self, server_id: str, url: str) -> None:
        client = ServerClient(server_id, url, key=self._key)
        try:
            client.leave_group(self._name, time.monotonic() + _LEAVE_TIMEOUT_S)
        except OutloopError as error:
            _log.info("group_not_left", server_id=server_id, error=str(error))
        finally:
            client.close()

    def _disband(self, fanout: Fanout) -> None:
        """Have every member that can be reached leave."""
        members, self._members = self._members, ()
        for server_id, url in members:
            if server_id in fanout.left:
                self._ask_to_leave(server_id, url)
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        if group is not None:
            # Leaving a broken group blocks until what is under way in it has run out.
            in_thread(group.close)
