"""Trajectories that were played elsewhere are checked, admitted and trained as our own."""

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.served_policy import publish
from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import CheckpointMark, Lease
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run

SAMPLING = {"temperature": 1.0}


@dataclass
class Posting:
    """A router over a run with tasks, on Redis or on the twin, and its trainer."""

    stage: Any
    reader: BufferReader
    fence: int
    num_claims: int = 0

    async def claim(self, count: int = 2) -> list[str]:
        """Episodes of newly claimed attempts."""
        self.num_claims += 1
        body = {"key": f"k{self.num_claims}", "count": count, "open": True}
        answer = await self.stage.post("/tasks/claim", body)
        assert answer.status_code == 200, answer.text
        return [claim["episode"]["episode_id"] for claim in answer.json()["claims"]]

    async def post(self, *trajectories: dict) -> tuple[int, dict]:
        """Status, and what was answered."""
        answer = await self.stage.post("/trajectories", {"trajectories": list(trajectories)})
        return answer.status_code, answer.json()

    async def refusal(self, *trajectories: dict) -> str:
        """The sentence of a refusal, which left nothing behind."""
        status, answer = await self.post(*trajectories)
        assert status in (400, 404, 422), answer
        for one in trajectories:
            known = await self.stage.get(f"/episodes/{one['episode_id']}")
            assert known.status_code == 404 or not known.json()["turns"]
        return str(answer["error"]["message"])

    def publish(self, version: int) -> None:
        """Weights of this version are served."""
        self.reader.announce_version(version, version - 1)
        self.reader.acknowledge_version(version)

    def take(self, version: int = 0) -> Lease | None:
        """A group to train, or None."""
        try:
            (lease,) = self.reader.take(
                1,
                fence=self.fence,
                policy_version=version,
                timeout_s=0.0,
                on_wait=lambda sentence: None,
                should_stop=lambda: False,
            )
        except DeadlineExceeded:
            return None
        return lease

    def train(self, lease: Lease, version: int) -> None:
        """A step and its checkpoint."""
        group_id = lease.group.group_id
        self.publish(version)
        self.reader.mark_trained([group_id], fence=self.fence, policy_version=version)
        self.reader.acknowledge(
            CheckpointMark(
                fence=self.fence,
                group_ids=(group_id,),
                next_slot=lease.group.slot + 1,
                policy_version=version,
            )
        )


def played(episode_id: str, value: float | None = 1.0, **changes: Any) -> dict:
    """A trajectory of two turns, with fields of its last turn changed."""
    first = {
        "turn_id": f"{episode_id}-a",
        "prompt_ids": [5, 6, 7],
        "output_ids": [8, 9],
        "behavior_logprobs": [-0.5, -0.25],
        "policy_version": 0,
        "sampling": SAMPLING,
    }
    last = {
        "turn_id": f"{episode_id}-b",
        "parent_turn_id": first["turn_id"],
        "prompt_ids": [10],
        "output_ids": [11, 12, 13],
        "behavior_logprobs": [-1.0, -2.0, -3.0],
        "version_spans": [[0, 0, 3]],
        "sampling": SAMPLING,
    }
    reward = {} if value is None else {"reward": {"value": value}}
    return {"episode_id": episode_id, "turns": [first, last | changes], **reward}


