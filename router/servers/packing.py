"""Training's last turns on few servers, so that the others become empty.

Owns: which servers are kept for turns of training, and since when. Does not own: how many
(buffer.packing), choosing among them (pool). Invariant: servers are kept in the order of their ids,
so that all router processes keep the same ones; nothing is packed while episodes still start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outloop.buffer.packing import servers_to_keep

_NUM_STEADY = 4
"""Looks at the registry in a row at which no more episodes were in flight than before, and fewer
servers would do: a batch that is starting is not packed."""


class Packing:
    """What is packed now."""

    def __init__(
        self,
        *,
        turns_per_server: int,
        max_context_tokens: int | None = None,
        count_move: Callable[[], None],
    ) -> None:
        """
        Args:
            turns_per_server: that a server generates as fast as one.
            max_context_tokens: an episode with a longer prompt stays where its prefix is cached.
            count_move: called for each turn whose prefix another server has.
        """
        self.turns_per_server = turns_per_server
        self._max_context_tokens = max_context_tokens
        self._count_move = count_move
        self._known: tuple[str, ...] = ()
        """Servers that may serve, and did not fail, in order."""
        self._num_kept: int | None = None
        """None: turns are placed on all servers."""
        self._num_steady = 0
        self._num_episodes = 0
        self._turns_per_episode = 1.0
        """More than one where episodes were seen to make several turns at once."""
        self._was_full = False
        self.kept: frozenset[str] = frozenset()
        """Ids of the servers that take turns of training; empty: all do."""

    def observe(self, server_ids: Sequence[str], num_episodes: int) -> None:
        """Decide anew, `num_episodes` of training being in flight in the whole run."""
        self._known = tuple(sorted(server_ids))
        num_servers, most = len(self._known), self.turns_per_server
        kept = num_servers if self._num_kept is None else min(self._num_kept, num_servers)
        if self._was_full and 0 < num_episodes <= kept * most:
            self._turns_per_episode = max(self._turns_per_episode, (kept * most + 1) / num_episodes)
        self._was_full = False
        found = servers_to_keep(
            kept,
            num_episodes * self._turns_per_episode,
            num_servers=num_servers,
            turns_per_server=most,
        )
        is_steady = found < kept and num_episodes <= self._num_episodes
        self._num_steady = self._num_steady + 1 if is_steady else 0
        self._num_episodes = num_episodes
        if found > kept or self._num_steady >= _NUM_STEADY:
            kept, self._num_steady = found, 0
        self._keep(kept if kept < num_servers and num_episodes else None)

    def leave_out(self, server_id: str) -> None:
        """A server failed: others are kept in its place until the registry is read again."""
        self._known = tuple(one for one in self._known if one != server_id)
        self._keep(self._num_kept)

    def _keep(self, number: int | None) -> None:
        self._num_kept = number
        self.kept = frozenset(self._known[:number] if number is not None else ())
        if number is None:
            self._turns_per_episode = 1.0

    def may_move(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens is worth a prefill elsewhere."""
        return self._max_context_tokens is None or num_tokens <= self._max_context_tokens

    def note_full(self) -> None:
        """A turn found no room on the servers that are kept."""
        self._was_full = True

    def note_turn(self, before: str | None, server_id: str) -> None:
        """A turn goes to `server_id` whose prefix is cached at `before`; count it if it moved."""
        if before is not None and (before in self.kept) != (server_id in self.kept):
            self._count_move()
