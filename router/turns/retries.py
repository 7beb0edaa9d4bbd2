"""What a request repeats.

Owns: finding the turn of a retry, running or recorded, in whichever process. Does not own: telling
retries from fresh requests (front), drawing (service), messages between processes (peers).
Invariant: a retry is drawn only when no process draws its turn and the buffer does not have it.
"""

from __future__ import annotations

from outloop.router.dialects.base import TurnRequest, TurnResult
from outloop.router.episodes.episode import Episodes, EpisodeSession
from outloop.router.episodes.turn_tree import Node, Plan
from outloop.router.peers.turn_locator import Peers
from outloop.router.turns.answer_reader import AnswerReader
from outloop.router.turns.in_flight import TurnJob
from outloop.router.turns.planner import Planner


class Retries:
    """Retries of all episodes."""

    def __init__(
        self, episodes: Episodes, planner: Planner, reader: AnswerReader, peers: Peers
    ) -> None:
        self._episodes = episodes
        self._planner = planner
        self._reader = reader
        self._peers = peers

    async def find(
        self, job: TurnJob, session: EpisodeSession, request: TurnRequest, retry_key: str
    ) -> tuple[TurnResult, ...]:
        """The recorded answer that `job`, a retry, gets; (): there is none, and it is to be drawn.

        Waits for a process that draws it at this moment.

        Raises:
            DeadlineExceeded: for longer than a turn may take.
            BufferUnavailable: Redis does not say.
        """
        if session.opening is None:
            return ()
        # The last turn of such a request is meant, which may be drawn at this moment, or have been
        # recorded, by another process.
        since = await self._peers.wait_for_turn(session, retry_key, lambda: job.has_client)
        if since is not None or not session.tree.recorded_under(retry_key):
            await self._episodes.refresh(session)
        return self._recorded(session, request, retry_key, since or 0.0)

    def _recorded(
        self, session: EpisodeSession, request: TurnRequest, retry_key: str, since: float
    ) -> tuple[TurnResult, ...]:
        # Who went on from an answer has read it, and asks for another.
        nodes = [node for node in session.tree.recorded_under(retry_key) if not node.children]
        last = max((node.turn.started_at for node in nodes), default=0.0)
        if last < since:
            return ()
        nodes = [node for node in nodes if node.turn.started_at == last]
        if len(nodes) != request.num_choices:
            return ()
        return tuple(self._again(node, request) for node in nodes)

    def _again(self, node: Node, request: TurnRequest) -> TurnResult:
        plan = Plan(
            parent=node.parent,
            said_after=None,
            prompt_ids=node.turn.prompt_ids.tolist(),
            cause="root",
        )
        return self._reader.again(request, node.turn, self._planner.find_forced(plan, request))


def repeated(jobs: list[TurnJob] | tuple[()], is_retry: bool) -> TurnJob | None:
    """The job of this process that an identical request repeats; None: it may be a fresh sample."""
    abandoned = next((job for job in jobs if job.is_abandoned and not job.has_failed), None)
    if abandoned is not None or not is_retry:
        return abandoned
    running = next((job for job in jobs if not job.is_over), None)
    return running if running is not None else (jobs[-1] if jobs else None)
