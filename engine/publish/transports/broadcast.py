"""Buckets broadcast to all servers at once: each sending rank has a group with all of them.

The groups stand and fall together, and servers take part in one after the other. Every wait has a
deadline. A server that does not join is left out, and the groups are made of the others; a
broadcast that breaks costs every member. Over NCCL SGLang answers before a byte came, so that an
answer says nothing there, and verification does.

A group that was just joined carries one byte before it carries weights, with a deadline of its own:
NCCL makes its communicator in the first broadcast. SGLang takes part in one only between
begin_weight_update and end_weight_update, and a server is not let go on between: it may hold what a
trainer that died had sent. So the bytes are sent when the update is open, before the first bucket.
"""

from __future__ import annotations

import itertools
import secrets
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

import structlog

from outloop.buffer.errors import (
    DeadlineExceeded,
    OutloopError,
    PublishFailed,
    ServerUnavailable,
)
from outloop.engine.publish.process_group import Backend, Rendezvous
from outloop.engine.publish.sending.orders import Await, Broadcast, Join, Leave, Outcome
from outloop.engine.publish.sending.ranks import OrderedRanks
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.server_fanout import Fanout, error_of
from outloop.engine.publish.transports.base import Outgoing

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


@dataclass(frozen=True, slots=True)
class _Link:
    """A rank's group with the servers."""

    rank: int
    name: str
    rendezvous: Rendezvous


