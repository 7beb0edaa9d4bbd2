"""Buckets broadcast to each server over a group of its own.

Owns: which servers have such a group, going on with all of them at once. Does not own: a group and
what becomes of a server that breaks it (collective). Invariant: no server waits for another one, so
one that hangs is the only one that does not take the bucket.

Gloo broadcasts along a tree in which servers pass on what they receive. One that is stopped dead
would keep those behind it until a timeout of their own, which cannot be shortened for SGLang:
while it receives it takes no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.pipeline import Filled
from outloop.engine.publish.buckets.plan import PACKED
from outloop.engine.publish.server_fanout import Action, Fanout
from outloop.engine.publish.transports.broadcast import GroupSender


class GroupPerServer:
    """A sender that has a `GroupSender` for every server."""

    alignment = PACKED
    is_joint = True

    def __init__(self, make_sender: Callable[[], GroupSender]) -> None:
        self._make_sender = make_sender
        self._senders: dict[str, GroupSender] = {}

    def connect(self, fanout: Fanout) -> None:
        """Have a group with each of the servers that are left.

        Raises:
            PublishFailed: no server is left.
        """
        for server_id in self._senders.keys() - set(fanout.left):
            self._senders.pop(server_id).forget()
        for server_id in fanout.left:
            if server_id not in self._senders:
                self._senders[server_id] = self._make_sender()
        _on_each(fanout, lambda one: self._senders[one.server_id].connect(one))

    def start(self, fanout: Fanout, bucket: Filled) -> None:
        """Announce the bucket to every server and begin to send it."""
        for server_id in fanout.left:
            self._senders[server_id].start(_One(fanout, server_id), bucket)

    def finish(self, fanout: Fanout) -> None:
        """Wait until every server has answered; those that do not take the bucket fail.

        Raises:
            PublishFailed: no server is left.
        """
        _on_each(fanout, lambda one: self._senders[one.server_id].finish(one))

    def close(self) -> None:
        """Leave all groups, and have their members leave."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()


class _One:
    """One server of a fanout, as a sender sees it; used in a thread of its own.

    How it failed is kept for the thread that the fanout belongs to.
    """

    def __init__(self, fanout: Fanout, server_id: str) -> None:
        self.server_id = server_id
        self.timeout_s = fanout.timeout_s
        self.failure: tuple[str, str] | None = None
        """Phase and error."""
        self._fanout = fanout

    @property
    def left(self) -> tuple[str, ...]:
        return () if self.failure else (self.server_id,)

    def url_of(self, server_id: str) -> str:
        return self._fanout.url_of(server_id)

    def start(self, action: Action, only: Sequence[str] | None = None) -> dict[str, Future[None]]:
        return self._fanout.start(action, self.left if only is None else only)

    def fail(self, server_id: str, phase: str, error: str) -> None:
        self.failure = self.failure or (phase, error)

    def require_some(self) -> None:
        if self.failure:
            raise PublishFailed(self.failure[1])


def _on_each(fanout: Fanout, action: Callable[[_One], None]) -> None:
    """Do `action` with every server that is left, at once; a server that fails it is left out."""
    each = [_One(fanout, server_id) for server_id in fanout.left]

    def act(one: _One) -> None:
        try:
            action(one)
        except PublishFailed:
            if not one.failure:
                raise

    with ThreadPoolExecutor(max(1, len(each)), thread_name_prefix="publish-groups") as pool:
        for _ in pool.map(act, each):
            pass
    for one in each:
        if one.failure:
            fanout.fail(one.server_id, *one.failure)
    fanout.require_some()
