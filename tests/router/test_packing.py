"""The last turns of a batch on few servers: the others become empty and stay so."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fake_server import FakeServer, serving
from outloop.buffer.errors import SettingsError
from outloop.buffer.packing import servers_to_keep
from outloop.buffer.settings import build_settings
from outloop.router.servers.packing import Packing

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
EVAL = {"purpose": "eval", "group_id": None}
MOST = 4
NUM_LOOKS = 5
"""Looks at the registry after which a batch that has become small is packed."""


class Fleet:
    """Four fake servers behind one router, and episodes that take turn after turn."""

    def __init__(self, stage, servers: list[FakeServer]) -> None:
        self.stage = stage
        self.servers = servers
        self.messages: dict[str, list[dict]] = {}

    async def look(self, number: int = NUM_LOOKS) -> None:
        """The router reads the registry."""
        for _ in range(number):
            await self.stage.app.state.parts.pool.refresh()

    async def open(self, number: int, **fields) -> list[dict]:
        """Episodes, each of a task of its own."""
        num_before = len(self.messages)
        opened = [
            await self.stage.open(task_id=f"t{num_before + n}", **fields) for n in range(number)
        ]
        for episode in opened:
            self.messages[episode["episode_id"]] = [{"role": "user", "content": "hi"}]
        return opened

    async def turn(self, episode) -> None:
        """One more turn of an episode."""
        messages = self.messages[episode["episode_id"]]
        answer = await self.stage.post(
            "/v1/chat/completions", {**BODY, "messages": messages}, episode["api_key"]
        )
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "more"}]

    async def turns_at_once(self, episodes) -> list[int]:
        """A turn of each, all in flight together; how many each server had of them."""
        before = [len(server.requests) for server in self.servers]
        for server in self.servers:
            server.gate.clear()
        asked = [asyncio.create_task(self.turn(episode)) for episode in episodes]
        async with asyncio.timeout(30):
            while sum(len(s.requests) for s in self.servers) - sum(before) < len(episodes):
                await asyncio.sleep(0.005)
        for server in self.servers:
            server.gate.set()
        await asyncio.gather(*asked)
        return [len(s.requests) - b for s, b in zip(self.servers, before, strict=True)]

    def asked(self, episode) -> list[tuple[int, dict]]:
        """For each turn of an episode the server that generated it, and its request."""
        requests = {
            request["rid"].partition("-")[0]: (number, request)
            for number, server in enumerate(self.servers)
            for request in server.requests
        }
        return [requests[turn.turn_id] for turn in self.stage.turns(episode)]

    async def close(self, episodes) -> None:
        """End episodes."""
        for number, episode in enumerate(episodes):
            body = {"outcome": "completed", "reward": {"value": 1.0}, "key": f"c{number}"}
            answer = await self.stage.post(f"/episodes/{episode['episode_id']}/close", body)
            assert answer.status_code == 200, answer.text

    async def spare(self) -> list[str]:
        """Servers that the router says it keeps training off."""
        answer = await self.stage.get("/servers", key=self.stage.run.keys.admin_key)
        return [one["server_id"] for one in answer.json()["servers"] if one["is_spare"]]

    async def metric(self, name: str) -> float:
        """A value of the router's metrics."""
        lines = (await self.stage.http.get("/metrics")).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


@pytest.fixture
async def make_fleet(make_stage):
    """A fleet; keywords are settings of the router."""

    async def make(**router) -> Fleet:
        stage = await make_stage(
            server={"num_servers": 4},
            router={"packed_turns_per_server": MOST} | router,
            # Groups of one: a claim starts exactly the attempt that is opened.
            buffer={"group_size": 1},
            trainer={"groups_per_step": 64, "advantage": "reinforce_pp"},
        )
        servers = [stage.server]
        stage.server.answer = lambda request: stage.script("fine")
        for number in (1, 2, 3):
            server = FakeServer(lambda request: stage.script("fine"))
            server.url = await stage.stack.enter_async_context(serving(server))
            stage.buffer.serve(server.url, server_id=f"server-{number}")
            servers.append(server)
        fleet = Fleet(stage, servers)
        await fleet.look(1)
        return fleet

    return make


async def test_the_long_ones_of_a_batch_end_up_on_one_server(make_fleet) -> None:
    """Each moves once, at the boundary of a turn, with exactly the ids that it had; then no more.
    The next batch is placed on all servers again."""
    fleet = await make_fleet()
    stage = fleet.stage
    episodes = await fleet.open(16)
    await fleet.look()
    assert await fleet.turns_at_once(episodes) == [4, 4, 4, 4]
    assert not await fleet.spare()
    elsewhere = [one for one in episodes if fleet.asked(one)[0][0] != 0]
    long = elsewhere[:3]
    await fleet.close([one for one in episodes if one not in long])
    await fleet.look()
    assert await fleet.spare() == ["server-1", "server-2", "server-3"]
    for _ in range(4):
        assert await fleet.turns_at_once(long) == [3, 0, 0, 0]
        await fleet.look()
    assert await fleet.metric("router_moved_turns_total") == 3.0
    for episode in long:
        turns = stage.turns(episode)
        assert len(turns) == 5
        assert [turn.parent_turn_id for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]
        _, last = fleet.asked(episode)[-1]
        recorded = [
            one for turn in turns for one in (*turn.prompt_ids.tolist(), *turn.output_ids.tolist())
        ]
        assert recorded == [*last["input_ids"], *turns[-1].output_ids.tolist()]
    await fleet.close(long)
    await fleet.look(1)
    assert not await fleet.spare()
    assert await fleet.turns_at_once(await fleet.open(8)) == [2, 2, 2, 2]