def row(episode_id: str, **changes: Any) -> dict:
    """The same trajectory as one row of tokens."""
    sample = {
        "token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13],
        "loss_mask": [0, 0, 0, 1, 1, 0, 1, 1, 1],
        "behavior_logprobs": [0, 0, 0, -0.5, -0.25, 0, -1.0, -2.0, -3.0],
        "policy_versions": 0,
        "sampling": SAMPLING,
    }
    return {"episode_id": episode_id, "samples": [sample | changes], "reward": {"value": 0.0}}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory):
    """A real server for this file."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), max_memory_mb=64) as redis:
        yield redis.url


@pytest.fixture(params=["redis", "twin"])
async def posting(
    request: pytest.FixtureRequest,
    make_stage: Callable,
    make_run: Callable,
    redis_url: str,
    tmp_path: Path,
) -> AsyncIterator[Posting]:
    """Groups of two, one a step, tokens at most one publish old; two tasks."""
    sections: dict = {
        "buffer": {"group_size": 2, "max_staleness": 1},
        "trainer": {"groups_per_step": 1},
        "model": {"max_context_tokens": 16},
        "env": {"turn_scores": "record"},
    }
    run = make_run(**sections)
    if request.param == "redis":
        run = replace(run, run_id=request.node.name.replace("/", "-"), redis_url=redis_url)
        init_run(run)
        stage = await make_stage(run=run)
        reader = BufferReader.connect(run)
    else:
        stage = await make_stage(**sections)
        reader = stage.buffer.reader
    with closing(reader):
        fence = reader.acquire_fence()
        if request.param == "redis":
            reader.recover(None, fence=fence)
            publish(run, stage.server.url)
            await stage.app.state.parts.pool.refresh()
        tasks = [{"task_id": f"t{i}", "payload": {"n": i}} for i in range(2)]
        eval_tasks = [{"task_id": "e", "payload": {"n": -1}}]
        answer = await stage.post("/tasks", {"tasks": tasks, "eval_tasks": eval_tasks})
        assert answer.status_code == 200, answer.text
        yield Posting(stage, reader, fence)


@pytest.mark.medium
async def test_a_posted_group_is_trained_exactly_once(posting: Posting) -> None:
    """Turns and rows make the same samples; what is posted again, also after its training, is the
    same answer and no second group."""
    one, other = await posting.claim()
    body = played(one), row(other)
    status, answer = await posting.post(*body)
    expected = [{"episode_id": e, "counted": True, "error": ""} for e in (one, other)]
    assert (status, answer) == (200, {"num_accepted": 2, "results": expected})
    assert await posting.post(*body) == (200, answer)
    lease = posting.take()
    assert lease is not None
    first, second = lease.group.trajectories
    assert [t.episode.reward.value for t in (first, second)] == [1.0, 0.0]
    for trajectory in (first, second):
        (branch,) = trajectory.branches()
        ids = [i for turn in branch for i in (*turn.prompt_ids, *turn.output_ids)]
        assert ids == [5, 6, 7, 8, 9, 10, 11, 12, 13]
        assert [turn.loss_spans for turn in branch] == [((0, 2),), ((0, 3),)]
        assert [p for turn in branch for p in turn.behavior_logprobs] == [-0.5, -0.25, -1, -2, -3]
        assert all(turn.trained_version_bounds == (0, 0) for turn in branch)
    posting.train(lease, 1)
    assert await posting.post(*body) == (200, answer)
    assert posting.take(1) is None


async def test_another_trajectory_for_the_same_episode_is_not_taken(posting: Posting) -> None:
    """Neither other tokens nor another reward change what was counted."""
    one, _ = await posting.claim()
    assert (await posting.post(played(one)))[1]["num_accepted"] == 1
    for changed in (played(one, output_ids=[11, 12, 14]), played(one, value=0.5)):
        status, answer = await posting.post(changed)
        (result,) = answer["results"]
        assert (status, result["counted"]) == (200, False)
        assert result["error"]
    known = (await posting.stage.get(f"/episodes/{one}")).json()
    assert known["reward"]["value"] == 1.0
    assert known["turns"][1]["output_ids"] == [11, 12, 13]


async def test_what_was_sampled_too_long_ago_is_played_again(posting: Posting) -> None:
    """By the same limit as our own: the attempt is claimed again, the group of fresh ones."""
    one, other = await posting.claim()
    for version in (1, 2):
        posting.publish(version)
    status, answer = await posting.post(played(one))
    assert (status, answer["num_accepted"]) == (200, 0)
    assert "too old" in answer["results"][0]["error"]
    again = [e for e in await posting.claim(1) if e not in (one, other)]
    fresh = {"policy_version": 2}
    bodies = [row(episode, policy_versions=2) for episode in (*again, other)]
    assert (await posting.post(*bodies))[1]["num_accepted"] == 2, fresh
    lease = posting.take(2)
    assert lease is not None
    assert {t.episode.episode_id for t in lease.group.trajectories} == {other, *again}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"output_ids": [11, 12, 2**31 - 1]}, "vocab_size="),
        ({"output_ids": [11, 12, -1]}, "output_ids"),
        ({"behavior_logprobs": [-1.0, -2.0]}, "behavior_logprobs"),
        ({"behavior_logprobs": [-1.0, -2.0, 0.5]}, "at most 0"),
        ({"behavior_logprobs": [-1.0, -2.0, None]}, "behavior_logprobs"),
        ({"version_spans": [[0, 0, 2]]}, "version_spans"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": [[1, 0, 3]]}, "policy_version=1"),
        ({"version_spans": [[-1, 0, 3]]}, "policy_version=-1"),
        ({"parent_turn_id": "stranger"}, "stranger"),
        ({"parent_turn_id": None, "prompt_ids": []}, "without prompt_ids"),
        ({"prompt_ids": [10] * 9}, "max_context_tokens=16"),
        ({"loss_spans": [[0, 4]]}, "loss_spans"),
        ({"sampling": {}}, "temperature"),
        ({"finish_reason": "bored"}, "finish_reason"),
    ],
)
async def test_what_could_not_be_trained_is_refused(
    posting: Posting, changes: dict, names: str
) -> None:
    """By a sentence that names it; nothing of the request is recorded, and the next one is."""
    one, other = await posting.claim()
    assert names in await posting.refusal(played(one), played(other, **changes))
    assert (await posting.post(played(one), played(other)))[1]["num_accepted"] == 2


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"turns": {"stranger": 1.0}}, "'stranger' is none of the 2 turns"),
        ({"tokens": [[0, 2], [1, 3]]}, "0..2 and 1..3 of turn"),
        ({"tokens": [[0, 4]]}, "end behind its 3 output tokens"),
        ({"components": {"form": None}}, "components"),
    ],
)
async def test_a_reward_of_what_was_not_posted_is_refused(
    posting: Posting, parts: dict, names: str
) -> None:
    """Nothing of the request is recorded, the trajectories before it neither."""
    one, other = await posting.claim()
    if "tokens" in parts:
        turn = f"{other}-b"
        spans = [{"turn": turn, "start": a, "end": b, "value": 1.0} for a, b in parts["tokens"]]
        parts = {"tokens": spans}
    bad = played(other) | {"reward": {"value": 1.0} | parts}
    assert names in await posting.refusal(played(one), bad)
    good = {"value": 1.0, "turns": {f"{other}-b": 0.5}}
    answer = (await posting.post(played(one), played(other) | {"reward": good}))[1]
    assert answer["num_accepted"] == 2
    known = (await posting.stage.get(f"/episodes/{other}")).json()
    assert known["reward"]["turns"] == {f"{other}-b": 0.5}


async def test_a_token_has_one_owner(posting: Posting) -> None:
    """Two rows may not both train what one of them sampled; as context of the second it may be
    there. Choices that begin alike are two."""
    one, other = await posting.claim()
    long = row(one)["samples"][0]
    short = {
        **long,
        "token_ids": [5, 6, 7, 8, 9, 10, 11, 20],
        "loss_mask": [0, 0, 0, 1, 1, 0, 1, 1],
        "behavior_logprobs": [-0.5] * 8,
    }
    twice = {"episode_id": one, "samples": [long, short], "reward": {"value": 1.0}}
    assert "samples[1] trains the tokens 3..5" in await posting.refusal(twice)
    short["loss_mask"] = [0, 0, 0, 0, 0, 0, 1, 1]
    assert (await posting.post(twice, played(other)))[1]["num_accepted"] == 2
    lease = posting.take()
    assert lease is not None
    trained = [
        sum(end - start for turn in t.turns for start, end in turn.loss_spans)
        for t in lease.group.trajectories
    ]
    assert trained == [7, 5]


async def test_tokens_of_an_unknown_distribution_are_context(posting: Posting) -> None:
    """Greedy and truncated sampling cannot be rebuilt; what follows a stop was never asked for."""
    one, other = await posting.claim()
    stop = posting.stage.renderer.stop_ids[0]
    greedy = played(one, sampling={"temperature": 0.0})
    stopped = played(other, output_ids=[11, stop, 12])
    assert (await posting.post(greedy, stopped))[1]["num_accepted"] == 2
    turns = (await posting.stage.get(f"/episodes/{one}")).json()["turns"]
    assert (turns[1]["loss_spans"], turns[1]["mask_reason"]) == ([], "behavior_unknown")
    turns = (await posting.stage.get(f"/episodes/{other}")).json()["turns"]
    assert (turns[1]["loss_spans"], turns[1]["mask_reason"]) == ([[0, 2]], "after_stop")


async def test_a_failure_elsewhere_is_a_failure_here(posting: Posting) -> None:
    """Of the environment: the attempt is played again and has no reward. An episode without a
    reward waits for it."""
    one, other = await posting.claim()
    lost = {"episode_id": one, "turns": [], "outcome": "failed", "failure_kind": "environment"}
    assert (await posting.post(lost))[1]["num_accepted"] == 0
    (again,) = await posting.claim(1)
    assert again not in (one, other)
    status, answer = await posting.post(played(other, value=None))
    assert (status, answer["results"][0]["error"]) == (200, "")
    scored = {"value": 1.0, "key": "late"}
    assert (await posting.stage.post(f"/episodes/{other}/reward", scored)).status_code == 200
    assert (await posting.post(played(again)))[1]["num_accepted"] == 1
    assert posting.take() is not None


async def test_an_episode_is_played_here_or_posted(posting: Posting) -> None:
    """Not both; a post is of one kind; an episode that nobody opened is not made by posting."""
    one, other = await posting.claim()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
    status, answer = await posting.post(played(one), {"messages": talk})
    assert (status, "neither turns nor samples" in answer["error"]["message"]) == (400, True)
    assert "no episode" in await posting.refusal(played("ep-stranger"))
    posting.stage.says("fine")
    key = posting.stage.app.state.parts.keys.episode_key(other)
    body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4}
    answer = await posting.stage.post("/v1/completions", body, key)
    assert answer.status_code == 200, answer.text
    status, answer = await posting.post(played(other))
    assert (status, "recorded here" in answer["error"]["message"]) == (400, True)


async def test_an_evaluation_may_be_posted(posting: Posting) -> None:
    """Of its own version or a later one; it is scored and nothing of it is trained."""
    posting.publish(1)
    posting.reader.request_eval(
        "1:m", policy_version=1, num_episodes=1, sampling={}, blocks_training=True
    )
    (episode_id,) = await posting.claim(1)
    body = row(episode_id, policy_versions=0)
    assert "evaluation '1:m'" in await posting.refusal(body)
    assert (await posting.post(row(episode_id, policy_versions=1)))[1]["num_accepted"] == 1
    assert posting.reader.eval_progress("1:m").rewards == (0.0,)
    turns = (await posting.stage.get(f"/episodes/{episode_id}")).json()["turns"]
    assert {turn["mask_reason"] for turn in turns} == {"eval"}


async def test_a_post_that_broke_off_is_posted_again(posting: Posting) -> None:
    """Redis goes away between two turns: the answer asks to come back, and the same request then
    makes one whole trajectory."""
    one, other = await posting.claim()
    body = played(one), played(other)
    posting.stage.writer.refuses = lambda turn: turn.turn_id == f"{other}-b"
    answer = await posting.stage.post("/trajectories", {"trajectories": list(body)})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    posting.stage.writer.refuses = lambda turn: False
    assert (await posting.post(*body))[1]["num_accepted"] == 2
    lease = posting.take()
    assert lease is not None
    assert [len(trajectory.turns) for trajectory in lease.group.trajectories] == [2, 2]
