"""Which turn is served next, and what the choice costs."""

import asyncio

import pytest

from outloop.router.servers.fair_queue import FairQueue, Ticket


class Servers:
    """Room for turns by policy version, and how often somebody looked for some."""

    def __init__(self, **room: int) -> None:
        self.room = {int(name[1:]): number for name, number in room.items()}
        self.num_looks = 0
        self.served: list[str] = []

    def ticket(self, episode_id: str, policy_version: int | None = None) -> Ticket[int]:
        """A turn that takes room at its version, or anywhere."""

        def choose() -> int | None:
            self.num_looks += 1
            versions = [policy_version] if policy_version is not None else list(self.room)
            return next((version for version in versions if self.room.get(version)), None)

        ticket = Ticket(episode_id, choose, policy_version)
        ticket.granted.add_done_callback(lambda _: self.served.append(episode_id))
        return ticket

    def take(self, version: int) -> None:
        """A turn has this room."""
        self.room[version] -= 1


async def test_episodes_are_served_in_rotation() -> None:
    """One that asks for much delays another by one turn a round."""
    servers, queue = Servers(v0=0), FairQueue[int]()
    for episode_id in ("greedy", "greedy", "greedy", "modest", "modest"):
        queue.add(servers.ticket(episode_id))
    servers.room[0] = 5
    queue.serve(servers.take)
    await asyncio.sleep(0)
    assert servers.served == ["greedy", "modest", "greedy", "modest", "greedy"]
    assert not queue


@pytest.mark.parametrize("first", [None, 7])
async def test_a_version_that_no_server_has_holds_no_turn_up(first: int | None) -> None:
    """Turns that ask for a version wait for it; the others, before or behind them, go on."""
    servers, queue = Servers(v0=0), FairQueue[int]()
    queue.add(servers.ticket("first", first))
    for number in range(100):
        queue.add(servers.ticket(f"any{number}"))
        queue.add(servers.ticket(f"pinned{number}", 7))
    servers.room[0] = 101
    queue.serve(servers.take)
    await asyncio.sleep(0)
    assert len(servers.served) == 100 + (first is None)
    assert set(queue.policy_versions) == {7}
    servers.room[7] = 101
    queue.serve(servers.take)
    assert not queue


async def test_versions_take_turns() -> None:
    """Who waits for a version and who takes any are one rotation: neither starves."""
    servers, queue = Servers(v0=0), FairQueue[int]()
    for number in range(3):
        queue.add(servers.ticket(f"any{number}"))
        queue.add(servers.ticket(f"pinned{number}", 0))
    servers.room[0] = 6
    queue.serve(servers.take)
    await asyncio.sleep(0)
    assert servers.served == ["any0", "pinned0", "any1", "pinned1", "any2", "pinned2"]


async def test_who_gives_up_is_passed_over() -> None:
    """A ticket that is removed, twice too, is never served."""
    servers, queue = Servers(v0=0), FairQueue[int]()
    gone, other = servers.ticket("gone"), servers.ticket("other")
    queue.add(gone)
    queue.add(other)
    queue.remove(gone)
    queue.remove(gone)
    servers.room[0] = 2
    queue.serve(servers.take)
    assert other.granted.done()
    assert not gone.granted.done()
    assert servers.room[0] == 1