async def test_evaluation_has_the_empty_servers_to_itself(make_fleet) -> None:
    """Its episodes are no stragglers, and disturb none."""
    fleet = await make_fleet()
    long = await fleet.open(2)
    await fleet.look()
    tests = await fleet.open(6, **EVAL)
    await fleet.look()
    assert await fleet.turns_at_once(tests) == [0, 2, 2, 2]
    assert await fleet.turns_at_once([*long, *tests]) == [2, 2, 2, 2]


async def test_a_server_that_dies_right_after_the_move_is_replaced(make_fleet) -> None:
    """The turn goes on elsewhere, and the next server takes all; the dead one is not asked again
    at every turn."""
    fleet = await make_fleet()
    long = await fleet.open(3)
    await fleet.turns_at_once(long)
    await fleet.look()
    script = fleet.stage.script("lost")
    fleet.servers[0].answer = lambda request: replace(script, fail="drop")
    for episode in long:
        await fleet.turn(episode)
    await fleet.look()
    num_asked = len(fleet.servers[0].requests)
    for _ in range(3):
        assert await fleet.turns_at_once(long) == [0, 3, 0, 0]
        await fleet.look()
    assert len(fleet.servers[0].requests) == num_asked
    texts = {turn.output_ids.tobytes() for one in long for turn in fleet.stage.turns(one)}
    assert len(texts) == 1


async def test_a_long_prompt_stays_where_its_prefix_is(make_fleet) -> None:
    """To fill another server's cache with it would cost more than the empty server is worth."""
    fleet = await make_fleet(packed_max_context_tokens=64)
    # So many that nothing is packed yet.
    others = await fleet.open(16)
    short, long = await fleet.open(2)
    fleet.messages[long["episode_id"]][0]["content"] = "many words " * 40
    fleet.servers[0].gate.clear()
    busy = asyncio.create_task(fleet.turn(others[0]))
    async with asyncio.timeout(30):
        while not fleet.servers[0].requests:
            await asyncio.sleep(0.005)
    for episode in (short, long):
        await fleet.turn(episode)
    fleet.servers[0].gate.set()
    await busy
    await fleet.close(others)
    await fleet.look()
    for episode in (short, long):
        await fleet.turn(episode)
    where = [[server for server, _ in fleet.asked(one)] for one in (short, long)]
    assert where == [[1, 0], [1, 1]]


async def test_episodes_of_several_turns_at_once_are_not_squeezed(make_fleet) -> None:
    """What does not fit goes elsewhere at once, and is counted before anything is packed again."""
    fleet = await make_fleet()
    (one,) = await fleet.open(1)
    await fleet.look()
    assert len(await fleet.spare()) == 3
    assert sum(await fleet.turns_at_once([one] * 6)) == 6
    await fleet.look()
    assert len(await fleet.spare()) == 2


async def test_without_the_setting_nothing_moves(make_fleet) -> None:
    """Turns stay on the servers they were on."""
    fleet = await make_fleet(packed_turns_per_server=None)
    episodes = await fleet.open(4)
    assert await fleet.turns_at_once(episodes) == [1, 1, 1, 1]
    await fleet.look()
    assert await fleet.turns_at_once(episodes) == [1, 1, 1, 1]
    assert not await fleet.spare()
    assert await fleet.metric("router_moved_turns_total") == 0.0


def test_a_batch_that_starts_is_not_packed_and_one_that_sways_does_not_move() -> None:
    """Fewer servers only when no more episodes come; then a quarter more may come and go."""
    packing = Packing(turns_per_server=16, count_move=lambda: None)
    servers = [f"server-{number}" for number in range(4)]
    for number in range(1, 13):
        packing.observe(servers, number)
        assert not packing.kept
    for _ in range(NUM_LOOKS):
        packing.observe(servers, 12)
    assert packing.kept == {"server-0"}
    for number in [16, 9, 16, 12, 15] * 10:
        packing.observe(servers, number)
        assert packing.kept == {"server-0"}
    packing.observe(servers, 17)
    assert packing.kept == {"server-0", "server-1"}
    for number in [17, 13, 17, 14, 16] * 10:
        packing.observe(servers, number)
        assert packing.kept == {"server-0", "server-1"}


@given(st.integers(1, 64), st.integers(2, 64), st.lists(st.integers(0, 4000), max_size=60))
def test_servers_hold_what_is_in_flight(num_servers: int, most: int, numbers: list[int]) -> None:
    """Never more turns on a server than are allowed while another is kept empty; what shrinks
    moves each turn at most log2(servers) times."""
    kept = num_servers
    for number in numbers:
        kept = servers_to_keep(kept, number, num_servers=num_servers, turns_per_server=most)
        assert 1 <= kept <= num_servers
        assert number <= kept * most or kept == num_servers
    kept, num_moves = num_servers, 0
    for number in range(num_servers * most, 0, -1):
        after = servers_to_keep(kept, number, num_servers=num_servers, turns_per_server=most)
        num_moves += after < kept
        kept = after
    assert kept == 1
    assert 2**num_moves <= num_servers


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"router": {"packed_turns_per_server": 8}}, "with 1 servers has no effect"),
        (
            {"router": {"packed_turns_per_server": 300}, "server": {"num_servers": 2}},
            "server.max_running_requests=128",
        ),
        ({"router": {"packed_max_context_tokens": 8}}, "without router.packed_turns_per_server"),
        (
            {
                "router": {"packed_turns_per_server": 8, "packed_max_context_tokens": 10**9},
                "server": {"num_servers": 2},
            },
            "no prompt is longer",
        ),
    ],
)
def test_settings_without_effect_are_refused(sections: dict, sentence: str) -> None:
    """One sentence that says which number and what would do."""
    with pytest.raises(SettingsError, match=sentence):
        build_settings({"model": {"path": "x"}, **sections}, source="test")
