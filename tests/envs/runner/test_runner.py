"""How episodes are claimed, played, scored and closed."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Reward
from outloop.buffer.settings import Settings
from outloop.envs.rollout.episode_result import EpisodeResult
from outloop.envs.runner.failures import FailureLog
from outloop.envs.runner.runner import run
from outloop.envs.tasks.sft_conversations import load_conversations

PlayWith = Callable[..., Any]

AGENT = """
async def play(task, episode):
    messages = [{"role": "user", "content": task.payload["question"]}]
    answer = await episode.client.chat.completions.create(model="policy", messages=messages)
    return float(bool(answer.choices[0].message.tool_calls))
"""


@pytest.mark.medium
async def test_every_claimed_episode_is_played_and_scored(router: Any, play_with: PlayWith) -> None:
    """Each goes to its own address with its own key, over one shared client."""
    router.num_episodes = 20
    await play_with(router, AGENT, max_concurrent_episodes=6)
    assert len(router.closes) == 20
    assert set(router.closed("outcome")) == {"completed"}
    assert [reward["value"] for reward in router.closed("reward")] == [1.0] * 20
    assert router.num_chat_calls == 20
    assert 1 < router.most_open <= 6
    assert len(set(router.claim_keys)) == len(router.claim_keys)


@pytest.mark.medium
async def test_a_runner_says_that_it_is_there(router: Any, play_with: PlayWith) -> None:
    """Under the id of its claims, for as long as episodes last, whatever becomes of a heartbeat."""
    router.num_episodes = 1
    router.chat_gate, router.gate_opens_after = asyncio.Event(), 3
    router.refusals["/runners/heartbeat"] = [410, 503]
    await play_with(router, AGENT, max_runner_silence_s=0.2)
    assert router.closed("outcome") == ["completed"]
    assert len(router.heartbeats) >= 3
    assert set(router.heartbeats) == router.claimed_by
    assert len(router.claimed_by) == 1


@pytest.mark.medium
async def test_without_a_limit_nobody_says_that_it_is_there(
    router: Any, play_with: PlayWith
) -> None:
    """env.max_runner_silence_s = 0: deadlines alone hold."""
    await play_with(router, AGENT, max_runner_silence_s=0)
    assert len(router.closes) > 0
    assert router.heartbeats == []


@pytest.mark.medium
async def test_claims_go_together(router: Any, play_with: PlayWith) -> None:
    """Many free slots are one claim, and waiting for admission does not spin."""
    router.num_episodes = 64
    await play_with(router, AGENT, max_concurrent_episodes=64)
    assert len(router.closes) == 64
    assert len(router.claim_keys) < 20


async def test_an_episode_without_a_model_call_is_fine(router: Any, play_with: PlayWith) -> None:
    """An agent that never calls the model still gets its reward."""
    await play_with(router, "async def play(task, episode):\n    return 0\n")
    assert router.num_chat_calls == 0
    assert router.closed("reward") == [{"value": 0, "components": {}}] * 4


async def test_eval_claims_are_marked(router: Any, play_with: PlayWith, folder: Path) -> None:
    """The function sees the purpose; eval tasks are registered beside training tasks."""
    (folder / "eval.jsonl").write_text('{"question": "held out"}\n')
    router.eval_names = ["0:sampled", "0:greedy"]
    source = (
        "async def play(task, episode):\n"
        "    return 1.0 if (episode.purpose == 'eval') == (task.payload['question'] == 'held out')"
        " else 0.0\n"
    )
    await play_with(router, source, eval_tasks="eval.jsonl")
    assert [reward["value"] for reward in router.closed("reward")] == [1.0] * 4
    assert len(router.eval_tasks) == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return float('nan')", "reward value=nan"),
        ("return float('inf')", "reward value=inf"),
        ("return None", "play returned None"),
        ("return 'good'", "is a str"),
        ("return True", "is a bool"),
        ("import numpy; return numpy.bool_(True)", "is a bool"),
    ],
)
async def test_a_verifier_that_gives_no_reward_stops_the_runner(
    body: str, words: str, router: Any, play_with: PlayWith
) -> None:
    """Each such episode is closed as a failure of the environment; then the sentence is raised."""
    router.num_episodes = 40
    with pytest.raises(SettingsError, match="no usable reward 8 times in a row") as caught:
        await play_with(
            router, f"async def play(task, episode):\n    {body}\n", max_concurrent_episodes=4
        )
    assert words in str(caught.value)
    assert "a finite number is allowed" in str(caught.value)
    assert set(router.closed("failure_kind")) == {"environment"}
    assert set(router.closed("outcome")) == {"failed"}
    assert set(map(str, router.closed("reward"))) == {"None"}
    assert len(router.closes) < 40


async def test_one_bad_reward_does_not_stop_the_run(router: Any, play_with: PlayWith) -> None:
    """A verifier that slips now and then loses those episodes only."""
    router.num_episodes = 24
    source = (
        "import itertools\nimport numpy as np\ncount = itertools.count()\n\n\n"
        "async def play(task, episode):\n"
        "    return float('nan') if next(count) % 3 == 0 else np.float32(0.5)\n"
    )
    await play_with(router, source, max_concurrent_episodes=4)
    assert sorted(set(router.closed("outcome"))) == ["completed", "failed"]
    assert router.closed("outcome").count("failed") == 8


async def test_a_crashing_agent_is_a_result(router: Any, play_with: PlayWith) -> None:
    """Its exception is kept, its reward is failure_reward, and the run goes on."""
    source = "async def play(task, episode):\n    raise KeyError('lost')\n"
    with structlog.testing.capture_logs() as logs:
        await play_with(router, source, failure_reward=-1.0)
    assert router.closed("failure_kind") == ["agent"] * 4
    assert router.closed("outcome") == ["failed"] * 4
    assert [reward["value"] for reward in router.closed("reward")] == [-1.0] * 4
    assert "KeyError: 'lost'" in router.closed("error")[0]
    assert [log["event"] for log in logs].count("episode_failed") == 1
    assert [log["num_failed"] for log in logs if log["event"] == "episodes_failed"] == [4]


async def test_an_environment_that_never_works_stops_the_run(
    router: Any, play_with: PlayWith
) -> None:
    """Nothing could ever be scored; the sentence holds what was raised."""
    router.num_episodes = 30
    source = """
