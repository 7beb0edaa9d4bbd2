"""What a request repeats.

Owns: finding the turn of a retry, in flight or recorded, in whichever process. Does not own: which
requests are retries (routes), generating (service), messages between processes (peers). Invariant:
a retry is generated only when no process has its turn in flight and the buffer does not have it.
"""

from __future__ import annotations

from collections.abc import Sequence

from outloop.router.dialects.base import TurnRequest, TurnResult
from outloop.router.episodes.episode import Episodes
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.episodes.turn_tree import Node, Plan
from outloop.router.peers.turn_locator import TurnLocator
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.planner import Planner


class Retries:
    """Retries of all episodes."""

    def __init__(
        self, episodes: Episodes, planner: Planner, reader: AnswerReader, locator: TurnLocator
    ) -> None:
        self._episodes = episodes
        self._planner = planner
        self._reader = reader
        self._locator = locator

    async def find(self, turn: InFlightTurn) -> tuple[TurnResult, ...]:
        """The recorded answer that `turn`, a retry, gets; (): there is none, it is to be generated.

        Waits for a process that has it in flight.

        Raises:
            DeadlineExceeded: for longer than a turn may take.
            BufferUnavailable: Redis does not say.
        """
        episode = turn.episode
        if episode.opening is None:
            return ()
        # The last turn of such a request is meant, which may be in flight, or have been recorded,
        # at another process.
        since = await self._locator.wait_for_turn(turn)
        if since is not None or not episode.tree.recorded_under(turn.retry_key):
            await self._episodes.refresh(episode)
        return self._recorded(turn, since or 0.0)

    def _recorded(self, turn: InFlightTurn, since: float) -> tuple[TurnResult, ...]:
        nodes = turn.episode.tree.recorded_under(turn.retry_key)
        if ":" not in turn.retry_key:
            # A client that continued an answer has read it, and asks for another. An idempotency
            # key, which stands before the colon, names the first one for good.
            nodes = [node for node in nodes if not node.children]
        last = max((node.turn.started_at for node in nodes), default=0.0)
        if last < since:
            return ()
        nodes = [node for node in nodes if node.turn.started_at == last]
        if len(nodes) != turn.request.num_choices:
            return ()
        return tuple(self._result(node, turn.request) for node in nodes)

    def _result(self, node: Node, request: TurnRequest) -> TurnResult:
        plan = Plan(
            parent=node.parent,
            previous=None,
            prompt_ids=node.turn.prompt_ids.tolist(),
            cause="root",
        )
        return self._reader.again(request, node.turn, self._planner.find_forced(plan, request))


def repeated(turns: Sequence[InFlightTurn], is_retry: bool) -> InFlightTurn | None:
    """The turn here that an identical request repeats; None: it may be a fresh sample."""
    abandoned = next((one for one in turns if one.is_abandoned and not one.has_failed), None)
    if abandoned is not None or not is_retry:
        return abandoned
    running = next((one for one in turns if not one.is_over), None)
    return running if running is not None else (turns[-1] if turns else None)