class GroupSender:
    """A sender over groups, which live from publish to publish."""

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
        self._ranks: OrderedRanks | None = None
        self._links: list[_Link] = []
        self._names: list[str] = []
        """Of the groups that members joined; they may have been left here."""
        self._members: tuple[tuple[str, str], ...] = ()
        """(server_id, url) in the order of their ranks, which begin with 1."""
        self._senders: tuple[int, ...] = ()
        self._has_carried = False
        """Whether the groups have carried their first bytes."""
        self._numbers = itertools.count()
        self._posts: dict[str, Future[None]] = {}
        self._rank = 0
        """Whose broadcast is under way."""
        self._ends_at = 0.0
        """Its deadline, monotonic seconds."""

    def connect(self, fanout: Fanout, ranks: OrderedRanks) -> None:
        """Have a group of each sending rank with exactly the servers that are left.

        Raises:
            PublishFailed: no server is left.
        """
        if self._ranks is not None and not ranks.are_those_of(self._ranks):
            # Theirs to leave: they may be another thread's.
            self._ranks = None
            self._disband(fanout)
        self._ranks = ranks
        wanted = tuple((server_id, fanout.url_of(server_id)) for server_id in fanout.left)
        senders = tuple(rank for rank, share in enumerate(ranks.shares) if share)
        if self._links and (wanted, senders) == (self._members, self._senders):
            return
        self._disband(fanout)
        while not self._links:
            fanout.require_some()
            self._try_to_join(fanout, senders)

    def start(self, fanout: Fanout, bucket: Outgoing) -> None:
        """Announce the bucket to every server and begin to broadcast; new groups are tried first.

        Raises:
            PublishFailed: no server is left.
        """
        assert self._ranks is not None
        # Without those that failed since.
        self.connect(fanout, self._ranks)
        while not self._has_carried:
            self._carry_first_bytes(fanout)
            self.connect(fanout, self._ranks)
        names = [place.spec.name for place in bucket.places]
        dtypes = [str(place.spec.dtype).removeprefix("torch.") for place in bucket.places]
        shapes = [list(place.spec.shape) for place in bucket.places]
        (name,) = (link.name for link in self._links if link.rank == bucket.rank)

        def post(client: ServerClient, deadline: float) -> None:
            client.update_from_group(names, dtypes, shapes, name, deadline)

        self._posts = fanout.start(post)
        self._rank = bucket.rank
        self._ends_at = time.monotonic() + fanout.timeout_s
        # Sooner than the servers' answers are given up, so that those that wait for others answer.
        self._order(Broadcast(bucket.rank, bucket.index, fanout.timeout_s / 2))

    def finish(self, fanout: Fanout) -> None:
        """Wait until every server has answered; one that refused the bucket fails.

        Raises:
            PublishFailed: no server is left, or the broadcast broke, which costs every member: who
                broke it is not known, and an answer of SGLang over NCCL says nothing.
        """
        posts = self._posts
        wait(posts.values(), timeout=self._left_s, return_when=FIRST_EXCEPTION)
        # A server that failed takes no further part; its leaving ends the wait of the others.
        for server_id in [s for s, post in posts.items() if post.done() and error_of(post)]:
            self._ask_to_leave(server_id, fanout.url_of(server_id))
        broken = _failure_of(self._order(Await(self._rank, self._left_s)))
        if broken:
            _log.warning("broadcast_broke", error=broken, trainer_rank=self._rank)
            self._leave()
        errors = {server_id: error_of(post) for server_id, post in posts.items()}
        for server_id, error in errors.items():
            if error is not None:
                fanout.fail(server_id, "bucket", str(error))
        if broken:
            for server_id in fanout.left:
                fanout.fail(server_id, "bucket", f"{broken}{_REMEDY[self._backend]}")
        fanout.require_some()

    def close(self) -> None:
        """Have the groups' members leave; the sending ranks leave when they are closed."""
        for server_id, url in self._members:
            self._ask_to_leave(server_id, url)
        self._forget()

    @property
    def _left_s(self) -> float:
        """Until the broadcast under way is given up."""
        return max(0.0, self._ends_at - time.monotonic())

    def _order(self, order: Join | Broadcast | Await) -> Outcome:
        assert self._ranks is not None
        return self._ranks.one(order.rank, order)

    def _try_to_join(self, fanout: Fanout, senders: tuple[int, ...]) -> None:
        """Join with the servers that are left, group by group, or fail at least one of them."""
        chosen = fanout.left
        self._members = tuple((server_id, fanout.url_of(server_id)) for server_id in chosen)
        self._senders = senders
        self._has_carried = False
        for rank in senders:
            if not self._join_one(fanout, rank):
                self._disband(fanout)
                return

    def _join_one(self, fanout: Fanout, rank: int) -> bool:
        """Whether a rank's group is complete; if not, at least one server has failed."""
        num_ranks = self._num_ranks
        rank_of = {
            server_id: 1 + num_ranks * index for index, (server_id, _) in enumerate(self._members)
        }
        world_size = 1 + num_ranks * len(rank_of)
        # Servers get the name in a call with their key; without the name nothing can join.
        name = f"outloop-{next(self._numbers)}-{secrets.token_hex(16)}"
        rendezvous = Rendezvous(self._host)
        host, port = rendezvous.host, rendezvous.port
        link = _Link(rank, name, rendezvous)
        self._links.append(link)
        self._names.append(name)

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

        half_s = fanout.timeout_s / 2
        ends_at = time.monotonic() + half_s
        posts = fanout.start(post)
        self._order(Join(rank, host, port, name, world_size, half_s))
        wait(posts.values(), timeout=half_s, return_when=FIRST_EXCEPTION)
        early = {server_id: error_of(f) for server_id, f in posts.items() if f.done()}
        is_refused = any(early.values())
        own = self._order(Await(rank, 0.0 if is_refused else ends_at - time.monotonic()))
        if _failure_of(own):
            coming = [rank for server_id, rank in rank_of.items() if server_id not in early]
            rendezvous.wait_for(name, coming, self._backend, ends_at - time.monotonic())
            # Ends the wait of all members for one that does not come, the sending rank included.
            rendezvous.close()
        late = {server_id: error_of(f) for server_id, f in posts.items() if server_id not in early}
        if not (_failure_of(own) or any([*early.values(), *late.values()])):
            return True
        rendezvous.close()
        reason = _failure_of(own)
        if not own.is_over:
            reason = _failure_of(self._order(Await(rank, _LEAVE_TIMEOUT_S)))
        self._blame(fanout, early, late, reason)
        return False

    def _carry_first_bytes(self, fanout: Fanout) -> None:
        """Broadcast one byte over each new group; where that fails, all are left."""
        self._has_carried = all(self._carries(fanout, link) for link in tuple(self._links))

    def _carries(self, fanout: Fanout, link: _Link) -> bool:
        """Whether a new group carries a byte; if not, at least one of its servers has failed.

        Those that took no part fail, and over NCCL all: a communicator that was not made holds who
        waits in it.
        """
        limit_s = _FIRST_BYTE_SHARE * fanout.timeout_s
        ends_at = time.monotonic() + limit_s

        def post(client: ServerClient, deadline: float) -> None:
            # Those that wait for others answer when the group has been left.
            until = min(deadline, ends_at + _LEAVE_TIMEOUT_S)
            client.update_from_group([_UNLOADED], ["uint8"], [[1]], link.name, until)

        posts = fanout.start(post)
        self._order(Broadcast(link.rank, None, limit_s))
        wait(posts.values(), timeout=limit_s, return_when=FIRST_EXCEPTION)
        early = {server_id: error_of(f) for server_id, f in posts.items() if f.done()}
        is_refused = any(early.values())
        left_s = 0.0 if is_refused else ends_at - time.monotonic()
        broken = _failure_of(self._order(Await(link.rank, left_s)))
        if len(early) == len(posts) and not broken and not is_refused:
            return True
        for server_id in [s for s, error in early.items() if error]:
            self._ask_to_leave(server_id, fanout.url_of(server_id))
        self._leave()
        late = {server_id: error_of(f) for server_id, f in posts.items() if server_id not in early}
        reason = (
            f"the first byte over the group was not taken by all within {limit_s:.1f} s"
            f"{f': {broken}' if broken else ''}{_REMEDY[self._backend]}"
        )
        _log.warning("group_does_not_carry", reason=reason, trainer_rank=link.rank)
        if self._backend == "nccl":
            for server_id in posts:
                error = early.get(server_id) or late.get(server_id)
                fanout.fail(server_id, "join", f"{f'{error}; ' if error else ''}{reason}")
        else:
            self._blame(fanout, early, late, reason)
        return False

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
            for name in self._names:
                self._leave_one(client, name)
        except _GONE as error:
            _log.info("groups_not_left", server_id=server_id, error=str(error))
        finally:
            client.close()

    def _leave_one(self, client: ServerClient, name: str) -> None:
        try:
            client.leave_group(name, time.monotonic() + _LEAVE_TIMEOUT_S)
        except PublishFailed as error:
            # It never joined this one.
            _log.info("group_not_left", server_id=client.server_id, error=str(error))

    def _disband(self, fanout: Fanout) -> None:
        """Have every member that can be reached leave."""
        members, self._members = self._members, ()
        for server_id, url in members:
            if server_id in fanout.left:
                self._ask_to_leave(server_id, url)
        self._leave()
        self._names = []

    def _leave(self) -> None:
        """Have the sending ranks leave all groups."""
        if self._links and self._ranks is not None:
            self._ranks.tell(Leave())
        self._forget()

    def _forget(self) -> None:
        links, self._links = self._links, []
        for link in links:
            link.rendezvous.close()


def _failure_of(outcome: Outcome) -> str:
    """Why what was awaited is not done; empty if it is."""
    if not outcome.is_over:
        return "it did not end by its deadline, and is given up"
    return outcome.error