from outloop.buffer.errors import EnvironmentFailure


async def play(task, episode):
    raise EnvironmentFailure("no database")
"""
    with pytest.raises(SettingsError, match="first 20 episodes .* no database"):
        await play_with(router, source)


@pytest.mark.medium
@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_hanging_agent_is_truncated(
    stubborn: bool, router: Any, play_with: PlayWith
) -> None:
    """At its deadline it is cancelled and scored, even if it swallows the cancellation."""
    router.deadline_s = 0.4
    router.num_episodes = 3
    wait = "    await asyncio.sleep(60)\n"
    if stubborn:
        wait = (
            "    for _ in range(30):\n        try:\n            await asyncio.sleep(0.1)\n"
            "        except asyncio.CancelledError:\n            pass\n"
        )
    source = f"import asyncio\n\n\nasync def play(task, episode):\n{wait}    return 1.0\n"
    started = time.monotonic()
    await play_with(router, source, failure_reward=-0.5)
    assert time.monotonic() - started < 6
    assert router.closed("outcome") == ["truncated"] * 3
    assert router.closed("failure_kind") == ["agent"] * 3
    assert [reward["value"] for reward in router.closed("reward")] == [-0.5] * 3


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise EnvironmentFailure('no sandbox')", "environment"),
        ("raise ValueError('x') from EnvironmentFailure('no sandbox')", "environment"),
        ("await call(episode)", "infrastructure"),
        ("await wrapped(episode)", "infrastructure"),
        ("await elsewhere()", "agent"),
        ("await hasty(episode)", "agent"),
    ],
)
async def test_failures_are_distinguished(
    body: str, kind: str, router: Any, play_with: PlayWith
) -> None:
    """Only our own 5xx and lost connections are infrastructure; those carry no reward."""
    router.num_episodes = 1
    router.chat_status = 500
    if "hasty" in body:
        router.chat_gate = asyncio.Event()
    source = f"""
import openai
from outloop.buffer.errors import EnvironmentFailure

MESSAGES = [{{"role": "user", "content": "x"}}]


async def call(episode):
    await episode.client.chat.completions.create(model="policy", messages=MESSAGES)


async def wrapped(episode):
    try:
        await call(episode)
    except openai.OpenAIError:
        raise RuntimeError("model gone")


async def elsewhere():
    async with openai.AsyncOpenAI(
        base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0
    ) as client:
        await client.chat.completions.create(model="policy", messages=MESSAGES)


async def hasty(episode):
    client = episode.client.with_options(timeout=0.05, max_retries=0)
    await client.chat.completions.create(model="policy", messages=MESSAGES)


async def play(task, episode):
    {body}
"""
    await play_with(router, source)
    if router.chat_gate is not None:
        router.chat_gate.set()
    assert router.closed("failure_kind") == [kind]
    assert (router.closed("reward")[0] is None) == (kind != "agent")


async def test_a_lost_router_reaching_play_is_infrastructure(
    router: Any, play_with: PlayWith
) -> None:
    """A refused connection to the episode's own address is ours, not the agent's."""
    router.num_episodes = 1
    source = """
import httpx


async def play(task, episode):
    raise httpx.ConnectError("refused", request=httpx.Request("POST", episode.base_url))
"""
    await play_with(router, source)
    assert router.closed("failure_kind") == ["infrastructure"]


async def test_play_cannot_change_the_task_of_others(router: Any, play_with: PlayWith) -> None:
    """What one attempt writes into its payload is not seen by the next."""
    source = (
        "async def play(task, episode):\n"
        "    seen = 'mark' in task.payload\n    task.payload['mark'] = 1\n"
        "    return float(seen)\n"
    )
    router.num_episodes = 10
    await play_with(router, source, max_concurrent_episodes=1)
    assert {reward["value"] for reward in router.closed("reward")} == {0.0}


@pytest.mark.medium
async def test_a_runner_may_wait_where_a_run_is_finished(
    router: Any,
    folder: Path,
    make_settings: Callable[..., Settings],
    fake_module: ModuleType,
) -> None:
    """It goes on asking, plays what more there is, and ends when it is stopped."""
    (folder / "user.py").write_text(
        "async def play(task, episode):\n    return 1.0\n\n\n"
        "def tasks():\n    return [{'question': 'q'}]\n"
    )
    stop = asyncio.Event()
    playing = asyncio.create_task(
        run(
            make_settings(),
            router_url=router.url,
            runner_key=fake_module.RUNNER_KEY,
            stop=stop,
            ends_when_finished=False,
        )
    )
    async with asyncio.timeout(10):
        while router.num_finished < 2:
            await asyncio.sleep(0.01)
        router.num_episodes += 3
        while len(router.closes) < 7:
            await asyncio.sleep(0.01)
        assert not playing.done()
        stop.set()
        await playing
    assert router.num_registered == 1


@pytest.mark.medium
async def test_stopping_drains_then_aborts(
    router: Any,
    folder: Path,
    make_settings: Callable[..., Settings],
    fake_module: ModuleType,
) -> None:
    """Short episodes end as they would; long ones are closed as aborted, without a reward."""
    router.num_episodes = 4
    (folder / "user.py").write_text(
        "import asyncio\nimport itertools\nfrom pathlib import Path\n\n"
        "count = itertools.count()\n\n\n"
        "async def play(task, episode):\n"
        "    if next(count) % 2:\n        await asyncio.sleep(60)\n"
        "    while not Path('stopped').exists():\n        await asyncio.sleep(0.01)\n"
        "    return 1.0\n\n\n"
        "def tasks():\n    return [{'question': 'q'}]\n"
    )
    stop = asyncio.Event()
    playing = asyncio.create_task(
        run(
            make_settings(),
            router_url=router.url,
            runner_key=fake_module.RUNNER_KEY,
            stop=stop,
            drain_s=2.0,
        )
    )
    async with asyncio.timeout(10):
        while len(router.claims) < 4:
            await asyncio.sleep(0.01)
    stop.set()
    (folder / "stopped").touch()
    await asyncio.wait_for(playing, 20)
    assert sorted(router.closed("outcome")) == ["aborted", "aborted", "completed", "completed"]
    assert sorted(map(str, router.closed("failure_kind"))) == [
        "None",
        "None",
        "infrastructure",
        "infrastructure",
    ]


@pytest.mark.medium
async def test_late_closes_are_not_errors(router: Any, play_with: PlayWith) -> None:
    """A group that sealed meanwhile answers 410; the run goes on."""
    router.refusals["/episodes"] = [410]
    with pytest.raises(TimeoutError):
        # The fake counts closes, so with one refused it never says "finished".
        await play_with(router, AGENT, timeout_s=2.0)
    assert len(router.closes) == 3


async def test_conversations_are_sent_in_batches(
    router: Any, folder: Path, make_settings: Callable[..., Settings], fake_module: ModuleType
) -> None:
    """SFT rows are posted once, the last batch is final, and a second runner adds nothing."""
    (folder / "user.py").write_text(
        "def rows():\n"
        "    for n in range(300):\n"
        "        yield {'messages': [{'role': 'user', 'content': str(n)},\n"
        "                            {'role': 'assistant', 'content': 'ok'}]}\n"
    )
    router.refusals["/trajectories"] = [503]
    for _ in range(2):
        await run(
            make_settings(trainer={"mode": "sft"}, conversations="user:rows"),
            router_url=router.url,
            runner_key=fake_module.RUNNER_KEY,
            stop=asyncio.Event(),
        )
    assert len(router.trajectories) == 300
    assert list(router.trajectory_calls.values()) == [False, False, True]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{'message': []}", "item 1.*no list of messages"),
        ("{'messages': [{'role': 'robot'}]}", "item 1.*messages.0.*has no role"),
        ("{'messages': [{'role': 'user', 'content': 'x'}]}", "item 1.*no assistant message"),
    ],
)
def test_malformed_conversations_are_sentences(
    row: str, words: str, folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """The row is named by its index."""
    (folder / "user.py").write_text(
        f"rows = [{{'messages': [{{'role': 'assistant', 'content': 'x'}}]}}, {row}]\n"
    )
    with pytest.raises(SettingsError, match=words):
        list(load_conversations(make_settings(conversations="user:rows")))


_SAID = "[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]"


def test_preferences_are_two_conversations_that_belong_together(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """A pair, or a conversation with a reward: what they are worth is in their metadata."""
    pair = f"{{'chosen': {_SAID}, 'rejected': {_SAID}, 'tools': []}}"
    (folder / "user.py").write_text(f"rows = [{pair}, {{'messages': {_SAID}, 'reward': 0.25}}]\n")
    trainer = {"mode": "sft", "reward_model": "bradley_terry"}
    settings = make_settings(conversations="user:rows", trainer=trainer)
    better, worse, alone = load_conversations(settings)
    assert (better["metadata"]["reward"], worse["metadata"]["reward"]) == ("1", "0")
    assert better["metadata"]["pair"] == worse["metadata"]["pair"]
    assert better["tools"] == []
    assert alone["metadata"] == {"reward": "0.25"}


@pytest.mark.parametrize(
    ("row", "reward_model", "words"),
    [
        (f"{{'chosen': {_SAID}, 'rejected': {_SAID}}}", None, "with a preference or reward"),
        (f"{{'messages': {_SAID}}}", "regression", "without a preference or reward"),
        (f"{{'chosen': {_SAID}}}", "bradley_terry", "item 0.*no list of messages"),
        (f"{{'messages': {_SAID}, 'reward': 'high'}}", "regression", "reward='high' is no number"),
    ],
)
def test_rows_of_the_wrong_kind_are_sentences(
    row: str,
    reward_model: str | None,
    words: str,
    folder: Path,
    make_settings: Callable[..., Settings],
) -> None:
    """SFT must not imitate what was rejected; a reward model needs to know what is better."""
    (folder / "user.py").write_text(f"rows = [{row}]\n")
    settings = make_settings(
        conversations="user:rows", trainer={"mode": "sft", "reward_model": reward_model}
    )
    with pytest.raises(SettingsError, match=words):
        list(load_conversations(settings))


async def test_claims_of_a_router_that_died_are_asked_for_again(
    router: Any, play_with: PlayWith
) -> None:
    """A key under which none was ready is used again: a router may have claimed and died."""
    router.num_episodes = 3
    router.lost_claims = 1
    await play_with(router, AGENT)
    assert len(router.closes) == 3
    assert router.claim_keys[0] == router.claim_keys[1]


RAISING = "async def play(task, episode):\n    reply = {}\n    return reply['answer']\n"


async def test_a_run_whose_episodes_all_fail_is_stopped(router: Any, play_with: PlayWith) -> None:
    """With the commonest failure, where it was raised, how often, and an episode to look at."""
    router.num_episodes = 200
    with pytest.raises(SettingsError) as caught:
        await play_with(router, RAISING, max_concurrent_episodes=4)
    sentence = str(caught.value)
    assert "32 of the last 32 episodes failed" in sentence
    assert "(32 times): KeyError: 'answer' at " in sentence
    assert "user.py:3" in sentence
    assert re.search(r"episode ep-\d+", sentence)
    assert "outloop episodes --run runs/run --failed" in sentence
    assert "env.max_failed_share=0.98" in sentence
    assert len(router.closes) < 200


async def test_failures_are_reported_at_once(router: Any, play_with: PlayWith) -> None:
    """The router is given the sentence with a heartbeat of its own, not after the next interval."""
    router.num_episodes = 8
    with structlog.testing.capture_logs() as logs:
        await play_with(router, RAISING, max_concurrent_episodes=2, max_runner_silence_s=0)
    assert [log["warning"] for log in logs if log["event"] == "episodes_fail"] == router.warnings
    assert router.warnings
    assert "4 of the first 4 episodes failed" in router.warnings[0]
    assert "KeyError: 'answer' at " in router.warnings[0]


def test_episodes_that_fail_after_a_thousand_that_did_not_are_reported() -> None:
    """Of the last ones alone, with what they failed of, and not again for each that follows; again
    when they fail another time."""
    log = FailureLog(max_failed_share=0.98, run_folder="runs/x")
    played = EpisodeResult(outcome="completed", reward=Reward(value=1.0))
    timeout = EpisodeResult(
        outcome="failed", failure_kind="agent", reward=Reward(value=0.0), error="TurnTimeout: late"
    )
    broken = EpisodeResult(
        outcome="failed", failure_kind="environment", error="OSError: No space left on device"
    )
    for _ in range(2):
        for number in range(1000):
            if number % 20 == 0:
                assert not log.failure(timeout, f"late-{number}")
            else:
                assert not log.success(played, f"ep-{number}")
        said = [log.failure(broken, f"broken-{number}") for number in range(60)]
        (sentence,) = filter(None, said)
        assert said.index(sentence) < 16
        assert "16 of the last 32 episodes failed" in sentence
        assert "OSError: No space left on device, for example episode broken-" in sentence


async def test_a_run_in_which_failing_pays_is_warned_of(router: Any, play_with: PlayWith) -> None:
    """A scored reward below env.failure_reward is told once, with what to set."""
    router.num_episodes = 6
    source = "async def play(task, episode):\n    return -1.0\n"
    await play_with(router, source, failure_reward=-0.5)
    assert len(router.warnings) == 1
    assert "scored -1, below env.failure_reward=-0.5" in router.warnings[0]
    router.warnings.clear()
    router.num_episodes = 12
    await play_with(router, source, failure_reward=-1.0)
    assert router.warnings == []


async def test_a_share_of_one_stops_nothing(router: Any, play_with: PlayWith) -> None:
    """Whoever wants to watch an agent fail may."""
    router.num_episodes = 80
    await play_with(router, RAISING, max_failed_share=1)
    assert len(router.closes) == 80


def test_failures_that_are_scored_apart_can_be_learned_from() -> None:
    """Rewards of failed programs that differ are a signal: the run goes on."""
    log = FailureLog(max_failed_share=0.5, run_folder="runs/x")
    for number in range(100):
        ending = EpisodeResult(
            outcome="failed",
            failure_kind="agent",
            reward=Reward(value=float(number % 3)),
            error="AgentFailed: exit_code=3",
        )
        log.failure(ending, f"ep-{number}")


def test_crashes_that_end_before_the_episodes_that_work_stop_nothing() -> None:
    """Every second agent crashes at once: the first 200 to end have crashed, and others play on."""
    log = FailureLog(max_failed_share=0.98, run_folder="runs/x")
    crash = EpisodeResult(
        outcome="failed", failure_kind="agent", reward=Reward(value=0.0), error="it broke"
    )
    for number in range(16):
        log.start(f"plays-{number}")
    for number in range(200):
        log.start(f"crashes-{number}")
        log.failure(crash, f"crashes-{number}")


def test_one_episode_that_hangs_does_not_hide_that_all_others_crash() -> None:
    """The run stops a little later."""
    log = FailureLog(max_failed_share=0.98, run_folder="runs/x")
    crash = EpisodeResult(
        outcome="failed", failure_kind="agent", reward=Reward(value=0.0), error="it broke"
    )
    log.start("hangs")
    for number in range(49):
        log.start(f"crashes-{number}")
        log.failure(crash, f"crashes-{number}")
    with pytest.raises(SettingsError, match="50 of the last 50 episodes failed"):
        log.failure(crash, "crashes-49")


@pytest.mark.medium
async def test_a_few_failures_stop_nothing(router: Any, play_with: PlayWith) -> None:
    """One episode in sixteen that does not fail is enough to go on."""
    router.num_episodes = 100
    source = RAISING.replace(
        "    reply",
        "    if int(episode.episode_id[3:]) % 16 == 0:\n        return 1.0\n    reply",
        1,
    )
    await play_with(router, source)
    assert len(router.closes) == 100


async def test_an_agent_that_fails_before_a_call_is_no_zero_in_its_group(
    router: Any, play_with: PlayWith
) -> None:
    """Such a failure cannot depend on the policy: it gets no reward. After a call it is a result,
    and so is a deadline."""
    router.num_episodes, router.counts_turns, router.deadline_s = 30, True, 2.0
    source = """
import asyncio

MESSAGES = [{"role": "user", "content": "x"}]


async def play(task, episode):
    number = int(episode.episode_id[3:])
    if number % 10 == 1:
        raise ConnectionError("the database is away")
    if number == 12:
        await asyncio.sleep(60)
    await episode.client.chat.completions.create(model="policy", messages=MESSAGES)
    if number % 10 == 3:
        raise ValueError("a malformed answer")
    return 1.0
"""
    await play_with(router, source)
    kinds = [router.closes[f"ep-{number}"]["failure_kind"] for number in range(30)]
    assert [kinds[number] for number in (1, 11, 21)] == ["environment"] * 3
    assert router.closes["ep-1"]["reward"] is None
    assert "the database is away" in router.closes["ep-1"]["error"]
    assert "(before its first model call)" in router.closes["ep-1"]["error"]
    assert [kinds[number] for number in (3, 12, 13, 23)] == ["agent"] * 4
    assert router.closes["ep-12"]["outcome"] == "truncated"


async def test_an_agent_that_always_fails_before_a_call_stops_the_run(
    router: Any, play_with: PlayWith
) -> None:
    """With the cause and its place."""
    router.num_episodes, router.counts_turns = 200, True
    source = "async def play(task, episode):\n    return 1 / 0\n"
    with pytest.raises(SettingsError, match=r"ZeroDivisionError: .* at .*user.py:2"):
        await play_with(router, source, max_concurrent_episodes=8)
    assert len(router.closes) < 40


async def test_an_environment_that_is_away_for_a_while_costs_few_attempts(
    router: Any, play_with: PlayWith
) -> None:
    """While all attempts fail alike, one at a time looks whether it is back."""
    router.num_episodes = 120
    source = """
import asyncio
import time
from pathlib import Path

from outloop.buffer.errors import EnvironmentFailure


async def play(task, episode):
    await asyncio.sleep(0.01)
    if int(episode.episode_id[3:]) >= 40:
        file = Path("began")
        if not file.exists():
            file.touch()
        if time.time() < file.stat().st_mtime + 3.0:
            raise EnvironmentFailure("connection refused")
    return 1.0
"""
    await play_with(router, source, max_concurrent_episodes=8, timeout_s=60)
    kinds = router.closed("failure_kind")
    assert len(kinds) == 120
    assert 4 <= kinds.count("environment") <= 8 + 10
